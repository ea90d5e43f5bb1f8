// int8 quantise, reduce and dequantise for NVIDIA GPUs; reference.py has the maths.
//
// All three are bound by memory, so each touches every byte once. One warp owns a block of values
// (128, 256 or 512): lane l holds values 4l..4l+3 of every 128, so loads are 16 bytes of fp32 and
// stores 4 bytes of int8, coalesced, and the block's maximum is one warp instruction on the bit
// patterns (which orders inf and NaN above every finite number). `Lines` is block / 128.
//
// A division per value would cost more than the memory does. x / s is instead computed from the
// correctly rounded reciprocal with two fused corrections, which gives the same bits as IEEE
// division while s >= 2^-90 (all remainders exact); smaller scales take the plain division.
// Everything else uses the _rn intrinsics, so that the compiler fuses nothing.
#include "int8_device.cuh"

namespace {

using namespace int8;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

template <class T, class R, int Lines, bool Stochastic>
__global__ void __launch_bounds__(kThreads)
quantize_kernel(const T* __restrict__ x, int64_t x_stride, bool x_wide, int8_t* __restrict__ q,
                int64_t q_stride, float* __restrict__ scale, int64_t scale_stride,
                R* __restrict__ residual, int64_t residual_stride, bool residual_wide,
                int64_t cols, unsigned seed) {
  constexpr int kGroup = 4 / Lines;  // blocks a warp loads before it works on the first
  constexpr int kBlock = 128 * Lines;
  const int lane = threadIdx.x & 31;
  const int64_t row = blockIdx.y;
  const int64_t blocks = (cols + kBlock - 1) / kBlock;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps * kGroup;
  int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + (threadIdx.x >> 5)) * kGroup;
  for (; first < blocks; first += step) {
    float v[kGroup][Lines][4];
#pragma unroll
    for (int g = 0; g < kGroup; ++g)
#pragma unroll
      for (int l = 0; l < Lines; ++l) {
        const int64_t at = (first + g) * kBlock + l * 128 + lane * 4;
        const int left = remaining(cols, at);
        load4(x, row * x_stride + at, left, x_wide, v[g][l]);
        add_residual4(residual, row * residual_stride + at, left, residual_wide, v[g][l]);
      }
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      if (first + g >= blocks) break;
      const float s = block_scale<Lines>(v[g]);
      unsigned word[Lines];
      const int64_t start = (first + g) * kBlock + lane * 4;
      quantize_block<Lines, Stochastic>(v[g], s, static_cast<unsigned>(row * cols + start), seed,
                                        word);
#pragma unroll
      for (int l = 0; l < Lines; ++l) {
        const int64_t at = start + l * 128;
        const int left = remaining(cols, at);
        store_q4(q, row * q_stride + at, left, word[l]);
        store_lost4(residual, row * residual_stride + at, left, residual_wide, v[g][l], word[l], s);
      }
      if (lane == 0) scale[row * scale_stride + first + g] = s;
    }
  }
}

template <class T, int Lines>
__global__ void __launch_bounds__(kThreads)
dequantize_kernel(const int8_t* __restrict__ q, int64_t q_stride, const float* __restrict__ scale,
                  int64_t scale_stride, T* __restrict__ out, int64_t out_stride, bool out_wide,
                  int64_t cols) {
  constexpr int kGroup = 8 / Lines;
  constexpr int kBlock = 128 * Lines;
  const int lane = threadIdx.x & 31;
  const int64_t row = blockIdx.y;
  const int64_t blocks = (cols + kBlock - 1) / kBlock;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps * kGroup;
  int64_t first = (static_cast<int64_t>(blockIdx.x) * kWarps + (threadIdx.x >> 5)) * kGroup;
  for (; first < blocks; first += step) {
    unsigned word[kGroup][Lines];
    float s[kGroup];
#pragma unroll
    for (int g = 0; g < kGroup; ++g) {
      s[g] = first + g < blocks ? scale[row * scale_stride + first + g] : 0.0f;
#pragma unroll
      for (int l = 0; l < Lines; ++l) {
        const int64_t at = (first + g) * kBlock + l * 128 + lane * 4;
        const int left = remaining(cols, at);
        word[g][l] = load_q4(q, row * q_stride + at, left);
      }
    }
#pragma unroll
    for (int g = 0; g < kGroup; ++g)
#pragma unroll
      for (int l = 0; l < Lines; ++l) {
        const int64_t at = (first + g) * kBlock + l * 128 + lane * 4;
        const int left = remaining(cols, at);
        float v[4];
        unpack4(word[g][l], v);
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = __fmul_rn(v[i], s[g]);
        store4(out, row * out_stride + at, left, out_wide, v);
      }
  }
}

