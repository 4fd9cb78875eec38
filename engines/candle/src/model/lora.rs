//! LoRA adapters: low-rank products in addition to those with the weights.
//!
//! An adapter adds `(x A^T) B^T` to products of a layer: `A` is `[rank, in_features]`, and `B`, which includes the adapter's
//! scale, is `[out_features, rank]`. The weights stay unchanged, quantized or not, so one step can compute rows of several
//! adapters and of none. `decoder` applies the additions, `load` creates [`AdapterWeights`], and a step's [`AdapterRows`] assign
//! rows to adapters.
//!
//! On the CPU, a row's bits do not depend on the other rows here either: both products are those of `linear`.
//!
//! # Source
//! Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021; the names are those of the library `peft`.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use genset_kernels::{LANES, WeightMemory};

use super::batch::StepBatch;
use super::config::ModelConfig;
use super::host;
use super::linear::Matrix;

/// Products of a layer that share an input, and that adapters may add to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Site {
    /// Queries, keys and values, concatenated.
    Qkv,
    /// The output projection of attention.
    Output,
    /// The first two products of a feed-forward block, concatenated.
    GateUp,
    /// The last product of a feed-forward block.
    Down,
}

/// The columns of a module in a layer's product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdapterTarget {
    /// The product.
    pub site: Site,
    /// The module's first column in it.
    pub first_column: usize,
    /// The number of the module's columns.
    pub out_features: usize,
    /// The width of its input.
    pub in_features: usize,
}

impl AdapterTarget {
    /// Modules that an adapter may add to, without those of experts.
    pub const MODULES: [&str; 9] = [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "qkv_proj",
        "gate_up_proj",
    ];

    /// The module with this name in `transformers`, inside a layer, such as `self_attn.q_proj`; `None` for others, including those
    /// of a mixture of experts. Phi's fused modules are supported.
    #[must_use]
    pub fn of(config: &ModelConfig, module: &str) -> Option<Self> {
        let hidden = config.hidden_size;
        let q = config.num_heads * config.head_dim;
        let kv = config.num_kv_heads * config.head_dim;
        let inner = config.intermediate_size;
        let (site, first_column, out_features, in_features) = match module {
            "self_attn.q_proj" => (Site::Qkv, 0, q, hidden),
            "self_attn.k_proj" => (Site::Qkv, q, kv, hidden),
            "self_attn.v_proj" => (Site::Qkv, q + kv, kv, hidden),
            "self_attn.qkv_proj" => (Site::Qkv, 0, q + 2 * kv, hidden),
            "self_attn.o_proj" => (Site::Output, 0, hidden, q),
            "mlp.gate_proj" => (Site::GateUp, 0, inner, hidden),
            "mlp.up_proj" => (Site::GateUp, inner, inner, hidden),
            "mlp.gate_up_proj" => (Site::GateUp, 0, 2 * inner, hidden),
            "mlp.down_proj" => (Site::Down, 0, hidden, inner),
            _ => return None,
        };
        let is_of_experts = matches!(site, Site::GateUp | Site::Down) && config.experts.is_some();
        // Of a block without a gate, only the second matrix has a usual name.
        let is_unnamed = matches!(site, Site::GateUp) && !config.is_gated;
        (!is_of_experts && !is_unnamed).then_some(Self {
            site,
            first_column,
            out_features,
            in_features,
        })
    }
}

/// An adapter's addition to some columns of a product.
#[derive(Debug)]
struct Addition {
    site: Site,
    first_column: usize,
    /// `[rank, in_features]`.
    a: Matrix,
    /// `[out_features, rank]`, scaled.
    b: Matrix,
}

/// The weights of an adapter.
#[derive(Debug)]
pub struct AdapterWeights {
    /// Of each layer.
    layers: Vec<Vec<Addition>>,
    memory: WeightMemory,
    bytes: u64,
    digest: u64,
}

impl AdapterWeights {
    /// Creates an adapter that adds nothing yet, for a model with `num_layers` layers.
    #[must_use]
    pub fn new(num_layers: usize) -> Self {
        Self {
            layers: std::iter::repeat_with(Vec::new).take(num_layers).collect(),
            memory: WeightMemory::default(),
            bytes: 0,
            digest: 0,
        }
    }

    /// Sets the [digest](Self::digest).
    #[must_use]
    pub fn with_digest(mut self, digest: u64) -> Self {
        self.digest = digest;
        self
    }

