// Three operations of the CPU back end that take PyTorch many passes over memory: paged attention, RMS norm, and rotary
// embedding with the write into the paged cache. native.py compiles them on first use and documents their arguments;
// without a compiler the PyTorch versions in cpu.py run instead.
//
// Any target compiles. The bf16 dot product has a variant for AVX-512 BF16, attention in bf16 a kernel for AMX
// (kernels_amx.h).

#if !defined(__GNUC__) || defined(__clang__)  // Clang's OpenMP library would start threads in addition to PyTorch's
#error "the kernels need GCC"
#endif

#include <atomic>
#include <cmath>
#include <type_traits>
#include <vector>

#include "kernels_amx.h"
#include "kernels_packed.h"
#include "kernels_vectors.h"

namespace {

inline float highest(Floats value) {
    float best = value[0];
    for (int lane = 1; lane < kLanes; ++lane) best = value[lane] > best ? value[lane] : best;
    return best;
}

// e^x for x <= 0, relative error below 2e-7 (degree-6 Taylor polynomial of 2^f on |f| <= 1/2); 0 below -87.
inline Floats exponential(Floats x) {
    Floats y = x * 1.44269504088896341f;
    Floats shifted = y + 12582912.0f;  // 1.5 * 2^23: the addition rounds to an integer
    Ints whole = (Ints)shifted - 0x4b400000;
    Floats f = y - (shifted - 12582912.0f);
    Floats p = broadcast(1.5403530393381608e-4f);
    p = p * f + 1.3333558146428443e-3f;
    p = p * f + 9.618129107628477e-3f;
    p = p * f + 5.550410866482158e-2f;
    p = p * f + 2.402265069591007e-1f;
    p = p * f + 6.931471805599453e-1f;
    p = p * f + 1.0f;
    Floats result = (Floats)((Ints)p + (whole << 23));
    return x < -87.0f ? Floats{} : result;
}

// Sums of 16 vectors, one per lane: each level of the tree halves their number with three operations a pair.
template <int Width> inline void fold(Floats *sums) {
    constexpr int half = Width / 2;
    Ints low, high;
    for (int lane = 0; lane < kLanes; ++lane) {
        int block = lane / Width * Width, within = lane % Width;
        low[lane] = within < half ? block + within : 16 + block + within - half;
        high[lane] = within < half ? block + half + within : 16 + block + within;
    }
    for (int pair = 0; pair < half; ++pair)
        sums[pair] = __builtin_shuffle(sums[pair], sums[pair + half], low) +
                     __builtin_shuffle(sums[pair], sums[pair + half], high);
}

inline Floats fold16(Floats *sums) {
    fold<16>(sums);
    fold<8>(sums);
    fold<4>(sums);
    fold<2>(sums);
    return sums[0];
}

constexpr int kMaxQueries = 16, kMaxPage = 256;

template <int E> constexpr int kBlock = E > 64 ? 2 : 4;  // queries whose sums fit in the registers together

// Lane sums of query * key, not yet added up.
template <int E, typename T> inline Floats product(const T *query, const T *key) {
    Floats sum{};
    for (int e = 0; e < E; e += kLanes) sum += load(query + e) * load(key + e);
    return sum;
}

#ifdef __AVX512BF16__
template <int E> inline Floats product(const bf16 *query, const bf16 *key) {
    __m512 sum = _mm512_setzero_ps();
    for (int e = 0; e < E; e += 2 * kLanes)
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(query + e), (__m512bh)_mm512_loadu_si512(key + e));
    return (Floats)sum;
}
#endif

// Dot products of one query with 16 consecutive keys.
template <int E, typename T> inline Floats dots(const T *query, const T *keys) {
    Floats sums[kLanes];
    for (int key = 0; key < kLanes; ++key) sums[key] = product<E>(query, keys + key * E);
    return fold16(sums);
}

