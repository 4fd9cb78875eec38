//! The attention kernel for main memory.
//!
//! Work is divided into tiles (a few rows of a sequence, with the query heads that share one key and value head), and a tile's
//! context into partitions of [`PARTITION`] tokens at fixed positions. Each partition computes a partial result, and partials
//! are merged in order. So a row's result depends only on its own query and context, bit for bit: not on the rows in its tile,
//! its chunk, the numbers of its KV blocks, or the threads that share the work.
//!
//! # Source
//! Partial softmax and merge as in FlashAttention and Flash-Decoding (Dao et al. 2022, 2023).

mod partition;

use std::ops::Range;

use self::partition::{PARTITION, Partial, Scratch};
use super::{AttentionHeads, SequenceRows};
use crate::kv::{AnyLayer, HostLayer, KvNumber, TypedLayer};
use crate::parallel::{SharedMut, for_each_range_if_large, num_threads};

/// The approximate number of query vectors per tile: enough to reuse each key, few enough for the cache.
const TILE_QUERIES: usize = 32;

/// One unit of work.
#[derive(Debug, Clone)]
struct Item {
    /// Index in the batch.
    sequence: usize,
    /// Rows of the batch.
    rows: Range<usize>,
    /// Key and value head.
    head: usize,
    partitions: Range<usize>,
    /// The range of its partials, if other items have other partitions of the tile.
    partials: Option<Range<usize>>,
}

/// What all tiles of a layer share.
#[derive(Debug, Clone, Copy)]
struct Call<'a> {
    heads: &'a AttentionHeads,
    /// `[num_heads]`.
    sinks: Option<&'a [f32]>,
    sequences: &'a [SequenceRows],
}

/// Attends with `queries`, `[rows, num_heads * head_dim]`; returns the same shape.
///
/// `sinks`, `[num_heads]`, are one more score for each query head, which enters the softmax but has no value. The sequences are in
/// the order of their rows. The result of a row of no sequence is 0.
///
/// # Panics
/// Two sequences have a row in common or are in another order, a row is not one of `queries`, a sequence has more rows than tokens or
/// too few blocks for its context, a KV block is not in the cache, or the cache has other heads.
///
/// # Source
/// The sinks are those of gpt-oss; "Efficient Streaming Language Models with Attention Sinks" (Xiao et al. 2023).
#[must_use]
pub fn attend(
    heads: &AttentionHeads,
    sinks: Option<&[f32]>,
    queries: &[f32],
    kv: &HostLayer<'_>,
    sequences: &[SequenceRows],
) -> Vec<f32> {
    let call = Call {
        heads,
        sinks,
        sequences,
    };
    match &kv.0 {
        AnyLayer::F32(kv) => attend_to(call, queries, kv),
        AnyLayer::F16(kv) => attend_to(call, queries, kv),
    }
}

fn attend_to<T: KvNumber>(call: Call<'_>, queries: &[f32], kv: &TypedLayer<'_, T>) -> Vec<f32> {
    kv.check(call.heads);
    check_rows(call, queries);
    let plan = Plan::new(call);
    let mut out = vec![0.0f32; queries.len()];
    let mut partials = vec![Partial::empty(); plan.partials];
    let shared_out = SharedMut::new(&mut out);
    let shared_partials = SharedMut::new(&mut partials);
    for_each_range_if_large(plan.items.len(), plan.operations, |range| {
        let mut scratch = Scratch::new(call.heads, kv.block_size());
        for item in &plan.items[range] {
            let tile = Tile::new(call, item);
            scratch.load_queries(&tile, queries);
            match &item.partials {
                None => {
                    for index in item.partitions.clone() {
                        scratch.run(&tile, kv, index);
                        scratch.merge();
                    }
                    tile.for_each_query(|query, range| {
                        #[expect(unsafe_code, reason = "threads write disjoint parts")]
                        // SAFETY: the heads of tiles do not overlap, nor do their rows, which `check_rows` compared.
                        let out = unsafe { shared_out.part(range) };
                        scratch.finish(query, tile.sink(query), out);
                    });
                }
                Some(places) => {
                    #[expect(unsafe_code, reason = "threads write disjoint parts of one buffer")]
                    // SAFETY: each item has its own places.
                    let places = unsafe { shared_partials.part(places.clone()) };
                    for (place, index) in places.iter_mut().zip(item.partitions.clone()) {
                        scratch.run(&tile, kv, index);
                        *place = scratch.partial();
                    }
                }
            }
        }
    });
    merge_split_tiles(call, &plan, &partials, kv.block_size(), &mut out);
    out
}

