// silu(x G^T) * (x U^T) of e4m3 matrices on Hopper (sm_90a): the sums of both products stay in registers until they are one.
//
// Persistent programs take tiles of ROWS tokens by 128 outputs, tokens first, so that programs that run together share
// weights in L2. One thread copies pieces of x and of the weights into a ring in shared memory with the bulk copy engine;
// groups of four warps multiply 64 rows each with wgmma. CLUSTER programs work on neighbouring rows and the same weights:
// each copies its part of a piece of weights into the shared memory of all.
//
// The rows of the weight are stored in the order in which a thread holds sums (`interleaved` in gated_product.py), so that a
// thread has gate and up of 32 neighbouring outputs and stores them without an exchange.

// A tile has COLUMNS gates and ups.
#define WARPS (ROWS / 16)  // that multiply

// Activation -----------------------------------------------------------------------------------------------------------

// 1 + exp(-gate), at most 2^30, so that the product of four is finite.
__device__ __forceinline__ float one_plus_exp(float gate) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(fminf(gate * -1.4426950408889634f, 30.0f)));
  return 1.0f + power;
}

__device__ __forceinline__ u32 two_e4m3(float low, float high) {
  unsigned short pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// Four outputs. They share one reciprocal, because the unit for special functions is what bounds the activation.
__device__ __forceinline__ u32 activated(const float* gates_and_ups, float scale, float out_factor) {
  float gate[4], over[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    gate[i] = gates_and_ups[4 * i] * scale;
    over[i] = one_plus_exp(gate[i]);
    gate[i] *= gates_and_ups[4 * i + 1] * out_factor;
  }
  const float first = over[0] * over[1], second = over[2] * over[3];
  const float all = __fdividef(1.0f, first * second);
  const float of_first = all * second, of_second = all * first;
  return two_e4m3(gate[0] * (of_first * over[1]), gate[1] * (of_first * over[0])) |
         two_e4m3(gate[2] * (of_second * over[3]), gate[3] * (of_second * over[2])) << 16;
}

// Kernel ---------------------------------------------------------------------------------------------------------------

extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTER_DIMENSIONS
    gated_product(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight, const float* x_scale,
                  const float* weight_scale, const float* out_scale, unsigned char* out, int tokens, int features,
                  int depth) {
  extern __shared__ unsigned char shared[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  const u32 ring = (shared_address(shared) + 1023) & ~1023;
  const u32 filled = shared_address(barriers), emptied = filled + 8 * STAGES;
  const int group = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);
  u32 rank = 0;
#if CLUSTER > 1
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; stage++) {
      init_barrier(filled + 8 * stage, 1);
      init_barrier(emptied + 8 * stage, WARPS * CLUSTER);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  meet_cluster();

  const int pieces = depth / DEPTH;
  const int row_tiles = (tokens + CLUSTER * ROWS - 1) / (CLUSTER * ROWS);
  const int tiles = row_tiles * (2 * features / COLUMNS);
  const int first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
  u32 stage = 0, parity = 0;

  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      for (int tile = first; tile < tiles; tile += stride) {
        const int row = (tile % row_tiles * CLUSTER + rank) * ROWS;
        const int column = tile / row_tiles * COLUMNS;
        for (int piece = 0; piece < pieces; piece++) {
          wait_barrier(emptied + 8 * stage, parity ^ 1);
          copy_piece(&x, &weight, ring + stage * STAGE_BYTES, filled + 8 * stage, piece * DEPTH, row, column, rank);
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / 32 - 4, 0), lane = threadIdx.x % 32;
    const float scale = *x_scale * *weight_scale, out_factor = scale / *out_scale;
    for (int tile = first; tile < tiles; tile += stride) {
      float sum[SUMS];
      u32 before = 0;
      for (int piece = 0; piece < pieces; piece++) {
        wait_barrier(filled + 8 * stage, parity);
        const u32 at = ring + stage * STAGE_BYTES;
        const u64 x_piece = matrix_at(at + (group - 1) * 64 * DEPTH), weight_piece = matrix_at(at + X_BYTES);
        keep(sum);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int part = 0; part < DEPTH / 32; part++)
          multiply(sum, x_piece + 2 * part, weight_piece + 2 * part, piece + part > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        keep(sum);
        if (piece > 0) {
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
          if (lane < CLUSTER) arrive_at(emptied + 8 * before, lane);
        }
        before = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
      asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
      keep(sum);
      if (lane < CLUSTER) arrive_at(emptied + 8 * before, lane);

      // Of a warp's 16 rows, a thread has row lane / 4 and the one 8 below; of their outputs, 32 from lane % 4 * 32 on.
      const int first_row = (tile % row_tiles * CLUSTER + rank) * ROWS + warp * 16 + lane / 4;
      const int feature = tile / row_tiles * (COLUMNS / 2) + lane % 4 * 32;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = first_row + 8 * half;
        u32 words[8];
#pragma unroll
        for (int word = 0; word < 8; word++) words[word] = activated(sum + 16 * word + 2 * half, scale, out_factor);
        if (row < tokens) {
          uint4* target = (uint4*)(out + (u64)row * features + feature);
          target[0] = make_uint4(words[0], words[1], words[2], words[3]);
          target[1] = make_uint4(words[4], words[5], words[6], words[7]);
        }
      }
    }
  }
  // No program may end while another still copies into its shared memory or arrives at its barriers.
  meet_cluster();
}
