//! Attention by our own kernels: `kernels/attention.cuh` and `kernels/prefill.cuh`.
//!
//! One kernel prepares queries and stores keys and values in their slots. Then decode rows and prefill chunks, each with their
//! own kernel, read the KV blocks in place. Long contexts of few decode rows are split to use the whole GPU, and a last kernel
//! merges the splits.

use bytemuck::NoUninit;
use candle_core::{DType, Device, Result, Tensor};
use genset_kernels::AttentionHeads;

use super::Attention;
use super::plan::{MANY_QUERIES, Plan, Tiles};
use crate::model::kernels::{self, Launch, address, module_of, narrow, to_write};
use crate::model::norm::Norm;

/// Threads per block; as in `attention.cuh` and `prefill.cuh`.
const THREADS: u32 = 128;
/// Warps per block; each prepares one head.
const WARPS: usize = 4;
/// Dimensions that one lane reads at once.
const DIMENSIONS_PER_LANE: usize = 8;
/// Threads per block for a single query; `ATTEND_THREADS` in `attention.cuh`.
const THREADS_OF_ONE: u32 = 256;
/// Blocks that keep a large GPU busy; contexts are split to reach about this number.
const BLOCKS_WANTED: usize = 512;
/// Positions per group of lanes up to which one block is faster than several and a merge.
const POSITIONS_UNSPLIT: usize = 8;
const MOST_SPLITS: usize = 64;

/// Whether the kernels support this head size and type on this device. `tensors` computes the other cases.
pub(in crate::model) fn cover(device: &Device, dtype: DType, head_dim: usize) -> bool {
    let is_size = head_dim.is_multiple_of(DIMENSIONS_PER_LANE) && (8..=256).contains(&head_dim);
    is_size && kernels::are_for(device, dtype)
}

/// Whether there is a kernel for many queries at once: tensor cores multiply only 16-bit floats.
pub(in crate::model) fn has_many(dtype: DType) -> bool {
    dtype != DType::F32
}

/// A layer's keys and values, `[slots, num_kv_heads * head_dim]`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kv<'a> {
    pub(super) keys: &'a Tensor,
    pub(super) values: &'a Tensor,
    pub(super) block_size: usize,
}

/// As [`Attention::forward`].
pub(super) fn forward(
    attention: &Attention,
    qkv: &Tensor,
    plan: &Plan,
    kv: Kv<'_>,
) -> Result<Tensor> {
    let (rows, width) = qkv.dims2()?;
    if width != attention.heads.qkv_width() || kv.keys.dtype() != qkv.dtype() {
        candle_core::bail!("projections {qkv:?} for keys {:?}", kv.keys);
    }
    let shape = [rows, attention.heads.num_heads * attention.heads.head_dim];
    let queries = to_write(&shape, qkv.dtype(), qkv.device())?;
    make_heads(attention, qkv, plan, kv, &queries)?;
    let out = to_write(&shape, qkv.dtype(), qkv.device())?;
    let call = Call {
        attention,
        plan,
        kv,
        queries: &queries,
        out: &out,
    };
    call.few()?;
    call.many()?;
    Ok(out)
}

/// As in `attention.cuh`.
#[derive(Debug, Clone, Copy, NoUninit)]
#[repr(C)]
struct HeadArguments {
    queries: u64,
    keys: u64,
    values: u64,
    qkv: u64,
    query_norm: u64,
    key_norm: u64,
    plan: u64,
    positions: u32,
    slots: u32,
    frequencies: u32,
    num_heads: u32,
    num_kv_heads: u32,
    head_dim: u32,
    query_eps: f32,
    key_eps: f32,
    norms_are_last: u32,
    unused: u32,
}

const _: () = assert!(size_of::<HeadArguments>() == 96);

fn make_heads(
    attention: &Attention,
    qkv: &Tensor,
    plan: &Plan,
    kv: Kv<'_>,
    queries: &Tensor,
) -> Result<()> {
    let (query_norm, query_eps) = norm(attention.query_norm.as_ref(), qkv.dtype())?;
    let (key_norm, key_eps) = norm(attention.key_norm.as_ref(), qkv.dtype())?;
    let all_heads = attention.heads.num_heads + 2 * attention.heads.num_kv_heads;
    let launch = Launch {
        kernel: "heads",
        module: module_of(qkv)?,
        grid: [qkv.dim(0)?, all_heads.div_ceil(WARPS), 1],
        threads: THREADS,
        arguments: HeadArguments {
            queries: address(queries)?,
            keys: address(kv.keys)?,
            values: address(kv.values)?,
            qkv: address(qkv)?,
            query_norm,
            key_norm,
            plan: address(&plan.words)?,
            positions: plan.places.positions,
            slots: plan.places.slots,
            frequencies: plan.places.frequencies[attention.rotation],
            num_heads: narrow(attention.heads.num_heads)?,
            num_kv_heads: narrow(attention.heads.num_kv_heads)?,
            head_dim: narrow(attention.heads.head_dim)?,
            query_eps,
            key_eps,
            norms_are_last: u32::from(attention.norms_are_last),
            unused: 0,
        },
    };
    #[expect(unsafe_code, reason = "kernels write through addresses")]
    // SAFETY: the batch was checked, so slots are in the cache; `queries` is new and has one row per row of `qkv`.
    unsafe {
        launch.on(qkv.device())
    }
}

/// A norm's address, or zero without one, and its epsilon.
fn norm(norm: Option<&Norm>, dtype: DType) -> Result<(u64, f32)> {
    match norm {
        None => Ok((0, 0.0)),
        Some(norm) if norm.weight().dtype() == dtype => Ok((address(norm.weight())?, norm.eps())),
        Some(norm) => candle_core::bail!("a norm {:?} for heads in {dtype:?}", norm.weight()),
    }
}

