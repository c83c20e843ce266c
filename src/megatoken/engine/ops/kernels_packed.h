// Products with four-bit weights that stay packed in memory, for kernels.cpp: AVX2, faster with AVX-512 VNNI.
//
// A weight [N, K] has two codes to a byte, the even column in the low bits, a factor for each group of columns, and for
// integers a zero. Codes become unsigned bytes: integers as they are, e2m1 numbers twice their value plus 12. Inputs
// become integers of 16 bits with a scale for each chunk of columns, in two bytes, so that one instruction multiplies a
// vector of weights by one of inputs; sums of a chunk are exact. The error is that of the input's 16 bits, far below
// bf16's 8.
//
// A chunk is one vector of codes: their low halves are the even columns, their high halves the odd ones. Lane j of a
// chunk's sums covers columns 8 j to 8 j + 7, so groups of 16, 32 and 64 columns are whole lanes.

#ifndef MEGATOKEN_KERNELS_PACKED_H
#define MEGATOKEN_KERNELS_PACKED_H

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>

namespace packed {

#ifdef __AVX512BW__
constexpr int kBytes = 64;          // of a vector
constexpr int kMostTogether = 16;   // rows times tokens whose sums stay in registers
#else
constexpr int kBytes = 32;
constexpr int kMostTogether = 4;
#endif
constexpr int kLanes = kBytes / 4;
constexpr int kChunk = 2 * kBytes;    // columns
constexpr int kPlanes = 4;            // of a chunk's inputs: high bytes of even and odd columns, low bytes of them
constexpr int kMostRows = 4;          // of the weight at once
constexpr float kLargest = 32512.0f;  // so that the high byte, rounded to the nearest, is at most 127
constexpr float kE2m1Zero = 12, kE2m1Unit = 0.5f, kInt4Zero = 8;

typedef uint8_t Bytes __attribute__((vector_size(kBytes)));
typedef float Floats __attribute__((vector_size(kBytes)));
typedef int32_t Ints __attribute__((vector_size(kBytes)));

struct Weight {
    const uint8_t *codes;
    const float *factors, *zeros;  // [N, K / group]; null zeros: all have the same
    int64_t rows, columns;
    int group;
    bool e2m1;

    int64_t chunks() const { return columns / kChunk; }
};

// Inputs of one token.
struct Inputs {
    const uint8_t *planes;  // [chunks, 4, kBytes]
    const float *scales;    // [chunks]
    const float *sums;      // [chunks, kLanes]: of the integers, by lane
};

template <typename Vector, typename T> inline Vector vector_at(const T *from) {
    Vector value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

// The codes of even and of odd columns.
inline void split(const uint8_t *from, Bytes &even, Bytes &odd) {
#ifdef __AVX512BW__
    const __m512i both = _mm512_loadu_si512(from), low = _mm512_set1_epi8(15);
    even = (Bytes)_mm512_and_si512(both, low), odd = (Bytes)_mm512_and_si512(_mm512_srli_epi16(both, 4), low);
#else
    const __m256i both = _mm256_loadu_si256((const __m256i *)from), low = _mm256_set1_epi8(15);
    even = (Bytes)_mm256_and_si256(both, low), odd = (Bytes)_mm256_and_si256(_mm256_srli_epi16(both, 4), low);
#endif
}

template <bool E2m1> inline Bytes unsigned_values(Bytes codes) {
    if constexpr (!E2m1) return codes;
    const __m128i values = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
#ifdef __AVX512BW__
    return (Bytes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), (__m512i)codes);
#else
    return (Bytes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), (__m256i)codes);
#endif
}

// In each lane the sum of eight products: four even bytes times their inputs, which are signed, and four odd ones.
inline Ints products(Bytes even, Bytes odd, const uint8_t *even_inputs, const uint8_t *odd_inputs) {
#ifdef __AVX512VNNI__
    const __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), (__m512i)even, vector_at<__m512i>(even_inputs));
    return (Ints)_mm512_dpbusd_epi32(sums, (__m512i)odd, vector_at<__m512i>(odd_inputs));
#elif defined(__AVX512BW__)  // four products of at most 24 * 128 fit in 16 bits
    const __m512i first = _mm512_maddubs_epi16((__m512i)even, vector_at<__m512i>(even_inputs));
    const __m512i second = _mm512_maddubs_epi16((__m512i)odd, vector_at<__m512i>(odd_inputs));
    return (Ints)_mm512_madd_epi16(_mm512_add_epi16(first, second), _mm512_set1_epi16(1));
#else
    const __m256i first = _mm256_maddubs_epi16((__m256i)even, vector_at<__m256i>(even_inputs));
    const __m256i second = _mm256_maddubs_epi16((__m256i)odd, vector_at<__m256i>(odd_inputs));
    return (Ints)_mm256_madd_epi16(_mm256_add_epi16(first, second), _mm256_set1_epi16(1));
