// Packs what is not zero of an array: one bit an element says where it was, and each block of 4,096 elements says where
// in the stream its values begin. Elements are bit patterns of 2, 4 or 8 bytes: -0.0, NaN and denormals are kept.
//
// [Note: staging] Vectors are compressed into a register and stored whole, each over the end of the one before: several
// times as fast as the instruction that compresses to memory. So the last store of a block runs over what follows it.
// That is harmless where nothing is there yet, as with one thread and room to spare; elsewhere the block goes to a
// buffer on the stack, which stays in the first cache, and is copied from there.
//
// [Note: order] Each thread takes a run of blocks, and each block the next free place in the stream. With several
// threads the order of blocks in the stream is that of their arrival; what is unpacked does not depend on it.

#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define PLANISH_X86 1
#include <immintrin.h>
#endif

#if defined(_WIN32)
#define PLANISH_PUBLIC extern "C" __declspec(dllexport)
#else
#define PLANISH_PUBLIC extern "C" __attribute__((visibility("default")))
#endif

namespace {

constexpr int64_t kBlock = 4096;
constexpr int64_t kSlackBytes = 64;  // the widest vector that a store or a load may run over
constexpr int64_t kBlocksPerThread = 16;

struct alignas(64) Staging {
  char bytes[kBlock * 8 + kSlackBytes];
};

// A kernel handles one block of `n` elements, a multiple of 8 of them in `bits`, and returns how many are not zero.
// compact: x by its own zeros (`mine`) or by given bits; `out` may be null to count and mark only.
using Compress = int64_t (*)(const void* x, int64_t n, uint8_t* bits, bool given, void* out);
using Expand = void (*)(const void* values, int64_t n, const uint8_t* bits, void* out);

template <typename T>
int64_t compress_portable(const T* x, int64_t begin, int64_t n, uint8_t* bits, bool given, T* out, int64_t count) {
  for (int64_t i = begin; i < n; i += 8) {
    const int64_t width = n - i < 8 ? n - i : 8;
    unsigned mask = given ? bits[i / 8] : 0;
    if (!given) {
      for (int64_t lane = 0; lane < width; ++lane) mask |= unsigned(x[i + lane] != 0) << lane;
      if (bits) bits[i / 8] = uint8_t(mask);
    }
    if (out) {
      for (int64_t lane = 0; lane < width; ++lane) {
        out[count] = x[i + lane];
        count += (mask >> lane) & 1;
      }
    } else {
      for (; mask; mask &= mask - 1) ++count;
    }
  }
  return count;
}

template <typename T>
void expand_portable(const T* values, int64_t begin, int64_t n, const uint8_t* bits, T* out) {
  for (int64_t i = begin; i < n; ++i) {
    const bool set = (bits[i / 8] >> (i % 8)) & 1;
    out[i] = set ? *values : T(0);
    values += set;
  }
}

template <typename T>
int64_t compress_plain(const void* x, int64_t n, uint8_t* bits, bool given, void* out) {
  return compress_portable(static_cast<const T*>(x), 0, n, bits, given, static_cast<T*>(out), 0);
}

template <typename T>
void expand_plain(const void* values, int64_t n, const uint8_t* bits, void* out) {
  expand_portable(static_cast<const T*>(values), 0, n, bits, static_cast<T*>(out));
}

#ifdef PLANISH_X86

// For each byte of bits, the positions of those set, in order (`gather`), and for each position its rank (`scatter`).
struct Tables {
  uint8_t gather16[256][16], scatter16[256][16];
  uint32_t gather32[256][8], scatter32[256][8];
};

constexpr Tables make_tables() {
  Tables t{};
  for (int mask = 0; mask < 256; ++mask) {
    int rank = 0;
    for (int lane = 0; lane < 8; ++lane) {
      t.scatter16[mask][2 * lane] = t.scatter16[mask][2 * lane + 1] = 0x80;  // the shuffle writes zero
      if (!((mask >> lane) & 1)) continue;
      t.gather16[mask][2 * rank] = uint8_t(2 * lane), t.gather16[mask][2 * rank + 1] = uint8_t(2 * lane + 1);
      t.scatter16[mask][2 * lane] = uint8_t(2 * rank), t.scatter16[mask][2 * lane + 1] = uint8_t(2 * rank + 1);
      t.gather32[mask][rank] = uint32_t(lane), t.scatter32[mask][lane] = uint32_t(rank);
      ++rank;
    }
  }
  return t;
}

alignas(64) constexpr Tables kTables = make_tables();

#define PLANISH_AVX2 __attribute__((target("avx2,bmi2,popcnt")))
#define PLANISH_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi2,bmi2,popcnt")))

PLANISH_AVX2 int64_t compress16_avx2(const void* from, int64_t n, uint8_t* bits, bool given, void* to) {
  const auto* x = static_cast<const uint16_t*>(from);
  auto* out = static_cast<uint16_t*>(to);
  const __m256i zero = _mm256_setzero_si256();
  int64_t count = 0, i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
    uint16_t mask;
    if (given) {
      std::memcpy(&mask, bits + i / 8, 2);
    } else {
      const __m256i is_zero = _mm256_cmpeq_epi16(v, zero);
      const __m128i narrow = _mm_packs_epi16(_mm256_castsi256_si128(is_zero), _mm256_extracti128_si256(is_zero, 1));
      mask = uint16_t(~_mm_movemask_epi8(narrow));
      if (bits) std::memcpy(bits + i / 8, &mask, 2);
    }
    if (out) {
      const unsigned low = mask & 0xff, high = mask >> 8;
      const __m128i a = _mm_load_si128(reinterpret_cast<const __m128i*>(kTables.gather16[low]));
      const __m128i b = _mm_load_si128(reinterpret_cast<const __m128i*>(kTables.gather16[high]));
      const int64_t middle = count + _mm_popcnt_u32(low);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + count), _mm_shuffle_epi8(_mm256_castsi256_si128(v), a));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + middle), _mm_shuffle_epi8(_mm256_extracti128_si256(v, 1), b));
    }
    count += _mm_popcnt_u32(mask);
  }
  return compress_portable(x, i, n, bits, given, out, count);
}