// Sums the block's rows of all ranks, in rank order, eight ranks' loads in flight at a time.
template <int Lines>
__device__ __forceinline__ void sum_ranks(const int8_t* __restrict__ q, int64_t q_stride,
                                          const float* __restrict__ scale, int64_t scale_stride,
                                          int ranks, int64_t k, int lane, int64_t cols,
                                          float sum[Lines][4]) {
  constexpr int kFlight = 8;
#pragma unroll
  for (int l = 0; l < Lines; ++l)
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[l][i] = 0.0f;
  for (int base = 0; base < ranks; base += kFlight) {
    unsigned word[kFlight][Lines];
    float s[kFlight];
#pragma unroll
    for (int n = 0; n < kFlight; ++n) {
      const bool present = base + n < ranks;
      s[n] = present ? scale[(base + n) * scale_stride + k] : 0.0f;
#pragma unroll
      for (int l = 0; l < Lines; ++l) {
        const int64_t at = k * (128 * Lines) + l * 128 + lane * 4;
        const int left = remaining(cols, at);
        word[n][l] = present ? load_q4(q, (base + n) * q_stride + at, left) : 0u;
      }
    }
#pragma unroll
    for (int n = 0; n < kFlight; ++n)
#pragma unroll
      for (int l = 0; l < Lines; ++l) {
        float v[4];
        unpack4(word[n][l], v);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[l][i] = __fadd_rn(sum[l][i], __fmul_rn(v[i], s[n]));
      }
  }
}

template <class Out, class R, int Lines, bool Stochastic>
__global__ void __launch_bounds__(kThreads)
reduce_kernel(const int8_t* __restrict__ q, int64_t q_stride, const float* __restrict__ scale,
              int64_t scale_stride, int ranks, Out* __restrict__ out, bool out_wide,
              int8_t* __restrict__ q_out, float* __restrict__ scale_out, R* __restrict__ residual,
              bool residual_wide, int64_t cols, float factor, unsigned seed) {
  constexpr int kBlock = 128 * Lines;
  const int lane = threadIdx.x & 31;
  const int64_t blocks = (cols + kBlock - 1) / kBlock;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t k = static_cast<int64_t>(blockIdx.x) * kWarps + (threadIdx.x >> 5); k < blocks;
       k += step) {
    float sum[Lines][4];
    sum_ranks<Lines>(q, q_stride, scale, scale_stride, ranks, k, lane, cols, sum);
    const int64_t start = k * kBlock + lane * 4;
#pragma unroll
    for (int l = 0; l < Lines; ++l) {
      const int64_t at = start + l * 128;
      const int left = remaining(cols, at);
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[l][i] = __fmul_rn(sum[l][i], factor);
      if (out) store4(out, at, left, out_wide, sum[l]);
      if (q_out) add_residual4(residual, at, left, residual_wide, sum[l]);
    }
    if (!q_out) continue;
    const float s = block_scale<Lines>(sum);
    unsigned word[Lines];
    quantize_block<Lines, Stochastic>(sum, s, static_cast<unsigned>(start), seed, word);
#pragma unroll
    for (int l = 0; l < Lines; ++l) {
      const int64_t at = start + l * 128;
      const int left = remaining(cols, at);
      store_q4(q_out, at, left, word[l]);
      store_lost4(residual, at, left, residual_wide, sum[l], word[l], s);
    }
    if (lane == 0) scale_out[k] = s;
  }
}

bool aligned(const void* p, int64_t row_elements, int dtype) {
  const int size = dtype == kFloat32 ? 4 : 2;
  return reinterpret_cast<uintptr_t>(p) % (4 * size) == 0 && row_elements % 4 == 0;
}

// Enough blocks of threads to fill the GPU several times over, never more than there is work.
dim3 grid_for(int64_t warps_of_work, int64_t rows, int device) {
  int processors = 0;
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  const int64_t wanted = (warps_of_work + kWarps - 1) / kWarps;
  const int64_t enough = (static_cast<int64_t>(processors) * 64 + rows - 1) / rows;
  const int64_t x = wanted < enough ? wanted : enough;
  return dim3(static_cast<unsigned>(x > 0 ? x : 1), static_cast<unsigned>(rows));
}

template <class T> struct Tag { using type = T; };

