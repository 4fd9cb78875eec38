//! Quantized blocks in tiles of sixteen rows, and their products with 8-bit rows by the processor's 8-bit dot product.
//!
//! A tile stores sixteen rows of the same columns, four numbers of each row in turn, so that one instruction adds four products
//! to each of a vector's sums. A row's sums are added in the order of the columns, independent of the other rows.
//!
//! `formats` locates values and scales in the blocks of each type, `tiles` and `heads` define their memory layout, and
//! `instructions` abstracts processors. The products of `blocks` and the loops of `kernels` are shared by all.

mod blocks;
mod formats;
mod heads;
mod instructions;
mod int8;
mod kernels;
mod tiles;

use std::io;
use std::ops::Range;

use bytemuck::Zeroable;
use rayon::prelude::*;

use self::formats::{
    Format, Iq4Nl, Iq4Xs, Mxfp4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0,
};
pub(super) use self::int8::Int8Rows;
use self::tiles::Tile;
use super::packed::Output;
use crate::memory::{Stored, WeightMemory};
use crate::simd::{LANES, QuantizedKernels};

/// The type of a matrix's quantized blocks, as GGUF has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockType {
    /// Two bits, with scales and minima of four bits, in blocks of 256.
    Q2K,
    /// Three bits, with scales of six bits, in blocks of 256.
    Q3K,
    /// Four bits with a scale, in blocks of 32.
    Q4_0,
    /// Four bits with a scale and a minimum, in blocks of 32.
    Q4_1,
    /// Four bits, with scales and minima of six bits, in blocks of 256.
    Q4K,
    /// Five bits with a scale, in blocks of 32.
    Q5_0,
    /// Five bits with a scale and a minimum, in blocks of 32.
    Q5_1,
    /// Five bits, with scales and minima of six bits, in blocks of 256.
    Q5K,
    /// Six bits, with scales of eight bits, in blocks of 256.
    Q6K,
    /// Eight bits with a scale, in blocks of 32.
    Q8_0,
    /// Four-bit indices into a table of sixteen numbers, in blocks of 32.
    Iq4Nl,
    /// The same in blocks of 256, with six-bit scales.
    Iq4Xs,
    /// Four-bit floats, in blocks of 32 whose scale is a power of two.
    Mxfp4,
}

/// A quantized matrix, tile after tile.
pub(super) struct QuantizedTiles {
    kernels: QuantizedKernels,
    tiles: Kind,
    /// Tiles of sixteen rows.
    per_row: usize,
}

/// Defines the tile types, and [`with_tiles!`], which runs its body with the tiles of any type.
macro_rules! kinds {
    ($($name:ident),*) => {
        enum Kind {
            $($name(Stored<Tile<$name>>),)*
        }

        $(const _: () = assert!(Tile::<$name>::IS_SOUND);)*

        macro_rules! with_tiles {
            ($kind:expr, $tiles:ident => $body:expr) => {
                match $kind {
                    $(Kind::$name($tiles) => $body,)*
                }
            };
        }

        fn pack_kind(
            block_type: BlockType,
            blocks: &[u8],
            shape: (usize, usize),
            memory: &mut WeightMemory,
        ) -> io::Result<Kind> {
            Ok(match block_type {
                $(BlockType::$name => Kind::$name(pack(blocks, shape, memory)?),)*
            })
        }

        impl Kind {
            fn block_type(&self) -> BlockType {
                match self {
                    $(Self::$name(_) => BlockType::$name,)*
                }
            }
        }

        impl BlockType {
            /// Writes the numbers of blocks of this type, as many as `out` holds whole blocks.
            pub fn numbers(self, blocks: &[u8], out: &mut [f32]) {
                match self {
                    $(Self::$name => unpack::<$name>(blocks, out),)*
                }
            }
        }
    };
}
kinds!(
    Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, Iq4Nl, Iq4Xs, Mxfp4
);