    /// Adds to a module of layer `layer`: `a` is `[rank, in_features]`, and `b`, which includes the scale, is
    /// `[out_features, rank]`. Both have the type and the device of the model's activations.
    ///
    /// # Errors
    /// There is no such layer, a shape is wrong, or the system is out of memory.
    pub fn add(&mut self, layer: usize, target: AdapterTarget, a: Tensor, b: Tensor) -> Result<()> {
        let (rank, in_features) = a.dims2()?;
        let (out_features, b_rank) = b.dims2()?;
        let shapes = (in_features, out_features, b_rank);
        if shapes != (target.in_features, target.out_features, rank) {
            candle_core::bail!(
                "A of {:?} and B of {:?} for {target:?}",
                a.shape(),
                b.shape()
            );
        }
        let Some(additions) = self.layers.get_mut(layer) else {
            candle_core::bail!("an adapter of layer {layer}, which the model has not");
        };
        for (matrix, shape) in [(&a, a.dims2()?), (&b, b.dims2()?)] {
            self.bytes += Self::bytes_of(shape, matrix.dtype(), matrix.device().is_cpu());
        }
        additions.push(Addition {
            site: target.site,
            first_column: target.first_column,
            a: Matrix::dense(a)?.into_packed(&mut self.memory)?,
            b: Matrix::dense(b)?.into_packed(&mut self.memory)?,
        });
        Ok(())
    }

    /// Bytes that a matrix of this size takes: on the CPU whole tiles.
    #[must_use]
    pub fn bytes_of((rows, columns): (usize, usize), dtype: DType, is_cpu: bool) -> u64 {
        let rows = if is_cpu {
            rows.next_multiple_of(LANES)
        } else {
            rows
        };
        let numbers = rows.saturating_mul(columns);
        u64::try_from(numbers.saturating_mul(dtype.size_in_bytes())).unwrap_or(u64::MAX)
    }

    /// Bytes of its numbers.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A number that identifies the weights: the same for the same files, on every machine. 0 if it was not set.
    #[must_use]
    pub fn digest(&self) -> u64 {
        self.digest
    }

    /// Whether it adds nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.layers.iter().all(Vec::is_empty)
    }
}

/// The rows of a step that use one adapter.
#[derive(Debug, Clone)]
pub struct AdapterRows {
    /// The adapter.
    pub weights: Arc<AdapterWeights>,
    /// Its rows, in order.
    pub rows: Vec<u32>,
}

/// Compares rows, and adapters by identity.
impl PartialEq for AdapterRows {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.weights, &other.weights) && self.rows == other.rows
    }
}

impl Eq for AdapterRows {}

/// The additions of a step's adapters in one layer. It costs nothing in a step without adapters.
#[derive(Debug, Clone, Copy)]
pub(super) struct Beside<'a> {
    adapters: &'a [AdapterRows],
    layer: usize,
}

impl<'a> Beside<'a> {
    /// No additions.
    pub(super) const NOTHING: Beside<'static> = Beside {
        adapters: &[],
        layer: 0,
    };

    /// The additions of the batch's adapters in layer `layer`.
    pub(super) fn layer(batch: &'a StepBatch, layer: usize) -> Self {
        Self {
            adapters: &batch.adapters,
            layer,
        }
    }

    /// Whether any adapter adds something at `site`.
    pub(super) fn adds(self, site: Site) -> bool {
        self.adapters.iter().any(|rows| rows.adds(self.layer, site))
    }

    /// Adds the adapters' additions at `site` to `product`, `[rows, columns]`, which is the product of `x`, `[rows, in_features]`.
    pub(super) fn add(self, site: Site, x: &Tensor, product: Tensor) -> Result<Tensor> {
        if !self.adds(site) {
            return Ok(product);
        }
        if product.device().is_cpu() {
            self.add_on_host(site, x, &product)
        } else {
            self.add_by_tensors(site, x, product)
        }
    }

    fn add_on_host(self, site: Site, x: &Tensor, product: &Tensor) -> Result<Tensor> {
        let (rows, columns) = product.dims2()?;
        let mut sums = host::read(product, <[f32]>::to_vec)?;
        for adapter in self.adapters {
            let Some(x) = adapter.select(self.layer, site, x)? else {
                continue;
            };
            for addition in adapter.additions(self.layer, site) {
                let added = addition.b.forward(&addition.a.forward(&x)?)?;
                let width = addition.b.out_features();
                host::read(&added, |added| {
                    for (row, added) in adapter.rows.iter().zip(added.chunks_exact(width)) {
                        let first = *row as usize * columns + addition.first_column;
                        for (sum, added) in sums[first..first + width].iter_mut().zip(added) {
                            *sum += added;
                        }
                    }
                })?;
            }
        }
        Tensor::from_vec(sums, (rows, columns), product.device())
    }

    fn add_by_tensors(self, site: Site, x: &Tensor, mut product: Tensor) -> Result<Tensor> {
        let (_, columns) = product.dims2()?;
        for adapter in self.adapters {
            let Some(x) = adapter.select(self.layer, site, x)? else {
                continue;
            };
            let rows = adapter.row_numbers(product.device())?;
            for addition in adapter.additions(self.layer, site) {
                let added = addition.b.forward(&addition.a.forward(&x)?)?;
                let added = among(&added, addition.first_column, columns)?;
                product = product.index_add(&rows, &added, 0)?;
            }
        }
        Ok(product)
    }
}