// out[G][E] += weights[G][tokens] * values[tokens][E] for a block of G queries held in registers.
template <typename T, int E, int G>
inline void accumulate(float *out, const float *weights, const T *values, int tokens, const float *scale,
                       const T *ahead) {
    constexpr int vectors = E / kLanes;
    Floats sums[G][vectors];
    for (int g = 0; g < G; ++g)
        for (int v = 0; v < vectors; ++v) sums[g][v] = load(out + g * E + v * kLanes) * scale[g];
    for (int token = 0; token < tokens; ++token) {
        prefetch(ahead + token * E, E);
        for (int v = 0; v < vectors; ++v) {
            Floats value = load(values + token * E + v * kLanes);
            for (int g = 0; g < G; ++g) sums[g][v] += value * weights[g * kMaxPage + token];
        }
    }
    for (int g = 0; g < G; ++g)
        for (int v = 0; v < vectors; ++v) store(out + g * E + v * kLanes, sums[g][v]);
}

// The queries of these rows that share one key/value head: online softmax page by page (Milakov and Gimelshein, 2018).
template <typename T, int E>
void attend(T *out, const T *q, int64_t out_stride, int64_t q_stride, const T *k_cache, const T *v_cache,
            const int32_t *pages, Rows rows, int kv_heads, int kv_head, int group, int page_size, float scale) {
    alignas(64) float sums[kMaxQueries][E], weights[kMaxQueries][kMaxPage];
    float best[kMaxQueries], weight_sum[kMaxQueries], shrink[kMaxQueries];
    int queries = rows.count * group, length = rows.length;
    std::memset(sums, 0, sizeof sums);
    for (int g = 0; g < queries; ++g) {
        best[g] = -INFINITY;
        weight_sum[g] = 0;
    }
    for (int first = 0; first < length; first += page_size) {
        int tokens = length - first < page_size ? length - first : page_size;
        int64_t place = ((int64_t)pages[first / page_size] * kv_heads + kv_head) * page_size * E;
        const T *keys = k_cache + place, *values = v_cache + place;
        // The processor cannot predict the next page, so keys are fetched while values are computed, and the reverse.
        bool more = first + page_size < length;
        const T *next = more ? k_cache + ((int64_t)pages[first / page_size + 1] * kv_heads + kv_head) * page_size * E : keys;
        for (int tile = 0; tile < tokens; tile += kLanes) {
            prefetch(values + tile * E, kLanes * E);
            for (int g = 0; g < queries; ++g)
                store(weights[g] + tile, dots<E>(q + g / group * q_stride + g % group * E, keys + tile * E) * scale);
        }
        for (int g = 0; g < queries; ++g) {
            int visible = length - first - (rows.count - 1 - g / group);
            int padded = (tokens + kLanes - 1) / kLanes * kLanes;
            for (int token = visible > 0 ? visible : 0; token < padded; ++token) weights[g][token] = -INFINITY;
            Floats top = load(weights[g]);
            for (int tile = kLanes; tile < padded; tile += kLanes) {
                Floats other = load(weights[g] + tile);
                top = other > top ? other : top;
            }
            float old = best[g], now = highest(top);
            best[g] = old > now ? old : now;
            shrink[g] = old == -INFINITY ? 0.0f : std::exp(old - best[g]);
            Floats added{};
            for (int tile = 0; tile < padded; tile += kLanes) {
                Floats weight = exponential(load(weights[g] + tile) - best[g]);
                added += weight;
                store(weights[g] + tile, weight);
            }
            weight_sum[g] = weight_sum[g] * shrink[g] + total(added);
        }
        for (int g = 0; g < queries;) {
            int block = queries - g < kBlock<E> ? queries - g : kBlock<E>;
            float *out = sums[g], *weight = weights[g], *by = shrink + g;
            const T *ahead = g ? values : next;
            if (block == 4) accumulate<T, E, 4>(out, weight, values, tokens, by, ahead);
            if (block == 3) accumulate<T, E, 3>(out, weight, values, tokens, by, ahead);
            if (block == 2) accumulate<T, E, 2>(out, weight, values, tokens, by, ahead);
            if (block == 1) accumulate<T, E, 1>(out, weight, values, tokens, by, ahead);
            g += block;
        }
    }
    for (int g = 0; g < queries; ++g)
        for (int e = 0; e < E; e += kLanes)
            store(out + g / group * out_stride + g % group * E + e, load(sums[g] + e) / weight_sum[g]);
}

