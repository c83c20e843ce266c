// Products with four-bit weights that stay packed in memory, for kernels.cpp: AVX2.
//
// A weight [N, K] has two codes to a byte, the even column in the low bits, a factor for each group of columns, and for
// integers a zero. Codes become unsigned bytes: integers as they are, e2m1 numbers twice their value plus 12. Inputs
// become integers of 16 bits with a scale for each block of columns, in two bytes, so that one instruction multiplies 32
// weights by 32 inputs; sums of a block are exact. The error is that of the input's 16 bits, far below bf16's 8.
//
// A chunk is 64 columns, 32 bytes of codes: their low halves are the even columns, their high halves the odd ones. Lane j
// of a chunk's sums covers columns 8 j to 8 j + 7, so groups of 16 and 32 columns are whole lanes.

#ifndef MEGATOKEN_KERNELS_PACKED_H
#define MEGATOKEN_KERNELS_PACKED_H

#include <cmath>
#include <vector>

#include "kernels_vectors.h"

#ifdef __AVX2__
#include <immintrin.h>

namespace packed {

constexpr int kChunk = 64;           // columns
constexpr int kBlock = 128;          // most columns whose sums fit in 16 bits: 4 pairs of products below 2 * 24 * 128
constexpr int kPlanes = 4 * 32;      // bytes of a chunk's inputs: high and low bytes, each of even and of odd columns
constexpr int kSums = 8;            // lanes
constexpr int kMostTogether = 4;     // rows times tokens whose sums fit in the registers
constexpr float kLargest = 32512.0f;  // so that the high byte, rounded to the nearest, is at most 127
constexpr float kE2m1Zero = 12, kE2m1Unit = 0.5f, kInt4Zero = 8;

struct Weight {
    const uint8_t *codes;
    const float *factors, *zeros;  // [N, K / group]; null zeros: all have the same
    int64_t rows, columns;
    int group;
    bool e2m1;

    int64_t block() const { return group % kBlock == 0 ? kBlock : kChunk; }
    int64_t blocks() const { return columns / block(); }
};

// Inputs of one token.
struct Inputs {
    const uint8_t *planes;  // [K / 64, 128]
    const float *scales;    // [blocks]
    const float *sums;      // [blocks, 8]: of the integers, by lane
};

inline __m256i low_codes(__m256i bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }

template <bool E2m1> inline __m256i unsigned_values(__m256i codes) {
    if constexpr (!E2m1) return codes;
    const __m256i values = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    return _mm256_shuffle_epi8(values, codes);
}

inline __m256i plane(const uint8_t *planes, int which) {
    return _mm256_load_si256((const __m256i *)(planes + 32 * which));
}

// Numbers of a row's groups for each lane of a chunk, from that of the chunk's first column on.
inline __m256 of_lanes(const float *groups, int group) {
    if (group >= kChunk) return _mm256_set1_ps(*groups);
    __m128i some = group == 32 ? _mm_loadl_epi64((const __m128i *)groups) : _mm_loadu_si128((const __m128i *)groups);
    __m256i lanes = group == 32 ? _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1) : _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    return _mm256_permutevar8x32_ps(_mm256_castsi256_ps(_mm256_castsi128_si256(some)), lanes);
}

inline float sum(__m256 lanes) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

