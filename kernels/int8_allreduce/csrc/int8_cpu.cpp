// int8 quantise, reduce and dequantise for CPUs, one pass over memory each; reference.py has the maths.
// Built with -ffp-contract=off: a fused multiply-add would change bits.
// Suffixes as in reference.py: rows of `cols` values, `blocks` scales a row; strides in elements.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

namespace {

constexpr int kMaxBlock = 512;
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds half to even into the low bits
constexpr float kMaxScale = 2.67938839e+36f;  // the largest whose 127-fold is finite
enum Dtype { kNone = 0, kFloat32 = 1, kBFloat16 = 2 };

inline uint32_t bits_of(float x) { uint32_t b; std::memcpy(&b, &x, 4); return b; }
inline float float_of(uint32_t b) { float x; std::memcpy(&x, &b, 4); return x; }

inline uint16_t to_bf16(float x) {
  const uint32_t b = bits_of(x);
  const uint32_t rounded = (b + 0x7FFFu + ((b >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((b & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

inline void load(const void* base, int dtype, int64_t at, int n, float* __restrict__ out) {
  if (dtype == kFloat32) {
    std::memcpy(out, static_cast<const float*>(base) + at, n * sizeof(float));
  } else {
    const uint16_t* in = static_cast<const uint16_t*>(base) + at;
    for (int i = 0; i < n; ++i) out[i] = float_of(static_cast<uint32_t>(in[i]) << 16);
  }
}

inline void store(void* base, int dtype, int64_t at, int n, const float* __restrict__ in) {
  if (dtype == kFloat32) {
    std::memcpy(static_cast<float*>(base) + at, in, n * sizeof(float));
  } else {
    uint16_t* out = static_cast<uint16_t*>(base) + at;
    for (int i = 0; i < n; ++i) out[i] = to_bf16(in[i]);
  }
}

inline float noise(uint32_t position, uint32_t seed) {
  uint32_t h = position * 0x9E3779B1u + seed;
  h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
  h = (h ^ (h >> 13)) * 0xC2B2AE35u;
  return static_cast<float>((h ^ (h >> 16)) >> 8) * 5.9604644775390625e-8f;
}

struct Rounding { bool stochastic; uint32_t seed; };

// Quantises values[0..n) in place of memory traffic: writes q and returns the scale.
inline float quantize_block(const float* __restrict__ v, int n, int8_t* __restrict__ q,
                            Rounding rounding, uint32_t position) {
  uint32_t top = 0;
  for (int i = 0; i < n; ++i) top = std::max(top, bits_of(v[i]) & 0x7FFFFFFFu);
  if (top >= 0x7F800000u) {
    std::memset(q, 0, n);
    return std::numeric_limits<float>::quiet_NaN();
  }
  const float scale = std::min(float_of(top) / 127.0f, kMaxScale);
  if (!(scale > 0.0f)) {
    std::memset(q, 0, n);
    return 0.0f;
  }
  float r[kMaxBlock];
  for (int i = 0; i < n; ++i) r[i] = v[i] / scale;
  if (rounding.stochastic) {
    for (int i = 0; i < n; ++i)
      r[i] = __builtin_floorf(r[i] + noise(position + static_cast<uint32_t>(i), rounding.seed));
  }
  for (int i = 0; i < n; ++i) {
    float c = r[i] > 127.0f ? 127.0f : r[i];
    c = c < -127.0f ? -127.0f : c;
    q[i] = static_cast<int8_t>(bits_of(c + kRounder) & 0xFFu);
  }
  return scale;
}

// v holds value + residual; leaves the new residual in memory (untouched for a non-finite block).
inline void update_residual(const float* v, const int8_t* q, float scale, int n, void* residual,
                            int dtype, int64_t at) {
  if (scale != scale) return;
  float lost[kMaxBlock];
  for (int i = 0; i < n; ++i) lost[i] = v[i] - static_cast<float>(q[i]) * scale;
  store(residual, dtype, at, n, lost);
}

inline void add_residual(float* __restrict__ v, int n, const void* residual, int dtype, int64_t at) {
  float old[kMaxBlock];
  load(residual, dtype, at, n, old);
  for (int i = 0; i < n; ++i) v[i] += old[i];
}

// Calls body(first, last) on slices of [0, items), one per thread.
template <class Body>
void parallel(int64_t items, int threads, Body body) {
  const int64_t workers = std::max<int64_t>(1, std::min<int64_t>(threads, items));
  std::vector<std::thread> pool;
  for (int64_t w = 1; w < workers; ++w)
    pool.emplace_back(body, items * w / workers, items * (w + 1) / workers);
  body(0, items / workers);
  for (auto& thread : pool) thread.join();
}

}  // namespace

extern "C" void int8_quantize_cpu(const void* x, int x_dtype, int64_t x_stride, int8_t* q,
                                  int64_t q_stride, float* scale, int64_t scale_stride,
                                  void* residual, int residual_dtype, int64_t residual_stride,
                                  int64_t rows, int64_t cols, int block, int stochastic,
                                  uint32_t seed, int threads) {
  const int64_t blocks = (cols + block - 1) / block;
  parallel(rows * blocks, threads, [=](int64_t first, int64_t last) {
    float v[kMaxBlock];
    for (int64_t item = first; item < last; ++item) {
      const int64_t row = item / blocks, k = item % blocks, at = k * block;
      const int n = static_cast<int>(std::min<int64_t>(block, cols - at));
      load(x, x_dtype, row * x_stride + at, n, v);
      const int64_t residual_at = row * residual_stride + at;
      if (residual_dtype) add_residual(v, n, residual, residual_dtype, residual_at);
      int8_t* q_block = q + row * q_stride + at;
      const float s = quantize_block(v, n, q_block, {stochastic != 0, seed},
                                     static_cast<uint32_t>(row * cols + at));
      scale[row * scale_stride + k] = s;
      if (residual_dtype)
        update_residual(v, q_block, s, n, residual, residual_dtype, residual_at);
    }
  });
}

extern "C" void int8_dequantize_cpu(const int8_t* q, int64_t q_stride, const float* scale,
                                    int64_t scale_stride, void* out, int out_dtype,
                                    int64_t out_stride, int64_t rows, int64_t cols, int block,
                                    int threads) {
  const int64_t blocks = (cols + block - 1) / block;
  parallel(rows * blocks, threads, [=](int64_t first, int64_t last) {
    float v[kMaxBlock];
    for (int64_t item = first; item < last; ++item) {
      const int64_t row = item / blocks, k = item % blocks, at = k * block;
      const int n = static_cast<int>(std::min<int64_t>(block, cols - at));
      const int8_t* q_block = q + row * q_stride + at;
      const float s = scale[row * scale_stride + k];
      for (int i = 0; i < n; ++i) v[i] = static_cast<float>(q_block[i]) * s;
      store(out, out_dtype, row * out_stride + at, n, v);
    }
  });
}

extern "C" void int8_reduce_cpu(const int8_t* q, int64_t q_stride, const float* scale,
                                int64_t scale_stride, int64_t ranks, int64_t cols, int block,
                                void* out, int out_dtype, int8_t* q_out, float* scale_out,
                                void* residual, int residual_dtype, float factor, int stochastic,
                                uint32_t seed, int threads) {
  parallel((cols + block - 1) / block, threads, [=](int64_t first, int64_t last) {
    float sum[kMaxBlock];
    for (int64_t k = first; k < last; ++k) {
      const int64_t at = k * block;
      const int n = static_cast<int>(std::min<int64_t>(block, cols - at));
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const int8_t* q_block = q + rank * q_stride + at;
        const float s = scale[rank * scale_stride + k];
        if (rank == 0) {
          for (int i = 0; i < n; ++i) sum[i] = static_cast<float>(q_block[i]) * s;
        } else {
          for (int i = 0; i < n; ++i) sum[i] += static_cast<float>(q_block[i]) * s;
        }
      }
      for (int i = 0; i < n; ++i) sum[i] *= factor;
      if (out_dtype) store(out, out_dtype, at, n, sum);
      if (!q_out) continue;
      if (residual_dtype) add_residual(sum, n, residual, residual_dtype, at);
      const float s = quantize_block(sum, n, q_out + at, {stochastic != 0, seed},
                                     static_cast<uint32_t>(at));
      scale_out[k] = s;
      if (residual_dtype) update_residual(sum, q_out + at, s, n, residual, residual_dtype, at);
    }
  });
}
