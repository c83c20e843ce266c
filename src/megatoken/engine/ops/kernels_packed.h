// Products with four-bit weights that stay packed in memory, for kernels.cpp: AVX2.
//
// A weight [N, K] has two codes to a byte, the even column in the low bits, and a factor for each group of columns. Eight
// codes are one 32-bit word: it is broadcast, each lane shifts its own code down, and a permutation or a conversion makes
// the values. A code is an e2m1 number, or an integer less the zero of its group.

#ifndef MEGATOKEN_KERNELS_PACKED_H
#define MEGATOKEN_KERNELS_PACKED_H

#include <vector>

#include "kernels_vectors.h"

#ifdef __AVX2__
#include <immintrin.h>

namespace packed {

constexpr int kWidth = 8;      // codes in a word
constexpr int kMostTokens = 4;  // whose sums fit in the registers together

struct Weight {
    const uint8_t *codes;
    const float *factors, *zeros;  // [N, K / group]; zeros are null for e2m1
    int64_t rows, columns;
    int group;
};

template <bool E2m1> inline __m256 values(const uint8_t *codes) {
    int32_t word;
    std::memcpy(&word, codes, sizeof word);
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    __m256i code = _mm256_srlv_epi32(_mm256_set1_epi32(word), shifts);
    if constexpr (E2m1) {
        const __m256 magnitudes = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
        __m256 magnitude = _mm256_permutevar8x32_ps(magnitudes, code);  // looks at the lowest three bits alone
        __m256i sign = _mm256_and_si256(_mm256_slli_epi32(code, 28), _mm256_set1_epi32((int)0x80000000));
        return _mm256_xor_ps(magnitude, _mm256_castsi256_ps(sign));
    } else {
        return _mm256_cvtepi32_ps(_mm256_and_si256(code, _mm256_set1_epi32(15)));
    }
}

inline float sum(__m256 lanes) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

// Rows of the weight times Tokens inputs [Tokens, K] in fp32. sums: of each group's inputs, [Tokens, K / group, 8].
template <bool E2m1, int Rows, int Tokens>
inline void dots(float *out, int64_t out_stride, const float *x, const float *sums, const Weight &weight, int64_t row) {
    int64_t groups = weight.columns / weight.group, row_bytes = weight.columns / 2;
    __m256 total[Rows][Tokens];
    for (int r = 0; r < Rows; ++r)
        for (int t = 0; t < Tokens; ++t) total[r][t] = _mm256_setzero_ps();
    const uint8_t *codes = weight.codes + row * row_bytes;
    for (int64_t g = 0; g < groups; ++g) {
        __m256 part[Rows][Tokens];
        for (int r = 0; r < Rows; ++r)
            for (int t = 0; t < Tokens; ++t)
                if constexpr (E2m1)
                    part[r][t] = _mm256_setzero_ps();
                else
                    part[r][t] = _mm256_mul_ps(_mm256_set1_ps(-weight.zeros[(row + r) * groups + g]),
                                               _mm256_loadu_ps(sums + (t * groups + g) * kWidth));
        for (int64_t at = g * weight.group, end = at + weight.group; at < end; at += kWidth) {
            for (int r = 0; r < Rows; ++r) {
                __m256 value = values<E2m1>(codes + r * row_bytes + at / 2);
                for (int t = 0; t < Tokens; ++t)
                    part[r][t] = _mm256_fmadd_ps(value, _mm256_loadu_ps(x + t * weight.columns + at), part[r][t]);
            }
        }
        for (int r = 0; r < Rows; ++r) {
            __m256 factor = _mm256_set1_ps(weight.factors[(row + r) * groups + g]);
            for (int t = 0; t < Tokens; ++t) total[r][t] = _mm256_fmadd_ps(part[r][t], factor, total[r][t]);
        }
    }
    for (int r = 0; r < Rows; ++r)
        for (int t = 0; t < Tokens; ++t) out[t * out_stride + row + r] = sum(total[r][t]);
}

template <bool E2m1, int Tokens>
void some_tokens(float *out, const float *x, const float *sums, const Weight &weight, int threads) {
    constexpr int rows = Tokens > 2 ? 2 : 4;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < weight.rows; row += rows) {
        if (row + rows <= weight.rows)
            dots<E2m1, rows, Tokens>(out, weight.rows, x, sums, weight, row);
        else
            for (int64_t last = row; last < weight.rows; ++last)
                dots<E2m1, 1, Tokens>(out, weight.rows, x, sums, weight, last);
    }
}

// out [tokens, N] = x [tokens, K] times the weight.
template <bool E2m1> void product(float *out, const float *x, int tokens, const Weight &weight, int threads) {
    int64_t groups = weight.columns / weight.group;
    std::vector<float> sums(E2m1 ? 0 : (size_t)tokens * groups * kWidth);
    for (int64_t group = 0; !E2m1 && group < tokens * groups; ++group) {
        __m256 lanes = _mm256_setzero_ps();
        for (int at = 0; at < weight.group; at += kWidth)
            lanes = _mm256_add_ps(lanes, _mm256_loadu_ps(x + group * weight.group + at));
        _mm256_storeu_ps(sums.data() + group * kWidth, lanes);
    }
    for (int done = 0; done < tokens;) {
        float *to = out + done * weight.rows;
        const float *from = x + done * weight.columns, *of_groups = sums.data() + (E2m1 ? 0 : done * groups * kWidth);
        switch (tokens - done) {
            case 1: some_tokens<E2m1, 1>(to, from, of_groups, weight, threads); done += 1; break;
            case 2: some_tokens<E2m1, 2>(to, from, of_groups, weight, threads); done += 2; break;
            case 3: some_tokens<E2m1, 3>(to, from, of_groups, weight, threads); done += 3; break;
            default: some_tokens<E2m1, kMostTokens>(to, from, of_groups, weight, threads); done += kMostTokens;
        }
    }
}

// The values of rows from first to last, fp32 [last - first, K].
template <bool E2m1> void decode(float *out, const Weight &weight, int64_t first, int64_t last, int threads) {
    int64_t groups = weight.columns / weight.group;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = first; row < last; ++row)
        for (int64_t g = 0; g < groups; ++g) {
            __m256 factor = _mm256_set1_ps(weight.factors[row * groups + g]);
            __m256 zero = E2m1 ? _mm256_setzero_ps() : _mm256_set1_ps(weight.zeros[row * groups + g]);
            for (int64_t at = g * weight.group, end = at + weight.group; at < end; at += kWidth) {
                __m256 value = values<E2m1>(weight.codes + (row * weight.columns + at) / 2);
                if constexpr (!E2m1) value = _mm256_sub_ps(value, zero);
                _mm256_storeu_ps(out + (row - first) * weight.columns + at, _mm256_mul_ps(value, factor));
            }
        }
}

}  // namespace packed
#endif

#endif
