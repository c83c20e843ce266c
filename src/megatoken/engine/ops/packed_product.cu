// Weights of four bits (e2m1) that stay packed in a GPU's memory: products of few tokens, and their expansion to e4m3.
//
// A tile is 16 outputs of 64 inputs. A lane of a warp holds the 32 codes of one tile that it needs as its part of the
// first operand of `mma.m16n8k16`, in 16 bytes: of outputs lane / 4 and that + 8 the inputs from lane % 4 * 16 on, which
// have one scale each. So codes go from memory to the tensor cores without an exchange. `packed_product.py` has the order.

// GROUP (inputs that share a scale: 16 with e4m3 scales, 32 with powers of two), WARPS of a program, OUTPUT_TILES of a
// program, TOKEN_TILES of 8 tokens and AHEAD (tiles that a warp has on their way) are given by packed_product.py.
#define DEPTH 64                   // inputs of a tile
#define SCALES (8 * DEPTH / GROUP) // of a tile, each for two outputs
#define SCALE_COPIES (SCALES / 8)  // of 16 bytes, of a tile

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

__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// Copies to shared memory are on their way until `wait_for_all_but`. Weights are read once, so they do not push inputs out
// of the nearest cache.
__device__ __forceinline__ void copy_weights(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// Zeros, if there is no such token.
__device__ __forceinline__ void copy_inputs(void* to, const void* from, bool exists) {
  const int bytes = exists ? 16 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int GROUPS>
__device__ __forceinline__ void wait_for_all_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

// Of a kernel that starts before those before it have ended: until they have, and their results are in memory.
__device__ __forceinline__ void wait_for_kernels_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#define permute_bytes __byte_perm
#endif

// Codes ----------------------------------------------------------------------------------------------------------------

// A word has four inputs of two outputs: the first in bytes 0, 2, 1, 3. Of a byte bit 7 is the sign of the first output's
// code and bits 1 to 3 its magnitude, bit 0 is the sign of the second's and bits 4 to 6 its magnitude: so the first's lie
// as fp16 has its sign, lowest exponent bits and highest fraction bit, and one mask decodes two. A code is then its value
// times 2^-14, that of 0.5 too, which is subnormal.
__device__ __forceinline__ u32 first_output(u32 word) { return word & 0x8E008E00; }
__device__ __forceinline__ u32 second_output(u32 magnitudes, u32 signs) {
  return (magnitudes & 0x0E000E00) | (signs & 0x80008000);
}

__device__ __forceinline__ void decode(u32 word, u32 (&halves)[4]) {
  halves[0] = first_output(word << 8);
  halves[1] = second_output(word << 5, word << 15);
  halves[2] = first_output(word);
  halves[3] = second_output(word >> 3, word << 7);
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

// What a warp multiplies at a time, in shared memory: AHEAD of them are a ring that copies fill ahead of the products.
struct Piece {
  uint4 codes[OUTPUT_TILES][32];
  uint4 inputs[TOKEN_TILES][32];
  u16 scales[OUTPUT_TILES][SCALES];
};

__device__ __forceinline__ void multiply_piece(float (&sum)[OUTPUT_TILES][TOKEN_TILES][4], const Piece& piece, int lane) {
  uint4 codes[OUTPUT_TILES], inputs[TOKEN_TILES];
  u32 scale[OUTPUT_TILES][2];
#pragma unroll
  for (int token = 0; token < TOKEN_TILES; token++) inputs[token] = piece.inputs[token][lane];
#pragma unroll
  for (int output = 0; output < OUTPUT_TILES; output++) {
    codes[output] = piece.codes[output][lane];
    u32 both = scale_halves(piece.scales[output][lane / 4 * (DEPTH / GROUP) + lane % 4 * 16 / GROUP]);
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
      decode(words(codes[output])[part], weight[output]);
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

// bf16 [tokens, outputs] of `x W^T + bias`; x is e4m3 of its values over x_scale. factors: of each output, multiplies its
// sums. A program has OUTPUT_TILES x 16 outputs of TOKEN_TILES x 8 tokens; its warps share the inputs, and their sums are
// added in their order.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    packed_product(const uint4* codes, const u16* scales, const float* factors, const unsigned char* x,
                   const float* x_scale, const u16* bias, u16* out, int tokens, int outputs, int depth) {
  extern __shared__ uint4 shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tiles = depth / DEPTH;
  const int first_token = blockIdx.y * TOKEN_TILES * 8, own_token = first_token + lane / 4;
  const int first_row = blockIdx.x * OUTPUT_TILES * 16;
  const long long first_tile = (long long)blockIdx.x * OUTPUT_TILES * tiles + warp;
  codes += first_tile * 32 + lane;
  scales += (first_tile + (long long)(lane / SCALE_COPIES) * tiles) * SCALES + lane % SCALE_COPIES * 8;
  const unsigned char* x_start = x;
  x += (long long)own_token * depth + warp * DEPTH + lane % 4 * 16;
  float2* finishing = (float2*)shared;  // [OUTPUT_TILES * 16]: factor and bias of each output
  Piece* pieces_of_all = (Piece*)(finishing + OUTPUT_TILES * 16);
  Piece* ring = pieces_of_all + warp * AHEAD;
  const int pieces = (tiles - warp + WARPS - 1) / WARPS;

  auto copy_weights_of = [&](int number, Piece& piece) {
    if (number >= pieces) return;
#pragma unroll
    for (int output = 0; output < OUTPUT_TILES; output++)
      copy_weights(&piece.codes[output][lane], codes + output * tiles * 32);
    if (lane < OUTPUT_TILES * SCALE_COPIES) copy_weights(&piece.scales[0][8 * lane], scales);
    codes += WARPS * 32;
    scales += WARPS * SCALES;
  };
  auto copy_inputs_of = [&](int number, Piece& piece) {
    if (number < pieces) {
#pragma unroll
      for (int token = 0; token < TOKEN_TILES; token++) {
        const bool exists = own_token + token * 8 < tokens;
        copy_inputs(&piece.inputs[token][lane], exists ? x + (long long)token * 8 * depth : x_start, exists);
      }
      x += WARPS * DEPTH;
    }
    close_group();
  };

#pragma unroll
  for (int i = 0; i < AHEAD - 1; i++) copy_weights_of(i, ring[i]);
  wait_for_kernels_before();  // of what they write only the inputs and their scale are read, and nothing else is written
#pragma unroll
  for (int i = 0; i < AHEAD - 1; i++) copy_inputs_of(i, ring[i]);
  for (int output = threadIdx.x; output < OUTPUT_TILES * 16; output += 32 * WARPS) {  // while the first are on their way
    const int row = first_row + output;
    finishing[output] = make_float2(factors[row] * *x_scale, bias ? __uint_as_float((u32)bias[row] << 16) : 0.0f);
  }
  float sum[OUTPUT_TILES][TOKEN_TILES][4] = {};
  for (int first = 0; first < pieces; first += AHEAD) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      if (first + i >= pieces) break;
      wait_for_all_but<AHEAD - 2>();
      __syncwarp();  // all lanes' copies have arrived, and none needs the piece before this one any more
      copy_weights_of(first + i + AHEAD - 1, ring[(i + AHEAD - 1) % AHEAD]);
      copy_inputs_of(first + i + AHEAD - 1, ring[(i + AHEAD - 1) % AHEAD]);
      multiply_piece(sum, ring[i], lane);
    }
  }

  const int places = TOKEN_TILES * 8 * OUTPUT_TILES * 16;  // token by token
  float* sums = (float*)pieces_of_all;                     // [WARPS][places]
  __syncthreads();
#pragma unroll
  for (int output = 0; output < OUTPUT_TILES; output++)
#pragma unroll
    for (int token = 0; token < TOKEN_TILES; token++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int own_place = (token * 8 + lane % 4 * 2 + i % 2) * OUTPUT_TILES * 16 + output * 16 + lane / 4 + i / 2 * 8;
        sums[warp * places + own_place] = sum[output][token][i];
      }
  __syncthreads();
  for (int place = threadIdx.x; place < places; place += 32 * WARPS) {
    const int token = first_token + place / (OUTPUT_TILES * 16), output = place % (OUTPUT_TILES * 16);
    if (token >= tokens) break;
    float all = sums[place];
#pragma unroll
    for (int other = 1; other < WARPS; other++) all += sums[other * places + place];
    all = all * finishing[output].x + finishing[output].y;
    out[(long long)token * outputs + first_row + output] = bf16(all);
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

// Four inputs of an output of a word, given with its magnitudes in the low bits of each byte and its signs in the highest.
__device__ __forceinline__ u32 look_up(u32 magnitudes, u32 signs, const u32 (&table)[2]) {
  const u32 codes = magnitudes & 0x07070707, sign = signs & 0x80808080;
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
      loaded[i] = codes[tile * 32 + lane];
      pairs[i] = scales[tile * SCALES + scale];
    }
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int tile = start + i * WARPS;
      const u32 both = scale_halves(pairs[i]);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 table[2], bytes[4];
        scaled_magnitudes(low_half(both >> 16 * half) * firsts[half], seconds[half], table);
#pragma unroll
        for (int part = 0; part < 4; part++) {
          const u32 word = words(loaded[i])[part];
          bytes[part] = half ? look_up(word >> 4, word << 7, table) : look_up(word >> 1, word, table);
        }
        if (tile < tiles)
          *(uint4*)(to + (long long)half * 8 * depth + tile * DEPTH) = make_uint4(bytes[0], bytes[1], bytes[2], bytes[3]);
      }
    }
  }
}
