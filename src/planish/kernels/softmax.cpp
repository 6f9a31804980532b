// The elementwise half of a softmax over tiles of logits: sums of exponentials by blocks, and probabilities to gradients.
//
// [Note: one body] Each kernel is written once (`softmax_body.h`) and compiled for every level of instructions. Sums are
// formed in the same order at each: those of every 64th number first.
//
// [Note: NaN] A comparison with NaN is false: every `a < b ? c : d` has the number that may be NaN in `d`. The maximum
// passes NaN over, the sum does not.

#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define PLANISH_X86 1
#endif

#define PLANISH_PUBLIC extern "C" __attribute__((visibility("default")))
#define PLANISH_INLINE inline __attribute__((always_inline))
#define PLANISH_INLINE_LAMBDA __attribute__((always_inline))

namespace {

constexpr int64_t kGroup = 64;
constexpr float kNothing = -std::numeric_limits<float>::infinity();
constexpr float kFloor = -1e38f;    // the maximum of a block that is -inf throughout
constexpr float kVanish = -87.33f;  // exp of less is no normal number, and taken as 0

struct Bfloat16 {
  uint16_t bits;
};

template <typename T>
constexpr T nothing();
template <>
constexpr float nothing<float>() {
  return kNothing;
}
template <>
constexpr Bfloat16 nothing<Bfloat16>() {
  return Bfloat16{0xff80};
}

// What two of the kernels are given; see the functions at the end.
struct Fold {
  void* tile;
  int64_t columns, block;
  float *top, *sum;
  int64_t stride;
  bool keep;
};

struct Derive {
  void* tile;
  int64_t columns, block;
  const float *lse, *factor;
  int64_t stride;
  const float *slope, *uniform, *hit;
  const int64_t* column;
};

enum Level { kPortable, kAvx2, kAvx512 };

namespace portable {
constexpr int64_t kLanes = 4;
#include "softmax_body.h"
}  // namespace portable

#if defined(PLANISH_X86) && defined(__clang__)
#define PLANISH_AVX2 _Pragma("clang attribute push(__attribute__((target(\"avx2,fma\"))), apply_to = function)")
#define PLANISH_AVX512 \
  _Pragma("clang attribute push(__attribute__((target(\"avx512f,avx512bw,avx512dq,avx512vl,fma\"))), apply_to = function)")
#define PLANISH_END _Pragma("clang attribute pop")
#elif defined(PLANISH_X86)
#define PLANISH_AVX2 _Pragma("GCC push_options") _Pragma("GCC target(\"avx2,fma\")")
#define PLANISH_AVX512 _Pragma("GCC push_options") _Pragma("GCC target(\"avx512f,avx512bw,avx512dq,avx512vl,fma\")")
#define PLANISH_END _Pragma("GCC pop_options")
#endif

#ifdef PLANISH_X86
PLANISH_AVX2
namespace avx2 {
constexpr int64_t kLanes = 8;
#include "softmax_body.h"
}  // namespace avx2
PLANISH_END
PLANISH_AVX512
namespace avx512 {
constexpr int64_t kLanes = 16;
#include "softmax_body.h"
}  // namespace avx512
PLANISH_END
#define PLANISH_PICK(level, name) ((level) == kAvx512 ? avx512::name : (level) == kAvx2 ? avx2::name : portable::name)
#else
#define PLANISH_PICK(level, name) portable::name
#endif

int best_level() {
#ifdef PLANISH_X86
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return kAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return kAvx2;
#endif
  return kPortable;
}

constexpr int64_t kWorthAThread = 1 << 18;  // numbers, which take several times as long as starting a thread

// Calls work(begin, end) over `n` things of `size` numbers each, in at most `threads` threads.
template <typename Work>
void share(int64_t n, int64_t size, int threads, Work work) {
  const int64_t useful = n * size / kWorthAThread;
  const int64_t teams = threads < useful ? threads : useful;
  if (teams <= 1) return work(0, n);
  std::vector<std::thread> others;
  for (int64_t each = 1; each < teams; ++each) others.emplace_back(work, n * each / teams, n * (each + 1) / teams);
  work(0, n / teams);
  for (auto& each : others) each.join();
}

}  // namespace

// The instructions that this processor has: 0 portable, 1 AVX2, 2 AVX-512. Every `level` below is at most that.
PLANISH_PUBLIC int planish_softmax_level() { return best_level(); }

// For each row of `tile` [rows, columns], float or (`narrow`) bfloat16, and each block of `block` columns, the last with
// the remainder, write the maximum to `top` and the sum of exp(z - maximum) to `sum`, [rows, >= blocks] with `stride`.
// With `keep` the exponentials take the place of the logits.
PLANISH_PUBLIC void planish_softmax_fold(void* tile, int narrow, int64_t rows, int64_t columns, int64_t block, float* top,
                                         float* sum, int64_t stride, int keep, int threads, int level) {
  const Fold job{tile, columns, block, top, sum, stride, keep != 0};
  const auto fold = PLANISH_PICK(level, fold);
  share(rows, columns, threads, [&](int64_t begin, int64_t end) { fold(job, narrow != 0, begin, end); });
}

// Overwrite each row of `tile` by slope * p - uniform, and add `hit` at `column`; p is exp(y - lse) or, without an `lse`,
// what `fold` kept times the block's `factor`. Null for slope is 1, for uniform and hit nothing.
PLANISH_PUBLIC void planish_softmax_derive(void* tile, int narrow, int64_t rows, int64_t columns, int64_t block,
                                           const float* lse, const float* factor, int64_t stride, const float* slope,
                                           const float* uniform, const float* hit, const int64_t* column, int threads,
                                           int level) {
  const Derive job{tile, columns, block, lse, factor, stride, slope, uniform, hit, column};
  const auto derive = PLANISH_PICK(level, derive);
  share(rows, columns, threads, [&](int64_t begin, int64_t end) { derive(job, narrow != 0, begin, end); });
}

// Add `part`, n numbers in bfloat16, to `total`.
PLANISH_PUBLIC void planish_softmax_add(float* total, const void* part, int64_t n, int threads, int level) {
  const auto add = PLANISH_PICK(level, add);
  const auto* from = static_cast<const Bfloat16*>(part);
  share((n + kGroup - 1) / kGroup, kGroup, threads, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kGroup, last = end * kGroup < n ? end * kGroup : n;
    add(total + first, from + first, last - first);
  });
}
