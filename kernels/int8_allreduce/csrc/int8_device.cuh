// Device functions shared by the kernels of int8_cuda.cu: one warp's loads, rounding and stores.
#pragma once
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace int8 {

constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds half to even into the low byte
constexpr float kSmallestFastScale = 8.0779356694631609e-28f;  // 2^-90
constexpr float kMaxScale = 2.67938839e+36f;  // the largest whose 127-fold is finite
constexpr unsigned kFull = 0xFFFFFFFFu;
enum Dtype { kNone = 0, kFloat32 = 1, kBFloat16 = 2 };

struct Absent {};  // the residual type of kernels without one

// How many of the four values from `at` on exist in a row.
__device__ __forceinline__ int remaining(int64_t cols, int64_t at) {
  return static_cast<int>(max(min(cols - at, int64_t{4}), int64_t{0}));
}

// Four neighbouring values at `at`, of which those below `left` exist; `wide` promises alignment.
__device__ __forceinline__ void load4(const float* p, int64_t at, int left, bool wide, float v[4]) {
  if (wide && left >= 4) {
    const float4 w = __ldcs(reinterpret_cast<const float4*>(p + at));
    v[0] = w.x; v[1] = w.y; v[2] = w.z; v[3] = w.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = i < left ? p[at + i] : 0.0f;
  }
}

__device__ __forceinline__ void load4(const __nv_bfloat16* p, int64_t at, int left, bool wide,
                                      float v[4]) {
  if (wide && left >= 4) {
    const uint2 w = __ldcs(reinterpret_cast<const uint2*>(p + at));
    v[0] = __uint_as_float(w.x << 16); v[1] = __uint_as_float(w.x & 0xFFFF0000u);
    v[2] = __uint_as_float(w.y << 16); v[3] = __uint_as_float(w.y & 0xFFFF0000u);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = i < left ? __bfloat162float(p[at + i]) : 0.0f;
  }
}

__device__ __forceinline__ void store4(float* p, int64_t at, int left, bool wide, const float v[4]) {
  if (wide && left >= 4) {
    __stcs(reinterpret_cast<float4*>(p + at), make_float4(v[0], v[1], v[2], v[3]));
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) if (i < left) p[at + i] = v[i];
  }
}

__device__ __forceinline__ void store4(__nv_bfloat16* p, int64_t at, int left, bool wide,
                                       const float v[4]) {
  if (wide && left >= 4) {
    const __nv_bfloat162 low = __floats2bfloat162_rn(v[0], v[1]);
    const __nv_bfloat162 high = __floats2bfloat162_rn(v[2], v[3]);
    uint2 w;
    w.x = *reinterpret_cast<const unsigned*>(&low);
    w.y = *reinterpret_cast<const unsigned*>(&high);
    __stcs(reinterpret_cast<uint2*>(p + at), w);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) if (i < left) p[at + i] = __float2bfloat16_rn(v[i]);
  }
}

__device__ __forceinline__ unsigned load_q4(const int8_t* q, int64_t at, int left) {
  if (left >= 4) return __ldcs(reinterpret_cast<const unsigned*>(q + at));
  unsigned word = 0;
  for (int i = 0; i < left; ++i) word |= static_cast<unsigned>(static_cast<uint8_t>(q[at + i])) << (8 * i);
  return word;
}

__device__ __forceinline__ void store_q4(int8_t* q, int64_t at, int left, unsigned word) {
  if (left >= 4) {
    *reinterpret_cast<unsigned*>(q + at) = word;
  } else {
    for (int i = 0; i < left; ++i) q[at + i] = static_cast<int8_t>(word >> (8 * i));
  }
}

// Four int8 in a word to floats without conversion instructions: byte b ^ 0x80 in the low bits of
// 2^23 is the float 2^23 + b + 128.
__device__ __forceinline__ void unpack4(unsigned word, float v[4]) {
  word ^= 0x80808080u;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    v[i] = __uint_as_float(__byte_perm(word, 0x4B000000u, 0x7540u + i)) - 8388736.0f;
}

__device__ __forceinline__ float noise(unsigned position, unsigned seed) {
  unsigned h = position * 0x9E3779B1u + seed;
  h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
  h = (h ^ (h >> 13)) * 0xC2B2AE35u;
  return __uint2float_rn((h ^ (h >> 16)) >> 8) * 5.9604644775390625e-8f;
}

// x / s with the bits of IEEE division; `inverse` is s's correctly rounded reciprocal.
__device__ __forceinline__ float divide(float x, float s, float inverse) {
  float r = __fmul_rn(x, inverse);
  r = __fmaf_rn(__fmaf_rn(-s, r, x), inverse, r);
  return __fmaf_rn(__fmaf_rn(-s, r, x), inverse, r);
}

template <bool Stochastic>
__device__ __forceinline__ unsigned round4(const float r[4], unsigned position, unsigned seed) {
  unsigned b[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float whole = r[i];
    if (Stochastic) whole = floorf(__fadd_rn(whole, noise(position + i, seed)));
    whole = fminf(fmaxf(whole, -127.0f), 127.0f);
    b[i] = __float_as_uint(__fadd_rn(whole, kRounder));
  }
  return __byte_perm(__byte_perm(b[0], b[1], 0x0040), __byte_perm(b[2], b[3], 0x0040), 0x5410);
}

// The scale of a block whose values this warp holds; NaN when one of them is not finite.
template <int Lines>
__device__ __forceinline__ float block_scale(const float v[Lines][4]) {
  unsigned top = 0;
#pragma unroll
  for (int l = 0; l < Lines; ++l)
#pragma unroll
    for (int i = 0; i < 4; ++i) top = max(top, __float_as_uint(v[l][i]) & 0x7FFFFFFFu);
  top = __reduce_max_sync(kFull, top);
  return top >= 0x7F800000u ? __uint_as_float(0x7FC00000u)
                            : fminf(__fdiv_rn(__uint_as_float(top), 127.0f), kMaxScale);
}

template <int Lines, bool Stochastic>
__device__ __forceinline__ void quantize_block(const float v[Lines][4], float s, unsigned position,
                                               unsigned seed, unsigned word[Lines]) {
  const bool fast = s >= kSmallestFastScale;
  const float inverse = __frcp_rn(s);
#pragma unroll
  for (int l = 0; l < Lines; ++l) {
    float r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = divide(v[l][i], s, inverse);
    if (!fast) {
#pragma unroll
      for (int i = 0; i < 4; ++i) r[i] = s > 0.0f ? __fdiv_rn(v[l][i], s) : 0.0f;
    }
    word[l] = s > 0.0f ? round4<Stochastic>(r, position + l * 128, seed) : 0u;
  }
}

__device__ __forceinline__ void add_residual4(const Absent*, int64_t, int, bool, float[4]) {}
template <class R>
__device__ __forceinline__ void add_residual4(const R* residual, int64_t at, int left, bool wide,
                                              float v[4]) {
  float old[4];
  load4(residual, at, left, wide, old);
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = __fadd_rn(v[i], old[i]);
}

__device__ __forceinline__ void store_lost4(Absent*, int64_t, int, bool, const float[4], unsigned,
                                            float) {}
template <class R>
__device__ __forceinline__ void store_lost4(R* residual, int64_t at, int left, bool wide,
                                            const float v[4], unsigned word, float s) {
  float lost[4];
  unpack4(word, lost);
#pragma unroll
  for (int i = 0; i < 4; ++i) lost[i] = __fsub_rn(v[i], __fmul_rn(lost[i], s));
  if (s == s) store4(residual, at, left, wide, lost);
}

}  // namespace int8
