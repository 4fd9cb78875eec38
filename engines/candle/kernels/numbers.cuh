// The number types of tensors, read and written eight at a time; all arithmetic is in float.
#pragma once

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include "emulation/cuda.h"
#endif

constexpr unsigned WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

__device__ inline void put(float *to, float value) { *to = value; }
__device__ inline void put(__half *to, float value) { *to = __float2half_rn(value); }
__device__ inline void put(__nv_bfloat16 *to, float value) { *to = __float2bfloat16_rn(value); }

// The vector that begins at `from`, which must be a multiple of its size.
template <typename Vector> __device__ inline const Vector &vector_at(const void *from) {
#ifndef __CUDACC__
  emulation::check_alignment(from, sizeof(Vector));
#endif
  return *static_cast<const Vector *>(from);
}

// Eight adjacent numbers as in memory. Loading and conversion to float are separate steps, so that many loads can be in
// flight before the first is used.
template <typename T> struct Eight {
  uint4 words;

  __device__ static Eight zeros() { return {make_uint4(0, 0, 0, 0)}; }

  // `from` is a multiple of 16 bytes.
  __device__ static Eight load(const T *from) { return {vector_at<uint4>(from)}; }

  __device__ void floats(float (&to)[8]) const {
    const unsigned all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      to[2 * i] = half_of(all[i] & 0xffffu);
      to[2 * i + 1] = half_of(all[i] >> 16);
    }
  }

private:
  __device__ static float half_of(unsigned bits);
};

template <> __device__ inline float Eight<__half>::half_of(unsigned bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

template <> __device__ inline float Eight<__nv_bfloat16>::half_of(unsigned bits) { return __uint_as_float(bits << 16); }

template <> struct Eight<float> {
  float4 first, second;

  __device__ static Eight zeros() { return {make_float4(0, 0, 0, 0), make_float4(0, 0, 0, 0)}; }

  __device__ static Eight load(const float *from) {
    return {vector_at<float4>(from), vector_at<float4>(from + 4)};
  }

  __device__ void floats(float (&to)[8]) const {
    to[0] = first.x, to[1] = first.y, to[2] = first.z, to[3] = first.w;
    to[4] = second.x, to[5] = second.y, to[6] = second.z, to[7] = second.w;
  }
};

// Writes eight adjacent numbers, and stores their rounded values in `numbers`. `to` is a multiple of 16 bytes.
template <typename T> __device__ inline void put_eight(T *to, float (&numbers)[8]) {
  __align__(16) T rounded[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    put(&rounded[i], numbers[i]);
    numbers[i] = to_float(rounded[i]);
  }
#pragma unroll
  for (unsigned i = 0; i < 8 * sizeof(T) / sizeof(uint4); i++)
    reinterpret_cast<uint4 *>(to)[i] = reinterpret_cast<const uint4 *>(rounded)[i];
}

// The sum over lanes that differ in the bits below `LANES`; each of these lanes gets it.
template <unsigned LANES> __device__ inline float sum_over(float value) {
#pragma unroll
  for (unsigned offset = LANES / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(ALL_LANES, value, offset);
  return value;
}

// The sum over a block of `THREADS`; each thread gets it. `shared` has room for one float per warp.
template <unsigned THREADS> __device__ inline float sum_over_block(float value, float *shared) {
  value = sum_over<WARP>(value);
  if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = value;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (unsigned warp = 0; warp < THREADS / WARP; warp++) sum += shared[warp];
  return sum;
}
