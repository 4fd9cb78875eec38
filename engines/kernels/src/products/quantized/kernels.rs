//! The products of tiles with 8-bit rows: when weights are unpacked, and for how many rows.

#![expect(unsafe_code, reason = "functions that are compiled for a processor")]

use super::blocks::{BlockWeights, Group};
use super::formats::Format;
use super::heads::Head;
use super::instructions::Instructions;
#[cfg(target_arch = "x86_64")]
use super::instructions::{Avx2, Avx512Vnni, DotProduct, Pairs};
#[cfg(target_arch = "aarch64")]
use super::instructions::{DotProduct, MatrixProduct, Neon, Pairs};
use super::int8::{BLOCK, Int8Group, Int8Rows, Residual};
use super::tiles::Tile;
use crate::products::activations::{GROUP_ROWS, groups};
use crate::products::packed::Output;
use crate::simd::{LANES, QuantizedKernels, QuantizedLevel};

/// The products of `tiles` with each of the `rows` rows of `x`; `per_row` adjacent tiles are sixteen rows of a matrix.
pub(super) fn multiply<F: Format>(
    kernels: QuantizedKernels,
    tiles: &[Tile<F>],
    per_row: usize,
    x: &Int8Rows,
    rows: usize,
    output: &Output<'_>,
) {
    let mut whole = 0;
    if rows >= MANY_ROWS {
        whole = rows / GROUP_ROWS;
        run(
            kernels,
            WholeGroups {
                tiles,
                per_row,
                x,
                groups: whole,
                output,
            },
        );
    }
    for (index, tiles) in tiles.chunks_exact(per_row).enumerate() {
        for (first, rows) in groups(rows).skip(whole) {
            let group = x.group(first, rows);
            macro_rules! multiply {
                ($rows:literal) => {{
                    let sums = products::<F, $rows>(kernels, tiles, &group);
                    output.store_rows(index, first, &sums);
                }};
            }
            match rows {
                1 => multiply!(1),
                2 => multiply!(2),
                3 => multiply!(3),
                4 => multiply!(4),
                5 => multiply!(5),
                6 => multiply!(6),
                7 => multiply!(7),
                _ => multiply!(8),
            }
        }
    }
}

/// Work that is compiled for each kind of processor.
trait Work {
    type Done;

    /// Runs it.
    ///
    /// # Safety
    /// The processor has the instructions.
    unsafe fn by<I: Instructions>(self) -> Self::Done;
}