PLANISH_AVX2 int64_t compress32_avx2(const void* from, int64_t n, uint8_t* bits, bool given, void* to) {
  const auto* x = static_cast<const uint32_t*>(from);
  auto* out = static_cast<uint32_t*>(to);
  const __m256i zero = _mm256_setzero_si256();
  int64_t count = 0, i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
    unsigned mask;
    if (given) {
      mask = bits[i / 8];
    } else {
      mask = ~unsigned(_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(v, zero)))) & 0xff;
      if (bits) bits[i / 8] = uint8_t(mask);
    }
    if (out) {
      const __m256i order = _mm256_load_si256(reinterpret_cast<const __m256i*>(kTables.gather32[mask]));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + count), _mm256_permutevar8x32_epi32(v, order));
    }
    count += _mm_popcnt_u32(mask);
  }
  return compress_portable(x, i, n, bits, given, out, count);
}

PLANISH_AVX2 void expand16_avx2(const void* from, int64_t n, const uint8_t* bits, void* to) {
  const auto* values = static_cast<const uint16_t*>(from);
  auto* out = static_cast<uint16_t*>(to);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    uint16_t mask;
    std::memcpy(&mask, bits + i / 8, 2);
    const unsigned low = mask & 0xff, high = mask >> 8;
    const uint16_t* middle = values + _mm_popcnt_u32(low);
    const __m128i a = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
    const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(middle));
    const __m128i to_a = _mm_load_si128(reinterpret_cast<const __m128i*>(kTables.scatter16[low]));
    const __m128i to_b = _mm_load_si128(reinterpret_cast<const __m128i*>(kTables.scatter16[high]));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm_shuffle_epi8(a, to_a));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i + 8), _mm_shuffle_epi8(b, to_b));
    values += _mm_popcnt_u32(mask);
  }
  expand_portable(values, i, n, bits, out);
}

PLANISH_AVX2 void expand32_avx2(const void* from, int64_t n, const uint8_t* bits, void* to) {
  const auto* values = static_cast<const uint32_t*>(from);
  auto* out = static_cast<uint32_t*>(to);
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const unsigned mask = bits[i / 8];
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values));
    const __m256i order = _mm256_load_si256(reinterpret_cast<const __m256i*>(kTables.scatter32[mask]));
    const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(mask)), lane), lane);
    const __m256i spread = _mm256_and_si256(_mm256_permutevar8x32_epi32(v, order), set);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), spread);
    values += _mm_popcnt_u32(mask);
  }
  expand_portable(values, i, n, bits, out);
}

