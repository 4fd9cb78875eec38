//! One tile with one partition of its context: scores, softmax, and the weighted sum of values.

use std::ops::Range;

use super::Tile;
use crate::attention::AttentionHeads;
use crate::kv::{KvNumber, TypedLayer};
use crate::simd::{LANES, by_simd, exp, multiply_add, sum_of, tanh};

/// Tokens of a partition, which starts at a multiple of it.
pub(super) const PARTITION: usize = 128;

/// Queries that are computed together.
const GROUP: usize = 8;

/// A partition's result for each query of a tile, before the division by the sum of weights.
#[derive(Debug, Clone)]
pub(super) struct Partial {
    /// The largest score; minus infinity if the query attends to none of the partition.
    max: Vec<f32>,
    /// The sum of `exp(score - max)`.
    sum: Vec<f32>,
    /// Values times those weights, `[queries, head_dim]`.
    values: Vec<f32>,
}

impl Partial {
    pub(super) fn empty() -> Self {
        Self {
            max: Vec::new(),
            sum: Vec::new(),
            values: Vec::new(),
        }
    }
}

/// Consecutive tokens of a partition in one KV block.
#[derive(Debug, Clone)]
pub(super) struct Segment {
    block: usize,
    /// Offsets in the block.
    offsets: Range<usize>,
    /// Index of the first in the partition.
    first: usize,
}

/// A thread's buffers.
#[derive(Debug)]
pub(super) struct Scratch {
    head_dim: usize,
    block_size: usize,
    softcap: Option<f32>,
    num_queries: usize,
    /// Queries in groups of [`GROUP`], each `[head_dim, queries of the group]`.
    queries: Vec<f32>,
    /// `[queries, PARTITION]`, first scores, then weights.
    scores: Vec<[f32; PARTITION]>,
    current: Partial,
    merged: Partial,
    segments: Vec<Segment>,
}

impl Scratch {
    pub(super) fn new(heads: &AttentionHeads, block_size: usize) -> Self {
        Self {
            head_dim: heads.head_dim,
            block_size,
            softcap: heads.softcap,
            num_queries: 0,
            queries: Vec::new(),
            scores: Vec::new(),
            current: Partial::empty(),
            merged: Partial::empty(),
            segments: Vec::new(),
        }
    }

    /// Starts a tile.
    pub(super) fn reset(&mut self, tile: &Tile<'_>) {
        self.num_queries = tile.num_queries();
        self.scores.resize(self.num_queries, [0.0; PARTITION]);
        for partial in [&mut self.current, &mut self.merged] {
            partial.max.clear();
            partial.max.resize(self.num_queries, f32::NEG_INFINITY);
            partial.sum.clear();
            partial.sum.resize(self.num_queries, 0.0);
            partial.values.clear();
            partial.values.resize(self.num_queries * self.head_dim, 0.0);
        }
    }

    /// Starts a tile whose queries are in `queries`, `[rows, num_heads * head_dim]`.
    pub(super) fn load_queries(&mut self, tile: &Tile<'_>, queries: &[f32]) {
        self.reset(tile);
        self.queries.resize(self.num_queries * self.head_dim, 0.0);
        let (num_queries, head_dim) = (self.num_queries, self.head_dim);
        tile.for_each_query(|query, range| {
            let first = query / GROUP * GROUP;
            let width = (num_queries - first).min(GROUP);
            let group = &mut self.queries[first * head_dim..][query - first..];
            for (to, &from) in group.iter_mut().step_by(width).zip(&queries[range]) {
                *to = from;
            }
        });
    }

    /// Computes the partial result of partition `index`.
    pub(super) fn run<T: KvNumber>(
        &mut self,
        tile: &Tile<'_>,
        kv: &TypedLayer<'_, T>,
        index: usize,
    ) {
        let start = index * PARTITION;
        self.find_segments(tile, start);
        for segment in &self.segments {
            let keys = kv.keys(segment.block, tile.head);
            for (group, scores) in self.scores.chunks_mut(GROUP).enumerate() {
                let queries =
                    &self.queries[group * GROUP * self.head_dim..][..scores.len() * self.head_dim];
                score(queries, keys, self.block_size, segment, scores);
            }
        }
        for (query, scores) in self.scores.iter_mut().enumerate() {
            let visible = tile.visible(query);
            let visible = visible.start.clamp(start, start + PARTITION) - start
                ..visible.end.clamp(start, start + PARTITION) - start;
            let (max, sum) = (&mut self.current.max[query], &mut self.current.sum[query]);
            weigh(scores, visible, self.softcap, max, sum);
        }
        let groups = self
            .scores
            .chunks(GROUP)
            .zip(self.current.values.chunks_mut(GROUP * self.head_dim));
        for (weights, out) in groups {
            sum_values(weights, &self.segments, kv, tile.head, out);
        }
    }

