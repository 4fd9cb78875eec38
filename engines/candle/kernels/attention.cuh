// Attention over KV blocks: stores a step's keys and values in the cache, and reads the cache.
//
// Keys and values are [slots, num_kv_heads, head_dim]; a slot is block * block_size + offset. A step's rows belong to many
// sequences, with prefill chunks and decode rows mixed, without padding. The plan, one array of words made on the host, maps
// rows to sequences. Online softmax and the merge of splits are those of FlashAttention and Flash-Decoding.
#pragma once

#include "numbers.cuh"

constexpr unsigned HEAD_THREADS = 128;
constexpr unsigned MERGE_THREADS = 128;
constexpr float LOG2_E = 1.4426950408889634f;

template <typename T> struct HeadArguments {
  T *queries;           // [rows, num_heads * head_dim]
  T *keys, *values;     // [slots, num_kv_heads * head_dim]
  const T *qkv;         // [rows, (num_heads + 2 * num_kv_heads) * head_dim]
  const T *query_norm, *key_norm; // [head_dim], or null
  const unsigned *plan;
  unsigned positions;   // where in the plan: a word for each row
  unsigned slots;       // likewise
  unsigned frequencies; // where in the plan: head_dim / 2 floats, then the amplitude
  unsigned num_heads, num_kv_heads, head_dim;
  float query_eps, key_eps;
  unsigned norms_are_last; // whether norms come after the rotation
  unsigned unused;
};
static_assert(sizeof(HeadArguments<float>) == 96, "as `HeadArguments` in Rust");

// Normalizes one head, if there is a norm, and rotates it to its position. A warp handles one head.
template <typename T>
__device__ void turn_head(const HeadArguments<T> &a, const T *from, T *to, const T *norm, float eps) {
  const unsigned lane = threadIdx.x % WARP, half = a.head_dim / 2;
  const bool is_first = norm != nullptr && a.norms_are_last == 0, is_last = norm != nullptr && !is_first;
  const float position = static_cast<float>(a.plan[a.positions + blockIdx.x]);
  const float amplitude = __uint_as_float(a.plan[a.frequencies + half]);
  float scale = 1;
  if (norm != nullptr) {
    float squares = 0;
    for (unsigned i = lane; i < a.head_dim; i += WARP) {
      // The rotation changes the length of a pair by the amplitude alone.
      const bool is_longer = is_last && __uint_as_float(a.plan[a.frequencies + i % half]) != 0.0f;
      const float x = to_float(from[i]) * (is_longer ? amplitude : 1.0f);
      squares += x * x;
    }
    scale = 1.0f / sqrtf(sum_over<WARP>(squares) / static_cast<float>(a.head_dim) + eps);
  }
  for (unsigned i = lane; i < half; i += WARP) {
    float x = to_float(from[i]), y = to_float(from[i + half]);
    if (is_first) {
      x *= scale * to_float(norm[i]);
      y *= scale * to_float(norm[i + half]);
    }
    const float frequency = __uint_as_float(a.plan[a.frequencies + i]), angle = frequency * position;
    // Dimensions that do not rotate keep their scale.
    const float size = frequency == 0.0f ? 1.0f : amplitude;
    const float cosine = size * cosf(angle), sine = size * sinf(angle);
    float first = x * cosine - y * sine, second = y * cosine + x * sine;
    if (is_last) {
      first *= scale * to_float(norm[i]);
      second *= scale * to_float(norm[i + half]);
    }
    put(&to[i], first);
    put(&to[i + half], second);
  }
}

// Prepares the projections of all rows for attention: queries are transformed, and keys and values stored in their slots. The
// grid is [rows, heads of all three kinds / warps of a block].
template <typename T> __device__ void heads(const HeadArguments<T> &a) {
  unsigned head = blockIdx.y * (HEAD_THREADS / WARP) + threadIdx.x / WARP;
  const unsigned all_heads = a.num_heads + 2 * a.num_kv_heads;
  if (head >= all_heads) return;
  const size_t row = blockIdx.x;
  const T *from = a.qkv + (row * all_heads + head) * a.head_dim;
  if (head < a.num_heads) {
    turn_head(a, from, a.queries + (row * a.num_heads + head) * a.head_dim, a.query_norm, a.query_eps);
    return;
  }
  head -= a.num_heads;
  const size_t slot = static_cast<size_t>(a.plan[a.slots + row]) * a.num_kv_heads;
  if (head < a.num_kv_heads) {
    turn_head(a, from, a.keys + (slot + head) * a.head_dim, a.key_norm, a.key_eps);
  } else {
    T *to = a.values + (slot + head - a.num_kv_heads) * a.head_dim;
    for (unsigned i = threadIdx.x % WARP; i < a.head_dim; i += WARP) to[i] = from[i];
  }
}

