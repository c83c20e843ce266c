// x W^T of e4m3 matrices in bf16 on Hopper (sm_90a), as gated_product.cu computes it, but for what follows the sums.
//
// Results leave through shared memory and the bulk copy engine: a warp writes 16 rows of 64 columns into one of its two
// buffers while the engine still reads the other. If OVERLAPPED, a thread has room for the sums of two tiles, and those of
// a tile are written while the first pieces of the next are multiplied.

// TILE_ROWS_FIRST: programs that run together share weights in L2, otherwise x. ROW_SCALES: a scale for each row and each
// column instead of one for all.
#define WARPS (ROWS / 16)
#define CHUNK 64  // columns: a swizzled row of 128 bytes
#define CHUNKS ((COLUMNS + CHUNK - 1) / CHUNK)
#define BUFFER_BYTES (16 * CHUNK * 2)

__device__ __forceinline__ u32 two_bf16(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// What a warp needs to write its 16 rows of a tile.
struct Writer {
  const TensorMap* out;
  const float* x_scale;
  const float* weight_scale;
  float scale;  // of all, unless ROW_SCALES
  u32 buffers;  // two of the warp's own
  int lane, tokens, outputs;

  // Columns of one chunk. The last of a tile whose columns are no multiple of CHUNK writes some again, with the same values.
  __device__ __forceinline__ void write(const float (&sum)[SUMS], int chunk, int row, int column) const {
    const int begin = chunk * CHUNK < COLUMNS - CHUNK ? chunk * CHUNK : COLUMNS - CHUNK;
    const u32 buffer = buffers + chunk % 2 * BUFFER_BYTES;
    float of_row[2] = {scale, scale};
#if ROW_SCALES
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int at = row + lane / 4 + 8 * half;
      of_row[half] = at < tokens ? x_scale[at] : 0.0f;
    }
#endif
    // The engine may still read this buffer: for the chunk before the last one, or, at the start of a tile of an odd number of
    // chunks, for the last one.
    if (lane == 0) {
      if (chunk == 0 && CHUNKS % 2) {
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
      } else {
        asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
      }
    }
    __syncwarp();
#pragma unroll
    for (int pair = 0; pair < CHUNK / 16; pair++) {
      const float* of = sum + begin / 2 + 8 * pair;
      u32 words[4];
#pragma unroll
      for (int eight = 0; eight < 2; eight++) {
        float of_column[2] = {1.0f, 1.0f};
#if ROW_SCALES
        const int at = column + begin + 16 * pair + 8 * eight + lane % 4 * 2;
        if (at < outputs) of_column[0] = weight_scale[at], of_column[1] = weight_scale[at + 1];
#endif
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float* two = of + 4 * eight + 2 * half;
          words[2 * eight + half] =
              two_bf16(two[0] * (of_row[half] * of_column[0]), two[1] * (of_row[half] * of_column[1]));
        }
      }
      // Lane 8 m + r gives the address of row r of matrix m: matrices 0 and 1 are rows 0 to 7 and 8 to 15 of the left columns.
      const int at_row = lane % 16, at_eight = 2 * pair + lane / 16;
      store_matrices(buffer + at_row * 128 + ((at_eight ^ (at_row % 8)) * 16), words[0], words[1], words[2], words[3]);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (lane == 0) {
      asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(out), "r"(buffer),
                   "r"(column + begin), "r"(row)
                   : "memory");
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
  }
};

// Where a program's tile lies.
__device__ __forceinline__ int row_of(int tile, int row_tiles, int column_tiles, u32 rank) {
  const int place = TILE_ROWS_FIRST ? tile % row_tiles : tile / column_tiles;
  return (place * CLUSTER + rank) * ROWS;
}

__device__ __forceinline__ int column_of(int tile, int row_tiles, int column_tiles) {
  return (TILE_ROWS_FIRST ? tile / row_tiles : tile % column_tiles) * COLUMNS;
}

// The ring as a group of warps reads it.
struct Reader {
  u32 ring, filled, emptied, stage, parity;
  int group, lane;