/// Pads `added` with zero columns to `columns` columns; it starts at column `first`.
fn among(added: &Tensor, first: usize, columns: usize) -> Result<Tensor> {
    let (_, width) = added.dims2()?;
    let rest = columns.saturating_sub(first + width);
    added.pad_with_zeros(1, first, rest)
}

impl AdapterRows {
    fn additions(&self, layer: usize, site: Site) -> impl Iterator<Item = &Addition> {
        let layer = self.weights.layers.get(layer);
        let additions = layer.into_iter().flatten();
        additions.filter(move |addition| addition.site == site)
    }

    fn adds(&self, layer: usize, site: Site) -> bool {
        self.additions(layer, site).next().is_some()
    }

    /// The adapter's rows of `x`; `None` if it adds nothing there.
    fn select(&self, layer: usize, site: Site, x: &Tensor) -> Result<Option<Tensor>> {
        if !self.adds(layer, site) {
            return Ok(None);
        }
        if self.rows.len() == x.dim(0)? {
            return Ok(Some(x.clone()));
        }
        let rows = self.row_numbers(x.device())?;
        x.index_select(&rows, 0).map(Some)
    }

    fn row_numbers(&self, device: &Device) -> Result<Tensor> {
        Tensor::from_slice(&self.rows, self.rows.len(), device)
    }
}

/// A matrix of an adapter in the type of the model's activations, multiplied by `scale` before rounding.
///
/// # Errors
/// Candle fails.
pub(crate) fn scaled(
    numbers: Vec<f32>,
    shape: (usize, usize),
    scale: f64,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let matrix = Tensor::from_vec(numbers, shape, &Device::Cpu)?;
    let matrix = if scale == 1.0 {
        matrix
    } else {
        matrix.affine(scale, 0.0)?
    };
    matrix.to_dtype(dtype)?.to_device(device)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(rows: usize, columns: usize, seed: f32) -> Tensor {
        let number = |place: usize| ((place as f32 + seed) * 0.37).sin();
        let numbers: Vec<f32> = (0..rows * columns).map(number).collect();
        Tensor::from_vec(numbers, (rows, columns), &Device::Cpu).unwrap()
    }

    #[test]
    fn tensor_operations_add_what_slices_do() {
        let target = |first_column| AdapterTarget {
            site: Site::GateUp,
            first_column,
            out_features: 5,
            in_features: 8,
        };
        let adapters = [1.0, 2.0].map(|seed| {
            let mut weights = AdapterWeights::new(2);
            for first in [0, 5] {
                let (a, b) = (matrix(3, 8, seed), matrix(5, 3, seed + first as f32));
                weights.add(1, target(first), a, b).unwrap();
            }
            Arc::new(weights)
        });
        let rows = [vec![0, 3], vec![1]];
        let adapters: Vec<AdapterRows> = adapters
            .into_iter()
            .zip(rows)
            .map(|(weights, rows)| AdapterRows { weights, rows })
            .collect();
        let beside = Beside {
            adapters: &adapters,
            layer: 1,
        };
        let (x, product) = (matrix(4, 8, 5.0), matrix(4, 12, 9.0));
        let numbers = |tensor: Tensor| tensor.to_vec2::<f32>().unwrap();
        let by_slices = numbers(beside.add(Site::GateUp, &x, product.clone()).unwrap());
        let by_tensors = beside.add_by_tensors(Site::GateUp, &x, product.clone());
        assert_eq!(by_slices, numbers(by_tensors.unwrap()));
        let before = numbers(product.clone());
        for (row, (now, before)) in by_slices.iter().zip(&before).enumerate() {
            // Row 2 has no adapter, and nothing is added to the last two columns.
            assert_eq!(now == before, row == 2);
            assert_eq!(now[10..], before[10..]);
        }
        let untouched = beside.add(Site::Down, &x, product.clone()).unwrap();
        assert_eq!(numbers(untouched), before);
        let of_layer_0 = Beside { layer: 0, ..beside };
        let untouched = of_layer_0.add(Site::GateUp, &x, product).unwrap();
        assert_eq!(numbers(untouched), before);
    }

    #[test]
    fn matrices_of_other_shapes_and_layers_are_refused() {
        let target = AdapterTarget {
            site: Site::Down,
            first_column: 0,
            out_features: 5,
            in_features: 8,
        };
        let mut weights = AdapterWeights::new(1);
        for (layer, a, b) in [
            (0, (3, 7), (5, 3)),
            (0, (3, 8), (5, 4)),
            (1, (3, 8), (5, 3)),
        ] {
            let (a, b) = (matrix(a.0, a.1, 1.0), matrix(b.0, b.1, 1.0));
            assert!(weights.add(layer, target, a, b).is_err());
        }
        assert!(weights.is_empty());
        assert_eq!(weights.bytes(), 0);
    }
}
