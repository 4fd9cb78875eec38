//! Prepares a row's projections for attention: normalizes and rotates heads, and stores keys and values in their slots.

use std::mem::MaybeUninit;

use super::AttentionHeads;
use crate::kv::{AnyLayer, HostLayer, KvNumber, TypedLayer};
use crate::norm::row_scale;
use crate::parallel::{SharedMut, for_each_range_if_large, written};
use crate::rope::{Turns, turn};
use crate::simd::by_simd;

/// The projections of a step's rows, as attention prepares them.
#[derive(Debug, Clone, Copy)]
pub struct Projections<'a> {
    /// Queries, keys and values, `[rows, (num_heads + 2 * num_kv_heads) * head_dim]`.
    pub qkv: &'a [f32],
    /// The rotation of each row.
    pub turns: &'a Turns,
    /// Normalizes each head of the queries.
    pub query_norm: Option<HeadNorm<'a>>,
    /// Normalizes each head of the keys.
    pub key_norm: Option<HeadNorm<'a>>,
}

/// The root-mean-square normalization of heads.
#[derive(Debug, Clone, Copy)]
pub struct HeadNorm<'a> {
    /// `[head_dim]`.
    pub weight: &'a [f32],
    /// Added to the mean square before the square root.
    pub eps: f32,
    /// Whether heads are normalized after they rotate, not before.
    pub is_last: bool,
}

impl HeadNorm<'_> {
    #[inline(always)]
    fn apply<const FMA: bool>(self, head: &mut [f32]) {
        let scale = row_scale::<FMA>(head, self.eps);
        for (value, weight) in head.iter_mut().zip(self.weight) {
            *value = *value * scale * weight;
        }
    }
}

/// The queries of all rows, normalized, rotated and scaled, `[rows, num_heads * head_dim]`.
///
/// # Panics
/// There are fewer rotations than rows.
#[must_use]
pub fn prepared_queries(heads: &AttentionHeads, projections: &Projections<'_>) -> Vec<f32> {
    let Projections {
        qkv,
        turns,
        query_norm: norm,
        ..
    } = *projections;
    let width = heads.num_heads * heads.head_dim;
    let rows = qkv.len() / heads.qkv_width();
    let fill = |out: &SharedMut<'_, MaybeUninit<f32>>| {
        for_each_range_if_large(rows, 4 * rows * width, |range| {
            for row in range {
                let qkv = &qkv[row * heads.qkv_width()..][..width];
                #[expect(unsafe_code, reason = "threads write disjoint parts of one buffer")]
                // SAFETY: each row is in only one range.
                let out = unsafe { out.part(row * width..(row + 1) * width) };
                let out = out.write_copy_of_slice(qkv);
                prepare_heads(out, heads.head_dim, norm, turns, row, heads.scale);
            }
        });
    };
    #[expect(unsafe_code, reason = "each row is written once")]
    // SAFETY: every row is in a range, and is written.
    unsafe {
        written(rows * width, fill)
    }
}

/// Stores the keys, normalized and rotated, and the values of all rows in `slots`, one per row: `block * block_size + offset`.
///
/// # Panics
/// A slot is not in the cache, the cache has other heads, or there are fewer rotations than rows.
pub fn store_keys_and_values(
    heads: &AttentionHeads,
    projections: &Projections<'_>,
    kv: &mut HostLayer<'_>,
    slots: &[u32],
) {
    match &mut kv.0 {
        AnyLayer::F32(kv) => store(heads, projections, kv, slots),
        AnyLayer::F16(kv) => store(heads, projections, kv, slots),
    }
}

fn store<T: KvNumber>(
    heads: &AttentionHeads,
    projections: &Projections<'_>,
    kv: &mut TypedLayer<'_, T>,
    slots: &[u32],
) {
    kv.check(heads);
    let Projections {
        qkv,
        turns,
        key_norm,
        ..
    } = *projections;
    let head_dim = heads.head_dim;
    let width = heads.num_kv_heads * head_dim;
    let mut keys = vec![0.0f32; width];
    let mut rounded = vec![T::zeroed(); 2 * width];
    let rows = qkv.chunks_exact(heads.qkv_width());
    for (row, (qkv, &slot)) in rows.zip(slots).enumerate() {
        let (row_keys, row_values) = qkv[heads.num_heads * head_dim..].split_at(width);
        keys.copy_from_slice(row_keys);
        prepare_heads(&mut keys, head_dim, key_norm, turns, row, 1.0);
        let (keys_out, values) = rounded.split_at_mut(width);
        T::round(&keys, keys_out);
        T::round(row_values, values);
        let both = keys_out
            .chunks_exact(head_dim)
            .zip(values.chunks_exact(head_dim));
        for (head, (key, value)) in both.enumerate() {
            kv.set_key(slot as usize, head, key);
            kv.set_value(slot as usize, head, value);
        }
    }
}

by_simd! {
    /// Normalizes, rotates and scales the heads of one row in place.
    fn prepare_heads(heads: &mut [f32], head_dim: usize, norm: Option<HeadNorm<'_>>, turns: &Turns, row: usize, scale: f32)
        = prepare_heads_inner
}

#[inline(always)]
fn prepare_heads_inner<const FMA: bool>(
    heads: &mut [f32],
    head_dim: usize,
    norm: Option<HeadNorm<'_>>,
    turns: &Turns,
    row: usize,
    scale: f32,
) {
    let (cos, sin) = turns.row(row);
    for head in heads.chunks_exact_mut(head_dim) {
        if let Some(norm) = norm.filter(|norm| !norm.is_last) {
            norm.apply::<FMA>(head);
        }
        turn(head, cos, sin);
        if let Some(norm) = norm.filter(|norm| norm.is_last) {
            norm.apply::<FMA>(head);
        }
        if scale != 1.0 {
            for value in head {
                *value *= scale;
            }
        }
    }
}
