// Attention for many queries of a sequence at a time, on tensor cores: prefill chunks.
//
// A block handles 64 queries, 16 per warp, and iterates over the positions that they attend to, 32 at a time. Scores stay in
// registers: the output layout of one product is the left input layout of the next.
#pragma once

#include "attention.cuh"

constexpr unsigned PREFILL_THREADS = 128;
constexpr unsigned PREFILL_QUERIES = 64; // of a block
constexpr unsigned PREFILL_POSITIONS = 32; // at a time

// c += a * b, with a [16, 16] by rows, b [16, 8] by columns and c [16, 8], distributed over the lanes of a warp. With
// g = lane / 4 and t = lane % 4, a lane has two numbers per word, the earlier one in the lower half:
// a: rows g, g + 8, g, g + 8 of columns 2t, 2t, 2t + 8, 2t + 8; b: rows 2t and 2t + 8 of column g;
// c: rows g, g, g + 8, g + 8 of columns 2t, 2t + 1, 2t, 2t + 1.
template <typename T>
__device__ inline void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

#ifdef __CUDACC__
#define GENSET_MMA(T, PTX)                                                                                                   \
  template <>                                                                                                                \
  __device__ inline void multiply_add<T>(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {                  \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." PTX "." PTX ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "         \
                 "{%0,%1,%2,%3};"                                                                                            \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                            \
  }
#ifdef GENSET_BF16
GENSET_MMA(__nv_bfloat16, "bf16")
#endif
#ifdef GENSET_F16
GENSET_MMA(__half, "f16")
#endif
#else
template <typename T>
inline void multiply_add(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  emulation::multiply_add(c, a, b0, b1, [](unsigned bits) {
    const unsigned short half = static_cast<unsigned short>(bits);
    T value;
    std::memcpy(&value, &half, sizeof value);
    return to_float(value);
  });
}
#endif

__device__ inline unsigned bits_of(__half value) { return __half_as_ushort(value); }
__device__ inline unsigned bits_of(__nv_bfloat16 value) { return __bfloat16_as_ushort(value); }

// Packs two numbers into a word.
template <typename T> __device__ inline unsigned pack(float low, float high) {
  T rounded[2];
  put(&rounded[0], low);
  put(&rounded[1], high);
  return bits_of(rounded[0]) | bits_of(rounded[1]) << 16;
}

// head_dim is at most DIMENSIONS and a multiple of 8. The grid is [tiles, num_kv_heads].
template <typename T, unsigned DIMENSIONS> __device__ void prefill(const AttendArguments<T> &a) {
  // The strides let the lanes of a warp read from all banks at once.
  constexpr unsigned KEY_STRIDE = DIMENSIONS + 8, VALUE_STRIDE = PREFILL_POSITIONS + 8;
  constexpr unsigned STEPS = DIMENSIONS / 16, COLUMNS = PREFILL_POSITIONS / 8, EIGHTS = DIMENSIONS / 8;
  __shared__ __align__(16) unsigned short keys[PREFILL_POSITIONS * KEY_STRIDE]; // [position, dimension]
  __shared__ __align__(16) unsigned short values[DIMENSIONS * VALUE_STRIDE];    // [dimension, position]
  const Tile<T> tile(a, blockIdx.x, blockIdx.y, PREFILL_QUERIES);
  const unsigned lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
  const unsigned first_query = threadIdx.x / WARP * 16;
  const unsigned of_row[2] = {first_query + g, first_query + g + 8};

  unsigned query[STEPS][4];
#pragma unroll
  for (unsigned step = 0; step < STEPS; step++)
#pragma unroll
    for (unsigned i = 0; i < 4; i++) {
      const unsigned q = of_row[i % 2], dimension = step * 16 + 2 * t + i / 2 * 8;
      const bool is_there = q < tile.queries && dimension < a.head_dim;
      query[step][i] = is_there ? vector_at<unsigned>(a.queries + tile.place(q) + dimension) : 0;
    }
  float sums[EIGHTS][4];
#pragma unroll
  for (unsigned n = 0; n < EIGHTS; n++) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0;
  float largest[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};
  const unsigned first_seen[2] = {tile.first_seen(of_row[0]), tile.first_seen(of_row[1])};
  const unsigned end_seen[2] = {tile.end_seen(of_row[0]), tile.end_seen(of_row[1])};

  const unsigned end = tile.end_seen(tile.queries - 1);
  for (unsigned base = tile.first_seen(0); base < end; base += PREFILL_POSITIONS) {
    __syncthreads();
    for (unsigned i = threadIdx.x; i < PREFILL_POSITIONS * EIGHTS; i += PREFILL_THREADS) {
      const unsigned position = i / EIGHTS, dimension = i % EIGHTS * 8;
      const bool is_read = base + position < end && dimension < a.head_dim;
      const Eight<T> eight = is_read ? Eight<T>::load(a.keys + tile.slot(base + position) + dimension) : Eight<T>::zeros();
      *reinterpret_cast<uint4 *>(&keys[position * KEY_STRIDE + dimension]) = eight.words;
    }
    for (unsigned i = threadIdx.x; i < PREFILL_POSITIONS * EIGHTS; i += PREFILL_THREADS) {
      const unsigned position = i % PREFILL_POSITIONS, dimension = i / PREFILL_POSITIONS * 8;
      const bool is_read = base + position < end && dimension < a.head_dim;
      const Eight<T> eight = is_read ? Eight<T>::load(a.values + tile.slot(base + position) + dimension) : Eight<T>::zeros();
      const unsigned words[4] = {eight.words.x, eight.words.y, eight.words.z, eight.words.w};
#pragma unroll
      for (unsigned d = 0; d < 8; d++)
        values[(dimension + d) * VALUE_STRIDE + position] = static_cast<unsigned short>(words[d / 2] >> (d % 2 * 16));
    }
    __syncthreads();
    // A warp whose queries all end before these positions only helps with loading.
    if (first_query >= tile.queries || tile.end_seen(min(first_query + 15, tile.queries - 1)) <= base) continue;

    float scores[COLUMNS][4];
#pragma unroll
    for (unsigned n = 0; n < COLUMNS; n++) {
      scores[n][0] = scores[n][1] = scores[n][2] = scores[n][3] = 0;
#pragma unroll
      for (unsigned step = 0; step < STEPS; step++) {
        const unsigned short *key = &keys[(n * 8 + g) * KEY_STRIDE + step * 16 + 2 * t];
        multiply_add<T>(scores[n], query[step], vector_at<unsigned>(key), vector_at<unsigned>(key + 8));
      }
#pragma unroll
      for (unsigned i = 0; i < 4; i++) {
        const unsigned position = base + n * 8 + 2 * t + i % 2, r = i / 2;
        const bool is_seen = position >= first_seen[r] && position < end_seen[r];
        scores[n][i] = is_seen ? tile.score(scores[n][i] * a.scale) : -INFINITY;
      }
    }
#pragma unroll
    for (unsigned r = 0; r < 2; r++) {
      float now = largest[r];
#pragma unroll
      for (unsigned n = 0; n < COLUMNS; n++) now = fmaxf(now, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
      now = fmaxf(now, __shfl_xor_sync(ALL_LANES, now, 1));
      now = fmaxf(now, __shfl_xor_sync(ALL_LANES, now, 2));
      const float before = weight(largest[r], now);
      largest[r] = now;
      total[r] *= before;
#pragma unroll
      for (unsigned n = 0; n < EIGHTS; n++) sums[n][2 * r] *= before, sums[n][2 * r + 1] *= before;
#pragma unroll
      for (unsigned n = 0; n < COLUMNS; n++)
#pragma unroll
        for (unsigned i = 2 * r; i < 2 * r + 2; i++) {
          scores[n][i] = weight(scores[n][i], now);
          total[r] += scores[n][i];
        }
    }
#pragma unroll
    for (unsigned step = 0; step < PREFILL_POSITIONS / 16; step++) {
      const unsigned n = 2 * step;
      const unsigned weights[4] = {pack<T>(scores[n][0], scores[n][1]), pack<T>(scores[n][2], scores[n][3]),
                                   pack<T>(scores[n + 1][0], scores[n + 1][1]),
                                   pack<T>(scores[n + 1][2], scores[n + 1][3])};
#pragma unroll
      for (unsigned d = 0; d < EIGHTS; d++) {
        const unsigned short *value = &values[(d * 8 + g) * VALUE_STRIDE + step * 16 + 2 * t];
        multiply_add<T>(sums[d], weights, vector_at<unsigned>(value), vector_at<unsigned>(value + 8));
      }
    }
  }

#pragma unroll
  for (unsigned r = 0; r < 2; r++) {
    float all = total[r];
    all += __shfl_xor_sync(ALL_LANES, all, 1);
    all += __shfl_xor_sync(ALL_LANES, all, 2);
    total[r] = all;
  }
#pragma unroll
  for (unsigned r = 0; r < 2; r++) {
    if (of_row[r] >= tile.queries) continue;
    T *out = a.out + tile.place(of_row[r]);
#pragma unroll
    for (unsigned d = 0; d < EIGHTS; d++) {
      const unsigned dimension = d * 8 + 2 * t;
      if (dimension < a.head_dim) {
        put(&out[dimension], tile.result(of_row[r], sums[d][2 * r], largest[r], total[r]));
        put(&out[dimension + 1], tile.result(of_row[r], sums[d][2 * r + 1], largest[r], total[r]));
      }
    }
  }
}
