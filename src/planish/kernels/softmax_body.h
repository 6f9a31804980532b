// The kernels of `softmax.cpp`, which takes this file in once for each level of instructions, in a namespace of its own,
// with `kLanes` the numbers that one register holds there.

using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using Halves = uint16_t __attribute__((vector_size(2 * kLanes)));

constexpr int64_t kSums = kGroup / kLanes;

PLANISH_INLINE Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

PLANISH_INLINE Floats load(const Bfloat16* from) {
  Halves x;
  std::memcpy(&x, from, sizeof x);
  return reinterpret_cast<Floats>(__builtin_convertvector(x, Words) << 16);
}

PLANISH_INLINE void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

// To the nearest, ties to even; NaN stays NaN.
PLANISH_INLINE void store(Bfloat16* to, Floats x) {
  const Words bits = reinterpret_cast<Words>(x);
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words quiet = Words{} + 0x7fc0;
  const Halves narrow = __builtin_convertvector(x == x ? rounded : quiet, Halves);
  std::memcpy(to, &narrow, sizeof narrow);
}

// exp(x) for x <= 0 to about one unit in the last place: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2] (Cephes).
PLANISH_INLINE Floats exponential(Floats x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to a whole number
  const Floats n = (x * 1.44269504f + magic) - magic;
  const Floats r = x - n * 0.693359375f - n * -2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  return x < kVanish ? Floats{} : p * reinterpret_cast<Floats>(power);
}

// Calls work(run) for each `kGroup` numbers of a run; the last ones are a copy, followed by `rest`, and copied back.
template <typename T, typename Work>
PLANISH_INLINE void for_groups(T* run, int64_t n, T rest, Work work) {
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup) work(run + i);
  if (i == n) return;
  T padded[kGroup];
  for (auto& each : padded) each = rest;
  std::memcpy(padded, run + i, (n - i) * sizeof(T));
  work(padded);
  std::memcpy(run + i, padded, (n - i) * sizeof(T));
}

template <typename T>
PLANISH_INLINE float largest(T* z, int64_t n) {
  Floats top[kSums];
  for (auto& each : top) each = Floats{} + kNothing;
  for_groups(z, n, nothing<T>(), [&](T* group) PLANISH_INLINE_LAMBDA {
    for (int64_t s = 0; s < kSums; ++s) {
      const Floats x = load(group + s * kLanes);
      top[s] = top[s] < x ? x : top[s];
    }
  });
  float found = kNothing;
  for (const auto& each : top)
    for (int64_t lane = 0; lane < kLanes; ++lane) found = found < each[lane] ? each[lane] : found;
  return found;
}

// The sum of exp(z - top); with `keep` the exponentials take the place of z.
template <typename T, bool keep>
PLANISH_INLINE float sum_exponentials(T* z, int64_t n, float top) {
  Floats sum[kSums] = {};
  for_groups(z, n, nothing<T>(), [&](T* group) PLANISH_INLINE_LAMBDA {
    for (int64_t s = 0; s < kSums; ++s) {
      const Floats e = exponential(load(group + s * kLanes) - top);
      if (keep) store(group + s * kLanes, e);
      sum[s] += e;
    }
  });
  float found = 0.0f;
  for (const auto& each : sum)
    for (int64_t lane = 0; lane < kLanes; ++lane) found += each[lane];
  return found;
}

// Calls work(number, start, columns) for each block of a row: all of one width but the last, which takes the remainder.
template <typename Work>
PLANISH_INLINE void for_blocks(int64_t columns, int64_t block, Work work) {
  const int64_t blocks = columns < block ? 1 : columns / block;
  for (int64_t b = 0; b < blocks; ++b) work(b, b * block, b + 1 == blocks ? columns - b * block : block);
}

template <typename T>
PLANISH_INLINE void fold_rows(const Fold& job, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T* z = static_cast<T*>(job.tile) + row * job.columns;
    for_blocks(job.columns, job.block, [&](int64_t b, int64_t start, int64_t n) PLANISH_INLINE_LAMBDA {
      const float top = largest(z + start, n), from = top < kFloor ? kFloor : top;
      job.top[row * job.stride + b] = from;
      job.sum[row * job.stride + b] =
          job.keep ? sum_exponentials<T, true>(z + start, n, from) : sum_exponentials<T, false>(z + start, n, from);
    });
  }
}

// y becomes weight * (exp(y - lse) or, where exponentials were kept, y) - uniform.
template <typename T, bool kept>
PLANISH_INLINE void derive_run(T* y, int64_t n, float lse, float weight, float uniform) {
  for_groups(y, n, T{}, [&](T* group) PLANISH_INLINE_LAMBDA {
    for (int64_t s = 0; s < kSums; ++s) {
      const Floats x = load(group + s * kLanes);
      store(group + s * kLanes, (kept ? x : exponential(x - lse)) * weight - uniform);
    }
  });
}

template <typename T>
PLANISH_INLINE void derive_rows(const Derive& job, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T* y = static_cast<T*>(job.tile) + row * job.columns;
    const float slope = job.slope ? job.slope[row] : 1.0f, uniform = job.uniform ? job.uniform[row] : 0.0f;
    const float lse = job.lse ? job.lse[row] : 0.0f;
    const int64_t hit = job.hit ? job.column[row] : -1;
    T at_hit = {};
    for_blocks(job.columns, job.block, [&](int64_t b, int64_t start, int64_t n) PLANISH_INLINE_LAMBDA {
      const float weight = job.lse ? slope : slope * job.factor[row * job.stride + b];
      if (hit >= start && hit < start + n) {  // before it is overwritten, so that it is rounded once
        T some[kLanes] = {y[hit]};
        const Floats x = load(some);
        store(some, (job.lse ? exponential(x - lse) : x) * weight - uniform + job.hit[row]);
        at_hit = some[0];
      }
      job.lse ? derive_run<T, false>(y + start, n, lse, weight, uniform)
              : derive_run<T, true>(y + start, n, lse, weight, uniform);
    });
    if (hit >= 0) y[hit] = at_hit;
  }
}

void fold(const Fold& job, bool narrow, int64_t begin, int64_t end) {
  narrow ? fold_rows<Bfloat16>(job, begin, end) : fold_rows<float>(job, begin, end);
}

void derive(const Derive& job, bool narrow, int64_t begin, int64_t end) {
  narrow ? derive_rows<Bfloat16>(job, begin, end) : derive_rows<float>(job, begin, end);
}

void add(float* total, const Bfloat16* part, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(total + i, load(total + i) + load(part + i));
  for (; i < n; ++i) {
    Bfloat16 some[kLanes] = {part[i]};
    total[i] += load(some)[0];
  }
}