/// Runs `work` with the instructions of this processor.
fn run<W: Work>(kernels: QuantizedKernels, work: W) -> W::Done {
    // SAFETY: a `QuantizedKernels` exists only for instructions that this processor has.
    unsafe {
        match kernels.level() {
            #[cfg(target_arch = "x86_64")]
            QuantizedLevel::Avx512Vnni => by_avx512(work),
            #[cfg(target_arch = "x86_64")]
            QuantizedLevel::AvxVnni => {
                #[cfg(debug_assertions)]
                if !is_x86_feature_detected!("avxvnni") {
                    return by_vnni_of_avx512(work);
                }
                by_avx_vnni(work)
            }
            #[cfg(target_arch = "x86_64")]
            QuantizedLevel::Avx2 => by_avx2(work),
            #[cfg(target_arch = "aarch64")]
            QuantizedLevel::NeonMatrix => work.by::<Neon<MatrixProduct>>(),
            #[cfg(target_arch = "aarch64")]
            QuantizedLevel::NeonDot => work.by::<Neon<DotProduct>>(),
            #[cfg(target_arch = "aarch64")]
            QuantizedLevel::Neon => work.by::<Neon<Pairs>>(),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn by_avx512<W: Work>(work: W) -> W::Done {
    // SAFETY: the caller's promise.
    unsafe { work.by::<Avx512Vnni>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn by_avx2<W: Work>(work: W) -> W::Done {
    // SAFETY: the caller's promise.
    unsafe { work.by::<Avx2<Pairs>>() }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
unsafe fn by_avx_vnni<W: Work>(work: W) -> W::Done {
    // SAFETY: the caller's promise.
    unsafe { work.by::<Avx2<DotProduct<false>>>() }
}

/// As `by_avx_vnni`, to test it on processors that have the instruction only in AVX-512.
#[cfg(debug_assertions)]
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512vl,avx512vnni")]
unsafe fn by_vnni_of_avx512<W: Work>(work: W) -> W::Done {
    // SAFETY: the caller's promise.
    unsafe { work.by::<Avx2<DotProduct<true>>>() }
}

/// The products with one group: weights are unpacked as they are read.
fn products<F: Format, const ROWS: usize>(
    kernels: QuantizedKernels,
    tiles: &[Tile<F>],
    group: &Int8Group<'_>,
) -> [[f32; LANES]; ROWS] {
    let residuals = group.residuals;
    let group = Group::<ROWS>::new(group, tiles.len() * F::COLUMNS);
    let mut sums = run(kernels, OneGroup { tiles, group });
    if !residuals.is_empty() {
        let sums = &mut sums;
        run(
            kernels,
            Residuals {
                tiles,
                residuals,
                sums,
            },
        );
    }
    sums
}

/// The products without residuals.
struct OneGroup<'a, F: Format, const ROWS: usize> {
    tiles: &'a [Tile<F>],
    group: Group<ROWS>,
}

impl<F: Format, const ROWS: usize> Work for OneGroup<'_, F, ROWS> {
    type Done = [[f32; LANES]; ROWS];

    #[inline(always)]
    unsafe fn by<I: Instructions>(self) -> [[f32; LANES]; ROWS] {
        let mut sums = [[0.0; LANES]; ROWS];
        for lane in (0..LANES).step_by(I::ROWS) {
            // SAFETY: the caller's promise; the group is as wide as the tiles.
            unsafe {
                let totals = totals::<I, F, ROWS>(self.tiles, self.group, lane);
                store::<I, ROWS>(&mut sums, lane, totals);
            }
        }
        sums
    }
}

/// The products of residuals, added to the sums of a group.
struct Residuals<'a, F: Format> {
    tiles: &'a [Tile<F>],
    residuals: &'a [Residual],
    sums: &'a mut [[f32; LANES]],
}

impl<F: Format> Work for Residuals<'_, F> {
    type Done = ();

    #[inline(always)]
    unsafe fn by<I: Instructions>(self) {
        for lane in (0..LANES).step_by(I::ROWS) {
            // SAFETY: the caller's promise.
            unsafe { add_residuals::<I, F>(self.tiles, self.residuals, lane, self.sums) };
        }
    }
}

/// The number of rows from which weights are unpacked once for all rows.
const MANY_ROWS: usize = 4 * GROUP_ROWS;

/// The products with many whole groups: weights are unpacked once and stay cached for all of them.
struct WholeGroups<'a, F: Format> {
    tiles: &'a [Tile<F>],
    per_row: usize,
    x: &'a Int8Rows,
    groups: usize,
    output: &'a Output<'a>,
}

impl<F: Format> Work for WholeGroups<'_, F> {
    type Done = ();

    #[inline(always)]
    unsafe fn by<I: Instructions>(self) {
        /// Rows of tiles that are unpacked together, so that each row of the output is written in longer pieces.
        const STRIP: usize = 4;
        /// The approximate bytes of unpacked weights that stay in the L2 cache beside a group.
        const NEAR: usize = 256 * 1024;
        let blocks = self.per_row * (F::COLUMNS / BLOCK);
        let parts = LANES / I::ROWS;
        let strip = NEAR / (parts * blocks * size_of::<BlockWeights<I>>());
        let strip = strip.clamp(1, STRIP);
        let mut weights = Vec::with_capacity(strip * parts * blocks);
        for (index, tiles) in self.tiles.chunks(strip * self.per_row).enumerate() {
            weights.clear();
            for tiles in tiles.chunks_exact(self.per_row) {
                for lane in (0..LANES).step_by(I::ROWS) {
                    // SAFETY: the caller's promise, and the rows match a vector.
                    unsafe { unpack::<I, F>(tiles, lane, &mut weights) };
                }
            }
            for (first, _) in groups(self.groups * GROUP_ROWS) {
                let rows = self.x.group(first, GROUP_ROWS);
                let group = Group::<GROUP_ROWS>::new(&rows, blocks * BLOCK);
                for (tile, weights) in weights.chunks_exact(parts * blocks).enumerate() {
                    let mut sums = [[0.0; LANES]; GROUP_ROWS];
                    let parts = weights.chunks_exact(blocks);
                    for (lane, weights) in (0..LANES).step_by(I::ROWS).zip(parts) {
                        // SAFETY: the caller's promise; the group is as wide as the tiles.
                        unsafe { put_products::<I, F>(weights, group, &rows, lane, &mut sums) };
                    }
                    self.output.store_rows(index * strip + tile, first, &sums);
                }
            }
        }
    }
}