// Calls f with a tag of the C++ type a dtype code names.
template <class F> void with_residual(int dtype, F f) {
  if (dtype == kFloat32) f(Tag<float>{});
  else if (dtype == kBFloat16) f(Tag<__nv_bfloat16>{});
  else f(Tag<Absent>{});
}
template <class F> void with_values(int dtype, F f) {
  if (dtype == kBFloat16) f(Tag<__nv_bfloat16>{});
  else f(Tag<float>{});
}
template <int N> struct Int { static constexpr int value = N; };
template <class F> void with_lines(int block, F f) {
  if (block == 128) f(Int<1>{});
  else if (block == 256) f(Int<2>{});
  else f(Int<4>{});
}
template <class F> void with_rounding(int stochastic, F f) {
  if (stochastic) f(Int<1>{});
  else f(Int<0>{});
}

}  // namespace

extern "C" int int8_quantize_cuda(const void* x, int x_dtype, int64_t x_stride, int8_t* q,
                                  int64_t q_stride, float* scale, int64_t scale_stride,
                                  void* residual, int residual_dtype, int64_t residual_stride,
                                  int64_t rows, int64_t cols, int block, int stochastic,
                                  uint32_t seed, int device, void* stream) {
  cudaSetDevice(device);
  const bool x_wide = aligned(x, x_stride, x_dtype);
  const bool residual_wide = aligned(residual, residual_stride, residual_dtype);
  with_values(x_dtype, [&](auto t) { with_residual(residual_dtype, [&](auto r) {
    with_lines(block, [&](auto lines) { with_rounding(stochastic, [&](auto noisy) {
      using T = typename decltype(t)::type;
      using R = typename decltype(r)::type;
      constexpr int kLines = decltype(lines)::value;
      const int64_t work = ((cols + block - 1) / block + 4 / kLines - 1) / (4 / kLines);
      quantize_kernel<T, R, kLines, decltype(noisy)::value != 0>
          <<<grid_for(work, rows, device), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
              static_cast<const T*>(x), x_stride, x_wide, q, q_stride, scale, scale_stride,
              static_cast<R*>(residual), residual_stride, residual_wide, cols, seed);
    }); });
  }); });
  return cudaGetLastError();
}

extern "C" int int8_dequantize_cuda(const int8_t* q, int64_t q_stride, const float* scale,
                                    int64_t scale_stride, void* out, int out_dtype,
                                    int64_t out_stride, int64_t rows, int64_t cols, int block,
                                    int device, void* stream) {
  cudaSetDevice(device);
  const bool out_wide = aligned(out, out_stride, out_dtype);
  with_values(out_dtype, [&](auto t) { with_lines(block, [&](auto lines) {
    using T = typename decltype(t)::type;
    constexpr int kLines = decltype(lines)::value;
    const int64_t work = ((cols + block - 1) / block + 8 / kLines - 1) / (8 / kLines);
    dequantize_kernel<T, kLines>
        <<<grid_for(work, rows, device), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
            q, q_stride, scale, scale_stride, static_cast<T*>(out), out_stride, out_wide, cols);
  }); });
  return cudaGetLastError();
}

extern "C" int int8_reduce_cuda(const int8_t* q, int64_t q_stride, const float* scale,
                                int64_t scale_stride, int64_t ranks, int64_t cols, int block,
                                void* out, int out_dtype, int8_t* q_out, float* scale_out,
                                void* residual, int residual_dtype, float factor, int stochastic,
                                uint32_t seed, int device, void* stream) {
  cudaSetDevice(device);
  const bool out_wide = aligned(out, 4, out_dtype);
  const bool residual_wide = aligned(residual, 4, residual_dtype);
  with_values(out_dtype, [&](auto o) { with_residual(residual_dtype, [&](auto r) {
    with_lines(block, [&](auto lines) { with_rounding(stochastic, [&](auto noisy) {
      using Out = typename decltype(o)::type;
      using R = typename decltype(r)::type;
      constexpr int kLines = decltype(lines)::value;
      const int64_t blocks = (cols + block - 1) / block;
      reduce_kernel<Out, R, kLines, decltype(noisy)::value != 0>
          <<<grid_for(blocks, 1, device), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
              q, q_stride, scale, scale_stride, static_cast<int>(ranks), static_cast<Out*>(out),
              out_wide, q_out, scale_out, static_cast<R*>(residual), residual_wide, cols, factor,
              seed);
    }); });
  }); });
  return cudaGetLastError();
}