#endif
}

inline Floats to_floats(Ints integers) {
#ifdef __AVX512BW__
    return (Floats)_mm512_cvtepi32_ps((__m512i)integers);
#else
    return (Floats)_mm256_cvtepi32_ps((__m256i)integers);
#endif
}

// How a row's groups cover the lanes of its chunks.
struct Groups {
    int step, chunks;       // groups that begin in a chunk, chunks of a group
    Ints of_lane, begins;   // the group of each lane, counted from the chunk's first; -1 in as many lanes as groups begin

    explicit Groups(int group) : step(std::max(1, kChunk / group)), chunks(std::max(1, group / kChunk)) {
        for (int lane = 0; lane < kLanes; ++lane) of_lane[lane] = lane * step / kLanes, begins[lane] = -(lane < step);
    }

    // Numbers of groups for each lane of a chunk, from that of the chunk's first column on.
    Floats spread(const float *numbers) const {
#ifdef __AVX512BW__
        const __m512 some = _mm512_maskz_loadu_ps(_mm512_movepi32_mask((__m512i)begins), numbers);
        return (Floats)_mm512_permutexvar_ps((__m512i)of_lane, some);
#else
        return (Floats)_mm256_permutevar8x32_ps(_mm256_maskload_ps(numbers, (__m256i)begins), (__m256i)of_lane);
#endif
    }
};

// Rows of the weight from `row` times the inputs of some tokens, into out [tokens, N].
template <bool E2m1, int Rows, int Tokens>
inline void dots(float *out, const Inputs *inputs, const Weight &weight, const Groups &groups, int64_t row) {
    const int64_t row_groups = weight.columns / weight.group, row_bytes = weight.columns / 2;
    const Floats same_zero = Floats{} + (E2m1 ? kE2m1Zero : kInt4Zero);
    const uint8_t *codes = weight.codes + row * row_bytes;
    Floats sums[Rows][Tokens] = {};
    int64_t group = row * row_groups;
    int inside = 0;  // chunks of the group that are done
    for (int64_t chunk = 0; chunk < weight.chunks(); ++chunk, codes += kBytes) {
#pragma GCC unroll 4
        for (int r = 0; r < Rows; ++r) {
            __builtin_prefetch(codes + (Rows + r) * row_bytes);
            Bytes even, odd;
            split(codes + r * row_bytes, even, odd);
            even = unsigned_values<E2m1>(even), odd = unsigned_values<E2m1>(odd);
            const Floats factor = groups.spread(weight.factors + group + r * row_groups);
            const Floats zero = weight.zeros ? groups.spread(weight.zeros + group + r * row_groups) : same_zero;
#pragma GCC unroll 4
            for (int t = 0; t < Tokens; ++t) {
                const uint8_t *x = inputs[t].planes + chunk * kPlanes * kBytes;
                const Ints high = products(even, odd, x, x + kBytes);
                const Ints whole = (high << 8) + products(even, odd, x + 2 * kBytes, x + 3 * kBytes);
                const Floats exact = to_floats(whole) - zero * vector_at<Floats>(inputs[t].sums + chunk * kLanes);
                sums[r][t] += exact * (factor * inputs[t].scales[chunk]);
            }
        }
        if (++inside == groups.chunks) group += groups.step, inside = 0;
    }
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
        for (int t = 0; t < Tokens; ++t) {
            float total = 0;
            for (int lane = 0; lane < kLanes; ++lane) total += sums[r][t][lane];
            out[t * weight.rows + row + r] = total;
        }
}

template <bool E2m1, int Tokens>
void some_tokens(float *out, const Inputs *inputs, const Weight &weight, int threads) {
    constexpr int rows = std::min(kMostRows, kMostTogether / Tokens);
    const Groups groups(weight.group);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < weight.rows; row += rows) {
        if (row + rows <= weight.rows)
            dots<E2m1, rows, Tokens>(out, inputs, weight, groups, row);
        else
            for (int64_t last = row; last < weight.rows; ++last) dots<E2m1, 1, Tokens>(out, inputs, weight, groups, last);
    }
}

