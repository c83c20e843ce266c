// Weights of four bits (e2m1) that stay packed in a GPU's memory: products of few tokens, and their expansion to e4m3.
//
// A tile is 16 outputs of 64 inputs. A lane of a warp holds the 32 codes of one tile that it needs as its part of the
// first operand of `mma.m16n8k16`, in 16 bytes: of outputs lane / 4 and that + 8 the inputs from lane % 4 * 16 on, which
// have one scale each. So codes go from memory to the tensor cores without an exchange. `packed_product.py` has the order.

// GROUP (inputs that share a scale: 16 with e4m3 scales, 32 with powers of two), WARPS of a program, OUTPUT_TILES of a
// program, TOKEN_TILES of 8 tokens and AHEAD (tiles that a warp loads at a time) are given by packed_product.py.
#define DEPTH 64                   // inputs of a tile
#define SCALES (8 * DEPTH / GROUP) // of a tile, each for two outputs

typedef unsigned int u32;
typedef unsigned short u16;

// Instructions ---------------------------------------------------------------------------------------------------------
// Tests compile this file for a CPU with instructions of their own.
#ifndef OWN_INSTRUCTIONS

// The two halves of a 32-bit number are fp16 here.
__device__ __forceinline__ u32 multiply_halves(u32 a, u32 b) {
  u32 product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

__device__ __forceinline__ u32 halves_of_e4m3(u32 pair) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)pair));
  return halves;
}

__device__ __forceinline__ float low_half(u32 halves) {
  float value;
  asm("{ .reg .f16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(value) : "r"(halves));
  return value;
}

__device__ __forceinline__ u32 e4m3_pair(float low, float high) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ u16 bf16(float value) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ void multiply_add(float (&sum)[4], const u32 (&weight)[4], u32 first, u32 second) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(weight[0]), "r"(weight[1]), "r"(weight[2]), "r"(weight[3]), "r"(first), "r"(second));
}

// Weights are read once: they must not push the inputs out of the nearest cache.
__device__ __forceinline__ uint4 read_once(const uint4* from) {
  uint4 value;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
      : "l"(from));
  return value;
}

#define permute_bytes __byte_perm
#endif

// Codes ----------------------------------------------------------------------------------------------------------------

// A word has four inputs of two outputs: bits 4 to 7, 20 to 23, 12 to 15, 28 to 31 of the first, and those 4 lower of the
// second. Shifted so that sign and magnitude lie where fp16 has its sign, lowest exponent bits and highest fraction bit,
// a code is its value times 2^-14, that of 0.5 too, which is subnormal.
__device__ __forceinline__ u32 signs(u32 word) { return word & 0x80008000; }
__device__ __forceinline__ u32 magnitudes(u32 word) { return word & 0x0E000E00; }

__device__ __forceinline__ void decode(u32 word, u32 (&halves)[4]) {
  halves[0] = signs(word << 8) | magnitudes(word << 5);
  halves[1] = signs(word << 12) | magnitudes(word << 9);
  halves[2] = signs(word) | magnitudes(word >> 3);
  halves[3] = signs(word << 4) | magnitudes(word << 1);
}

// The scales of both outputs as halves: of 16 inputs e4m3, of 32 the high byte of fp16.
__device__ __forceinline__ u32 scale_halves(u32 pair) {
#if GROUP == 16
  return halves_of_e4m3(pair);
#else
  return permute_bytes(pair << 8, 0, 0x2010);
#endif
}

__device__ __forceinline__ const u32* words(const uint4& codes) { return &codes.x; }

// Product --------------------------------------------------------------------------------------------------------------

struct Loaded {
  uint4 codes[OUTPUT_TILES];
  u32 scales[OUTPUT_TILES];
};

// `left`: tiles of this warp from these on; those beyond are zero.
__device__ __forceinline__ void load(Loaded (&loaded)[AHEAD], const uint4* codes, const u16* scales, int tiles, int left) {
#pragma unroll
  for (int output = 0; output < OUTPUT_TILES; output++) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      loaded[i].codes[output] = make_uint4(0, 0, 0, 0);
      loaded[i].scales[output] = 0;
      if (i < left) {
        loaded[i].codes[output] = read_once(codes + i * WARPS * 32);
        loaded[i].scales[output] = scales[i * WARPS * SCALES];
      }
    }
    codes += tiles * 32;
    scales += tiles * SCALES;
  }
}

// bf16 [tokens, outputs] of `x W^T + bias`; x is e4m3 of its values over x_scale. factors: of each output, multiplies its
// sums. A program has OUTPUT_TILES x 16 outputs of TOKEN_TILES x 8 tokens; its warps share the inputs, and their sums are
// added in their order.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    packed_product(const uint4* codes, const u16* scales, const float* factors, const unsigned char* x,
                   const float* x_scale, const u16* bias, u16* out, int tokens, int outputs, int depth) {
  __shared__ float sums[WARPS][TOKEN_TILES * 8 * 16];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = depth / DEPTH;
  const int first_token = blockIdx.y * TOKEN_TILES * 8;
  const long long first_tile = (long long)blockIdx.x * OUTPUT_TILES * tiles + warp;
  codes += first_tile * 32 + lane;
  scales += first_tile * SCALES + lane / 4 * (DEPTH / GROUP) + lane % 4 * 16 / GROUP;
  x += (long long)(first_token + lane / 4) * depth + warp * DEPTH + lane % 4 * 16;

  float sum[OUTPUT_TILES][TOKEN_TILES][4] = {};
  Loaded next[AHEAD], now[AHEAD];
  int left = (tiles - warp + WARPS - 1) / WARPS;
  load(next, codes, scales, tiles, left);
  for (; left > 0; left -= AHEAD) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) now[i] = next[i];
    codes += AHEAD * WARPS * 32;
    scales += AHEAD * WARPS * SCALES;
    load(next, codes, scales, tiles, left - AHEAD);
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      uint4 inputs[TOKEN_TILES];
#pragma unroll
      for (int token = 0; token < TOKEN_TILES; token++) {
        inputs[token] = make_uint4(0, 0, 0, 0);
        if (i < left && first_token + token * 8 + lane / 4 < tokens)
          inputs[token] = *(const uint4*)(x + (long long)token * 8 * depth + i * WARPS * DEPTH);
      }
      u32 scale[OUTPUT_TILES][2];