impl QuantizedTiles {
    /// Packs the blocks of a matrix, `[out_features, in_features]`; `None` if there are none.
    ///
    /// # Errors
    /// The system is out of memory.
    ///
    /// # Panics
    /// A row is not whole blocks, or there are more or fewer than the shape says.
    pub(super) fn pack(
        kernels: QuantizedKernels,
        block_type: BlockType,
        blocks: &[u8],
        shape: (usize, usize),
        memory: &mut WeightMemory,
    ) -> io::Result<Option<Self>> {
        if shape.0 == 0 || shape.1 == 0 {
            return Ok(None);
        }
        let tiles = pack_kind(block_type, blocks, shape, memory)?;
        let per_row = with_tiles!(&tiles, tiles => tiles.len()) / shape.0.div_ceil(LANES);
        Ok(Some(Self {
            kernels,
            tiles,
            per_row,
        }))
    }

    /// The type of its blocks.
    pub(super) fn block_type(&self) -> BlockType {
        self.tiles.block_type()
    }

    /// Bytes of all tiles.
    pub(super) fn bytes(&self) -> usize {
        with_tiles!(&self.tiles, tiles => size_of_val(&tiles[..]))
    }

    /// One row in f32.
    pub(super) fn row(&self, row: usize, out: &mut [f32]) {
        let first = row / LANES * self.per_row;
        with_tiles!(&self.tiles, tiles => unpack_row(&tiles[first..first + self.per_row], row % LANES, out));
    }

    /// Computes the columns of some tiles of a product, for all rows of `x`.
    pub(super) fn multiply(
        &self,
        tiles: Range<usize>,
        x: &Int8Rows,
        rows: usize,
        output: &Output<'_>,
    ) {
        let range = tiles.start * self.per_row..tiles.end * self.per_row;
        with_tiles!(&self.tiles, tiles => {
            kernels::multiply(self.kernels, &tiles[range], self.per_row, x, rows, output);
        });
    }
}

fn pack<F: Format>(
    blocks: &[u8],
    (out_features, in_features): (usize, usize),
    memory: &mut WeightMemory,
) -> io::Result<Stored<Tile<F>>> {
    let per_row = in_features.div_ceil(F::COLUMNS);
    let row_bytes = in_features / F::BLOCK_COLUMNS * F::BLOCK_BYTES;
    let tile_bytes = F::COLUMNS / F::BLOCK_COLUMNS * F::BLOCK_BYTES;
    assert!(
        in_features.is_multiple_of(F::BLOCK_COLUMNS)
            && row_bytes.checked_mul(out_features) == Some(blocks.len()),
        "{} bytes of blocks for {out_features} rows of {in_features}",
        blocks.len()
    );
    memory.store(
        out_features.div_ceil(LANES) * per_row,
        |tiles: &mut [Tile<F>]| {
            let rows = tiles
                .par_chunks_mut(per_row)
                .zip(blocks.par_chunks(LANES * row_bytes));
            rows.for_each(|(tiles, rows)| {
                for (lane, blocks) in rows.chunks_exact(row_bytes).enumerate() {
                    for (tile, blocks) in tiles.iter_mut().zip(blocks.chunks(tile_bytes)) {
                        for (index, block) in blocks.chunks_exact(F::BLOCK_BYTES).enumerate() {
                            tile.set(lane, index, block);
                        }
                    }
                }
            });
        },
    )
}

/// Unpacks the numbers of blocks, each with its own tile.
fn unpack<F: Format>(blocks: &[u8], out: &mut [f32]) {
    let blocks = blocks.chunks_exact(F::BLOCK_BYTES);
    for (block, out) in blocks.zip(out.chunks_exact_mut(F::BLOCK_COLUMNS)) {
        let mut tile = Tile::<F>::zeroed();
        tile.set(0, 0, block);
        unpack_row(&[tile], 0, out);
    }
}

fn unpack_row<F: Format>(tiles: &[Tile<F>], lane: usize, out: &mut [f32]) {
    for (tile, out) in tiles.iter().zip(out.chunks_mut(F::COLUMNS)) {
        for (column, out) in out.iter_mut().enumerate() {
            *out = tile.get(lane, column);
        }
    }
}