template <typename T> struct AttendArguments {
  T *out;            // [rows, num_heads * head_dim]
  float *partials;   // [tiles, num_kv_heads, queries of a tile, splits, head_dim + 2] where there are several splits
  const T *queries;  // [rows, num_heads * head_dim]
  const T *keys, *values;
  const unsigned *plan;
  const float *sinks; // [num_heads]: scores beside those of the positions, whose weights go nowhere; or null
  unsigned sequences; // where in the plan; see `Sequence`
  unsigned tiles;     // where in the plan: for each tile its sequence and its first query in it
  unsigned num_heads, num_kv_heads, head_dim, block_size;
  unsigned window; // positions that a query sees, its own included; NO_WINDOW for all
  unsigned splits; // parts that the positions of a tile are cut into
  unsigned queries_per_tile;
  float softcap; // 0 for none
  float scale;
  unsigned unused;
};
static_assert(sizeof(AttendArguments<float>) == 104, "as `AttendArguments` in Rust");

constexpr unsigned NO_WINDOW = 0xffffffffu;

// Four words of the plan. A sequence's queries for one key and value head are numbered row by row, and within a row head
// by head.
struct Sequence {
  unsigned blocks; // where in the plan its KV blocks begin
  unsigned first_row, rows;
  unsigned first_position; // of its first row
};

// 2^(score - largest), where both may be minus infinity. A NaN score stays NaN, though it is never the largest.
__device__ inline float weight(float score, float largest) {
  return score == -INFINITY ? 0.0f : exp2f(score - largest);
}

// The work of a block: some queries of one sequence and one key and value head.
template <typename T> struct Tile {
  const AttendArguments<T> &a;
  Sequence sequence;
  unsigned group, kv_head, first_query, queries;

  __device__ Tile(const AttendArguments<T> &arguments, unsigned tile, unsigned head, unsigned most)
      : a(arguments), group(arguments.num_heads / arguments.num_kv_heads), kv_head(head) {
    const unsigned *words = a.plan + a.tiles + 2 * tile;
    const unsigned *from = a.plan + a.sequences + 4 * words[0];
    sequence = {from[0], from[1], from[2], from[3]};
    first_query = words[1];
    queries = min(most, sequence.rows * group - first_query);
  }

  // The positions that a query of the tile attends to: from `first_seen` to before `end_seen`.
  __device__ unsigned end_seen(unsigned query) const {
    return query < queries ? sequence.first_position + (first_query + query) / group + 1 : 0;
  }
  __device__ unsigned first_seen(unsigned query) const {
    const unsigned end = end_seen(query);
    return end > a.window ? end - a.window : 0;
  }

  // The offset of a query in [rows, num_heads, head_dim].
  __device__ size_t place(unsigned query) const {
    const unsigned number = first_query + query;
    const size_t row = sequence.first_row + number / group;
    return (row * a.num_heads + kv_head * group + number % group) * a.head_dim;
  }

  // The offset of a position's key and value.
  __device__ size_t slot(unsigned position) const {
    const size_t block = a.plan[sequence.blocks + position / a.block_size];
    return ((block * a.block_size + position % a.block_size) * a.num_kv_heads + kv_head) * a.head_dim;
  }

  // The scaled product of query and key, for a softmax with base 2.
  __device__ float score(float product) const {
    if (a.softcap != 0) product = a.softcap * tanhf(product / a.softcap);
    return product * LOG2_E;
  }

  // A query's result, from the weighted sum over all positions and the sum of the weights; both were computed with
  // `largest`.
  __device__ float result(unsigned query, float sum, float largest, float total) const {
    if (a.sinks == nullptr) return sum / total;
    const float sink = a.sinks[kv_head * group + (first_query + query) % group] * LOG2_E;
    const float most = fmaxf(largest, sink), share = weight(largest, most);
    return sum * share / (total * share + weight(sink, most));
  }

  // A block's share of the positions that any of its queries attends to.
  __device__ void share(unsigned split, unsigned &begin, unsigned &end) const {
    const unsigned first = first_seen(0), all_end = end_seen(queries - 1);
    const unsigned length = (all_end - first + a.splits - 1) / a.splits;
    begin = min(first + split * length, all_end);
    end = min(begin + length, all_end);
  }
};