#pragma unroll
      for (int output = 0; output < OUTPUT_TILES; output++) {
        u32 both = scale_halves(now[i].scales[output]);
#if GROUP == 16
        both = multiply_halves(both, 0x58005800);  // 128, so that no product with a code is lost
#endif
        scale[output][0] = permute_bytes(both, both, 0x1010);
        scale[output][1] = permute_bytes(both, both, 0x3232);
      }
#pragma unroll
      for (int part = 0; part < 4; part++) {
        u32 weight[OUTPUT_TILES][4];
#pragma unroll
        for (int output = 0; output < OUTPUT_TILES; output++) {
          decode(words(now[i].codes[output])[part], weight[output]);
#pragma unroll
          for (int half = 0; half < 4; half++)
            weight[output][half] = multiply_halves(weight[output][half], scale[output][half % 2]);
        }
#pragma unroll
        for (int token = 0; token < TOKEN_TILES; token++) {
          const u32 four = words(inputs[token])[part];
          const u32 low = halves_of_e4m3(four), high = halves_of_e4m3(four >> 16);
#pragma unroll
          for (int output = 0; output < OUTPUT_TILES; output++) multiply_add(sum[output][token], weight[output], low, high);
        }
      }
    }
    x += AHEAD * WARPS * DEPTH;
  }

#pragma unroll
  for (int output = 0; output < OUTPUT_TILES; output++) {
    if (output) __syncthreads();
#pragma unroll
    for (int token = 0; token < TOKEN_TILES; token++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        sums[warp][(token * 8 + lane % 4 * 2 + i % 2) * 16 + lane / 4 + i / 2 * 8] = sum[output][token][i];
    __syncthreads();
    for (int place = threadIdx.x; place < TOKEN_TILES * 8 * 16; place += 32 * WARPS) {
      const int token = first_token + place / 16, row = (blockIdx.x * OUTPUT_TILES + output) * 16 + place % 16;
      if (token >= tokens) continue;
      float all = sums[0][place];
#pragma unroll
      for (int other = 1; other < WARPS; other++) all += sums[other][place];
      all *= factors[row] * *x_scale;
      if (bias) all += __uint_as_float((u32)bias[row] << 16);
      out[(long long)token * outputs + row] = bf16(all);
    }
  }
}

// Expansion ------------------------------------------------------------------------------------------------------------

// e4m3 of the eight magnitudes, scaled, rounded, multiplied by `ratio` and rounded again: as the weight would be stored if
// it were expanded when it is loaded.
__device__ __forceinline__ void scaled_magnitudes(float scale, float ratio, u32 (&table)[2]) {
  const float magnitude[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    u32 pairs[2];
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
      const float* two = magnitude + 4 * half + 2 * pair;
      const u32 rounded = halves_of_e4m3(e4m3_pair(two[0] * scale, two[1] * scale));
      pairs[pair] = e4m3_pair(low_half(rounded) * ratio, low_half(rounded >> 16) * ratio);
    }
    table[half] = pairs[0] | pairs[1] << 16;
  }
}

// Four inputs of the first output of a word; of the second, if the word is shifted left by 4.
__device__ __forceinline__ u32 look_up(u32 word, const u32 (&table)[2]) {
  const u32 codes = word >> 4 & 0x07070707, sign = word & 0x80808080;
  return permute_bytes(table[0], table[1], codes | codes >> 12) ^ permute_bytes(sign, sign, 0x3120);
}

// e4m3 [outputs, depth]: magnitude x scale of the group x first[output], rounded, x second[output], rounded.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    packed_expansion(const uint4* codes, const u16* scales, const float* first, const float* second, unsigned char* out,
                     int depth) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = depth / DEPTH;
  const int scale = lane / 4 * (DEPTH / GROUP) + lane % 4 * 16 / GROUP;
  const int row = blockIdx.x * 16 + lane / 4;
  codes += (long long)blockIdx.x * tiles * 32;
  scales += (long long)blockIdx.x * tiles * SCALES;
  unsigned char* to = out + (long long)row * depth + lane % 4 * 16;
  const float firsts[2] = {first[row], first[row + 8]}, seconds[2] = {second[row], second[row + 8]};
  for (int start = warp; start < tiles; start += AHEAD * WARPS) {
    uint4 loaded[AHEAD];
    u32 pairs[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int tile = min(start + i * WARPS, tiles - 1);
      loaded[i] = read_once(codes + tile * 32 + lane);
      pairs[i] = scales[tile * SCALES + scale];
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int tile = start + i * WARPS;
      if (tile >= tiles) break;
      const u32 both = scale_halves(pairs[i]);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 table[2], bytes[4];
        scaled_magnitudes(low_half(both >> 16 * half) * firsts[half], seconds[half], table);
#pragma unroll
        for (int part = 0; part < 4; part++) bytes[part] = look_up(words(loaded[i])[part] << 4 * half, table);
        *(uint4*)(to + (long long)half * 8 * depth + tile * DEPTH) = make_uint4(bytes[0], bytes[1], bytes[2], bytes[3]);
      }
    }
  }
}
