//! [`Plan`]: the layout of a step's rows, as the kernels read it. It is one array of words, made on the host and copied to the
//! device once for all layers.

use candle_core::{Device, Result, Tensor};

use crate::model::batch::StepBatch;
use crate::model::kernels::narrow;
use crate::model::rope::Frequencies;

/// Queries per block of the kernel for many queries; `PREFILL_QUERIES` in `prefill.cuh`.
pub(super) const MANY_QUERIES: usize = 64;
/// The most queries per block of the kernel for few queries.
const MOST_FEW_QUERIES: usize = 8;
/// Up to this number of queries, each gets its own block. Sharing the reads of keys and values gains nothing while the GPU has
/// room for more blocks.
const QUERIES_ALONE: usize = 64;
/// `Sequence` in `attention.cuh`.
const WORDS_PER_SEQUENCE: usize = 4;

/// A step's plan, on the device. Queries are counted per key and value head: `group` of them per row.
#[derive(Debug)]
pub(in crate::model) struct Plan {
    pub(super) words: Tensor,
    pub(super) places: Places,
}

/// The offsets of the parts of a plan's words. For a step of decode rows they depend only on the number of rows, so the same
/// launches serve every step of that size.
#[derive(Debug, Clone)]
pub(in crate::model) struct Places {
    /// One per row.
    pub(super) positions: u32,
    pub(super) slots: u32,
    /// For each set of frequencies: one number per pair, then the amplitude.
    pub(super) frequencies: Vec<u32>,
    /// `Sequence` in `attention.cuh`.
    pub(super) sequences: u32,
    /// Mainly decode rows.
    pub(super) few: Tiles,
    /// Prefill chunks.
    pub(super) many: Tiles,
}

/// The blocks of a kernel: each handles some queries of one sequence.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tiles {
    /// The offset in the words: for each tile the sequence and its first query.
    pub(super) start: u32,
    pub(super) count: usize,
    /// The most queries per tile.
    pub(super) queries: usize,
    /// The longest context of a sequence in the tiles.
    pub(super) longest_context: usize,
}

/// The inputs of a plan beside the batch.
#[derive(Debug, Clone, Copy)]
pub(in crate::model) struct PlanFor<'a> {
    pub(in crate::model) frequencies: &'a [Frequencies],
    /// Query heads per key and value head.
    pub(in crate::model) group: usize,
    /// Whether there is a kernel for many queries.
    pub(in crate::model) has_many: bool,
}

impl Plan {
    pub(in crate::model) fn try_new(
        batch: &StepBatch,
        of: PlanFor<'_>,
        device: &Device,
    ) -> Result<Self> {
        let (words, places) = Places::try_new(batch, of)?;
        let len = words.len();
        let words = Tensor::from_vec(words, len, device)?;
        Ok(Self { words, places })
    }

    /// Creates a plan whose words are already in a tensor.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "graphs alone have them in a place of their own")
    )]
    pub(in crate::model) fn at(words: Tensor, places: Places) -> Self {
        Self { words, places }
    }
}

impl Places {
    /// Creates the words, and the offsets of their parts.
    pub(in crate::model) fn try_new(
        batch: &StepBatch,
        of: PlanFor<'_>,
    ) -> Result<(Vec<u32>, Self)> {
        let mut words = Words::default();
        let positions = words.add(&batch.positions)?;
        let slots = words.add(&batch.slots)?;
        let frequencies = of
            .frequencies
            .iter()
            .map(|frequencies| words.add(&bits(frequencies)))
            .collect::<Result<_>>()?;
        let is_many =
            |rows: usize| of.has_many && rows > 1 && rows * of.group > 2 * MOST_FEW_QUERIES;
        let few = words.tiles(batch, of.group, None, |rows| !is_many(rows))?;
        let many = words.tiles(batch, of.group, Some(MANY_QUERIES), is_many)?;
        // Tiles come last: their number does not move the other parts.
        let sequences = narrow(words.0.len())?;
        let first_block = words.0.len() + WORDS_PER_SEQUENCE * batch.sequences.len();
        let mut blocks = Vec::new();
        for sequence in &batch.sequences {
            words.add(&[
                narrow(first_block + blocks.len())?,
                narrow(sequence.rows.start)?,
                narrow(sequence.rows.len())?,
                narrow(sequence.context_len - sequence.rows.len())?,
            ])?;
            blocks.extend_from_slice(&sequence.blocks);
        }
        words.add(&blocks)?;
        let places = Self {
            positions,
            slots,
            frequencies,
            sequences,
            few,
            many,
        };
        Ok((words.0, places))
    }

    /// Treats the contexts of decode rows as this long, so that all steps have the same splits.
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "graphs alone serve several steps")
    )]
    pub(in crate::model) fn for_contexts_of(mut self, tokens: usize) -> Self {
        self.few.longest_context = self.few.longest_context.max(tokens);
        self
    }
}

