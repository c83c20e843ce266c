// What products on Hopper (sm_90a) share: barriers in shared memory, a ring of copied pieces, wgmma on e4m3.
//
// A kernel's module gives ROWS and COLUMNS of a tile, STAGES of the ring, CLUSTER, the programs that work on neighbouring
// rows and the same weights, and DEPTH, the bytes of a row that are multiplied at a time: one swizzled row of shared memory.
// `hopper_source` of nvrtc.py names the operands of `multiply`.

#define X_BYTES (ROWS * DEPTH)
#define STAGE_BYTES (X_BYTES + COLUMNS * DEPTH)
#define SUMS (COLUMNS / 2)  // of a thread: four warps hold 64 rows of COLUMNS sums

typedef unsigned int u32;
typedef unsigned long long u64;

struct __align__(64) TensorMap {
  char opaque[128];
};

__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

// Barriers in shared memory --------------------------------------------------------------------------------------------

__device__ __forceinline__ void init_barrier(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_barrier(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Without `.release.cluster`, which waits for all memory at every piece and costs a fifth of the kernel's speed: what is
// handed back was read by wgmma, which has ended.
__device__ __forceinline__ void arrive_at(u32 barrier, u32 program) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(barrier),
      "r"(program)
      : "memory");
}

__device__ __forceinline__ void meet_cluster() {
#if CLUSTER > 1
  __syncwarp();
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// Copies and products --------------------------------------------------------------------------------------------------

__device__ __forceinline__ void copy_tile(const TensorMap* map, u32 target, u32 barrier, int byte, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          target),
      "l"(map), "r"(barrier), "r"(byte), "r"(row)
      : "memory");
}

__device__ __forceinline__ void copy_tile_to_all(const TensorMap* map, u32 target, u32 barrier, int byte, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(byte), "r"(row), "h"((unsigned short)((1 << CLUSTER) - 1))
      : "memory");
}

// Descriptor of a matrix whose rows are swizzled lines of 128 bytes, eight to 1,024 bytes.
__device__ __forceinline__ u64 matrix_at(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

__device__ __forceinline__ void multiply(float (&sum)[SUMS], u64 x, u64 weight, int add) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, @ADD@, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n@COLUMNS@k32.f32.e4m3.e4m3 {@SUMS@}, @X@, @WEIGHT@, add, 1, 1;\n"
      "}"
      : @OPERANDS@
      : "l"(x), "l"(weight), "r"(add));
}

// The compiler must not move sums while products on their way still write them.
__device__ __forceinline__ void keep(float (&sum)[SUMS]) {
#pragma unroll
  for (int i = 0; i < SUMS; i++) asm volatile("" : "+f"(sum[i])::"memory");
}

// One piece of x and of the weights on its way into a stage; each program of a cluster brings its part of the weights to all.
__device__ __forceinline__ void copy_piece(const TensorMap* x, const TensorMap* weight, u32 target, u32 barrier, int byte,
                                           int row, int column, u32 rank) {
  expect_bytes(barrier, STAGE_BYTES);
  copy_tile(x, target, barrier, byte, row);
#if CLUSTER > 1
  const int part = COLUMNS / CLUSTER * rank;
  copy_tile_to_all(weight, target + X_BYTES + part * DEPTH, barrier, byte, column + part);
#else
  copy_tile(weight, target + X_BYTES, barrier, byte, column);
#endif
}