// Rows of the weight from `row` times the inputs of some tokens, into out [tokens, N].
template <bool E2m1, int Rows, int Tokens>
inline void dots(float *out, const Inputs *inputs, const Weight &weight, int64_t row) {
    const int64_t groups = weight.columns / weight.group, row_bytes = weight.columns / 2;
    const int64_t chunks = weight.block() / kChunk;                               // of a block
    const int64_t step = weight.group < kChunk ? kChunk / weight.group : 1;       // groups that share a block
    const int64_t blocks = weight.group < kChunk ? 1 : weight.group / weight.block();  // of a group
    const __m256i ones = _mm256_set1_epi16(1), high_unit = _mm256_set1_epi16(256);
    const __m256 same_zero = _mm256_set1_ps(E2m1 ? kE2m1Zero : kInt4Zero);
    __m256 total[Rows][Tokens];
    for (int r = 0; r < Rows; ++r)
        for (int t = 0; t < Tokens; ++t) total[r][t] = _mm256_setzero_ps();
    for (int64_t group = 0, block = 0; group < groups; group += step)
        for (int64_t end = block + blocks; block < end; ++block) {
            __m256i high[Rows][Tokens], low[Rows][Tokens];
            for (int r = 0; r < Rows; ++r)
                for (int t = 0; t < Tokens; ++t) high[r][t] = low[r][t] = _mm256_setzero_si256();
            for (int64_t chunk = block * chunks; chunk < (block + 1) * chunks; ++chunk)
                for (int r = 0; r < Rows; ++r) {
                    const uint8_t *at = weight.codes + (row + r) * row_bytes + chunk * (kChunk / 2);
                    __m256i bytes = _mm256_loadu_si256((const __m256i *)at);
                    __m256i even = unsigned_values<E2m1>(low_codes(bytes));
                    __m256i odd = unsigned_values<E2m1>(low_codes(_mm256_srli_epi16(bytes, 4)));
                    for (int t = 0; t < Tokens; ++t) {
                        const uint8_t *x = inputs[t].planes + chunk * kPlanes;
                        __m256i first = _mm256_maddubs_epi16(even, plane(x, 0));
                        __m256i second = _mm256_maddubs_epi16(odd, plane(x, 1));
                        high[r][t] = _mm256_add_epi16(high[r][t], _mm256_add_epi16(first, second));
                        first = _mm256_maddubs_epi16(even, plane(x, 2));
                        second = _mm256_maddubs_epi16(odd, plane(x, 3));
                        low[r][t] = _mm256_add_epi16(low[r][t], _mm256_add_epi16(first, second));
                    }
                }
            for (int r = 0; r < Rows; ++r) {
                const int64_t at = (row + r) * groups + group;
                __m256 factor = of_lanes(weight.factors + at, weight.group);
                __m256 zero = weight.zeros ? of_lanes(weight.zeros + at, weight.group) : same_zero;
                for (int t = 0; t < Tokens; ++t) {
                    __m256i both = _mm256_add_epi32(_mm256_madd_epi16(high[r][t], high_unit),
                                                    _mm256_madd_epi16(low[r][t], ones));
                    __m256 products = _mm256_fnmadd_ps(zero, _mm256_loadu_ps(inputs[t].sums + block * kSums),
                                                       _mm256_cvtepi32_ps(both));
                    __m256 scale = _mm256_mul_ps(factor, _mm256_set1_ps(inputs[t].scales[block]));
                    total[r][t] = _mm256_fmadd_ps(products, scale, total[r][t]);
                }
            }
        }
    for (int r = 0; r < Rows; ++r)
        for (int t = 0; t < Tokens; ++t) out[t * weight.rows + row + r] = sum(total[r][t]);
}

template <bool E2m1, int Tokens>
void some_tokens(float *out, const Inputs *inputs, const Weight &weight, int threads) {
    constexpr int rows = kMostTogether / Tokens;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < weight.rows; row += rows) {
        if (row + rows <= weight.rows)
            dots<E2m1, rows, Tokens>(out, inputs, weight, row);
        else
            for (int64_t last = row; last < weight.rows; ++last) dots<E2m1, 1, Tokens>(out, inputs, weight, last);
    }
}

// The integers of one token. An input that is not finite makes its block's scale so.
inline void to_integers(uint8_t *planes, float *scales, float *sums, const float *x, const Weight &weight) {
    const int64_t columns = weight.block();
    for (int64_t block = 0; block < weight.blocks(); ++block, x += columns) {
        float largest = 0, wrong = 0;
        for (int64_t at = 0; at < columns; ++at) {
            largest = std::fabs(x[at]) > largest ? std::fabs(x[at]) : largest;
            wrong += x[at] * 0.0f;
        }
        scales[block] = largest / kLargest * (weight.e2m1 ? kE2m1Unit : 1) + wrong;
        const float each = largest > 0 && wrong == 0 ? kLargest / largest : 0;
        int32_t lanes[kSums] = {};
        for (int64_t at = 0; at < columns; ++at) {
            int32_t whole = wrong == 0 ? (int32_t)std::lrintf(x[at] * each) : 0, high = (whole + 128) >> 8;
            uint8_t *to = planes + (block * columns + at) / kChunk * kPlanes + at % 2 * 32 + at % kChunk / 2;
            to[0] = (uint8_t)high;
            to[64] = (uint8_t)(whole - high * 256);
            lanes[at % kChunk / kSums] += whole;
        }
        for (int lane = 0; lane < kSums; ++lane) sums[block * kSums + lane] = (float)lanes[lane];
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
    const int64_t bytes = weight.columns / kChunk * kPlanes, blocks = weight.blocks();
    std::vector<float> scales(tokens * blocks), sums(tokens * blocks * kSums);
    std::vector<uint8_t> room(tokens * bytes + 31);
    uint8_t *planes = (uint8_t *)(((uintptr_t)room.data() + 31) / 32 * 32);
    std::vector<Inputs> inputs(tokens);
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens > 1)
    for (int t = 0; t < tokens; ++t) {
        inputs[t] = {planes + t * bytes, scales.data() + t * blocks, sums.data() + t * blocks * kSums};
        to_integers(planes + t * bytes, scales.data() + t * blocks, sums.data() + t * blocks * kSums,
                    x + t * weight.columns, weight);
    }
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