template <typename T, int E>
void attend_all(T *out, const T *q, const T *k_cache, const T *v_cache, const int32_t *pages, const int32_t *lengths,
                const int32_t *first_rows, int sequences, int width, int heads, int kv_heads, int page_size,
                int64_t q_stride, int threads) {
    int group = heads / kv_heads;
    float scale = 1.0f / std::sqrt((float)E);
#ifdef MEGATOKEN_AMX
    constexpr bool is_bf16 = std::is_same<T, bf16>::value;
    const bool has_tiles = is_bf16 && amx::allowed();
#endif
    std::vector<Rows> blocks;
    for (int sequence = 0; sequence < sequences; ++sequence) {
        int row = first_rows[sequence], end = first_rows[sequence + 1], most = kMaxQueries;
        bool tiled = false;
#ifdef MEGATOKEN_AMX
        tiled = has_tiles && (end - row) * group >= amx::kFewestQueries;
        if (tiled) most = amx::kMostQueries;
#endif
        for (most /= group; row < end; row += most) {
            int count = end - row < most ? end - row : most;
            blocks.push_back({sequence, row, count, lengths[sequence] - (end - row - count), tiled});
        }
    }
    int items = (int)blocks.size() * kv_heads;
    auto at = [&](int item) { return Item{blocks[item / kv_heads], item % kv_heads}; };
    std::atomic<int> taken{0};
#pragma omp parallel num_threads(threads)
    {
#ifdef MEGATOKEN_AMX
        amx::Tiles tiles(has_tiles);
#endif
        for (int item = taken++, next; item < items; item = next) {
            next = taken++;
            Item now = at(item);
#ifdef MEGATOKEN_AMX
            if constexpr (is_bf16)
                if (now.rows.tiled) {
                    amx::Attention<E>{out, q, k_cache, v_cache, pages, width, heads, kv_heads, page_size, q_stride}.attend(
                        now, at(next < items ? next : item));
                    continue;
                }
#endif
            int64_t head = (int64_t)now.kv_head * group * E, out_stride = (int64_t)heads * E;
            attend<T, E>(out + now.rows.first * out_stride + head, q + now.rows.first * q_stride + head, out_stride,
                         q_stride, k_cache, v_cache, pages + (int64_t)now.rows.sequence * width, now.rows, kv_heads,
                         now.kv_head, group, page_size, scale);
        }
    }
}

template <typename T>
void attend_any(T *out, const T *q, const T *k_cache, const T *v_cache, const int32_t *pages, const int32_t *lengths,
               const int32_t *first_rows, int sequences, int width, int heads, int kv_heads, int head_dim,
               int page_size, int64_t q_stride, int threads) {
    switch (head_dim) {
#define CASE(E)                                                                                                         \
    case E:                                                                                                             \
        attend_all<T, E>(out, q, k_cache, v_cache, pages, lengths, first_rows, sequences, width, heads, kv_heads,       \
                         page_size, q_stride, threads);                                                                 \
        break;
        CASE(32) CASE(64) CASE(96) CASE(128)
#undef CASE
    }
}

template <typename T>
void normalise(T *out, const T *x, const T *weight, int64_t rows, int64_t width, float epsilon, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * width > 8192)
    for (int64_t row = 0; row < rows; ++row) {
        const T *from = x + row * width;
        Floats squares{};
        for (int64_t at = 0; at < width; at += kLanes) {
            Floats value = load(from + at);
            squares += value * value;
        }
        float inverse = 1.0f / std::sqrt(total(squares) / width + epsilon);
        for (int64_t at = 0; at < width; at += kLanes)
            store(out + row * width + at, rounded<T>(load(from + at) * inverse) * load(weight + at));
    }
}

