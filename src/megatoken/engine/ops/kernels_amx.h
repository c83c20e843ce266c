// Paged attention of bf16 in AMX tiles, for kernels.cpp, whose vector helpers it uses. A tile register holds 16 rows of 64
// bytes; one instruction multiplies 16 x 32 values by 32 x 16 and adds to 16 x 16 in fp32.
//
// Scores are computed transposed, keys x queries: tiles of keys are loaded directly from their page, and each lane of a
// vector is one query, so that maxima and sums over keys need no horizontal operations. The arithmetic of a query does not
// depend on other queries, so the rest of a batch never changes a request's tokens.

#ifndef MEGATOKEN_KERNELS_AMX_H
#define MEGATOKEN_KERNELS_AMX_H

#include "kernels_vectors.h"

namespace {

struct Rows {  // consecutive ones of one sequence; the last sees `length` keys, each before it one fewer than the next
    int sequence, first, count, length;
    bool tiled;  // which kernel
};

struct Item {  // these rows with the queries of one key/value head
    Rows rows;
    int kv_head;
};

}  // namespace

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define MEGATOKEN_AMX

#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>

namespace {
namespace amx {

constexpr int kBlockKeys = 64;    // scored between two updates of the maximum
constexpr int kMostQueries = 64;  // that share one pass over the pages, in tiles of 16
// Fewest queries of a sequence and key/value head for tiles: 64 decodes of 150 tokens on two cores ran 0.86 times as fast as without tiles for one
// query, 0.93 for two, 1.05 for three, 1.16 for four, 1.61 for eight.
constexpr int kFewestQueries = 3;

// Linux grants the tile registers to the whole process on request; repeated requests are harmless.
inline bool allowed() {
    constexpr int request_permission = 0x1023, tile_data = 18;
    static const bool granted = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
    return granted;
}

// Configures this thread's tiles during its lifetime. PyTorch's products configure theirs at every call.
struct Tiles {
    const bool on;
    explicit Tiles(bool on) : on(on) {
        if (!on) return;
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } layout;
        asm volatile("ldtilecfg %0" ::"m"(layout));
    }
    ~Tiles() {
        if (on) asm volatile("tilerelease");
    }
};

// GCC 12's intrinsic does not say that it reads memory. Strides are in bytes.
#define TILE_LOAD(TILE, FROM, STRIDE) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #TILE ::"r"((const void *)(FROM)), "r"((int64_t)(STRIDE)) : "memory")

typedef Ints Transposed[kLanes];

template <int Step> inline void exchange(Ints *rows) {
    Ints low, high;
    for (int lane = 0; lane < kLanes; ++lane) {
        low[lane] = lane & Step ? kLanes + lane - Step : lane;
        high[lane] = lane & Step ? kLanes + lane : lane + Step;
    }
    for (int row = 0; row < kLanes; ++row) {
        if (row & Step) continue;
        Ints upper = rows[row], lower = rows[row + Step];
        rows[row] = __builtin_shuffle(upper, lower, low);
        rows[row + Step] = __builtin_shuffle(upper, lower, high);
    }
}

inline void transpose(Ints *rows) {
    exchange<8>(rows);
    exchange<4>(rows);
    exchange<2>(rows);
    exchange<1>(rows);
}

// 2^x for x <= 0, relative error below 3e-6 where a bf16 keeps 2e-3; 1 at 0, 0 from -127 on. Scaling by vscalefps would
// take ten times as long, underflowing where keys are masked.
inline Floats power_of_two(Floats x) {
    Floats y = (Floats)_mm512_max_ps(_mm512_set1_ps(-127.0f), (__m512)x);  // NaN stays NaN
    Floats shifted = y + 12582912.0f;                                      // 1.5 * 2^23: the addition rounds to an integer
    Floats f = y - (shifted - 12582912.0f);
    Floats p = broadcast(9.582852945e-3f);
    p = p * f + 5.5906426161e-2f;
    p = p * f + 2.4024099112e-1f;
    p = p * f + 6.9312417507e-1f;
    p = p * f + 1.0f;
    return (Floats)((Ints)p + ((Ints)shifted << 23));
}

template <int E> struct Attention {  // the operands of one call
    bf16 *out;
    const bf16 *q, *k_cache, *v_cache;
    const int32_t *pages;
    int width, heads, kv_heads, page_size;
    int64_t q_stride;

    static constexpr int kParts = E / 32, kColumns = E / kLanes;  // of a head: tiles of queries and keys, of values

    struct Block {  // up to 64 keys of one item, 16 by 16 where they lie
        const bf16 *keys[kBlockKeys / kLanes], *values[kBlockKeys / kLanes];
        int tokens;
    };

    struct Sums {  // of 16 queries so far; columns in the order that interleaving gives the values
        alignas(64) float out[kLanes][E];
        Floats best, weights;
        Ints rows;  // which of the item's rows each query is of
    };

    struct Scratch {
        alignas(64) Ints queries[kMostQueries / kLanes][kParts][kLanes];  // [pair of columns][query]
        Floats scores[2][kBlockKeys];                                    // [key][query], of two tiles of queries
        Ints weights[kBlockKeys / 32][kLanes];                           // [query][pair of keys]
        Ints values[kBlockKeys / 32][kColumns][kLanes];                  // [pair of keys][column]
        Sums sums[kMostQueries / kLanes];
    };

    Block block(const Item &item, int first) const {
        Block found;
        int left = item.rows.length - first;
        found.tokens = left < kBlockKeys ? left : kBlockKeys;
        for (int tile = 0; tile < kBlockKeys / kLanes; ++tile) {
            int key = first + (tile * kLanes < found.tokens ? tile * kLanes : 0);
            int64_t page = pages[(int64_t)item.rows.sequence * width + key / page_size];
            int64_t at = ((page * kv_heads + item.kv_head) * page_size + key % page_size) * E;
            found.keys[tile] = k_cache + at;
            found.values[tile] = v_cache + at;
        }
        return found;
    }

    // Returns the number of tiles; queries beyond the last repeat it.
    int take_queries(Scratch &scratch, const Item &item) const {
        int group = heads / kv_heads, queries = item.rows.count * group, query = 0, row = 0, head = 0, tile = 0;
        const bf16 *from = q + item.rows.first * q_stride + (int64_t)item.kv_head * group * E;
        for (; tile * kLanes < queries; ++tile) {
            for (int lane = 0; lane < kLanes; ++lane) {
                for (int part = 0; part < kParts; ++part)
                    std::memcpy(scratch.queries[tile][part] + lane, from + row * q_stride + head * E + part * 32, 64);
                scratch.sums[tile].rows[lane] = row;
                if (++query >= queries) continue;
                if (++head == group) {
                    head = 0;
                    ++row;
                }
            }
            for (int part = 0; part < kParts; ++part) transpose(scratch.queries[tile][part]);
        }
        return tile;
    }

    // Products of 16 queries with the first keys of a block.
    void score(Floats *scores, const Ints (*queries)[kLanes], const Block &block, int key_tiles) const {
        asm volatile("tilezero %tmm0\n tilezero %tmm1\n tilezero %tmm2\n tilezero %tmm3");
        for (int part = 0; part < kParts; ++part) {
            TILE_LOAD(4, queries[part], 64);
#define SCORE(KEYS, TILE)                                      \
    if (key_tiles > KEYS) {                                    \
        TILE_LOAD(TILE, block.keys[KEYS] + part * 32, E * 2);  \
        _tile_dpbf16ps(KEYS, TILE, 4);                         \
    }
            SCORE(0, 5) SCORE(1, 6) SCORE(2, 7) SCORE(3, 5)
#undef SCORE
        }
        _tile_stored(0, scores, 64);
        _tile_stored(1, scores + 16, 64);
        _tile_stored(2, scores + 32, 64);
        _tile_stored(3, scores + 48, 64);
    }

    // Interleaves pairs of tokens, with zeros after the last. Prefetches the tiles `ahead`, whose pages the processor cannot
    // predict.
    void take_values(Scratch &scratch, const Block &block, const bf16 *const *ahead) const {
        for (int tile = 0; tile * kLanes < block.tokens || tile % 2; ++tile)
            for (int pair = 0; pair < kLanes / 2; ++pair) {
                int token = tile * kLanes + pair * 2;
                prefetch(ahead[tile] + pair * 2 * E, 2 * E);
                const bf16 *from = block.values[tile] + pair * 2 * E;
                Ints *to = scratch.values[tile / 2][0] + tile % 2 * (kLanes / 2) + pair;
                for (int part = 0; part < kParts; ++part, from += 32, to += 2 * kLanes) {
                    __m512i even = token < block.tokens ? _mm512_loadu_si512(from) : _mm512_setzero_si512();
                    __m512i odd = token + 1 < block.tokens ? _mm512_loadu_si512(from + E) : _mm512_setzero_si512();
                    to[0] = (Ints)_mm512_unpacklo_epi16(even, odd);
                    to[kLanes] = (Ints)_mm512_unpackhi_epi16(even, odd);
                }
            }
    }

    // Scores to weights in bf16. Sums the rounded weights, so that outputs stay weighted averages of values.
    void weigh(Scratch &scratch, Sums &sums, const Floats *scores, int steps, bool started,
               const bf16 *const *ahead) const {
        const float factor = 1.44269504088896341f / std::sqrt((float)E);  // exponentials are powers of two
        __m512 highest = (__m512)(started ? sums.best : scores[0]);
        for (int key = 0; key < steps * 32; ++key) highest = _mm512_max_ps((__m512)scores[key], highest);
        Floats top = (Floats)highest, shift = top * factor;
        if (!started) {
            sums.weights = Floats{};
        } else if (_mm512_cmp_ps_mask(highest, (__m512)sums.best, _CMP_NEQ_UQ)) {  // by exactly 1 where it did not grow
            alignas(64) float shrink[kLanes];
            store(shrink, power_of_two((sums.best - top) * factor));
            sums.weights *= load(shrink);
            for (int lane = 0; lane < kLanes; ++lane)
                for (int e = 0; e < E; e += kLanes) store(sums.out[lane] + e, load(sums.out[lane] + e) * shrink[lane]);
        }
        sums.best = top;
        Ints pairs;  // takes the weights of two keys in turn
        for (int lane = 0; lane < kLanes; ++lane) pairs[lane] = lane | (lane + kLanes) << 16;
        const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
        __m512 sum = (__m512)sums.weights;
        for (int step = 0; step < steps; ++step) {
            Ints *rows = scratch.weights[step];
            for (int pair = 0; pair < kLanes; ++pair, scores += 2) {
                if (ahead) prefetch(ahead[step * 2 + pair / 8] + pair % 8 * 2 * E, 2 * E);
                __m512 even = (__m512)power_of_two(scores[0] * factor - shift);
                __m512 odd = (__m512)power_of_two(scores[1] * factor - shift);
                rows[pair] = (Ints)_mm512_permutexvar_epi16((__m512i)pairs, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
                sum = _mm512_dpbf16_ps(sum, (__m512bh)rows[pair], ones);
            }
            transpose(rows);
        }
        sums.weights = (Floats)sum;
    }

    // Adds weights * values, 64 columns at a time.
    template <int First> void accumulate(const Scratch &scratch, Sums &sums, int steps, bool started) const {
        constexpr int columns = kColumns - First < 4 ? kColumns - First : 4;
#define EACH_COLUMN(DO) DO(0) DO(1) DO(2) DO(3)
#define LOAD(C) \
    if constexpr (columns > C) TILE_LOAD(C, sums.out[0] + (First + C) * kLanes, E * 4);
#define MULTIPLY(C)                                        \
    if constexpr (columns > C) {                           \
        TILE_LOAD(5, scratch.values[step][First + C], 64); \
        _tile_dpbf16ps(C, 4, 5);                           \
    }
#define STORE(C) \
    if constexpr (columns > C) _tile_stored(C, sums.out[0] + (First + C) * kLanes, E * 4);
        if (started) {
            EACH_COLUMN(LOAD)
        } else {
            asm volatile("tilezero %tmm0\n tilezero %tmm1\n tilezero %tmm2\n tilezero %tmm3");
        }
        for (int step = 0; step < steps; ++step) {
            TILE_LOAD(4, scratch.weights[step], 64);
            EACH_COLUMN(MULTIPLY)
        }
        EACH_COLUMN(STORE)
#undef EACH_COLUMN
#undef LOAD
#undef MULTIPLY
#undef STORE
        if constexpr (First + 4 < kColumns) accumulate<First + 4>(scratch, sums, steps, started);
    }

    // Online softmax block by block (Milakov and Gimelshein, 2018). Prefetches the first block of `next`, the thread's next
    // item, during the last block of this item.
    void attend(const Item &item, const Item &next) const {
        Scratch scratch;
        Rows rows = item.rows;
        int tiles = take_queries(scratch, item);
        Block now, ahead = block(item, 0);
        // Weights are multiplied one stage late, because a tile load would wait for the stores of the vector units.
        int waiting = -1, waiting_steps = 0;
        bool waiting_started = false;
        auto multiply_waiting = [&] {
            if (waiting >= 0) accumulate<0>(scratch, scratch.sums[waiting], waiting_steps, waiting_started);
            waiting = -1;
        };
        for (int first = 0; first < rows.length; first += kBlockKeys) {
            now = ahead;
            ahead = first + kBlockKeys < rows.length ? block(item, first + kBlockKeys) : block(next, 0);
            bool started = first > 0;
            int seen_by_first = rows.length - rows.count + 1 - first;  // keys of this block
            auto key_tiles = [&](int tile) {
                int seen = seen_by_first + scratch.sums[tile].rows[kLanes - 1];
                return seen <= 0 ? 0 : seen < now.tokens ? (seen + kLanes - 1) / kLanes : (now.tokens + kLanes - 1) / kLanes;
            };
            int tile = 0;
            while (!key_tiles(tile)) ++tile;
            score(scratch.scores[tile % 2], scratch.queries[tile], now, key_tiles(tile));
            multiply_waiting();
            take_values(scratch, now, ahead.keys);
            for (int rest = (now.tokens + 31) / 32 * 2; rest < kBlockKeys / kLanes; ++rest) {
                prefetch(ahead.keys[rest], kLanes * E);
                prefetch(ahead.values[rest], kLanes * E);
            }
            bool fetch = true;
            for (; tile < tiles; ++tile) {
                // The tile unit scores the next queries while the vector units weigh these.
                if (tile + 1 < tiles)
                    score(scratch.scores[(tile + 1) % 2], scratch.queries[tile + 1], now, key_tiles(tile + 1));
                multiply_waiting();
                Sums &sums = scratch.sums[tile];
                Floats *scores = scratch.scores[tile % 2];
                Ints seen = sums.rows + seen_by_first;
                int steps = (key_tiles(tile) + 1) / 2;
                for (int key = seen[0] > 0 ? seen[0] : 0; key < steps * 32; ++key)
                    scores[key] = key < seen ? scores[key] : broadcast(-INFINITY);
                weigh(scratch, sums, scores, steps, started, fetch ? ahead.values : nullptr);
                fetch = false;
                waiting = tile;
                waiting_steps = steps;
                waiting_started = started;
            }
        }
        multiply_waiting();
        finish(scratch, item);
    }

    void finish(const Scratch &scratch, const Item &item) const {
        int group = heads / kv_heads;
        alignas(64) int16_t columns[32];  // undoes the interleaving of columns
        for (int e = 0; e < 32; ++e) columns[e] = e / 8 * 4 + e % 4 + (e & 4 ? kLanes : 0);
        bf16 *row = out + ((int64_t)item.rows.first * heads + item.kv_head * group) * E;
        for (int count = 0, query = 0; count < item.rows.count; ++count, row += heads * E)
            for (int head = 0; head < group; ++head, ++query) {
                const Sums &sums = scratch.sums[query / kLanes];
                float inverse = 1.0f / sums.weights[query % kLanes];
                for (int part = 0; part < kParts; ++part) {
                    const float *from = sums.out[query % kLanes] + part * 32;
                    __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)(load(from + kLanes) * inverse),
                                                                (__m512)(load(from) * inverse));
                    _mm512_storeu_si512(row + head * E + part * 32, _mm512_permutexvar_epi16(_mm512_load_si512(columns), both));
                }
            }
    }
};

}  // namespace amx
}  // namespace

#undef TILE_LOAD
#endif
#endif
