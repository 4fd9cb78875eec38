// The part of CUDA's C++ that the kernels use, for the host, so that the kernels' source can be tested without a GPU.
//
// A block's threads are fibers of the thread that calls, and the blocks of a call run one after the other. At every barrier and
// shuffle the next fiber is chosen at random, to expose results that depend on an unspecified order. Threads that wait at
// different places are detected. Invalid memory accesses, the GPU's rounding of functions such as cosf, and speed are not emulated.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#define __device__
#define __global__
#define __shared__ static thread_local
#define __align__(BYTES) __attribute__((aligned(BYTES)))

using std::max;
using std::min;

namespace emulation {

struct Index {
  unsigned x, y, z;
};

// The state that the running fiber sees.
extern __thread Index thread, block;

// Waits for the other threads of the block.
void wait_for_block();

// Gives a word to the other lanes of the warp and takes that of another; all 32 lanes must call it.
unsigned exchange(unsigned word, unsigned lane);

// Twelve numbers of each lane, visible to all lanes until the next call.
const float (*gather(const float (&numbers)[12]))[12];

template <typename Convert>
void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Convert convert) {
  const unsigned words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  float halves[12];
  for (unsigned i = 0; i < 12; i++) halves[i] = convert(i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffff);
  const float (*all)[12] = gather(halves);
  const unsigned lane = thread.x % 32, g = lane / 4, t = lane % 4;
  for (unsigned i = 0; i < 4; i++) {
    const unsigned row = i < 2 ? g : g + 8, column = 2 * t + i % 2;
    for (unsigned k = 0; k < 16; k++) {
      // The lane that has a[row][k], and the lane that has b[k][column].
      const float left = all[row % 8 * 4 + k % 8 / 2][2 * ((row >= 8) + 2 * (k >= 8)) + k % 2];
      const float right = all[column * 4 + k % 8 / 2][2 * (4 + (k >= 8)) + k % 2];
      c[i] += left * right;
    }
  }
}

// Aborts the process for an address that a GPU would reject.
void check_alignment(const void *address, size_t size);

// The constructor registers a kernel.
struct Kernel {
  Kernel(const char *name, unsigned threads, void (*run)(const void *arguments));
};

} // namespace emulation

#define threadIdx (emulation::thread)
#define blockIdx (emulation::block)

inline void __syncthreads() { emulation::wait_for_block(); }

struct uint4 {
  unsigned x, y, z, w;
};
struct float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float __shfl_xor_sync(unsigned, float value, unsigned offset) {
  return __uint_as_float(emulation::exchange(__float_as_uint(value), (threadIdx.x % 32) ^ offset));
}

struct __half {
  unsigned short bits;
};
struct __nv_bfloat16 {
  unsigned short bits;
};

inline unsigned short __half_as_ushort(__half value) { return value.bits; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
inline __half __ushort_as_half(unsigned short bits) { return {bits}; }

inline float __bfloat162float(__nv_bfloat16 value) { return __uint_as_float(static_cast<unsigned>(value.bits) << 16); }

// Rounds to the nearest, and ties to even.
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  const unsigned bits = __float_as_uint(value);
  if (value != value) return {0x7fff};
  return {static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

inline float __half2float(__half value) {
  const unsigned sign = value.bits >> 15, exponent = value.bits >> 10 & 0x1f, fraction = value.bits & 0x3ff;
  float magnitude;
  if (exponent == 0) {
    magnitude = static_cast<float>(fraction) * 0x1p-24f;
  } else if (exponent == 31) {
    magnitude = fraction ? NAN : INFINITY;
  } else {
    magnitude = __uint_as_float((exponent + 112) << 23 | fraction << 13);
  }
  return sign ? -magnitude : magnitude;
}

inline __half __float2half_rn(float value) {
  const unsigned short sign = std::signbit(value) ? 0x8000 : 0;
  const float magnitude = std::fabs(value);
  if (value != value) return {0x7fff};
  if (magnitude >= 65520.0f) return {static_cast<unsigned short>(sign | 0x7c00)};
  int exponent = 0;
  std::frexp(magnitude, &exponent); // magnitude in [2^(exponent - 1), 2^exponent)
  // The distance of neighbours: 2^-24 below the smallest normal number, else ten bits below the leading one.
  const int step = magnitude == 0 ? -24 : std::max(exponent - 11, -24);
  const unsigned count = static_cast<unsigned>(std::nearbyint(std::ldexp(magnitude, -step)));
  // Rounding up to the next power of two carries into the exponent.
  const unsigned bits = step == -24 ? count : (static_cast<unsigned>(step + 24) << 10) + count;
  return {static_cast<unsigned short>(sign | bits)};
}
