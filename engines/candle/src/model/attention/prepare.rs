//! Prepares a row's projections for attention: normalizes and rotates heads, and stores keys and values in their slots.

use std::mem::MaybeUninit;

use candle_core::Result;

use super::Attention;
use crate::model::batch::StepBatch;
use crate::model::host;
use crate::model::kv_cache::{HostLayer, KvNumber};
use crate::model::norm::{Norm, row_scale};
use crate::model::parallel::{SharedMut, for_each_range_if_large, written};
use crate::model::rope::{Turns, turn};
use crate::model::simd::by_simd;

/// The queries of all rows, scaled, `[rows, num_heads * head_dim]`.
pub(super) fn queries(attention: &Attention, qkv: &[f32], turns: &Turns) -> Result<Vec<f32>> {
    let width = attention.num_heads * attention.head_dim;
    let rows = qkv.len() / attention.qkv_width();
    with_norm(attention.query_norm.as_ref(), |norm| {
        let fill = |out: &SharedMut<'_, MaybeUninit<f32>>| {
            for_each_range_if_large(rows, 4 * rows * width, |range| {
                for row in range {
                    let qkv = &qkv[row * attention.qkv_width()..][..width];
                    #[expect(unsafe_code, reason = "threads write disjoint parts of one buffer")]
                    // SAFETY: each row is in only one range.
                    let out = unsafe { out.part(row * width..(row + 1) * width) };
                    let out = out.write_copy_of_slice(qkv);
                    prepare_heads(out, attention.head_dim, norm, turns, row, attention.scale);
                }
            });
        };
        #[expect(unsafe_code, reason = "each row is written once")]
        // SAFETY: every row is in a range, and is written.
        unsafe {
            written(rows * width, fill)
        }
    })
}

/// Stores the keys and values of all rows in their slots.
pub(super) fn store_keys_and_values<T: KvNumber>(
    attention: &Attention,
    qkv: &[f32],
    turns: &Turns,
    kv: &mut HostLayer<'_, T>,
    batch: &StepBatch,
) -> Result<()> {
    let head_dim = attention.head_dim;
    let width = attention.num_kv_heads * head_dim;
    let mut keys = vec![0.0f32; width];
    let mut rounded = vec![T::zeroed(); 2 * width];
    with_norm(attention.key_norm.as_ref(), |norm| {
        for (row, (qkv, &slot)) in qkv
            .chunks_exact(attention.qkv_width())
            .zip(&batch.slots)
            .enumerate()
        {
            let (row_keys, row_values) = qkv[attention.num_heads * head_dim..].split_at(width);
            keys.copy_from_slice(row_keys);
            prepare_heads(&mut keys, head_dim, norm, turns, row, 1.0);
            let (keys_out, values) = rounded.split_at_mut(width);
            T::round(&keys, keys_out);
            T::round(row_values, values);
            let heads = keys_out
                .chunks_exact(head_dim)
                .zip(values.chunks_exact(head_dim))
                .enumerate();
            for (head, (key, value)) in heads {
                kv.set_key(slot as usize, head, key);
                kv.set_value(slot as usize, head, value);
            }
        }
    })
}

/// A norm's weights and epsilon.
type NormOf<'a> = Option<(&'a [f32], f32)>;

fn with_norm<R>(norm: Option<&Norm>, f: impl FnOnce(NormOf<'_>) -> R) -> Result<R> {
    match norm {
        Some(norm) => host::read(norm.weight(), |weight| f(Some((weight, norm.eps())))),
        None => Ok(f(None)),
    }
}

by_simd! {
    /// Normalizes, rotates and scales the heads of one row in place.
    fn prepare_heads(heads: &mut [f32], head_dim: usize, norm: NormOf<'_>, turns: &Turns, row: usize, scale: f32)
        = prepare_heads_inner
}

#[inline(always)]
fn prepare_heads_inner<const FMA: bool>(
    heads: &mut [f32],
    head_dim: usize,
    norm: NormOf<'_>,
    turns: &Turns,
    row: usize,
    scale: f32,
) {
    let (cos, sin) = turns.row(row);
    for head in heads.chunks_exact_mut(head_dim) {
        if let Some((weight, eps)) = norm {
            let scale = row_scale::<FMA>(head, eps);
            for (value, weight) in head.iter_mut().zip(weight) {
                *value = *value * scale * weight;
            }
        }
        turn(head, cos, sin);
        if scale != 1.0 {
            for value in head {
                *value *= scale;
            }
        }
    }
}
