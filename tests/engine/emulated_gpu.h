// Runs a CUDA kernel on a CPU: a program's threads are fibers that take turns, and instructions that warps execute
// together wait for all lanes. For the source of `packed_product.cu`, compiled with OWN_INSTRUCTIONS.

#include <math.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __shared__
#define __launch_bounds__(threads)

struct Index {
  int x, y;
};
struct uint4 {
  unsigned int x, y, z, w;
};
inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) { return {x, y, z, w}; }
struct float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int min(int one, int other) { return one < other ? one : other; }

static Index threadIdx, blockIdx;
uint4 shared[1 << 14];  // of the program that runs

// Threads of a program -------------------------------------------------------------------------------------------------

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool ended;
};
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static std::function<void()> kernel;

static void enter() {
  kernel();
  fibers[threadIdx.x].ended = true;
}

static void let_others_run() {
  const int own = threadIdx.x;
  swapcontext(&fibers[own].context, &scheduler);
  threadIdx.x = own;
}

static int waiting, barriers_passed;

inline void __syncthreads() {
  const int barrier = barriers_passed;
  if (++waiting == (int)fibers.size()) {
    waiting = 0;
    barriers_passed++;
  }
  while (barrier == barriers_passed) let_others_run();
}

inline void __syncwarp() { let_others_run(); }  // a warp's lanes take the same turns

static void forget_copies();

static void run(int columns, int rows, int threads, std::function<void()> body) {
  kernel = body;
  for (blockIdx.y = 0; blockIdx.y < rows; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < columns; blockIdx.x++) {
      fibers = std::vector<Fiber>(threads);
      forget_copies();
      for (Fiber& fiber : fibers) {
        fiber.ended = false;
        fiber.stack.reset(new char[1 << 16]);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = 1 << 16;
        fiber.context.uc_link = &scheduler;
        makecontext(&fiber.context, enter, 0);
      }
      for (bool more = true; more;) {
        more = false;
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) {
          if (fibers[threadIdx.x].ended) continue;
          const int own = threadIdx.x;
          swapcontext(&scheduler, &fibers[own].context);
          threadIdx.x = own;
          more |= !fibers[own].ended;
        }
      }
    }
}

// Number formats -------------------------------------------------------------------------------------------------------

// A value rounded to so many bits of fraction, ties to even, with a smallest exponent.
static float rounded(float value, int fraction, int smallest) {
  if (value == 0.0f || !isfinite(value)) return value;
  int exponent;
  frexpf(value, &exponent);
  if (exponent - 1 < smallest) exponent = smallest + 1;
  return ldexpf(nearbyintf(ldexpf(value, fraction - exponent + 1)), exponent - 1 - fraction);
}

static float of_bits(unsigned bits, int exponent_bits, int fraction) {
  const int exponent = bits >> fraction & ((1 << exponent_bits) - 1), bias = (1 << (exponent_bits - 1)) - 1;
  const int mantissa = bits & ((1 << fraction) - 1);
  const float value = exponent ? ldexpf((float)(mantissa | 1 << fraction), exponent - bias - fraction)
                               : ldexpf((float)mantissa, 1 - bias - fraction);
  return bits >> (exponent_bits + fraction) & 1 ? -value : value;
}

static unsigned to_bits(float value, int exponent_bits, int fraction) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const float magnitude = fabsf(rounded(value, fraction, 1 - bias));
  const unsigned sign = (unsigned)signbit(value) << (exponent_bits + fraction);
  if (magnitude == 0.0f) return sign;
  int exponent;
  frexpf(magnitude, &exponent);
  if (--exponent < 1 - bias) return sign | (unsigned)ldexpf(magnitude, fraction + bias - 1);
  return sign | ((unsigned)ldexpf(magnitude, fraction - exponent) + ((exponent + bias - 1) << fraction));
}

inline float half(unsigned int bits) { return of_bits(bits & 0xFFFF, 5, 10); }
inline float e4m3(unsigned int bits) { return of_bits(bits & 0xFF, 4, 3); }
inline unsigned e4m3_bits(float value) { return to_bits(fmaxf(-448.0f, fminf(448.0f, value)), 4, 3); }

// Instructions ---------------------------------------------------------------------------------------------------------

inline float __uint_as_float(unsigned int bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline unsigned int multiply_halves(unsigned int a, unsigned int b) {
  return to_bits(half(a) * half(b), 5, 10) | to_bits(half(a >> 16) * half(b >> 16), 5, 10) << 16;
}

inline unsigned int halves_of_e4m3(unsigned int pair) {
  return to_bits(e4m3(pair), 5, 10) | to_bits(e4m3(pair >> 8), 5, 10) << 16;
}

inline float low_half(unsigned int halves) { return half(halves); }
inline unsigned int e4m3_pair(float low, float high) { return e4m3_bits(low) | e4m3_bits(high) << 8; }
inline unsigned short bf16(float value) { return (unsigned short)to_bits(value, 8, 7); }

inline unsigned int permute_bytes(unsigned int a, unsigned int b, unsigned int selector) {
  const uint64_t bytes = (uint64_t)b << 32 | a;
  unsigned int chosen = 0;
  for (int i = 0; i < 4; i++) chosen |= (unsigned int)(bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
  return chosen;
}

// Copies that are on their way, group by group. They arrive at once or, if `late`, when a thread waits for them.
extern "C" int late = 0;
struct Copy {
  void* to;
  const void* from;
  int bytes;
  bool exists;
  void arrive() const { exists ? memcpy(to, from, bytes) : memset(to, 0, bytes); }
};
static std::map<int, std::deque<std::vector<Copy>>> on_their_way;  // of each thread; the last group is open

static void forget_copies() { on_their_way.clear(); }

static void begin(Copy copy) {
  if (!late) return copy.arrive();
  auto& groups = on_their_way[threadIdx.x];
  if (groups.empty()) groups.emplace_back();
  groups.back().push_back(copy);
}

inline void copy_weights(void* to, const void* from) { begin({to, from, 16, true}); }
inline void copy_inputs(void* to, const void* from, bool exists) { begin({to, from, 16, exists}); }

inline void close_group() {
  auto& groups = on_their_way[threadIdx.x];
  if (groups.empty()) groups.emplace_back();
  groups.emplace_back();
}

template <int GROUPS>
inline void wait_for_all_but() {
  auto& groups = on_their_way[threadIdx.x];
  for (; groups.size() > GROUPS + 1; groups.pop_front())
    for (const Copy& copy : groups.front()) copy.arrive();
}

inline void wait_for_kernels_before() {}

// The lanes' operands of the m16n8k16 product that a warp is at.
static float first_operands[64][16][16], second_operands[64][16][8];

inline void multiply_add(float (&sum)[4], const unsigned int (&weight)[4], unsigned int first, unsigned int second) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, column = lane % 4 * 2;
  float(&a)[16][16] = first_operands[warp], (&b)[16][8] = second_operands[warp];
  for (int i = 0; i < 8; i++)
    a[row + i / 2 % 2 * 8][column + i % 2 + i / 4 * 8] = half(weight[i / 2] >> 16 * (i % 2));
  for (int i = 0; i < 4; i++) b[column + i % 2 + i / 2 * 8][row] = half((i / 2 ? second : first) >> 16 * (i % 2));
  let_others_run();
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 16; k++) sum[i] += a[row + i / 2 * 8][k] * b[k][column + i % 2];
  let_others_run();
}
