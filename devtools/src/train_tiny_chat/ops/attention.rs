//! Causal attention over packed sequences, with rotary positions and grouped heads.
//!
//! Each row of the tensors is a token. Sequences attend only to themselves, each begins at position 0, and none is padded.
//!
//! # Source
//! Su et al., "RoFormer", for the rotation, with separate halves as in Hugging Face's Llama. Ainslie et al., "GQA", for the
//! groups.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp3, Layout, Shape, Tensor};
use rayon::prelude::*;

use super::{add_scaled, dot, slice, values};

/// The number and width of heads, and their rotation for each position.
#[derive(Debug)]
pub(crate) struct Heads {
    query_heads: usize,
    kv_heads: usize,
    width: usize,
    /// Cosine and sine for each position and each pair of a head's values: `[positions, width / 2]`.
    turns: Vec<(f32, f32)>,
}

impl Heads {
    /// `query_heads` is a multiple of `kv_heads`, and `width` is even.
    pub(crate) fn new(
        query_heads: usize,
        kv_heads: usize,
        width: usize,
        rope_theta: f32,
        positions: usize,
    ) -> Self {
        let half = width / 2;
        let turns = (0..positions)
            .flat_map(|position| {
                (0..half).map(move |pair| {
                    let frequency = rope_theta.powf(-(2.0 * pair as f32) / width as f32);
                    let angle = position as f32 * frequency;
                    (angle.cos(), angle.sin())
                })
            })
            .collect();
        Self {
            query_heads,
            kv_heads,
            width,
            turns,
        }
    }

    fn query_width(&self) -> usize {
        self.query_heads * self.width
    }

    fn kv_width(&self) -> usize {
        self.kv_heads * self.width
    }

    fn kv_head_of(&self, query_head: usize) -> usize {
        query_head / (self.query_heads / self.kv_heads)
    }

    /// Rotates every head of every token by its position; `direction` -1 rotates back.
    fn rotate(&self, rows: &mut [f32], row_width: usize, direction: f32) {
        let half = self.width / 2;
        for (row, turns) in rows
            .chunks_exact_mut(row_width)
            .zip(self.turns.chunks_exact(half))
        {
            for head in row.chunks_exact_mut(self.width) {
                let (low, high) = head.split_at_mut(half);
                for ((low, high), (cos, sin)) in low.iter_mut().zip(high).zip(turns) {
                    let sin = sin * direction;
                    (*low, *high) = (*low * cos - *high * sin, *high * cos + *low * sin);
                }
            }
        }
    }
}

/// Attention of `q: [tokens, query heads x width]`, `k` and `v: [tokens, KV heads x width]`.
#[derive(Debug)]
pub(crate) struct Attention {
    pub(crate) heads: Arc<Heads>,
    /// The length of each sequence in tokens; their sum is the tensors' rows.
    pub(crate) lengths: Arc<Vec<usize>>,
}

/// One sequence, with queries and keys already rotated.
struct Sequence<'a> {
    heads: &'a Heads,
    q: Vec<f32>,
    k: Vec<f32>,
    v: &'a [f32],
}

/// The gradients of one sequence's queries, keys and values.
type Gradients = (Vec<f32>, Vec<f32>, Vec<f32>);

impl<'a> Sequence<'a> {
    fn new(heads: &'a Heads, q: &[f32], k: &[f32], v: &'a [f32]) -> Self {
        let (mut q, mut k) = (q.to_vec(), k.to_vec());
        heads.rotate(&mut q, heads.query_width(), 1.0);
        heads.rotate(&mut k, heads.kv_width(), 1.0);
        Self { heads, q, k, v }
    }

    fn scale(&self) -> f32 {
        (self.heads.width as f32).sqrt().recip()
    }

    fn query(&self, token: usize, head: usize) -> std::ops::Range<usize> {
        let begin = token * self.heads.query_width() + head * self.heads.width;
        begin..begin + self.heads.width
    }

    fn kv(&self, token: usize, query_head: usize) -> std::ops::Range<usize> {
        let begin =
            token * self.heads.kv_width() + self.heads.kv_head_of(query_head) * self.heads.width;
        begin..begin + self.heads.width
    }

    /// The attention weights of the token for each token up to itself; their sum is one.
    fn weights(&self, token: usize, head: usize, weights: &mut Vec<f32>) {
        let (query, scale) = (&self.q[self.query(token, head)], self.scale());
        weights.clear();
        weights.extend((0..=token).map(|j| dot(query, &self.k[self.kv(j, head)]) * scale));
        let max = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        weights.iter_mut().for_each(|x| *x = (*x - max).exp());
        let total: f32 = weights.iter().sum();
        weights.iter_mut().for_each(|x| *x /= total);
    }