/// As in `attention.cuh`.
#[derive(Debug, Clone, Copy, NoUninit)]
#[repr(C)]
struct AttendArguments {
    out: u64,
    partials: u64,
    queries: u64,
    keys: u64,
    values: u64,
    plan: u64,
    sinks: u64,
    sequences: u32,
    tiles: u32,
    num_heads: u32,
    num_kv_heads: u32,
    head_dim: u32,
    block_size: u32,
    window: u32,
    splits: u32,
    queries_per_tile: u32,
    softcap: f32,
    scale: f32,
    unused: u32,
}

const _: () = assert!(size_of::<AttendArguments>() == 104);

/// One layer's attention with prepared queries.
struct Call<'a> {
    attention: &'a Attention,
    plan: &'a Plan,
    kv: Kv<'a>,
    queries: &'a Tensor,
    out: &'a Tensor,
}

impl Call<'_> {
    /// Decode rows, and all rows if there is no kernel for many queries.
    fn few(&self) -> Result<()> {
        let tiles = self.plan.places.few;
        let AttentionHeads {
            num_kv_heads,
            head_dim,
            ..
        } = self.attention.heads;
        if tiles.count == 0 {
            return Ok(());
        }
        let lanes = head_dim.div_ceil(DIMENSIONS_PER_LANE).next_power_of_two();
        let lanes = lanes.clamp(4, 32);
        let kernel = format!("attend_q{}_l{lanes}", tiles.queries);
        let threads = match tiles.queries {
            1 => THREADS_OF_ONE,
            _ => THREADS,
        };
        let splits = self.splits(tiles, threads as usize / lanes);
        let grid = [tiles.count, num_kv_heads, splits];
        if splits == 1 {
            return self.launch(&kernel, grid, threads, self.arguments(tiles, 1, 0)?);
        }
        let partials = [tiles.count * num_kv_heads * tiles.queries * splits * (head_dim + 2)];
        let partials = to_write(&partials, DType::F32, self.out.device())?;
        let arguments = self.arguments(tiles, splits, address(&partials)?)?;
        self.launch(&kernel, grid, threads, arguments)?;
        let grid = [tiles.count, num_kv_heads, tiles.queries];
        self.launch("merge", grid, THREADS, arguments)
    }

    /// Prefill chunks.
    fn many(&self) -> Result<()> {
        let tiles = self.plan.places.many;
        if tiles.count == 0 {
            return Ok(());
        }
        debug_assert_eq!(tiles.queries, MANY_QUERIES, "the kernel's own number");
        let size = self
            .attention
            .heads
            .head_dim
            .next_power_of_two()
            .clamp(32, 256);
        let arguments = self.arguments(tiles, 1, 0)?;
        let grid = [tiles.count, self.attention.heads.num_kv_heads, 1];
        self.launch(&format!("prefill_d{size}"), grid, THREADS, arguments)
    }

    /// The number of parts to split contexts into, for blocks with this many groups of lanes.
    fn splits(&self, tiles: Tiles, groups: usize) -> usize {
        let window = self.attention.heads.window.unwrap_or(usize::MAX);
        let positions = tiles.longest_context.min(window);
        let unsplit = groups * POSITIONS_UNSPLIT;
        if positions <= unsplit {
            return 1;
        }
        let blocks = tiles.count * self.attention.heads.num_kv_heads;
        let wanted = BLOCKS_WANTED.div_ceil(blocks);
        // If a merge is needed anyway, finer splits are better.
        let most = positions.div_ceil(unsplit / 2);
        wanted.min(most).clamp(1, MOST_SPLITS)
    }

    fn arguments(&self, tiles: Tiles, splits: usize, partials: u64) -> Result<AttendArguments> {
        let attention = self.attention;
        let window = attention
            .heads
            .window
            .map_or(u32::MAX, |window| u32::try_from(window).unwrap_or(u32::MAX));
        Ok(AttendArguments {
            out: address(self.out)?,
            partials,
            queries: address(self.queries)?,
            keys: address(self.kv.keys)?,
            values: address(self.kv.values)?,
            plan: address(&self.plan.words)?,
            sinks: match &attention.sinks {
                Some(sinks) => address(&sinks.tensor)?,
                None => 0,
            },
            sequences: self.plan.places.sequences,
            tiles: tiles.start,
            num_heads: narrow(attention.heads.num_heads)?,
            num_kv_heads: narrow(attention.heads.num_kv_heads)?,
            head_dim: narrow(attention.heads.head_dim)?,
            block_size: narrow(self.kv.block_size)?,
            window,
            splits: narrow(splits)?,
            queries_per_tile: narrow(tiles.queries)?,
            softcap: attention.heads.softcap.unwrap_or(0.0),
            scale: attention.heads.scale,
            unused: 0,
        })
    }

    fn launch(
        &self,
        kernel: &str,
        grid: [usize; 3],
        threads: u32,
        arguments: AttendArguments,
    ) -> Result<()> {
        let launch = Launch {
            kernel,
            module: module_of(self.out)?,
            grid,
            threads,
            arguments,
        };
        #[expect(unsafe_code, reason = "kernels write through addresses")]
        // SAFETY: the batch was checked, so blocks are in the cache; `queries`, `out` and `partials` match the sizes of the grid
        // and the arguments.
        unsafe {
            launch.on(self.out.device())
        }
    }
}

#[cfg(test)]
#[cfg(any(feature = "cuda", kernels_are_emulated))]
mod tests;