  // Begin the products of a piece, and hand back the stage before once its own have ended.
  __device__ __forceinline__ void multiply_piece(float (&sum)[SUMS], int piece, u32& before) {
    wait_barrier(filled + 8 * stage, parity);
    const u32 at = ring + stage * STAGE_BYTES;
    const u64 x_piece = matrix_at(at + group * 64 * DEPTH), weight_piece = matrix_at(at + X_BYTES);
    keep(sum);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int part = 0; part < DEPTH / 32; part++)
      multiply(sum, x_piece + 2 * part, weight_piece + 2 * part, piece + part > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    keep(sum);
    if (piece > 0) {
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      hand_back(before);
    }
    before = stage;
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }

  __device__ __forceinline__ void hand_back(u32 read) const {
    if (lane < CLUSTER) arrive_at(emptied + 8 * read, lane);
  }
};

// All products of a tile; if HAS_OTHER, `other`, the sums of the tile before, is written meanwhile.
template <bool HAS_OTHER>
__device__ __forceinline__ void multiply_tile(float (&sum)[SUMS], const float (&other)[SUMS], Reader& reader, int pieces,
                                              const Writer& writer, int other_row, int other_column) {
  u32 before = 0;
  int piece = 0;
  if (HAS_OTHER) {
#pragma unroll
    for (; piece < CHUNKS; piece++) {
      reader.multiply_piece(sum, piece, before);
      writer.write(other, piece, other_row, other_column);
    }
  }
  for (; piece < pieces; piece++) reader.multiply_piece(sum, piece, before);
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  keep(sum);
  reader.hand_back(before);
}

__device__ __forceinline__ void write_tile(const float (&sum)[SUMS], const Writer& writer, int row, int column) {
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS; chunk++) writer.write(sum, chunk, row, column);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTER_DIMENSIONS
    own_product(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,
                const __grid_constant__ TensorMap out, const float* x_scale, const float* weight_scale, int tokens,
                int outputs, int depth) {
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
  const int column_tiles = (outputs + COLUMNS - 1) / COLUMNS;
  const int tiles = row_tiles * column_tiles;
  const int first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;

  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      u32 stage = 0, parity = 0;
      for (int tile = first; tile < tiles; tile += stride) {
        const int row = row_of(tile, row_tiles, column_tiles, rank), column = column_of(tile, row_tiles, column_tiles);
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
    Reader reader = {ring, filled, emptied, 0, 0, group - 1, lane};
    const u32 buffers = ring + STAGES * STAGE_BYTES + warp * 2 * BUFFER_BYTES;
    const float scale = ROW_SCALES ? 1.0f : *x_scale * *weight_scale;
    const Writer writer = {&out, x_scale, weight_scale, scale, buffers, lane, tokens, outputs};
#if OVERLAPPED
    float sum[SUMS], other[SUMS];
    if (first < tiles) multiply_tile<false>(sum, other, reader, pieces, writer, 0, 0);
    for (int tile = first; tile < tiles;) {
      int row = row_of(tile, row_tiles, column_tiles, rank) + warp * 16;
      int column = column_of(tile, row_tiles, column_tiles);
      tile += stride;
      if (tile >= tiles) {
        write_tile(sum, writer, row, column);
        break;
      }
      multiply_tile<true>(other, sum, reader, pieces, writer, row, column);
      row = row_of(tile, row_tiles, column_tiles, rank) + warp * 16, column = column_of(tile, row_tiles, column_tiles);
      tile += stride;
      if (tile >= tiles) {
        write_tile(other, writer, row, column);
        break;
      }
      multiply_tile<true>(sum, other, reader, pieces, writer, row, column);
    }
#else
    for (int tile = first; tile < tiles; tile += stride) {
      float sum[SUMS];
      multiply_tile<false>(sum, sum, reader, pieces, writer, 0, 0);
      write_tile(sum, writer, row_of(tile, row_tiles, column_tiles, rank) + warp * 16,
                 column_of(tile, row_tiles, column_tiles));
    }
#endif
    if (lane == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  // No program may end while another still copies into its shared memory or arrives at its barriers.
  meet_cluster();
}