template <typename T>
void rotate_and_write(T *q_out, T *k_cache, T *v_cache, const T *qkv, const T *cos, const T *sin,
                      const int32_t *positions, const int32_t *cache_slots, int64_t rows, int heads, int kv_heads,
                      int head_dim, int page_size, int threads) {
    int half = head_dim / 2, per_row = heads + 2 * kv_heads;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * per_row * head_dim > 8192)
    for (int64_t row = 0; row < rows; ++row) {
        const T *from = qkv + row * per_row * head_dim;
        const T *c = cos + (int64_t)positions[row] * head_dim, *s = sin + (int64_t)positions[row] * head_dim;
        int64_t page = cache_slots[row] / page_size, offset = cache_slots[row] % page_size;
        for (int head = 0; head < heads + kv_heads; ++head, from += head_dim) {
            T *to = head < heads ? q_out + (row * heads + head) * head_dim
                                 : k_cache + ((page * kv_heads + head - heads) * page_size + offset) * head_dim;
            for (int at = 0; at < half; at += kLanes) {
                Floats first = load(from + at), second = load(from + half + at);
                store(to + at, first * load(c + at) + second * load(s + at));
                store(to + half + at, second * load(c + half + at) + first * load(s + half + at));
            }
        }
        for (int head = 0; head < kv_heads; ++head, from += head_dim)
            std::memcpy(v_cache + ((page * kv_heads + head) * page_size + offset) * head_dim, from, head_dim * sizeof(T));
    }
}

}  // namespace

#define EXPORT(T, SUFFIX)                                                                                               \
    void attention_##SUFFIX(T *out, const T *q, const T *k_cache, const T *v_cache, const int32_t *pages,               \
                            const int32_t *lengths, const int32_t *first_rows, int sequences, int width, int heads,     \
                            int kv_heads, int head_dim, int page_size, int64_t q_stride, int threads) {                 \
        attend_any<T>(out, q, k_cache, v_cache, pages, lengths, first_rows, sequences, width, heads, kv_heads,          \
                      head_dim, page_size, q_stride, threads);                                                          \
    }                                                                                                                   \
    void rms_norm_##SUFFIX(T *out, const T *x, const T *weight, int64_t rows, int64_t width, float epsilon,             \
                           int threads) {                                                                               \
        normalise<T>(out, x, weight, rows, width, epsilon, threads);                                                    \
    }                                                                                                                   \
    void rotate_and_write_##SUFFIX(T *q_out, T *k_cache, T *v_cache, const T *qkv, const T *cos, const T *sin,          \
                                   const int32_t *positions, const int32_t *cache_slots, int64_t rows, int heads,       \
                                   int kv_heads, int head_dim, int page_size, int threads) {                            \
        rotate_and_write<T>(q_out, k_cache, v_cache, qkv, cos, sin, positions, cache_slots, rows, heads, kv_heads,      \
                            head_dim, page_size, threads);                                                              \
    }

extern "C" {
int has_packed() {
#ifdef __AVX2__
    return 1;
#else
    return 0;
#endif
}
#ifdef __AVX2__
void packed_product(float *out, const float *x, const uint8_t *codes, const float *factors, const float *zeros,
                    int64_t rows, int64_t columns, int group, int e2m1, int tokens, int threads) {
    packed::product(out, x, tokens, {codes, factors, zeros, rows, columns, group, e2m1 != 0}, threads);
}
void packed_decode(float *out, const uint8_t *codes, const float *factors, const float *zeros, int64_t rows,
                   int64_t columns, int group, int e2m1, int64_t first, int64_t last, int threads) {
    packed::Weight weight{codes, factors, zeros, rows, columns, group, e2m1 != 0};
    e2m1 ? packed::decode<true>(out, weight, first, last, threads)
         : packed::decode<false>(out, weight, first, last, threads);
}
#endif
EXPORT(float, fp32)
EXPORT(bf16, bf16)
}