// The integers of a chunk of one token, and its scale. An input that is not finite makes the scale so.
inline void to_integers(uint8_t *planes, float *scale, float *sums, const float *x, bool e2m1) {
    constexpr float rounder = 12582912.0f;  // 1.5 * 2^23: the bits of a sum with it end in the other's nearest integer
    int32_t largest_bits = 0, integers[kChunk];
    for (int at = 0; at < kChunk; ++at) {
        int32_t bits;
        std::memcpy(&bits, x + at, sizeof bits);
        largest_bits = std::max(largest_bits, bits & 0x7fffffff);
    }
    float largest;
    std::memcpy(&largest, &largest_bits, sizeof largest);
    const bool finite = largest_bits < 0x7f800000;
    *scale = finite ? largest / kLargest * (e2m1 ? kE2m1Unit : 1) : largest * 0.0f;
    const float each = finite && largest > 0 ? kLargest / largest : 0;
    for (int at = 0; at < kChunk; ++at) {
        const float rounded = (finite ? x[at] : 0) * each + rounder;
        std::memcpy(integers + at, &rounded, sizeof rounded);
        integers[at] -= 0x4b400000;
    }
    for (int at = 0; at < kBytes; ++at)
        for (int odd = 0; odd < 2; ++odd) {
            const int32_t whole = integers[2 * at + odd], high = (whole + 128) >> 8;
            planes[odd * kBytes + at] = (uint8_t)high;
            planes[(2 + odd) * kBytes + at] = (uint8_t)(whole - high * 256);
        }
    for (int lane = 0; lane < kLanes; ++lane) {
        int32_t sum = 0;
        for (int at = 0; at < kChunk / kLanes; ++at) sum += integers[lane * (kChunk / kLanes) + at];
        sums[lane] = (float)sum;
    }
}

template <bool E2m1> void product(float *out, const Inputs *inputs, int tokens, const Weight &weight, int threads) {
    for (int done = 0; done < tokens;) {
        float *to = out + done * weight.rows;
        switch (tokens - done) {
            case 1: some_tokens<E2m1, 1>(to, inputs + done, weight, threads); done += 1; break;
            case 2:
            case 3: some_tokens<E2m1, 2>(to, inputs + done, weight, threads); done += 2; break;
            default: some_tokens<E2m1, 4>(to, inputs + done, weight, threads); done += 4;
        }
    }
}

// out [tokens, N] = x [tokens, K] times the weight.
inline void product(float *out, const float *x, int tokens, const Weight &weight, int threads) {
    const int64_t chunks = weight.chunks(), count = tokens * chunks;
    std::vector<float> scales(count), sums(count * kLanes);
    std::vector<uint8_t> room((count * kPlanes + 1) * kBytes);
    uint8_t *planes = (uint8_t *)(((uintptr_t)room.data() + kBytes - 1) / kBytes * kBytes);
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens > 1)
    for (int64_t at = 0; at < count; ++at)
        to_integers(planes + at * kPlanes * kBytes, &scales[at], &sums[at * kLanes], x + at * kChunk, weight.e2m1);
    std::vector<Inputs> inputs(tokens);
    for (int64_t t = 0; t < tokens; ++t)
        inputs[t] = {planes + t * chunks * kPlanes * kBytes, &scales[t * chunks], &sums[t * chunks * kLanes]};
    weight.e2m1 ? product<true>(out, inputs.data(), tokens, weight, threads)
                : product<false>(out, inputs.data(), tokens, weight, threads);
}

// The values of eight codes. A word of them is broadcast, and each lane shifts its own code down.
template <bool E2m1> inline __m256 values(const uint8_t *codes, __m256 zero) {
    int32_t word;
    std::memcpy(&word, codes, sizeof word);
    __m256i code = _mm256_srlv_epi32(_mm256_set1_epi32(word), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    if constexpr (!E2m1) return _mm256_sub_ps(_mm256_cvtepi32_ps(_mm256_and_si256(code, _mm256_set1_epi32(15))), zero);
    const __m256 magnitudes = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
    __m256 magnitude = _mm256_permutevar8x32_ps(magnitudes, code);  // looks at the lowest three bits alone
    __m256i sign = _mm256_and_si256(_mm256_slli_epi32(code, 28), _mm256_set1_epi32((int)0x80000000));
    return _mm256_xor_ps(magnitude, _mm256_castsi256_ps(sign));
}

// Rows of the weight from first to last, fp32 [last - first, K].
template <bool E2m1> void decode(float *out, const Weight &weight, int64_t first, int64_t last, int threads) {
    const int64_t groups = weight.columns / weight.group;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = first; row < last; ++row) {
        const uint8_t *codes = weight.codes + row * (weight.columns / 2);
        float *to = out + (row - first) * weight.columns;
        for (int64_t at = row * groups; at < (row + 1) * groups; ++at) {
            const __m256 factor = _mm256_set1_ps(weight.factors[at]);
            const __m256 zero = _mm256_set1_ps(weight.zeros ? weight.zeros[at] : kInt4Zero);
            for (int column = 0; column < weight.group; column += 8, codes += 4, to += 8)
                _mm256_storeu_ps(to, _mm256_mul_ps(values<E2m1>(codes, zero), factor));
        }
    }
}

}  // namespace packed
#endif

#endif