fn bits(frequencies: &Frequencies) -> Vec<u32> {
    let amplitude = [frequencies.amplitude()];
    let all = frequencies.per_pair().iter().chain(&amplitude);
    all.map(|number| number.to_bits()).collect()
}

#[derive(Debug, Default)]
struct Words(Vec<u32>);

impl Words {
    /// Appends words; returns their offset.
    fn add(&mut self, words: &[u32]) -> Result<u32> {
        let start = narrow(self.0.len())?;
        self.0.extend_from_slice(words);
        Ok(start)
    }

    /// The tiles of the sequences whose number of rows satisfies `wanted`, with `queries` each, or with the best number for the
    /// kernel for few queries.
    fn tiles(
        &mut self,
        batch: &StepBatch,
        group: usize,
        queries: Option<usize>,
        wanted: impl Fn(usize) -> bool,
    ) -> Result<Tiles> {
        let chosen = || {
            let all = batch.sequences.iter().enumerate();
            all.filter(|(_, sequence)| wanted(sequence.rows.len()))
        };
        let counts = || chosen().map(|(_, sequence)| sequence.rows.len() * group);
        let Some(most) = counts().max() else {
            return Ok(Tiles::default());
        };
        let few_queries = || match counts().sum::<usize>() {
            ..=QUERIES_ALONE => 1,
            _ => most.next_power_of_two().min(MOST_FEW_QUERIES),
        };
        let queries = queries.unwrap_or_else(few_queries);
        let mut words = Vec::new();
        for (index, sequence) in chosen() {
            for first in (0..sequence.rows.len() * group).step_by(queries) {
                words.extend([narrow(index)?, narrow(first)?]);
            }
        }
        let longest = chosen().map(|(_, sequence)| sequence.context_len).max();
        Ok(Tiles {
            start: self.add(&words)?,
            count: words.len() / 2,
            queries,
            longest_context: longest.unwrap_or(0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::batch::SequenceRows;
    use crate::model::config::{Rope, RopeScaling};

    fn plan(batch: &StepBatch, group: usize, has_many: bool) -> (Plan, Vec<u32>) {
        let rope = Rope {
            theta: 10_000.0,
            window_theta: None,
            scaling: RopeScaling::None,
            rotary_dim: 4,
            amplitude: 1.0,
            is_paired: false,
            still_every: None,
        };
        let of = PlanFor {
            frequencies: &[Frequencies::full(&rope, 4), Frequencies::still(4)],
            group,
            has_many,
        };
        let plan = Plan::try_new(batch, of, &Device::Cpu).unwrap();
        let words = plan.words.to_vec1().unwrap();
        (plan, words)
    }

    /// A prefill chunk of 9 rows after 4 tokens, and a decode row after 6.
    fn batch() -> StepBatch {
        let sequence = |rows, context_len, blocks| SequenceRows {
            rows,
            context_len,
            blocks,
        };
        StepBatch {
            tokens: vec![0; 10],
            positions: (4..13).chain([6]).collect(),
            slots: (20..30).collect(),
            sequences: vec![
                sequence(0..9, 13, vec![5, 6, 7, 2]),
                sequence(9..10, 7, vec![1, 3]),
            ],
            logit_rows: vec![9],
            adapters: Vec::new(),
        }
    }

    #[test]
    fn decode_rows_and_chunks_are_in_tiles_of_their_own() {
        let (plan, words) = plan(&batch(), 2, true);
        let at = |start: u32, len: usize| &words[start as usize..start as usize + len];
        assert_eq!(at(plan.places.positions, 10), batch().positions);
        assert_eq!(at(plan.places.slots, 10), batch().slots);
        assert_eq!(f32::from_bits(at(plan.places.frequencies[0], 2)[1]), 0.01);
        assert_eq!(at(plan.places.frequencies[1], 2), [0, 0]);
        let sequences = at(plan.places.sequences, 8);
        assert_eq!(sequences[1..4], [0, 9, 4]);
        assert_eq!(sequences[5..8], [9, 1, 6]);
        assert_eq!(at(sequences[0], 4), [5, 6, 7, 2]);
        assert_eq!(at(sequences[4], 2), [1, 3]);
        assert_eq!((plan.places.few.count, plan.places.few.queries), (2, 1));
        assert_eq!(at(plan.places.few.start, 4), [1, 0, 1, 1]);
        assert_eq!(plan.places.few.longest_context, 7);
        assert_eq!((plan.places.many.count, plan.places.many.queries), (1, 64));
        assert_eq!(at(plan.places.many.start, 2), [0, 0]);
    }

    #[test]
    fn without_a_kernel_for_many_queries_chunks_are_cut_into_few() {
        let (plan, words) = plan(&batch(), 7, false);
        assert_eq!(plan.places.many, Tiles::default());
        assert_eq!((plan.places.few.count, plan.places.few.queries), (9, 8));
        let tiles = &words[plan.places.few.start as usize..][..18];
        assert_eq!(tiles[..6], [0, 0, 0, 8, 0, 16]);
        assert_eq!(tiles[14..], [0, 56, 1, 0]);
    }
}
