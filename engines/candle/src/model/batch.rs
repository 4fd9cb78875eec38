//! The input of one step: rows of many sequences packed without padding, with prefill chunks and decode rows mixed.
//!
//! The engine fills a [`StepBatch`] from the scheduler's step, and [`Model::forward`](super::Model::forward) reads it.

pub use genset_kernels::SequenceRows;

use super::lora::AdapterRows;

/// The tokens of one step, sequence after sequence.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepBatch {
    /// Token ids, one per row.
    pub tokens: Vec<u32>,
    /// The position of each row's token in its sequence, from 0.
    pub positions: Vec<u32>,
    /// The slot of each row's key and value: `block * block_size + offset`.
    pub slots: Vec<u32>,
    /// The sequences in the order of their rows; together they cover all rows.
    pub sequences: Vec<SequenceRows>,
    /// The rows whose logits are wanted, in the order of the result.
    pub logit_rows: Vec<u32>,
    /// The rows of adapters, each adapter once; other rows use the base model.
    pub adapters: Vec<AdapterRows>,
}

/// Consecutive tokens of one sequence, to be added to a [`StepBatch`].
#[derive(Debug)]
pub struct Piece<'a> {
    /// The tokens.
    pub tokens: &'a [u32],
    /// The position of the first of them in the sequence.
    pub start: usize,
    /// The KV blocks of the sequence up to its last token, in order.
    pub blocks: Vec<u32>,
    /// The number of last rows whose logits are wanted.
    pub wanted: usize,
}

/// Why a [`StepBatch`] is invalid: an engine's mistake, never a request's.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum BatchError {
    /// The per-row lists differ in length.
    #[error("{tokens} tokens, {positions} positions and {slots} slots in one step")]
    RowCounts {
        /// Entries of `tokens`.
        tokens: usize,
        /// Entries of `positions`.
        positions: usize,
        /// Entries of `slots`.
        slots: usize,
    },
    /// A sequence's rows do not follow those of the previous one, or the last row is not the end of the last sequence.
    #[error("sequence {sequence} does not continue the rows before it, or rows are left over")]
    Rows {
        /// Index in `sequences`.
        sequence: usize,
    },
    /// A sequence's positions do not end at its context, or its blocks do not hold it.
    #[error(
        "sequence {sequence} has {rows} rows and {blocks} blocks for a context of {context_len} tokens"
    )]
    Context {
        /// Index in `sequences`.
        sequence: usize,
        /// Its rows.
        rows: usize,
        /// Its blocks.
        blocks: usize,
        /// Its tokens.
        context_len: usize,
    },
    /// A number is outside the range of the model or its KV cache.
    #[error("{what} {value} is out of range: {limit} is the number of them")]
    OutOfRange {
        /// The kind of number.
        what: &'static str,
        /// The number.
        value: usize,
        /// The exclusive upper bound.
        limit: usize,
    },
}

/// The bounds of a batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchLimits {
    pub(crate) vocab_size: usize,
    pub(crate) num_blocks: usize,
    pub(crate) block_size: usize,
}

impl StepBatch {
    /// A batch without logits whose sequences are computed as a whole in this step, each in its own KV blocks, numbered from 0.
    pub(crate) fn of_whole<'a>(
        sequences: impl IntoIterator<Item = &'a [u32]>,
        block_size: usize,
    ) -> Self {
        let mut batch = Self::default();
        let mut first_block = 0u32;
        for tokens in sequences {
            let blocks = (first_block..).take(tokens.len().div_ceil(block_size));
            let blocks: Vec<u32> = blocks.collect();
            first_block = blocks.last().map_or(first_block, |last| last + 1);
            let piece = Piece {
                tokens,
                start: 0,
                blocks,
                wanted: 0,
            };
            batch.push(block_size, piece);
        }
        batch
    }

    /// Adds a piece of another sequence.
    ///
    /// # Panics
    /// If the piece has too few blocks for its tokens, or `block_size` is 0.
    pub fn push(&mut self, block_size: usize, piece: Piece<'_>) {
        let Piece { start, blocks, .. } = piece;
        let first = self.tokens.len();
        let places = start..start + piece.tokens.len();
        self.tokens.extend_from_slice(piece.tokens);
        self.positions.extend(places.clone().map(narrow));
        let slot = |place: usize| {
            blocks[place / block_size] * narrow(block_size) + narrow(place % block_size)
        };
        self.slots.extend(places.clone().map(slot));
        let rows = first..self.tokens.len();
        let wanted = rows.end - piece.wanted.min(rows.len())..rows.end;
        self.logit_rows.extend(wanted.map(narrow));
        self.sequences.push(SequenceRows {
            rows,
            context_len: places.end,
            blocks,
        });
    }

    /// Checks everything that the kernels rely on: those on GPUs check nothing, and those of the CPU panic.
    pub(crate) fn check(&self, limits: BatchLimits) -> Result<(), BatchError> {
        let rows = self.tokens.len();
        if self.positions.len() != rows || self.slots.len() != rows {
            return Err(BatchError::RowCounts {
                tokens: rows,
                positions: self.positions.len(),
                slots: self.slots.len(),
            });
        }
        in_range("token", &self.tokens, limits.vocab_size)?;
        in_range("slot", &self.slots, limits.num_blocks * limits.block_size)?;
        in_range("logit row", &self.logit_rows, rows)?;
        for adapter in &self.adapters {
            in_range("row of an adapter", &adapter.rows, rows)?;
        }
        let mut next_row = 0;
        for (index, sequence) in self.sequences.iter().enumerate() {
            if sequence.rows.start != next_row
                || sequence.rows.end <= next_row
                || sequence.rows.end > rows
            {
                return Err(BatchError::Rows { sequence: index });
            }
            next_row = sequence.rows.end;
            self.check_context(index, sequence, limits)?;
        }
        if next_row != rows {
            return Err(BatchError::Rows {
                sequence: self.sequences.len(),
            });
        }
        Ok(())
    }

    fn check_context(
        &self,
        index: usize,
        sequence: &SequenceRows,
        limits: BatchLimits,
    ) -> Result<(), BatchError> {
        let rows = sequence.rows.len();
        let in_order = sequence.context_len.checked_sub(rows).is_some_and(|first| {
            self.positions[sequence.rows.clone()]
                .iter()
                .zip(first..)
                .all(|(&p, want)| p as usize == want)
        });
        if !in_order || sequence.blocks.len() * limits.block_size < sequence.context_len {
            return Err(BatchError::Context {
                sequence: index,
                rows,
                blocks: sequence.blocks.len(),
                context_len: sequence.context_len,
            });
        }
        in_range("block", &sequence.blocks, limits.num_blocks)
    }
}

/// The number of KV slots bounds places and sizes, and the engine keeps it below 2^32.
fn narrow(place: usize) -> u32 {
    u32::try_from(place).unwrap_or(u32::MAX)
}

fn in_range(what: &'static str, values: &[u32], limit: usize) -> Result<(), BatchError> {
    match values.iter().find(|&&value| value as usize >= limit) {
        Some(&value) => Err(BatchError::OutOfRange {
            what,
            value: value as usize,
            limit,
        }),
        None => Ok(()),
    }
}
