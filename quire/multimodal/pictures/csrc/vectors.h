// Memory for vectors.
#pragma once

#include <cstdint>
#include <vector>

// Bytes that begin at a line of the cache.
class Vectors {
public:
    static constexpr int64_t ALIGNMENT = 64;

    Vectors() = default;
    explicit Vectors(int64_t bytes) : memory_(size_t(bytes + ALIGNMENT)) {}

    uint8_t *data() {
        auto address = reinterpret_cast<uintptr_t>(memory_.data());
        return memory_.data() + (ALIGNMENT - int64_t(address % ALIGNMENT)) % ALIGNMENT;
    }

private:
    std::vector<uint8_t> memory_;
};