    /// Finds the KV blocks of the partition that starts at `start`, as far as any query attends to them.
    fn find_segments(&mut self, tile: &Tile<'_>, start: usize) {
        let visible = tile.visible_to_any();
        let mut position = visible.start.max(start);
        let end = visible.end.min(start + PARTITION);
        self.segments.clear();
        while position < end {
            let offset = position % self.block_size;
            let len = (self.block_size - offset).min(end - position);
            self.segments.push(Segment {
                block: tile.blocks[position / self.block_size] as usize,
                offsets: offset..offset + len,
                first: position - start,
            });
            position += len;
        }
    }

    /// Merges the partition just computed into the result.
    pub(super) fn merge(&mut self) {
        merge(&self.current, self.head_dim, &mut self.merged);
    }

    /// Merges a partition computed by another item into the result.
    pub(super) fn merge_partial(&mut self, partial: &Partial) {
        merge(partial, self.head_dim, &mut self.merged);
    }

    /// The result of the partition just computed.
    pub(super) fn partial(&self) -> Partial {
        self.current.clone()
    }

    /// Writes a query's result; `sink` is a score without a value.
    pub(super) fn finish(&self, query: usize, sink: Option<f32>, out: &mut [f32]) {
        let (max, sum) = (self.merged.max[query], self.merged.sum[query]);
        let inverse = match sink {
            None => 1.0 / sum,
            Some(sink) => {
                let largest = max.max(sink);
                let share = (max - largest).exp();
                share / (sum * share + (sink - largest).exp())
            }
        };
        let values = &self.merged.values[query * self.head_dim..][..self.head_dim];
        for (out, value) in out.iter_mut().zip(values) {
            *out = value * inverse;
        }
    }
}

/// The scores of a group's queries, `[head_dim, queries]`, with a segment's tokens.
fn score<T: KvNumber>(
    queries: &[f32],
    keys: &[T],
    block_size: usize,
    segment: &Segment,
    scores: &mut [[f32; PARTITION]],
) {
    let offsets = segment.offsets.clone();
    for from in offsets.clone().step_by(LANES) {
        let tokens = from..(from + LANES).min(offsets.end);
        let at = segment.first + from - offsets.start;
        match scores.len() {
            1 => score_lanes::<1, T>(queries, keys, block_size, tokens, at, scores),
            2 => score_lanes::<2, T>(queries, keys, block_size, tokens, at, scores),
            3 => score_lanes::<3, T>(queries, keys, block_size, tokens, at, scores),
            4 => score_lanes::<4, T>(queries, keys, block_size, tokens, at, scores),
            5 => score_lanes::<5, T>(queries, keys, block_size, tokens, at, scores),
            6 => score_lanes::<6, T>(queries, keys, block_size, tokens, at, scores),
            7 => score_lanes::<7, T>(queries, keys, block_size, tokens, at, scores),
            _ => score_lanes::<8, T>(queries, keys, block_size, tokens, at, scores),
        }
    }
}

by_simd! {
    /// Scores of up to sixteen tokens.
    fn score_lanes<const QUERIES: usize; T: KvNumber>(queries: &[f32], keys: &[T], block_size: usize, tokens: Range<usize>, at: usize, scores: &mut [[f32; PARTITION]])
        = score_lanes_inner
}

#[inline(always)]
fn score_lanes_inner<const FMA: bool, const QUERIES: usize, T: KvNumber>(
    queries: &[f32],
    keys: &[T],
    block_size: usize,
    tokens: Range<usize>,
    at: usize,
    scores: &mut [[f32; PARTITION]],
) {
    let mut totals = [[0.0f32; LANES]; QUERIES];
    let len = tokens.len();
    let (queries, _) = queries.as_chunks::<QUERIES>();
    if len == LANES {
        for (queries, keys) in queries.iter().zip(keys.chunks_exact(block_size)) {
            let Some(keys) = keys[tokens.start..].first_chunk::<LANES>() else {
                break;
            };
            multiply_add::<FMA, QUERIES>(queries, &T::lanes::<FMA>(keys), &mut totals);
        }
    } else {
        for (queries, keys) in queries.iter().zip(keys.chunks_exact(block_size)) {
            let mut padded = [T::zeroed(); LANES];
            padded[..len].copy_from_slice(&keys[tokens.clone()]);
            multiply_add::<FMA, QUERIES>(queries, &T::lanes::<FMA>(&padded), &mut totals);
        }
    }
    for (scores, totals) in scores.iter_mut().zip(&totals) {
        put_lanes(totals, &mut scores[at..at + len]);
    }
}