PLANISH_AVX512 int64_t compress16_avx512(const void* from, int64_t n, uint8_t* bits, bool given, void* to) {
  const auto* x = static_cast<const uint16_t*>(from);
  auto* out = static_cast<uint16_t*>(to);
  int64_t count = 0, i = 0;
  for (; i + 32 <= n; i += 32) {
    const __m512i v = _mm512_loadu_si512(x + i);
    uint32_t mask;
    if (given) {
      std::memcpy(&mask, bits + i / 8, 4);
    } else {
      mask = _mm512_test_epi16_mask(v, v);
      if (bits) std::memcpy(bits + i / 8, &mask, 4);
    }
    if (out) _mm512_storeu_si512(out + count, _mm512_maskz_compress_epi16(mask, v));
    count += _mm_popcnt_u32(mask);
  }
  return compress_portable(x, i, n, bits, given, out, count);
}

PLANISH_AVX512 int64_t compress32_avx512(const void* from, int64_t n, uint8_t* bits, bool given, void* to) {
  const auto* x = static_cast<const uint32_t*>(from);
  auto* out = static_cast<uint32_t*>(to);
  int64_t count = 0, i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m512i v = _mm512_loadu_si512(x + i);
    uint16_t mask;
    if (given) {
      std::memcpy(&mask, bits + i / 8, 2);
    } else {
      mask = _mm512_test_epi32_mask(v, v);
      if (bits) std::memcpy(bits + i / 8, &mask, 2);
    }
    if (out) _mm512_storeu_si512(out + count, _mm512_maskz_compress_epi32(mask, v));
    count += _mm_popcnt_u32(mask);
  }
  return compress_portable(x, i, n, bits, given, out, count);
}

PLANISH_AVX512 void expand16_avx512(const void* from, int64_t n, const uint8_t* bits, void* to) {
  const auto* values = static_cast<const uint16_t*>(from);
  auto* out = static_cast<uint16_t*>(to);
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    uint32_t mask;
    std::memcpy(&mask, bits + i / 8, 4);
    _mm512_storeu_si512(out + i, _mm512_maskz_expand_epi16(mask, _mm512_loadu_si512(values)));
    values += _mm_popcnt_u32(mask);
  }
  expand_portable(values, i, n, bits, out);
}

PLANISH_AVX512 void expand32_avx512(const void* from, int64_t n, const uint8_t* bits, void* to) {
  const auto* values = static_cast<const uint32_t*>(from);
  auto* out = static_cast<uint32_t*>(to);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    uint16_t mask;
    std::memcpy(&mask, bits + i / 8, 2);
    _mm512_storeu_si512(out + i, _mm512_maskz_expand_epi32(mask, _mm512_loadu_si512(values)));
    values += _mm_popcnt_u32(mask);
  }
  expand_portable(values, i, n, bits, out);
}

#endif  // PLANISH_X86

enum Level { kPortable = 0, kAvx2 = 1, kAvx512 = 2 };

int best_level() {
#ifdef PLANISH_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vbmi2"))
    return kAvx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) return kAvx2;
#endif
  return kPortable;
}

Compress pick_compress(int level, int64_t itemsize) {
#ifdef PLANISH_X86
  if (level == kAvx512 && itemsize == 2) return compress16_avx512;
  if (level == kAvx512 && itemsize == 4) return compress32_avx512;
  if (level == kAvx2 && itemsize == 2) return compress16_avx2;
  if (level == kAvx2 && itemsize == 4) return compress32_avx2;
#endif
  return itemsize == 2 ? compress_plain<uint16_t> : itemsize == 4 ? compress_plain<uint32_t> : compress_plain<uint64_t>;
}

Expand pick_expand(int level, int64_t itemsize) {
#ifdef PLANISH_X86
  if (level == kAvx512 && itemsize == 2) return expand16_avx512;
  if (level == kAvx512 && itemsize == 4) return expand32_avx512;
  if (level == kAvx2 && itemsize == 2) return expand16_avx2;
  if (level == kAvx2 && itemsize == 4) return expand32_avx2;
#endif
  return itemsize == 2 ? expand_plain<uint16_t> : itemsize == 4 ? expand_plain<uint32_t> : expand_plain<uint64_t>;
}

// A run of blocks of an array, and whether they are all of them, so that nobody else is at work.
struct Run {
  int64_t begin, end;
  bool alone;
};

template <typename Work>
void for_blocks(int64_t n, int threads, Work work) {
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  const int64_t useful = (blocks + kBlocksPerThread - 1) / kBlocksPerThread;
  const int64_t teams = threads < useful ? threads : useful;
  if (teams <= 1) return work(Run{0, blocks, true});
  std::vector<std::thread> others;
  for (int64_t each = 1; each < teams; ++each)
    others.emplace_back(work, Run{blocks * each / teams, blocks * (each + 1) / teams, false});
  work(Run{0, blocks / teams, false});
  for (auto& each : others) each.join();
}

}  // namespace

