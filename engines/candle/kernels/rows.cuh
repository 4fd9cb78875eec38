// Operations on single rows: norms, the gate of the feed-forward block, and the search for the best logit.
#pragma once

#include "numbers.cuh"

constexpr unsigned ROW_THREADS = 256;

template <typename T> struct NormArguments {
  T *sum;         // [rows, width]: x + delta; not written without delta
  T *normed;      // [rows, width]
  const T *x;     // [rows, width]
  const T *delta; // [rows, width], or null
  const T *weight; // [width]
  unsigned width;
  float eps;
};
static_assert(sizeof(NormArguments<float>) == 48, "as `NormArguments` in Rust");

// `norm`, number by number.
template <typename T> __device__ void norm_of_any_width(const NormArguments<T> &a, size_t row, float *shared) {
  const T *x = a.x + row;
  float squares = 0;
  for (unsigned i = threadIdx.x; i < a.width; i += ROW_THREADS) {
    float value = to_float(x[i]);
    if (a.delta != nullptr) {
      put(&a.sum[row + i], value + to_float(a.delta[row + i]));
      value = to_float(a.sum[row + i]);
    }
    squares += value * value;
  }
  const float mean = sum_over_block<ROW_THREADS>(squares, shared) / static_cast<float>(a.width);
  const float scale = 1.0f / sqrtf(mean + a.eps);
  // Each thread reads only what it wrote itself.
  const T *kept = a.delta != nullptr ? a.sum + row : x;
  for (unsigned i = threadIdx.x; i < a.width; i += ROW_THREADS)
    put(&a.normed[row + i], to_float(kept[i]) * scale * to_float(a.weight[i]));
}

// Groups of eight numbers of a row that a thread keeps.
constexpr unsigned NORM_EIGHTS = 4;

// x + delta, and that sum normalized: divided by its root mean square and multiplied by the weights. A block handles a row.
// Normalization reads the rounded sum, which is also the input of the next addition.
template <typename T> __device__ void norm(const NormArguments<T> &a) {
  __shared__ float shared[ROW_THREADS / WARP];
  const size_t row = static_cast<size_t>(blockIdx.x) * a.width;
  if (a.width % 8 != 0 || a.width > ROW_THREADS * 8 * NORM_EIGHTS) {
    norm_of_any_width(a, row, shared);
    return;
  }
  float kept[NORM_EIGHTS][8], squares = 0;
#pragma unroll
  for (unsigned e = 0; e < NORM_EIGHTS; e++) {
    const unsigned i = (e * ROW_THREADS + threadIdx.x) * 8;
    if (i >= a.width) continue;
    Eight<T>::load(a.x + row + i).floats(kept[e]);
    if (a.delta != nullptr) {
      float delta[8];
      Eight<T>::load(a.delta + row + i).floats(delta);
#pragma unroll
      for (int n = 0; n < 8; n++) kept[e][n] += delta[n];
      put_eight(a.sum + row + i, kept[e]);
    }
#pragma unroll
    for (int n = 0; n < 8; n++) squares += kept[e][n] * kept[e][n];
  }
  const float mean = sum_over_block<ROW_THREADS>(squares, shared) / static_cast<float>(a.width);
  const float scale = 1.0f / sqrtf(mean + a.eps);
#pragma unroll
  for (unsigned e = 0; e < NORM_EIGHTS; e++) {
    const unsigned i = (e * ROW_THREADS + threadIdx.x) * 8;
    if (i >= a.width) continue;
    float weight[8];
    Eight<T>::load(a.weight + i).floats(weight);
#pragma unroll
    for (int n = 0; n < 8; n++) kept[e][n] *= scale * weight[n];
    put_eight(a.normed + row + i, kept[e]);
  }
}