    fn forward(&self, out: &mut [f32]) {
        let tokens = out.len() / self.heads.query_width();
        let mut weights = Vec::with_capacity(tokens);
        for head in 0..self.heads.query_heads {
            for token in 0..tokens {
                self.weights(token, head, &mut weights);
                let out = &mut out[self.query(token, head)];
                for (j, weight) in weights.iter().enumerate() {
                    add_scaled(out, *weight, &self.v[self.kv(j, head)]);
                }
            }
        }
    }

    fn backward(&self, grad: &[f32]) -> Gradients {
        let tokens = grad.len() / self.heads.query_width();
        let mut q_grad = vec![0.0; self.q.len()];
        let mut k_grad = vec![0.0; self.k.len()];
        let mut v_grad = vec![0.0; self.v.len()];
        let (mut weights, mut weight_grads) = (Vec::new(), Vec::new());
        for head in 0..self.heads.query_heads {
            for token in 0..tokens {
                let query = self.query(token, head);
                let grad = &grad[query.clone()];
                self.weights(token, head, &mut weights);
                weight_grads.clear();
                weight_grads.extend((0..=token).map(|j| dot(grad, &self.v[self.kv(j, head)])));
                let mean = dot(&weights, &weight_grads);
                for j in 0..=token {
                    let kv = self.kv(j, head);
                    let score_grad = weights[j] * (weight_grads[j] - mean) * self.scale();
                    add_scaled(&mut q_grad[query.clone()], score_grad, &self.k[kv.clone()]);
                    add_scaled(&mut k_grad[kv.clone()], score_grad, &self.q[query.clone()]);
                    add_scaled(&mut v_grad[kv], weights[j], grad);
                }
            }
        }
        self.heads
            .rotate(&mut q_grad, self.heads.query_width(), -1.0);
        self.heads.rotate(&mut k_grad, self.heads.kv_width(), -1.0);
        (q_grad, k_grad, v_grad)
    }
}

impl Attention {
    /// Splits a tensor with rows of this width into sequences.
    fn split<'a>(&self, mut rows: &'a [f32], width: usize) -> Vec<&'a [f32]> {
        let mut parts = Vec::with_capacity(self.lengths.len());
        for length in self.lengths.iter() {
            let (part, rest) = rows.split_at(length * width);
            parts.push(part);
            rows = rest;
        }
        parts
    }

    /// The sequences of the three tensors.
    fn sequences<'a>(&'a self, q: &'a [f32], k: &'a [f32], v: &'a [f32]) -> Vec<[&'a [f32]; 3]> {
        let (query_width, kv_width) = (self.heads.query_width(), self.heads.kv_width());
        let (q, k, v) = (
            self.split(q, query_width),
            self.split(k, kv_width),
            self.split(v, kv_width),
        );
        let pairs = q.into_iter().zip(k).zip(v);
        pairs.map(|((q, k), v)| [q, k, v]).collect()
    }
}

impl CustomOp3 for Attention {
    fn name(&self) -> &'static str {
        "packed-attention-with-gradient"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let (q, k, v) = (
            slice(q, q_layout)?,
            slice(k, k_layout)?,
            slice(v, v_layout)?,
        );
        let parts: Vec<Vec<f32>> = self
            .sequences(q, k, v)
            .into_par_iter()
            .map(|[q, k, v]| {
                let mut out = vec![0.0; q.len()];
                Sequence::new(&self.heads, q, k, v).forward(&mut out);
                out
            })
            .collect();
        Ok((CpuStorage::F32(parts.concat()), q_layout.shape().clone()))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        _result: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (qs, ks, vs, grads) = (values(q)?, values(k)?, values(v)?, values(grad)?);
        let grads = self.split(&grads, self.heads.query_width());
        let parts: Vec<Gradients> = self
            .sequences(&qs, &ks, &vs)
            .into_par_iter()
            .zip(grads)
            .map(|([q, k, v], grad)| Sequence::new(&self.heads, q, k, v).backward(grad))
            .collect();
        let joined = |of: fn(&Gradients) -> &Vec<f32>, like: &Tensor| {
            let rows: Vec<f32> = parts.iter().flat_map(of).copied().collect();
            Tensor::from_vec(rows, like.shape(), like.device()).map(Some)
        };
        Ok((
            joined(|part| &part.0, q)?,
            joined(|part| &part.1, k)?,
            joined(|part| &part.2, v)?,
        ))
    }
}