// Threads of a block with this number of queries. Single queries are used when there are few: the block then has more
// threads, and each thread fewer sequential steps.
template <unsigned QUERIES> constexpr unsigned ATTEND_THREADS = QUERIES == 1 ? 256 : 128;

// Attention for few queries at a time, mainly for decode rows: the time is that of reading keys and values once.
//
// LANES lanes share a position, eight dimensions each. A block computes two positions per group of lanes at once. Each group
// keeps its own softmax, and they are merged at the end. head_dim is at most 8 * LANES and a multiple of 8. The grid is
// [tiles, num_kv_heads, splits].
template <typename T, unsigned LANES, unsigned QUERIES> __device__ void attend(const AttendArguments<T> &a) {
  constexpr unsigned THREADS = ATTEND_THREADS<QUERIES>, GROUPS = THREADS / LANES, WARPS = THREADS / WARP, UNROLL = 2;
  const Tile<T> tile(a, blockIdx.x, blockIdx.y, QUERIES);
  const unsigned group = threadIdx.x / LANES, dimension = threadIdx.x % LANES * 8;
  const bool has_dimensions = dimension < a.head_dim;

  float query[QUERIES][8], sums[QUERIES][8], largest[QUERIES], total[QUERIES];
#pragma unroll
  for (unsigned q = 0; q < QUERIES; q++) {
    const bool is_there = q < tile.queries && has_dimensions;
    const Eight<T> eight = is_there ? Eight<T>::load(a.queries + tile.place(q) + dimension) : Eight<T>::zeros();
    eight.floats(query[q]);
    largest[q] = -INFINITY, total[q] = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) query[q][i] *= a.scale, sums[q][i] = 0;
  }

  unsigned begin, end;
  tile.share(blockIdx.z, begin, end);
  for (unsigned base = begin; base < end; base += GROUPS * UNROLL) {
    Eight<T> keys[UNROLL], values[UNROLL];
    float scores[UNROLL][QUERIES];
#pragma unroll
    for (unsigned u = 0; u < UNROLL; u++) {
      const unsigned position = base + u * GROUPS + group;
      const bool is_read = position < end && has_dimensions;
      const size_t slot = is_read ? tile.slot(position) + dimension : 0;
      keys[u] = is_read ? Eight<T>::load(a.keys + slot) : Eight<T>::zeros();
      values[u] = is_read ? Eight<T>::load(a.values + slot) : Eight<T>::zeros();
    }
#pragma unroll
    for (unsigned u = 0; u < UNROLL; u++) {
      const unsigned position = base + u * GROUPS + group;
      float key[8];
      keys[u].floats(key);
#pragma unroll
      for (unsigned q = 0; q < QUERIES; q++) {
        float product = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) product += query[q][i] * key[i];
        const bool is_seen = position < end && position >= tile.first_seen(q) && position < tile.end_seen(q);
        product = sum_over<LANES>(product);
        scores[u][q] = is_seen ? tile.score(product) : -INFINITY;
      }
    }
#pragma unroll
    for (unsigned q = 0; q < QUERIES; q++) {
      float now = largest[q];
#pragma unroll
      for (unsigned u = 0; u < UNROLL; u++) now = fmaxf(now, scores[u][q]);
      const float before = weight(largest[q], now);
      largest[q] = now;
      total[q] *= before;
#pragma unroll
      for (int i = 0; i < 8; i++) sums[q][i] *= before;
#pragma unroll
      for (unsigned u = 0; u < UNROLL; u++) {
        scores[u][q] = weight(scores[u][q], now);
        total[q] += scores[u][q];
      }
    }
