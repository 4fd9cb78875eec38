//! Quantized blocks, sixteen rows to a tile, and their products with 8-bit rows by AVX-512's 8-bit dot product.
//!
//! A tile keeps what sixteen rows have in the same columns, four numbers of each row in turn, so that one instruction
//! adds four products to each of sixteen sums. A row's sums are added up in the order of the columns whatever the other
//! rows are.

mod int8;
mod kernels;
mod tiles;

use std::io;

use candle_core::quantized::GgmlDType;

pub(super) use self::int8::Int8Rows;
use self::tiles::{Tile, TileQ4_0, TileQ4K, TileQ5K, TileQ6K, TileQ8_0};
use super::activations::groups;
use super::packed::Output;
use crate::model::memory::{Stored, WeightMemory};
use crate::model::simd::{LANES, has_quantized_kernels};

/// A quantized matrix, tile after tile.
pub(super) struct QuantizedTiles {
    tiles: Kind,
    /// Tiles that cover sixteen rows.
    per_row: usize,
}

enum Kind {
    Q4_0(Stored<TileQ4_0>),
    Q8_0(Stored<TileQ8_0>),
    Q4K(Stored<TileQ4K>),
    Q5K(Stored<TileQ5K>),
    Q6K(Stored<TileQ6K>),
}

/// Runs `$body` with the tiles, whatever their type.
macro_rules! with_tiles {
    ($kind:expr, $tiles:ident => $body:expr) => {
        match $kind {
            Kind::Q4_0($tiles) => $body,
            Kind::Q8_0($tiles) => $body,
            Kind::Q4K($tiles) => $body,
            Kind::Q5K($tiles) => $body,
            Kind::Q6K($tiles) => $body,
        }
    };
}

impl QuantizedTiles {
    /// From the blocks of a matrix; `None` if there is no kernel for them on this processor.
    ///
    /// # Errors
    /// The system gives no memory.
    pub(super) fn pack(
        dtype: GgmlDType,
        blocks: &[u8],
        out_features: usize,
        in_features: usize,
        memory: &mut WeightMemory,
    ) -> io::Result<Option<Self>> {
        if !has_quantized_kernels() {
            return Ok(None);
        }
        let tiles = match dtype {
            GgmlDType::Q4_0 => Kind::Q4_0(pack(blocks, out_features, in_features, memory)?),
            GgmlDType::Q8_0 => Kind::Q8_0(pack(blocks, out_features, in_features, memory)?),
            GgmlDType::Q4K => Kind::Q4K(pack(blocks, out_features, in_features, memory)?),
            GgmlDType::Q5K => Kind::Q5K(pack(blocks, out_features, in_features, memory)?),
            GgmlDType::Q6K => Kind::Q6K(pack(blocks, out_features, in_features, memory)?),
            GgmlDType::F32
            | GgmlDType::F16
            | GgmlDType::BF16
            | GgmlDType::Q4_1
            | GgmlDType::Q5_0
            | GgmlDType::Q5_1
            | GgmlDType::Q8_1
            | GgmlDType::Q2K
            | GgmlDType::Q3K
            | GgmlDType::Q8K => return Ok(None),
        };
        let per_row =
            with_tiles!(&tiles, tiles => tiles.len()) / out_features.div_ceil(LANES).max(1);
        Ok(Some(Self { tiles, per_row }))
    }

    /// One row in f32.
    pub(super) fn row(&self, row: usize, out: &mut [f32]) {
        let first = row / LANES * self.per_row;
        with_tiles!(&self.tiles, tiles => unpack_row(&tiles[first..first + self.per_row], row % LANES, out));
    }

    /// One tile's columns of a product, for all rows of `x`.
    pub(super) fn multiply(&self, tile: usize, x: &Int8Rows, rows: usize, output: &Output<'_>) {
        let first = tile * self.per_row;
        let range = first..first + self.per_row;
        for (first_row, group_rows) in groups(rows) {
            let group = x.group(first_row, group_rows);
            let rows = (first_row, group_rows);
            with_tiles!(&self.tiles, tiles => kernels::multiply(&tiles[range.clone()], &group, rows, output));
        }
    }
}

fn pack<T: Tile>(
    blocks: &[u8],
    out_features: usize,
    in_features: usize,
    memory: &mut WeightMemory,
) -> io::Result<Stored<T>> {
    let per_row = in_features.div_ceil(T::COLUMNS);
    let row_bytes = in_features / T::BLOCK_COLUMNS * T::BLOCK_BYTES;
    let tile_bytes = T::COLUMNS / T::BLOCK_COLUMNS * T::BLOCK_BYTES;
    memory.store(
        out_features.div_ceil(LANES) * per_row,
        |tiles: &mut [T]| {
            for (row, blocks) in blocks.chunks_exact(row_bytes).enumerate() {
                let tiles = &mut tiles[row / LANES * per_row..][..per_row];
                for (tile, blocks) in tiles.iter_mut().zip(blocks.chunks(tile_bytes)) {
                    for (index, block) in blocks.chunks_exact(T::BLOCK_BYTES).enumerate() {
                        tile.set(row % LANES, index, block);
                    }
                }
            }
        },
    )
}

fn unpack_row<T: Tile>(tiles: &[T], lane: usize, out: &mut [f32]) {
    for (tile, out) in tiles.iter().zip(out.chunks_mut(T::COLUMNS)) {
        for (column, out) in out.iter_mut().enumerate() {
            *out = tile.get(lane, column);
        }
    }
}