template <typename T> struct GateArguments {
  T *out;           // [rows, width]
  const T *gate_up; // [rows, 2 * width]
  unsigned width;
  unsigned activation; // 0 SiLU, 1 GELU by tanh, 2 a clamped swish
  float limit;         // of the last
  unsigned unused;
};
static_assert(sizeof(GateArguments<float>) == 32, "as `GateArguments` in Rust");

// activation(gate) * up.
__device__ inline float gated(float gate, float up, unsigned activation, float limit) {
  float activated;
  if (activation == 2) {
    // A NaN stays, because every comparison with it is false.
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up;
    up = (up < -limit ? -limit : up) + 1.0f;
    activated = gate / (1.0f + expf(-1.702f * gate));
  } else if (activation == 1) {
    activated = 0.5f * gate * (1.0f + tanhf(0.7978845608f * gate * (1.0f + 0.044715f * gate * gate)));
  } else {
    activated = gate / (1.0f + expf(-gate));
  }
  return activated * up;
}

// activation(first half) * second half of every row. The grid is [rows, columns / ROW_THREADS]: only its first dimension
// supports more than 65535.
template <typename T> __device__ void gate(const GateArguments<T> &a) {
  const unsigned column = blockIdx.y * ROW_THREADS + threadIdx.x;
  if (column >= a.width) return;
  const size_t row = blockIdx.x;
  const T *from = a.gate_up + row * 2 * a.width;
  put(&a.out[row * a.width + column],
      gated(to_float(from[column]), to_float(from[a.width + column]), a.activation, a.limit));
}

struct BestArguments {
  unsigned *out;       // [rows]: the place of the largest, or NO_BEST
  const float *logits; // [rows, width]
  unsigned width;
  unsigned unused;
};
static_assert(sizeof(BestArguments) == 24, "as `BestArguments` in Rust");

// The row has a NaN or plus infinity, or is minus infinity everywhere.
constexpr unsigned NO_BEST = 0xffffffffu;

// The index of a row's largest number, the first among equal ones. A block handles a row.
__device__ inline void best(const BestArguments &a) {
  __shared__ float shared_value[ROW_THREADS];
  __shared__ unsigned shared_place[ROW_THREADS];
  __shared__ unsigned shared_is_bad[ROW_THREADS];
  const float *row = a.logits + static_cast<size_t>(blockIdx.x) * a.width;
  float value = -INFINITY;
  unsigned place = NO_BEST, is_bad = 0;
  const auto look_at = [&](float logit, unsigned i) {
    is_bad |= logit != logit || logit == INFINITY;
    if (logit > value) value = logit, place = i;
  };
  if (a.width % 8 == 0) {
    // Several loads are in flight at once.
#pragma unroll 4
    for (unsigned i = threadIdx.x * 8; i < a.width; i += ROW_THREADS * 8) {
      float logits[8];
      Eight<float>::load(row + i).floats(logits);
#pragma unroll
      for (unsigned n = 0; n < 8; n++) look_at(logits[n], i + n);
    }
  } else {
    for (unsigned i = threadIdx.x; i < a.width; i += ROW_THREADS) look_at(row[i], i);
  }
  shared_value[threadIdx.x] = value, shared_place[threadIdx.x] = place, shared_is_bad[threadIdx.x] = is_bad;
  for (unsigned offset = ROW_THREADS / 2; offset > 0; offset /= 2) {
    __syncthreads();
    if (threadIdx.x < offset) {
      const unsigned other = threadIdx.x + offset;
      shared_is_bad[threadIdx.x] |= shared_is_bad[other];
      const bool is_better = shared_value[other] > shared_value[threadIdx.x];
      const bool is_equal = shared_value[other] == shared_value[threadIdx.x];
      if (is_better || (is_equal && shared_place[other] < shared_place[threadIdx.x])) {
        shared_value[threadIdx.x] = shared_value[other];
        shared_place[threadIdx.x] = shared_place[other];
      }
    }
  }
  if (threadIdx.x == 0) a.out[blockIdx.x] = shared_is_bad[0] ? NO_BEST : shared_place[0];
}
