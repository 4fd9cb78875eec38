//! A mixture of experts: a router sends each row to a few of many feed-forward blocks, and adds their results weighted by its
//! probabilities.
//!
//! A step's rows are grouped by expert, so each expert's matrices are read once per step, for any number of rows. A row's
//! results are added in the order of the experts' indices, so its bits do not depend on the other rows.

use candle_core::{DType, Device, Result, Tensor};

use super::config::Experts;
use super::feed_forward::FeedForward;
use super::host;
use super::linear::Linear;
use super::lora::Beside;

/// One layer's experts and their router.
#[derive(Debug)]
pub(super) struct ExpertMixture {
    pub(super) router: Linear,
    /// As many as `config.count`.
    pub(super) experts: Vec<FeedForward>,
    pub(super) config: Experts,
    pub(super) shared: Option<SharedExpert>,
}

/// The expert of all rows.
#[derive(Debug)]
pub(super) struct SharedExpert {
    /// One number per row, whose sigmoid is the weight of the result.
    pub(super) gate: Linear,
    pub(super) expert: FeedForward,
}

impl SharedExpert {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let weights = candle_nn::ops::sigmoid(&self.gate.forward(x)?)?;
        let result = self.expert.forward(x, Beside::NOTHING)?;
        result.broadcast_mul(&weights)
    }
}

/// A row that goes to an expert, and the weight of its result.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Visit {
    row: usize,
    weight: f32,
}

impl ExpertMixture {
    /// Maps `[rows, hidden_size]` to the same shape.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let logits = self.router.forward(x)?;
        let logits = logits.to_dtype(DType::F32)?.to_device(&Device::Cpu)?;
        let visits = host::read(&logits, |logits| visits(logits, self.config))?;
        let busy = self.experts.iter().zip(&visits);
        let busy = busy.filter(|(_, visits)| !visits.is_empty());
        let sum = if x.device().is_cpu() {
            sum_on_host(x, busy)?
        } else {
            sum_by_tensors(x, busy)?
        };
        match &self.shared {
            Some(shared) => sum + shared.forward(x)?,
            None => Ok(sum),
        }
    }
}

fn sum_on_host<'a>(
    x: &Tensor,
    busy: impl Iterator<Item = (&'a FeedForward, &'a Vec<Visit>)>,
) -> Result<Tensor> {
    let (rows, width) = x.dims2()?;
    let mut sum = vec![0.0f32; rows * width];
    for (expert, visits) in busy {
        let result = expert.forward(&gather(x, visits)?, Beside::NOTHING)?;
        host::read(&result, |result| {
            for (visit, result) in visits.iter().zip(result.chunks_exact(width)) {
                let sum = &mut sum[visit.row * width..][..width];
                for (sum, value) in sum.iter_mut().zip(result) {
                    *sum += visit.weight * value;
                }
            }
        })?;
    }
    Tensor::from_vec(sum, (rows, width), x.device())
}

/// As [`sum_on_host`], on any device.
fn sum_by_tensors<'a>(
    x: &Tensor,
    busy: impl Iterator<Item = (&'a FeedForward, &'a Vec<Visit>)>,
) -> Result<Tensor> {
    let mut sum = x.zeros_like()?;
    for (expert, visits) in busy {
        let rows = visits
            .iter()
            .map(|visit| u32::try_from(visit.row))
            .collect::<std::result::Result<Vec<_>, _>>()
            .map_err(candle_core::Error::wrap)?;
        let rows = Tensor::from_vec(rows, visits.len(), x.device())?;
        let weights: Vec<f32> = visits.iter().map(|visit| visit.weight).collect();
        let weights = Tensor::from_vec(weights, (visits.len(), 1), x.device())?;
        let result = expert.forward(&x.index_select(&rows, 0)?, Beside::NOTHING)?;
        let result = result.broadcast_mul(&weights.to_dtype(result.dtype())?)?;
        sum = sum.index_add(&rows, &result, 0)?;
    }
    Ok(sum)
}

/// The rows that go to an expert, stacked.
fn gather(x: &Tensor, visits: &[Visit]) -> Result<Tensor> {
    let (_, width) = x.dims2()?;
    let rows = host::read(x, |x| {
        let rows = visits.iter().map(|visit| &x[visit.row * width..][..width]);
        rows.collect::<Vec<_>>().concat()
    })?;
    Tensor::from_vec(rows, (visits.len(), width), x.device())
}

