//! Attention in plain candle operations, for devices without our own kernels: sequence by sequence, with keys and values
//! gathered from their slots.

use candle_core::{D, DType, Device, Result, Tensor};
use genset_kernels::{SequenceRows, Turns};

use super::Attention;
use crate::model::batch::StepBatch;
use crate::model::norm::Norm;

/// As [`Attention::forward`]; `kv` are keys and values, `[slots, num_kv_heads * head_dim]`.
pub(super) fn forward(
    attention: &Attention,
    qkv: &Tensor,
    turns: &Turns,
    kv: (&Tensor, &Tensor),
    batch: &StepBatch,
    block_size: usize,
) -> Result<Tensor> {
    let rows = batch.tokens.len();
    let kv_width = attention.heads.num_kv_heads * attention.heads.head_dim;
    let q_width = attention.heads.num_heads * attention.heads.head_dim;
    let turns = TurnTensors::new(turns, rows, qkv.device(), qkv.dtype())?;
    let q = prepare(
        &qkv.narrow(1, 0, q_width)?,
        attention,
        attention.query_norm.as_ref(),
        &turns,
    )?;
    let q = q.affine(f64::from(attention.heads.scale), 0.0)?;
    let k = prepare(
        &qkv.narrow(1, q_width, kv_width)?,
        attention,
        attention.key_norm.as_ref(),
        &turns,
    )?;
    let v = qkv.narrow(1, q_width + kv_width, kv_width)?;
    store(kv.0, &k.reshape((rows, kv_width))?, batch)?;
    store(kv.1, &v, batch)?;
    let outputs = batch
        .sequences
        .iter()
        .map(|sequence| attend(attention, &q, kv, sequence, block_size))
        .collect::<Result<Vec<_>>>()?;
    Tensor::cat(&outputs, 0)
}

/// Stores each row in its slot.
fn store(to: &Tensor, rows: &Tensor, batch: &StepBatch) -> Result<()> {
    let slots = Tensor::from_slice(&batch.slots, (batch.slots.len(), 1), rows.device())?;
    let slots = slots.expand(rows.shape())?.contiguous()?;
    to.scatter_set(&slots, &rows.to_dtype(to.dtype())?.contiguous()?, 0)
}

/// Cosines and sines, `[rows, 1, head_dim / 2]`.
struct TurnTensors {
    cos: Tensor,
    sin: Tensor,
}

impl TurnTensors {
    fn new(turns: &Turns, rows: usize, device: &Device, dtype: DType) -> Result<Self> {
        let tensor = |numbers: &[f32]| {
            Tensor::from_slice(numbers, (rows, 1, turns.width()), device)?.to_dtype(dtype)
        };
        Ok(Self {
            cos: tensor(turns.cos())?,
            sin: tensor(turns.sin())?,
        })
    }
}

/// Normalizes and rotates heads, `[rows, heads, head_dim]`.
fn prepare(
    x: &Tensor,
    attention: &Attention,
    norm: Option<&Norm>,
    turns: &TurnTensors,
) -> Result<Tensor> {
    let (rows, width) = x.dims2()?;
    let head_dim = attention.heads.head_dim;
    let x = x.reshape((rows, width / head_dim, head_dim))?;
    let x = match norm {
        Some(norm) if !attention.norms_are_last => norm.forward_by_tensors(&x)?,
        Some(_) | None => x,
    };
    let half = head_dim / 2;
    let (a, b) = (
        x.narrow(D::Minus1, 0, half)?,
        x.narrow(D::Minus1, half, half)?,
    );
    let first = (a.broadcast_mul(&turns.cos)? - b.broadcast_mul(&turns.sin)?)?;
    let second = (b.broadcast_mul(&turns.cos)? + a.broadcast_mul(&turns.sin)?)?;
    let x = Tensor::cat(&[first, second], D::Minus1)?;
    match norm {
        Some(norm) if attention.norms_are_last => norm.forward_by_tensors(&x),
        Some(_) | None => Ok(x),
    }
}