// The instructions that this processor has: 0 portable, 1 AVX2, 2 AVX-512. Every `level` below is at most that.
PLANISH_PUBLIC int planish_bitmap_level() { return best_level(); }

// Return how many of the `n` elements of `x` are not zero.
PLANISH_PUBLIC int64_t planish_bitmap_count(const void* x, int64_t n, int itemsize, int threads, int level) {
  const Compress compress = pick_compress(level, itemsize);
  std::atomic<int64_t> total{0};
  for_blocks(n, threads, [&](Run run) {
    int64_t count = 0;
    for (int64_t block = run.begin; block < run.end; ++block) {
      const int64_t at = block * kBlock, width = n - at < kBlock ? n - at : kBlock;
      count += compress(static_cast<const char*>(x) + at * itemsize, width, nullptr, false, nullptr);
    }
    total += count;
  });
  return total;
}

// Write `bits`, each block's `base`, and the elements that are not zero to `values`, which has room for `capacity`.
// Return how many there are; if that is above `capacity`, some were not written and none are to be read.
PLANISH_PUBLIC int64_t planish_bitmap_pack(const void* x, int64_t n, int itemsize, uint8_t* bits, int64_t* base,
                                           void* values, int64_t capacity, int threads, int level) {
  const Compress compress = pick_compress(level, itemsize);
  std::atomic<int64_t> next{0};
  for_blocks(n, threads, [&](Run run) {
    Staging staging;
    for (int64_t block = run.begin; block < run.end; ++block) {
      const int64_t at = block * kBlock, width = n - at < kBlock ? n - at : kBlock;
      const char* from = static_cast<const char*>(x) + at * itemsize;
      const int64_t so_far = next.load(std::memory_order_relaxed);
      const bool direct = run.alone && so_far + kBlock + kSlackBytes <= capacity;
      char* to = direct ? static_cast<char*>(values) + so_far * itemsize : staging.bytes;
      const int64_t count = compress(from, width, bits + at / 8, false, to);
      const int64_t place = base[block] = next.fetch_add(count, std::memory_order_relaxed);
      if (!direct && place + count <= capacity)
        std::memcpy(static_cast<char*>(values) + place * itemsize, staging.bytes, count * itemsize);
    }
  });
  return next;
}

// Write the elements of `x` that `bits` marks to where `base` says, as `planish_bitmap_pack` did with another array, into
// `values`, which has room for `capacity`, at least as many as there are.
PLANISH_PUBLIC void planish_bitmap_compact(const void* x, int64_t n, int itemsize, const uint8_t* bits,
                                           const int64_t* base, void* values, int64_t capacity, int threads,
                                           int level) {
  const Compress compress = pick_compress(level, itemsize);
  for_blocks(n, threads, [&](Run run) {
    Staging staging;
    int64_t written = 0;
    for (int64_t block = run.begin; block < run.end; ++block) {
      const int64_t at = block * kBlock, width = n - at < kBlock ? n - at : kBlock, place = base[block];
      const char* from = static_cast<const char*>(x) + at * itemsize;
      const bool direct = run.alone && place >= written && place + kBlock + kSlackBytes <= capacity;
      char* there = static_cast<char*>(values) + place * itemsize;
      char* to = direct ? there : staging.bytes;
      const int64_t count = compress(from, width, const_cast<uint8_t*>(bits) + at / 8, true, to);
      if (!direct) std::memcpy(there, staging.bytes, count * itemsize);
      if (written < place + count) written = place + count;
    }
  });
}

// Write all `n` elements to `out`: the `num_values` packed ones where they were, zero elsewhere.
PLANISH_PUBLIC void planish_bitmap_unpack(const void* values, int64_t num_values, const uint8_t* bits,
                                          const int64_t* base, int64_t n, int itemsize, void* out, int threads,
                                          int level) {
  const Expand expand = pick_expand(level, itemsize);
  for_blocks(n, threads, [&](Run run) {
    Staging staging;
    for (int64_t block = run.begin; block < run.end; ++block) {
      const int64_t at = block * kBlock, width = n - at < kBlock ? n - at : kBlock;
      const char* from = static_cast<const char*>(values) + base[block] * itemsize;
      const int64_t left = (num_values - base[block]) * itemsize;
      if (left < kBlock * itemsize + kSlackBytes) {  // vector loads would run over the end
        std::memcpy(staging.bytes, from, left);
        from = staging.bytes;
      }
      expand(from, width, bits + at / 8, static_cast<char*>(out) + at * itemsize);
    }
  });
}