by_simd! {
    /// Turns scores into weights, 0 outside `visible`; also computes their largest score and sum.
    fn weigh(scores: &mut [f32; PARTITION], visible: Range<usize>, softcap: Option<f32>, max: &mut f32, sum: &mut f32)
        = weigh_inner
}

#[inline(always)]
fn weigh_inner<const FMA: bool>(
    scores: &mut [f32; PARTITION],
    visible: Range<usize>,
    softcap: Option<f32>,
    max: &mut f32,
    sum: &mut f32,
) {
    scores[..visible.start].fill(f32::NEG_INFINITY);
    scores[visible.end.max(visible.start)..].fill(f32::NEG_INFINITY);
    if visible.is_empty() {
        scores.fill(0.0);
        (*max, *sum) = (f32::NEG_INFINITY, 0.0);
        return;
    }
    if let Some(cap) = softcap {
        for score in scores[visible].iter_mut() {
            *score = cap * tanh::<FMA>(*score / cap);
        }
    }
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in scores.chunks_exact(LANES) {
        for (lane, &score) in lanes.iter_mut().zip(chunk) {
            *lane = if score < *lane { *lane } else { score };
        }
    }
    *max = lanes
        .iter()
        .fold(f32::NEG_INFINITY, |a, &b| if b < a { a } else { b });
    let largest = *max;
    for score in scores.iter_mut() {
        let weight = exp::<FMA>(*score - largest);
        *score = if *score == f32::NEG_INFINITY {
            0.0
        } else {
            weight
        };
    }
    *sum = sum_of::<FMA>(scores, |weight| weight);
    // A NaN score may be missed by the maximum, but never by the sum.
    if sum.is_nan() {
        *max = f32::NAN;
    }
}

/// The sums of the segments' values, weighted by a group's weights, `[queries, head_dim]`.
fn sum_values<T: KvNumber>(
    weights: &[[f32; PARTITION]],
    segments: &[Segment],
    kv: &TypedLayer<'_, T>,
    head: usize,
    out: &mut [f32],
) {
    match weights.len() {
        1 => sum_values_of::<1, T>(weights, segments, kv, head, out),
        2 => sum_values_of::<2, T>(weights, segments, kv, head, out),
        3 => sum_values_of::<3, T>(weights, segments, kv, head, out),
        4 => sum_values_of::<4, T>(weights, segments, kv, head, out),
        5 => sum_values_of::<5, T>(weights, segments, kv, head, out),
        6 => sum_values_of::<6, T>(weights, segments, kv, head, out),
        7 => sum_values_of::<7, T>(weights, segments, kv, head, out),
        _ => sum_values_of::<8, T>(weights, segments, kv, head, out),
    }
}