/// Stores the products of a group with unpacked weights, for the lanes from `lane` on.
#[inline(always)]
unsafe fn put_products<I: Instructions, F: Format>(
    weights: &[BlockWeights<I>],
    group: Group<GROUP_ROWS>,
    rows: &Int8Group<'_>,
    lane: usize,
    sums: &mut [[f32; LANES]; GROUP_ROWS],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut totals = [I::splat(0.0); GROUP_ROWS];
        for (block, weights) in weights.iter().enumerate() {
            weights.multiply::<F, GROUP_ROWS>(group, block, &mut totals);
        }
        store::<I, GROUP_ROWS>(sums, lane, totals);
        for residuals in rows.residuals.chunk_by(|a, b| a.place == b.place) {
            let weights = weights[residuals[0].place];
            for residual in residuals {
                weights.add_residual::<F>(residual, lane, sums);
            }
        }
    }
}

/// The products of the lanes from `lane` on.
#[inline(always)]
unsafe fn totals<I: Instructions, F: Format, const ROWS: usize>(
    tiles: &[Tile<F>],
    group: Group<ROWS>,
    lane: usize,
) -> [I::Floats; ROWS] {
    // SAFETY: the caller's promise, here and below.
    unsafe {
        let mut totals = [I::splat(0.0); ROWS];
        for (index, tile) in tiles.iter().enumerate() {
            let head = tile.head.unpack();
            for unit in 0..F::COLUMNS / BLOCK {
                let block = index * (F::COLUMNS / BLOCK) + unit;
                let weights = BlockWeights::<I>::new(tile, &head, unit, lane);
                weights.multiply::<F, ROWS>(group, block, &mut totals);
            }
        }
        totals
    }
}

/// Appends the weights of all columns, for the lanes from `lane` on.
#[inline(always)]
unsafe fn unpack<I: Instructions, F: Format>(
    tiles: &[Tile<F>],
    lane: usize,
    weights: &mut Vec<BlockWeights<I>>,
) {
    for tile in tiles {
        let head = tile.head.unpack();
        for unit in 0..F::COLUMNS / BLOCK {
            // SAFETY: the caller's promise.
            weights.push(unsafe { BlockWeights::new(tile, &head, unit, lane) });
        }
    }
}

/// Adds the products with residuals one by one: few rows have a residual in the same block.
#[inline(always)]
unsafe fn add_residuals<I: Instructions, F: Format>(
    tiles: &[Tile<F>],
    residuals: &[Residual],
    lane: usize,
    sums: &mut [[f32; LANES]],
) {
    const fn tile_of<F: Format>(residual: &Residual) -> usize {
        residual.place / (F::COLUMNS / BLOCK)
    }
    for residuals in residuals.chunk_by(|a, b| tile_of::<F>(a) == tile_of::<F>(b)) {
        let tile = &tiles[tile_of::<F>(&residuals[0])];
        let head = tile.head.unpack();
        for residuals in residuals.chunk_by(|a, b| a.place == b.place) {
            let unit = residuals[0].place % (F::COLUMNS / BLOCK);
            // SAFETY: the caller's promise.
            unsafe {
                let weights = BlockWeights::<I>::new(tile, &head, unit, lane);
                for residual in residuals {
                    weights.add_residual::<F>(residual, lane, sums);
                }
            }
        }
    }
}

/// Stores the totals of the lanes from `lane` on.
#[inline(always)]
unsafe fn store<I: Instructions, const ROWS: usize>(
    sums: &mut [[f32; LANES]; ROWS],
    lane: usize,
    totals: [I::Floats; ROWS],
) {
    for (sums, totals) in sums.iter_mut().zip(totals) {
        // SAFETY: the caller's promise; a part of a row of `sums` holds a vector.
        unsafe { I::store(sums[lane..].as_mut_ptr(), totals) };
    }
}