/// Checks that no row is in two sequences, and that each is one of `queries`.
fn check_rows(call: Call<'_>, queries: &[f32]) {
    let mut end = 0;
    for sequence in call.sequences {
        let rows = &sequence.rows;
        assert!(
            end <= rows.start && rows.start <= rows.end,
            "a sequence with the rows {rows:?} behind one up to row {end}"
        );
        assert!(
            rows.len() <= sequence.context_len,
            "{} rows of a sequence of {} tokens",
            rows.len(),
            sequence.context_len
        );
        end = rows.end;
    }
    let width = [call.heads.num_heads, call.heads.head_dim];
    let numbers = width.into_iter().try_fold(end, usize::checked_mul);
    assert!(
        numbers.is_some_and(|numbers| numbers <= queries.len()),
        "{end} rows of queries in {} numbers",
        queries.len()
    );
}

/// Merges the partials of tiles that are divided among items.
fn merge_split_tiles(
    call: Call<'_>,
    plan: &Plan,
    partials: &[Partial],
    block_size: usize,
    out: &mut [f32],
) {
    let mut split = plan
        .items
        .iter()
        .filter_map(|item| item.partials.clone().map(|places| (item, places)))
        .peekable();
    if split.peek().is_none() {
        return;
    }
    let mut scratch = Scratch::new(call.heads, block_size);
    while let Some((first, places)) = split.next() {
        let tile = Tile::new(call, first);
        scratch.reset(&tile);
        partials[places]
            .iter()
            .for_each(|partial| scratch.merge_partial(partial));
        while let Some((_, places)) =
            split.next_if(|(item, _)| item.rows == first.rows && item.head == first.head)
        {
            partials[places]
                .iter()
                .for_each(|partial| scratch.merge_partial(partial));
        }
        tile.for_each_query(|query, range| {
            scratch.finish(query, tile.sink(query), &mut out[range]);
        });
    }
}

/// The work of one layer.
#[derive(Debug)]
struct Plan {
    items: Vec<Item>,
    /// The number of partials to keep.
    partials: usize,
    /// The approximate number of vector operations of all items.
    operations: usize,
}

impl Plan {
    fn new(call: Call<'_>) -> Self {
        let heads = call.heads;
        let rows_per_tile = (TILE_QUERIES / heads.group()).max(1);
        let mut items = Vec::new();
        for (index, sequence) in call.sequences.iter().enumerate() {
            for head in 0..heads.num_kv_heads {
                for start in sequence.rows.clone().step_by(rows_per_tile) {
                    let rows = start..(start + rows_per_tile).min(sequence.rows.end);
                    let partitions = partitions(heads, sequence, &rows);
                    items.push(Item {
                        sequence: index,
                        rows,
                        head,
                        partitions,
                        partials: None,
                    });
                }
            }
        }
        let partitions: usize = items
            .iter()
            .map(|item| item.partitions.len() * item.rows.len())
            .sum();
        let operations = partitions * PARTITION * heads.group() * heads.head_dim / 8;
        Self {
            items,
            partials: 0,
            operations,
        }
        .split(num_threads())
    }

    /// Splits long tiles if there are too few tiles to keep all threads busy to the end.
    fn split(self, threads: usize) -> Self {
        const ITEMS_PER_THREAD: usize = 4;
        let wanted = threads * ITEMS_PER_THREAD;
        if threads == 1 || self.items.len() >= wanted {
            return self;
        }
        let pieces = wanted.div_ceil(self.items.len().max(1));
        let mut split = Self {
            items: Vec::new(),
            partials: 0,
            operations: self.operations,
        };
        for item in self.items {
            let len = item.partitions.len().div_ceil(pieces).max(1);
            if len >= item.partitions.len() {
                split.items.push(item);
                continue;
            }
            for start in item.partitions.clone().step_by(len) {
                let partitions = start..(start + len).min(item.partitions.end);
                let places = split.partials..split.partials + partitions.len();
                split.partials = places.end;
                split.items.push(Item {
                    partitions,
                    partials: Some(places),
                    ..item.clone()
                });
            }
        }
        split
    }
}

