// Products of one or two rows with a matrix, for decode steps of that size. Their cost is reading the matrix once, so the read
// is divided into many small ones in flight at once: one to eight warps compute a column of the result.
#pragma once

#include "rows.cuh"

constexpr unsigned PRODUCT_THREADS = 256;
constexpr unsigned PRODUCT_WARPS = PRODUCT_THREADS / WARP;

// Groups of eight weights of a row that a lane loads before it uses the first.
constexpr unsigned PRODUCT_EIGHTS = 4;

template <typename T> struct ProductArguments {
  T *out;          // [rows, out_features]
  const T *x;      // [rows, in_features]
  const T *weight; // [out_features, in_features]; of a gated product [2 * out_features, in_features]
  unsigned in_features; // a multiple of 8
  unsigned out_features;
  unsigned parts;      // warps that share a column: 1, 2, 4 or 8
  unsigned activation; // of a gated product, as in `GateArguments`
  float limit;
  unsigned unused;
};
static_assert(sizeof(ProductArguments<float>) == 48, "as `ProductArguments` in Rust");

// This warp's part of the products of each row of `x` with each of these rows of weights; all lanes get the sums.
template <typename T, unsigned ROWS, unsigned COLUMNS>
__device__ void multiply(const ProductArguments<T> &a, unsigned part, const T *const (&weights)[COLUMNS],
                         float (&sums)[ROWS][COLUMNS]) {
  constexpr unsigned STEP = WARP * 8, LENGTH = PRODUCT_EIGHTS * STEP;
#pragma unroll
  for (unsigned row = 0; row < ROWS; row++)
#pragma unroll
    for (unsigned column = 0; column < COLUMNS; column++) sums[row][column] = 0;
  for (unsigned first = part * LENGTH + threadIdx.x % WARP * 8; first < a.in_features; first += a.parts * LENGTH) {
    Eight<T> loaded[PRODUCT_EIGHTS][COLUMNS];
#pragma unroll
    for (unsigned e = 0; e < PRODUCT_EIGHTS; e++)
#pragma unroll
      for (unsigned column = 0; column < COLUMNS; column++) {
        const unsigned i = first + e * STEP;
        loaded[e][column] = i < a.in_features ? Eight<T>::load(weights[column] + i) : Eight<T>::zeros();
      }
#pragma unroll
    for (unsigned e = 0; e < PRODUCT_EIGHTS; e++) {
      const unsigned i = first + e * STEP;
      if (i >= a.in_features) break;
      float weight[COLUMNS][8];
#pragma unroll
      for (unsigned column = 0; column < COLUMNS; column++) loaded[e][column].floats(weight[column]);
#pragma unroll
      for (unsigned row = 0; row < ROWS; row++) {
        float x[8];
        Eight<T>::load(a.x + static_cast<size_t>(row) * a.in_features + i).floats(x);
#pragma unroll
        for (unsigned column = 0; column < COLUMNS; column++)
#pragma unroll
          for (int n = 0; n < 8; n++) sums[row][column] += weight[column][n] * x[n];
      }
    }
  }
#pragma unroll
  for (unsigned row = 0; row < ROWS; row++)
#pragma unroll
    for (unsigned column = 0; column < COLUMNS; column++) sums[row][column] = sum_over<WARP>(sums[row][column]);
}

// The products of a block's columns. With two COLUMNS, also those of the same columns in the matrix's second half. `finish` gets
// a row, a column and its sums. The order of a sum depends only on in_features.
template <typename T, unsigned ROWS, unsigned COLUMNS, typename Finish>
__device__ void multiply_columns(const ProductArguments<T> &a, Finish finish) {
  __shared__ float shared[PRODUCT_WARPS][ROWS][COLUMNS];
  const unsigned warp = threadIdx.x / WARP, block_columns = PRODUCT_WARPS / a.parts;
  const unsigned column = blockIdx.x * block_columns + warp / a.parts;
  float sums[ROWS][COLUMNS];
  if (column < a.out_features) {
    const T *weights[COLUMNS];
#pragma unroll
    for (unsigned c = 0; c < COLUMNS; c++)
      weights[c] = a.weight + (static_cast<size_t>(c) * a.out_features + column) * a.in_features;
    multiply(a, warp % a.parts, weights, sums);
    if (threadIdx.x % WARP == 0) {
#pragma unroll
      for (unsigned row = 0; row < ROWS; row++)
#pragma unroll
        for (unsigned c = 0; c < COLUMNS; c++) shared[warp][row][c] = sums[row][c];
    }
  }
  __syncthreads();
  const unsigned row = threadIdx.x / block_columns, mine = threadIdx.x % block_columns;
  if (row >= ROWS || blockIdx.x * block_columns + mine >= a.out_features) return;
  float sum[COLUMNS];
#pragma unroll
  for (unsigned c = 0; c < COLUMNS; c++) sum[c] = 0;
  for (unsigned part = 0; part < a.parts; part++)
#pragma unroll
    for (unsigned c = 0; c < COLUMNS; c++) sum[c] += shared[mine * a.parts + part][row][c];
  finish(row, blockIdx.x * block_columns + mine, sum);
}

// x times the transposed weights.
template <typename T, unsigned ROWS> __device__ void product(const ProductArguments<T> &a) {
  multiply_columns<T, ROWS, 1>(a, [&](unsigned row, unsigned column, const float (&sum)[1]) {
    put(&a.out[static_cast<size_t>(row) * a.out_features + column], sum[0]);
  });
}

// activation(first half) * second half of that product, bit for bit equal to `product` followed by `gate`.
template <typename T, unsigned ROWS> __device__ void gated_product(const ProductArguments<T> &a) {
  multiply_columns<T, ROWS, 2>(a, [&](unsigned row, unsigned column, const float (&sum)[2]) {
    T gate, up;
    put(&gate, sum[0]), put(&up, sum[1]);
    put(&a.out[static_cast<size_t>(row) * a.out_features + column],
        gated(to_float(gate), to_float(up), a.activation, a.limit));
  });
}
