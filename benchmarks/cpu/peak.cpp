// Peak rate of the processor's dot-product instructions without loads or stores: the upper bound of any matrix product.
//
//     g++ -O3 -march=native -fopenmp benchmarks/cpu/peak.cpp -o peak && ./peak
#include <cstdio>
#include <immintrin.h>
#include <omp.h>

constexpr int CHAINS = 24;  // independent accumulators
constexpr long TURNS = 20000000;

// Runs an instruction in all threads and returns operations per second; `operations` is the number per instruction.
template <class Step>
double rate(int operations, Step step) {
    double started = omp_get_wtime();
    int threads = 1;
#pragma omp parallel
    {
        threads = omp_get_num_threads();
        __m512i sums[CHAINS], one = _mm512_set1_epi32(omp_get_thread_num()), other = _mm512_set1_epi32(3);
#pragma GCC unroll 24
        for (int i = 0; i < CHAINS; i++) sums[i] = _mm512_setzero_si512();
        for (long turn = 0; turn < TURNS; turn++) {
#pragma GCC unroll 24
            for (int i = 0; i < CHAINS; i++) step(sums[i], one, other);
        }
        volatile int kept = 0;
#pragma GCC unroll 24
        for (int i = 0; i < CHAINS; i++) kept = kept + _mm512_reduce_add_epi32(sums[i]);
    }
    return double(threads) * TURNS * CHAINS * operations / (omp_get_wtime() - started);
}

int main() {
    for (int run = 0; run < 3; run++) {
        double bfloat16 = rate(64, [](__m512i &sum, __m512i a, __m512i b) { asm volatile("vdpbf16ps %1,%2,%0" : "+v"(sum) : "v"(a), "v"(b)); });
        double bytes = rate(128, [](__m512i &sum, __m512i a, __m512i b) { asm volatile("vpdpbusd %1,%2,%0" : "+v"(sum) : "v"(a), "v"(b)); });
        std::printf("bfloat16 %.2f, bytes %.2f Tera-operations a second\n", bfloat16 / 1e12, bytes / 1e12);
    }
}
