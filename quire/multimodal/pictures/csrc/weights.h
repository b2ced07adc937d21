// Weights of resizing, as Pillow computes them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

constexpr int COLORS = 3;
constexpr int WEIGHT_BITS = 22;
constexpr int32_t HALF = 1 << (WEIGHT_BITS - 1);
constexpr double PI = 3.14159265358979323846;

enum Filter { BILINEAR, BICUBIC, LANCZOS, FILTERS };
constexpr double SUPPORT[FILTERS] = {1.0, 2.0, 3.0};

inline double sinc(double x) { return x == 0.0 ? 1.0 : std::sin(x * PI) / (x * PI); }

inline double weight(int filter, double x) {
    constexpr double A = -0.5;
    if (filter == LANCZOS) return -3.0 <= x && x < 3.0 ? sinc(x) * sinc(x / 3) : 0.0;
    x = std::abs(x);
    if (filter == BILINEAR) return x < 1.0 ? 1.0 - x : 0.0;
    if (x < 1.0) return ((A + 2.0) * x - (A + 3.0)) * x * x + 1;
    return x < 2.0 ? (((x - 5) * x + 8) * x - 4) * A : 0.0;
}

// Which elements of a line each element of the resized line is made of, and their weights.
struct Weights {
    // Of `number_of_places` elements from `start` on, of a line of `after` elements that had `before`.
    Weights(int64_t before, int64_t after, int filter, int64_t start, int64_t number_of_places)
        : first(size_t(number_of_places)), count(size_t(number_of_places)) {
        double scale = double(before) / double(after), filter_scale = std::max(scale, 1.0);
        double support = SUPPORT[filter] * filter_scale;
        stride = int64_t(std::ceil(support)) * 2 + 1;
        values.resize(size_t(number_of_places * stride));
        std::vector<double> exact(size_t(stride), 0.0);
        for (int64_t place = 0; place < number_of_places; ++place) {
            double center = (double(start + place) + 0.5) * scale, sum = 0.0;
            int64_t begin = std::max<int64_t>(0, int64_t(center - support + 0.5));
            int64_t number = std::min(before, int64_t(center + support + 0.5)) - begin;
            for (int64_t i = 0; i < number; ++i) {
                exact[size_t(i)] = weight(filter, (double(i + begin) - center + 0.5) * (1.0 / filter_scale));
                sum += exact[size_t(i)];
            }
            for (int64_t i = 0; i < number; ++i) {
                double value = (sum != 0.0 ? exact[size_t(i)] / sum : exact[size_t(i)]) * (1 << WEIGHT_BITS);
                values[size_t(place * stride + i)] = int32_t(value < 0 ? value - 0.5 : value + 0.5);
            }
            first[size_t(place)] = begin;
            count[size_t(place)] = number;
        }
    }

    int64_t size() const { return int64_t(first.size()); }
    int64_t begin() const { return first.front(); }
    int64_t end() const { return first.back() + count.back(); }

    // Counts elements from `start` on.
    void count_from(int64_t start) {
        for (int64_t &element : first) element -= start;
    }

    std::vector<int64_t> first, count;
    std::vector<int32_t> values;
    int64_t stride;
};