/// Attention of one sequence's rows, `[rows, num_heads * head_dim]`.
fn attend(
    attention: &Attention,
    q: &Tensor,
    (keys, values): (&Tensor, &Tensor),
    sequence: &SequenceRows,
    block_size: usize,
) -> Result<Tensor> {
    let rows = sequence.rows.len();
    let (kv_heads, group, head_dim) = (
        attention.heads.num_kv_heads,
        attention.heads.group(),
        attention.heads.head_dim,
    );
    let first_position = sequence.context_len - rows;
    let context_len = sequence.context_len;
    let seen = attention.heads.visible(first_position, context_len).start..context_len;
    let slots = seen
        .clone()
        .map(|position| slot(sequence, position, block_size))
        .collect::<Result<Vec<u32>>>()?;
    let slots = Tensor::from_vec(slots, seen.len(), q.device())?;
    let gather = |from: &Tensor| {
        from.index_select(&slots, 0)?
            .reshape((seen.len(), kv_heads, head_dim))?
            .transpose(0, 1)?
            .to_dtype(q.dtype())
    };
    // A head's queries, ordered by row and then by head in the group: [kv_heads, rows * group, head_dim].
    let q = q
        .narrow(0, sequence.rows.start, rows)?
        .reshape((rows, kv_heads, group, head_dim))?;
    let q = q
        .transpose(0, 1)?
        .reshape((kv_heads, rows * group, head_dim))?
        .contiguous()?;
    let scores = q
        .matmul(&gather(keys)?.transpose(1, 2)?.contiguous()?)?
        .to_dtype(DType::F32)?;
    let scores = match attention.heads.softcap {
        Some(cap) => (scores.affine(1.0 / f64::from(cap), 0.0)?.tanh()? * f64::from(cap))?,
        None => scores,
    };
    let mask = mask(attention, sequence, &seen, q.device())?;
    let scores = scores.broadcast_add(&mask)?;
    let weights = match &attention.sinks {
        None => candle_nn::ops::softmax_last_dim(&scores)?,
        Some(sinks) => {
            let sinks = sinks.tensor.reshape((kv_heads, 1, group))?;
            let sinks = sinks.expand((kv_heads, rows, group))?;
            let sinks = sinks.reshape((kv_heads, rows * group, 1))?;
            let all = Tensor::cat(&[scores, sinks], D::Minus1)?;
            let weights = candle_nn::ops::softmax_last_dim(&all)?;
            weights.narrow(D::Minus1, 0, seen.len())?.contiguous()?
        }
    };
    let weights = weights.to_dtype(q.dtype())?;
    let out = weights.matmul(&gather(values)?.contiguous()?)?;
    out.reshape((kv_heads, rows, group, head_dim))?
        .transpose(0, 1)?
        .reshape((rows, kv_heads * group * head_dim))
}

fn slot(sequence: &SequenceRows, position: usize, block_size: usize) -> Result<u32> {
    let slot = sequence.blocks[position / block_size] as usize * block_size + position % block_size;
    u32::try_from(slot).map_err(candle_core::Error::wrap)
}

/// 0 if a query attends to a position, else minus infinity: `[rows * group, positions]`.
fn mask(
    attention: &Attention,
    sequence: &SequenceRows,
    seen: &std::ops::Range<usize>,
    device: &Device,
) -> Result<Tensor> {
    let rows = sequence.rows.len();
    let first_position = sequence.context_len - rows;
    let mask: Vec<f32> = (0..rows * attention.heads.group())
        .flat_map(|query| {
            let position = first_position + query / attention.heads.group();
            let visible = attention.heads.visible(position, sequence.context_len);
            seen.clone().map(move |position| {
                if visible.contains(&position) {
                    0.0
                } else {
                    f32::NEG_INFINITY
                }
            })
        })
        .collect();
    Tensor::from_vec(mask, (rows * attention.heads.group(), seen.len()), device)
}