#pragma unroll
    for (unsigned u = 0; u < UNROLL; u++) {
      float value[8];
      values[u].floats(value);
#pragma unroll
      for (unsigned q = 0; q < QUERIES; q++)
#pragma unroll
        for (int i = 0; i < 8; i++) sums[q][i] += scores[u][q] * value[i];
    }
  }

  // Merges the groups of a warp, then the warps.
#pragma unroll
  for (unsigned offset = LANES; offset < WARP; offset *= 2)
#pragma unroll
    for (unsigned q = 0; q < QUERIES; q++) {
      const float other = __shfl_xor_sync(ALL_LANES, largest[q], offset);
      const float now = fmaxf(largest[q], other);
      const float mine = weight(largest[q], now), theirs = weight(other, now);
      largest[q] = now;
      total[q] = total[q] * mine + __shfl_xor_sync(ALL_LANES, total[q], offset) * theirs;
#pragma unroll
      for (int i = 0; i < 8; i++)
        sums[q][i] = sums[q][i] * mine + __shfl_xor_sync(ALL_LANES, sums[q][i], offset) * theirs;
    }
  __shared__ float shared_sums[WARPS][QUERIES][LANES * 8];
  __shared__ float shared_largest[WARPS][QUERIES], shared_total[WARPS][QUERIES];
  const unsigned warp = threadIdx.x / WARP;
  if (threadIdx.x % WARP < LANES) {
#pragma unroll
    for (unsigned q = 0; q < QUERIES; q++) {
#pragma unroll
      for (int i = 0; i < 8; i++) shared_sums[warp][q][dimension + i] = sums[q][i];
      shared_largest[warp][q] = largest[q], shared_total[warp][q] = total[q];
    }
  }
  __syncthreads();
  for (unsigned number = threadIdx.x; number < tile.queries * a.head_dim; number += THREADS) {
    const unsigned q = number / a.head_dim, d = number % a.head_dim;
    float most = -INFINITY, sum = 0, all = 0;
    for (unsigned w = 0; w < WARPS; w++) most = fmaxf(most, shared_largest[w][q]);
    for (unsigned w = 0; w < WARPS; w++) {
      const float share = weight(shared_largest[w][q], most);
      sum += share * shared_sums[w][q][d];
      all += share * shared_total[w][q];
    }
    if (a.splits == 1) {
      put(&a.out[tile.place(q) + d], tile.result(q, sum, most, all));
    } else {
      const size_t query_place = (static_cast<size_t>(blockIdx.x) * a.num_kv_heads + blockIdx.y) * QUERIES + q;
      float *partial = a.partials + (query_place * a.splits + blockIdx.z) * (a.head_dim + 2);
      partial[d] = sum;
      if (d == 0) partial[a.head_dim] = most, partial[a.head_dim + 1] = all;
    }
  }
}

// Merges a query's splits. The grid is [tiles, num_kv_heads, queries of a tile].
template <typename T> __device__ void merge(const AttendArguments<T> &a) {
  const Tile<T> tile(a, blockIdx.x, blockIdx.y, a.queries_per_tile);
  const unsigned q = blockIdx.z;
  if (q >= tile.queries) return;
  const size_t query_place = (static_cast<size_t>(blockIdx.x) * a.num_kv_heads + blockIdx.y) * a.queries_per_tile + q;
  const float *partials = a.partials + query_place * a.splits * (a.head_dim + 2);
  float most = -INFINITY;
  for (unsigned s = 0; s < a.splits; s++) most = fmaxf(most, partials[s * (a.head_dim + 2) + a.head_dim]);
  for (unsigned d = threadIdx.x; d < a.head_dim; d += MERGE_THREADS) {
    float sum = 0, all = 0;
    for (unsigned s = 0; s < a.splits; s++) {
      const float *partial = partials + s * (a.head_dim + 2);
      const float share = weight(partial[a.head_dim], most);
      sum += share * partial[d];
      all += share * partial[a.head_dim + 1];
    }
    put(&a.out[tile.place(q) + d], tile.result(q, sum, most, all));
  }
}
