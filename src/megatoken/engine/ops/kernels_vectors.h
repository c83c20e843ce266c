// Sixteen numbers at a time, for kernels.cpp and kernels_amx.h: loading, storing and rounding, the same for fp32 and bf16.
//
// Vectors are GCC's generic ones, so any target compiles.

#ifndef MEGATOKEN_KERNELS_VECTORS_H
#define MEGATOKEN_KERNELS_VECTORS_H

#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

struct bf16 {
    uint16_t bits;
};

inline Floats load(const float *from) {
    Floats value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline Floats load(const bf16 *from) {
#ifdef __AVX512F__  // GCC 12 widens the generic vector in two halves
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#else
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
#endif
}

inline void store(float *to, Floats value) { std::memcpy(to, &value, sizeof value); }

inline void store(bf16 *to, Floats value) {  // to nearest, ties to even; NaN stays NaN as long as its top bits say so
    Words words = (Words)value;
    words += 0x7fff + ((words >> 16) & 1);
    Halves halves = __builtin_convertvector(words >> 16, Halves);
    std::memcpy(to, &halves, sizeof halves);
}

template <typename T> inline Floats rounded(Floats value) {
    T buffer[kLanes];
    store(buffer, value);
    return load(buffer);
}

inline Floats broadcast(float value) { return Floats{} + value; }

inline float total(Floats value) {
    float sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += value[lane];
    return sum;
}

template <typename T> inline void prefetch(const T *from, int count) {
    for (int at = 0; at < count; at += 64 / (int)sizeof(T)) __builtin_prefetch(from + at, 0, 2);
}

}  // namespace

#endif