/// The rows of each expert, chosen from router logits, `[rows, count]`.
fn visits(logits: &[f32], config: Experts) -> Vec<Vec<Visit>> {
    let mut visits = vec![Vec::new(); config.count];
    let mut order: Vec<usize> = Vec::with_capacity(config.count);
    for (row, logits) in logits.chunks_exact(config.count).enumerate() {
        order.clear();
        order.extend(0..config.count);
        // Among equal logits the lower index wins.
        let by_logit = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
        if config.per_token < config.count {
            order.select_nth_unstable_by(config.per_token, by_logit);
            order.truncate(config.per_token);
        }
        order.sort_unstable();
        let largest = logits.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
        let weight = |expert: usize| (logits[expert] - largest).exp();
        let sum: f32 = if config.is_normalized {
            order.iter().map(|&expert| weight(expert)).sum()
        } else {
            (0..config.count).map(weight).sum()
        };
        for &expert in &order {
            let weight = weight(expert) / sum;
            visits[expert].push(Visit { row, weight });
        }
    }
    visits
}

#[cfg(test)]
mod tests {
    use genset_kernels::WeightMemory;

    use super::*;
    use crate::model::config::Activation;
    use crate::model::linear::Matrix;

    fn config(per_token: usize, is_normalized: bool) -> Experts {
        Experts {
            count: 4,
            per_token,
            is_normalized,
            has_router_bias: false,
            shared_size: None,
        }
    }

    fn numbers(rows: usize, width: usize, seed: usize) -> Tensor {
        let number = |i: usize| ((i * 37 + seed * 101) % 97) as f32 / 48.0 - 1.0;
        let numbers: Vec<f32> = (0..rows * width).map(number).collect();
        Tensor::from_vec(numbers, (rows, width), &Device::Cpu).unwrap()
    }

    fn linear(rows: usize, width: usize, seed: usize) -> Linear {
        let matrix = Matrix::dense(numbers(rows, width, seed)).unwrap();
        Linear::try_new(vec![matrix], None, &mut WeightMemory::default()).unwrap()
    }

    fn mixture() -> ExpertMixture {
        let expert = |seed| FeedForward {
            gate_up: linear(12, 8, seed),
            down: linear(8, 6, seed + 1),
            activation: Activation::Silu,
            is_gated: true,
        };
        ExpertMixture {
            router: linear(4, 8, 50),
            experts: (0..4).map(expert).collect(),
            config: config(2, true),
            shared: None,
        }
    }

    #[test]
    fn tensors_on_any_device_give_what_slices_do() {
        let (mixture, x) = (mixture(), numbers(9, 8, 3));
        let want = mixture.forward(&x).unwrap().to_vec2::<f32>().unwrap();
        let logits = mixture.router.forward(&x).unwrap();
        let visits = host::read(&logits, |logits| visits(logits, mixture.config)).unwrap();
        let busy = mixture.experts.iter().zip(&visits);
        let busy = busy.filter(|(_, visits)| !visits.is_empty());
        let got = sum_by_tensors(&x, busy).unwrap().to_vec2::<f32>().unwrap();
        let pairs = got.iter().flatten().zip(want.iter().flatten());
        let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 1e-5, "{worst}");
    }

    #[test]
    fn a_row_has_the_same_bits_alone() {
        let (mixture, x) = (mixture(), numbers(9, 8, 3));
        let all = mixture.forward(&x).unwrap().to_vec2::<f32>().unwrap();
        for (row, want) in all.iter().enumerate() {
            let alone = mixture.forward(&x.narrow(0, row, 1).unwrap()).unwrap();
            assert_eq!(alone.to_vec2::<f32>().unwrap()[0], *want);
        }
    }

    #[test]
    fn rows_go_to_the_experts_of_the_largest_logits() {
        let logits = [0.0, 2.0, 1.0, 2.0, 5.0, 5.0, 5.0, 5.0];
        let found = visits(&logits, config(2, true));
        let rows = |expert: usize| found[expert].iter().map(|visit| visit.row);
        let rows: Vec<Vec<usize>> = (0..4).map(|expert| rows(expert).collect()).collect();
        assert_eq!(rows, [vec![1], vec![0, 1], vec![], vec![0]]);
        assert!(found.iter().flatten().all(|visit| visit.weight == 0.5));
    }

    #[test]
    fn probabilities_are_those_of_all_experts_unless_they_are_normalized() {
        let logits = [1.0, 0.0, 0.0, 0.0];
        let first =
            |per_token, is_normalized| visits(&logits, config(per_token, is_normalized))[0][0];
        let e = std::f32::consts::E;
        assert!((first(1, false).weight - e / (e + 3.0)).abs() < 1e-6);
        assert!((first(1, true).weight - 1.0).abs() < 1e-6);
        assert!((first(4, true).weight - first(4, false).weight).abs() < 1e-6);
    }

    #[test]
    fn logits_that_are_no_numbers_choose_experts_all_the_same() {
        let found = visits(
            &[f32::NAN, f32::NEG_INFINITY, f32::INFINITY, f32::NAN],
            config(2, true),
        );
        assert_eq!(found.iter().flatten().count(), 2);
    }
}