/// The partitions that any of `rows` attends to.
fn partitions(
    heads: &AttentionHeads,
    sequence: &SequenceRows,
    rows: &Range<usize>,
) -> Range<usize> {
    let position = |row: usize| sequence.context_len - (sequence.rows.end - row);
    let visible = |row: usize| heads.visible(position(row), sequence.context_len);
    let (start, end) = (visible(rows.start).start, visible(rows.end - 1).end);
    start / PARTITION..end.div_ceil(PARTITION)
}

/// Rows of a sequence with the query heads of one key and value head.
#[derive(Debug)]
struct Tile<'a> {
    call: Call<'a>,
    blocks: &'a [u32],
    rows: Range<usize>,
    head: usize,
    /// The position of the first row.
    first_position: usize,
    context_len: usize,
}

impl<'a> Tile<'a> {
    fn new(call: Call<'a>, item: &Item) -> Self {
        let sequence = &call.sequences[item.sequence];
        Self {
            call,
            blocks: &sequence.blocks,
            rows: item.rows.clone(),
            head: item.head,
            first_position: sequence.context_len - (sequence.rows.end - item.rows.start),
            context_len: sequence.context_len,
        }
    }

    /// The number of query vectors: those of the first row, then those of the next.
    fn num_queries(&self) -> usize {
        self.rows.len() * self.call.heads.group()
    }

    /// The positions that a query attends to.
    fn visible(&self, query: usize) -> Range<usize> {
        let position = self.first_position + query / self.call.heads.group();
        self.call.heads.visible(position, self.context_len)
    }

    /// The positions that any of the queries attends to.
    fn visible_to_any(&self) -> Range<usize> {
        self.visible(0).start..self.visible(self.num_queries() - 1).end
    }

    /// The query's sink score, if there is one.
    fn sink(&self, query: usize) -> Option<f32> {
        let group = self.call.heads.group();
        Some(self.call.sinks?[self.head * group + query % group])
    }

    /// Calls `f` with each query and its range in `[rows, num_heads * head_dim]`.
    fn for_each_query(&self, mut f: impl FnMut(usize, Range<usize>)) {
        let group = self.call.heads.group();
        let head_dim = self.call.heads.head_dim;
        for query in 0..self.num_queries() {
            let row = self.rows.start + query / group;
            let head = self.head * group + query % group;
            let start = (row * self.call.heads.num_heads + head) * head_dim;
            f(query, start..start + head_dim);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention::Direction;
    use crate::kv::{HostKv, KvNumbers, KvShape};

    /// Attends with two rows of one head over a cache of one KV block, whose heads are as wide as `cached_dim`.
    fn attend_over(cached_dim: usize, sequences: &[SequenceRows]) -> Vec<f32> {
        let heads = AttentionHeads {
            num_heads: 1,
            num_kv_heads: 1,
            head_dim: 2,
            direction: Direction::Causal,
            window: None,
            softcap: None,
            scale: 1.0,
        };
        let shape = KvShape {
            num_layers: 1,
            num_heads: 1,
            head_dim: cached_dim,
        };
        let mut kv = HostKv::try_new(KvNumbers::F32, shape, 1, 16).unwrap();
        attend(&heads, None, &[1.0; 4], &kv.layer(0), sequences)
    }

    fn sequence(rows: Range<usize>) -> SequenceRows {
        SequenceRows {
            context_len: rows.end,
            rows,
            blocks: vec![0],
        }
    }

    #[test]
    fn a_row_belongs_to_one_sequence() {
        assert_eq!(attend_over(2, &[sequence(0..1), sequence(1..2)]), [0.0; 4]);
    }

    #[test]
    #[should_panic(expected = "a sequence with the rows 0..2 behind one up to row 1")]
    fn a_row_of_two_sequences_is_refused() {
        attend_over(2, &[sequence(0..1), sequence(0..2)]);
    }

    #[test]
    #[should_panic(expected = "3 rows of queries in 4 numbers")]
    fn a_row_without_a_query_is_refused() {
        attend_over(2, &[sequence(0..3)]);
    }

    #[test]
    #[should_panic(expected = "number and width of the KV cache's heads")]
    fn a_cache_of_other_heads_is_refused() {
        attend_over(4, &[sequence(0..2)]);
    }
}