by_simd! {
    /// For a group of `QUERIES`.
    fn sum_values_of<const QUERIES: usize; T: KvNumber>(weights: &[[f32; PARTITION]], segments: &[Segment], kv: &TypedLayer<'_, T>, head: usize, out: &mut [f32])
        = sum_values_inner
}

#[inline(always)]
fn sum_values_inner<const FMA: bool, const QUERIES: usize, T: KvNumber>(
    weights: &[[f32; PARTITION]],
    segments: &[Segment],
    kv: &TypedLayer<'_, T>,
    head: usize,
    out: &mut [f32],
) {
    let Some(weights) = weights.first_chunk::<QUERIES>() else {
        return;
    };
    let head_dim = out.len() / QUERIES;
    for start in (0..head_dim).step_by(LANES) {
        let len = (head_dim - start).min(LANES);
        // All tokens for sixteen columns before the next sixteen, so that the sums stay in registers.
        let mut totals = [[0.0f32; LANES]; QUERIES];
        for segment in segments {
            let offsets = &segment.offsets;
            let values = &kv.values(segment.block, head)[offsets.start * head_dim..];
            let values = &values[..offsets.len() * head_dim];
            for (token, value) in values.chunks_exact(head_dim).enumerate() {
                let mut factors = [0.0; QUERIES];
                for (factor, weights) in factors.iter_mut().zip(weights) {
                    *factor = weights[segment.first + token];
                }
                if let Some(lanes) = value[start..].first_chunk::<LANES>() {
                    multiply_add::<FMA, QUERIES>(&factors, &T::lanes::<FMA>(lanes), &mut totals);
                } else {
                    let mut padded = [T::zeroed(); LANES];
                    padded[..len].copy_from_slice(&value[start..]);
                    multiply_add::<FMA, QUERIES>(&factors, &T::lanes::<FMA>(&padded), &mut totals);
                }
            }
        }
        for (query, totals) in totals.iter().enumerate() {
            put_lanes(totals, &mut out[query * head_dim + start..][..len]);
        }
    }
}

/// Writes the first of `lanes`, as many as `out` holds. The case of sixteen avoids a call of `memcpy`.
#[inline(always)]
fn put_lanes(lanes: &[f32; LANES], out: &mut [f32]) {
    match out.first_chunk_mut() {
        Some(out) => *out = *lanes,
        None => out.copy_from_slice(&lanes[..out.len()]),
    }
}

/// Merges a partition's result into that of the earlier ones.
fn merge(partial: &Partial, head_dim: usize, merged: &mut Partial) {
    for query in 0..partial.max.len() {
        if partial.max[query] == f32::NEG_INFINITY {
            continue;
        }
        let range = query * head_dim..(query + 1) * head_dim;
        let weights = [&mut merged.max[query], &mut merged.sum[query]];
        merge_query(
            (partial.max[query], partial.sum[query]),
            &partial.values[range.clone()],
            weights,
            &mut merged.values[range],
        );
    }
}

by_simd! {
    /// For one query; `merged` is its largest score and sum.
    fn merge_query(partial: (f32, f32), values: &[f32], merged: [&mut f32; 2], merged_values: &mut [f32])
        = merge_query_inner
}

#[inline(always)]
fn merge_query_inner<const FMA: bool>(
    (max, sum): (f32, f32),
    values: &[f32],
    [merged_max, merged_sum]: [&mut f32; 2],
    merged_values: &mut [f32],
) {
    if *merged_max == f32::NEG_INFINITY {
        (*merged_max, *merged_sum) = (max, sum);
        merged_values.copy_from_slice(values);
        return;
    }
    let largest = if max < *merged_max { *merged_max } else { max };
    let old = exp::<FMA>(*merged_max - largest);
    let new = exp::<FMA>(max - largest);
    *merged_sum = *merged_sum * old + sum * new;
    for (merged, value) in merged_values.iter_mut().zip(values) {
        *merged = *merged * old + value * new;
    }
    *merged_max = largest;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The result for values of 1 after partitions with these scores.
    fn result(partitions: &[&[f32]], sink: Option<f32>) -> f32 {
        let empty = || Partial {
            max: vec![f32::NEG_INFINITY],
            sum: vec![0.0],
            values: vec![0.0],
        };
        let mut merged = empty();
        for scores in partitions {
            let mut weights = [0.0; PARTITION];
            weights[..scores.len()].copy_from_slice(scores);
            let mut partial = empty();
            let (max, sum) = (&mut partial.max[0], &mut partial.sum[0]);
            weigh(&mut weights, 0..scores.len(), None, max, sum);
            partial.values[0] = partial.sum[0];
            merge(&partial, 1, &mut merged);
        }
        let scratch = Scratch {
            head_dim: 1,
            block_size: 16,
            softcap: None,
            num_queries: 1,
            queries: Vec::new(),
            scores: Vec::new(),
            current: Partial::empty(),
            merged,
            segments: Vec::new(),
        };
        let mut out = [0.0];
        scratch.finish(0, sink, &mut out);
        out[0]
    }

    #[test]
    fn a_score_that_is_no_number_leaves_no_number() {
        let (usual, odd) = ([1.0, 2.0], [f32::NAN; 20]);
        let (usual, odd) = (&usual[..], &odd[..]);
        for sink in [None, Some(0.5)] {
            assert!(result(&[usual, usual, &[]], sink).is_finite());
            for partitions in [&[odd][..], &[odd, usual], &[usual, odd], &[odd, &[]]] {
                assert!(result(partitions, sink).is_nan(), "{partitions:?}");
            }
            for place in 0..20 {
                let mut scores = [1.0; 20];
                scores[place] = f32::NAN;
                assert!(result(&[&scores], sink).is_nan(), "{place}");
            }
        }
    }
}
