//! Products with weights: [`Matrix`], which a loader creates, and `Linear`, one or more matrices that share an input.
//!
//! On the CPU matrices are repacked ([`PackedMatrix`]). Their kernels compute the same bits of a row for any number of rows, so a
//! sequence's answer does not depend on its neighbours in the batch. Other types, processors and devices use candle's products.

#[cfg(test)]
mod tests;
mod weight_type;

use std::io;
use std::sync::Arc;

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{D, DType, Device, Result, Tensor};
use genset_kernels::{PackedMatrix, QuantizedKernels, WeightMemory, product, quantized_kernels};

pub use self::weight_type::WeightType;
use super::config::Activation;
use super::host;
use super::kernels;

/// The weights of a product, `[out_features, in_features]`; also the table of token embeddings.
#[derive(Debug, Clone)]
pub struct Matrix {
    weight: Weight,
    out_features: usize,
    in_features: usize,
}

#[derive(Debug, Clone)]
enum Weight {
    Dense(Tensor),
    Quantized(Arc<QTensor>),
    Blocks(WeightType, Arc<[u8]>),
    Packed(Arc<PackedMatrix>),
}

impl Matrix {
    /// Weights in f32 (on a GPU: in the type of activations), `[out_features, in_features]`.
    ///
    /// # Errors
    /// The tensor does not have two dimensions.
    pub fn dense(weight: Tensor) -> Result<Self> {
        let (out_features, in_features) = weight.dims2()?;
        let weight = if weight.device().is_cpu() {
            weight.to_dtype(DType::F32)?
        } else {
            weight
        };
        Ok(Self {
            weight: Weight::Dense(weight),
            out_features,
            in_features,
        })
    }

    /// Quantized weights, `[out_features, in_features]`; blocks of F32, F16 and BF16 become dense.
    ///
    /// # Errors
    /// The tensor does not have two dimensions.
    pub fn quantized(weight: QTensor) -> Result<Self> {
        let (out_features, in_features) = weight.shape().dims2()?;
        if matches!(
            weight.dtype(),
            GgmlDType::F32 | GgmlDType::F16 | GgmlDType::BF16
        ) {
            return Self::dense(weight.dequantize(&weight.device())?);
        }
        Ok(Self {
            weight: Weight::Quantized(Arc::new(weight)),
            out_features,
            in_features,
        })
    }

    /// Blocks of a type that candle does not support, `[out_features, in_features]`, on the CPU.
    ///
    /// # Errors
    /// The number of blocks is wrong.
    pub fn blocks(
        dtype: WeightType,
        blocks: &[u8],
        (out_features, in_features): (usize, usize),
    ) -> Result<Self> {
        let row_bytes = in_features / dtype.block_size() * dtype.type_size();
        let is_whole = in_features.is_multiple_of(dtype.block_size());
        if !is_whole || Some(blocks.len()) != row_bytes.checked_mul(out_features) {
            candle_core::bail!(
                "{} bytes of {dtype:?} for {out_features} rows of {in_features}",
                blocks.len()
            );
        }
        Ok(Self {
            weight: Weight::Blocks(dtype, blocks.into()),
            out_features,
            in_features,
        })
    }

    /// The number of rows, which is the width of a product.
    #[must_use]
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// The number of columns, which is the width of a product's input.
    #[must_use]
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Rows by their indices, in f32 (on a GPU: in `to`), `[ids.len(), in_features]`.
    ///
    /// # Errors
    /// An index is out of range, or candle fails.
    pub fn rows(&self, ids: &[u32], device: &Device, to: DType) -> Result<Tensor> {
        match &self.weight {
            Weight::Dense(_) | Weight::Quantized(_) => {
                self.rows_of(&Tensor::from_slice(ids, ids.len(), device)?, to)
            }
            Weight::Blocks(dtype, blocks) => {
                let row_bytes = self.in_features / dtype.block_size() * dtype.type_size();
                let mut rows = vec![0.0; ids.len() * self.in_features];
                for (&id, out) in ids.iter().zip(rows.chunks_exact_mut(self.in_features)) {
                    let Some(row) = blocks.chunks_exact(row_bytes).nth(id as usize) else {
                        candle_core::bail!("row {id} of a matrix with {} rows", self.out_features);
                    };
                    if let Some(block_type) = dtype.block_type() {
                        block_type.numbers(row, out);
                    }
                }
                Tensor::from_vec(rows, (ids.len(), self.in_features), device)?.to_dtype(to)
            }
            Weight::Packed(packed) => {
                let rows = packed.rows(ids)?;
                Tensor::from_vec(rows, (ids.len(), self.in_features), device)
            }
        }
    }

    /// As [`Self::rows`], with indices on the device of the result.
    ///
    /// # Errors
    /// Candle fails, for example with a form that only the CPU has.
    pub(super) fn rows_of(&self, ids: &Tensor, to: DType) -> Result<Tensor> {
        match &self.weight {
            Weight::Dense(weight) => weight.index_select(ids, 0)?.to_dtype(to),
            Weight::Quantized(weight) => weight.embedding(ids)?.to_dtype(to),
            Weight::Blocks(..) | Weight::Packed(_) => {
                candle_core::bail!("rows of a matrix on the CPU, by numbers in a tensor")
            }
        }
    }

    /// `x` times the transposed weights: `[rows, in_features]` to `[rows, out_features]`.
    ///
    /// # Errors
    /// Shapes or types do not match.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match &self.weight {
            Weight::Dense(weight) => dense_product(weight, x),
            Weight::Quantized(weight) => quantized_product(weight, x),
            Weight::Blocks(..) => x.matmul(&self.numbers()?.t()?),
            Weight::Packed(packed) => packed_product(&[packed], None, x),
        }
    }

    /// All numbers in f32 on the CPU, if they are blocks that candle does not support.
    fn numbers(&self) -> Result<Tensor> {
        let ids: Vec<u32> = (0..).take(self.out_features).collect();
        self.rows(&ids, &Device::Cpu, DType::F32)
    }

    /// The type of its numbers, if it makes products on the CPU slow: f32, with four times the bytes of `Q8_0`, or blocks without
    /// kernels for this processor. Call it before [`Self::into_packed`].
    pub(super) fn slow_type(&self) -> Option<WeightType> {
        let has_kernels = quantized_kernels().is_some();
        match &self.weight {
            Weight::Dense(weight) => weight.device().is_cpu().then_some(WeightType::F32),
            Weight::Quantized(weight) => {
                let is_slow = weight.device().is_cpu() && !has_kernels;
                is_slow.then(|| weight.dtype().into())
            }
            Weight::Blocks(dtype, _) => (!has_kernels).then_some(*dtype),
            Weight::Packed(_) => None,
        }
    }

    /// The type of its numbers on the CPU, as products read them.
    pub(super) fn dtype(&self) -> WeightType {
        match &self.weight {
            Weight::Dense(_) => WeightType::F32,
            Weight::Quantized(weight) => weight.dtype().into(),
            Weight::Blocks(dtype, _) => *dtype,
            Weight::Packed(packed) => {
                (packed.block_type()).map_or(WeightType::F32, WeightType::from)
            }
        }
    }

    /// Bytes of its numbers.
    pub(super) fn bytes(&self) -> usize {
        match &self.weight {
            Weight::Dense(weight) => weight.elem_count() * weight.dtype().size_in_bytes(),
            Weight::Quantized(weight) => weight.storage_size_in_bytes(),
            Weight::Blocks(_, blocks) => blocks.len(),
            Weight::Packed(packed) => packed.bytes(),
        }
    }

    /// Whether its numbers are in quantized blocks, packed or not.
    #[cfg(any(feature = "cuda", test))]
    pub(super) fn is_quantized(&self) -> bool {
        match &self.weight {
            Weight::Dense(_) => false,
            Weight::Quantized(_) | Weight::Blocks(..) => true,
            Weight::Packed(packed) => packed.is_quantized(),
        }
    }

    /// Converts the matrix to the form with the fastest products, if there is one; drops the file's form.
    ///
    /// # Errors
    /// Candle cannot read the data, or the system is out of memory.
    pub(super) fn into_packed(self, memory: &mut WeightMemory) -> Result<Self> {
        self.packed_for(quantized_kernels(), memory)
    }

    /// As `into_packed`, with these kernels for quantized weights.
    fn packed_for(
        self,
        kernels: Option<QuantizedKernels>,
        memory: &mut WeightMemory,
    ) -> Result<Self> {
        let shape = (self.out_features, self.in_features);
        let packed = match (&self.weight, kernels) {
            (Weight::Dense(weight), _) if weight.device().is_cpu() => {
                let weight = weight.contiguous()?;
                let packed =
                    host::read(&weight, |weight| PackedMatrix::dense(weight, shape, memory))?;
                Some(packed?)
            }
            (Weight::Quantized(weight), Some(kernels)) if weight.device().is_cpu() => {
                let (dtype, blocks) = (weight.dtype().into(), weight.data()?);
                packed_blocks(kernels, dtype, &blocks, shape, memory)?
            }
            (Weight::Blocks(dtype, blocks), Some(kernels)) => {
                packed_blocks(kernels, *dtype, blocks, shape, memory)?
            }
            (Weight::Blocks(..), None) => {
                let weight = QTensor::quantize(&self.numbers()?, GgmlDType::Q8_0)?;
                return Self::quantized(weight);
            }
            (Weight::Dense(_) | Weight::Quantized(_) | Weight::Packed(_), _) => None,
        };
        Ok(match packed {
            Some(packed) => Self {
                weight: Weight::Packed(Arc::new(packed)),
                ..self
            },
            None => self,
        })
    }
}

/// Packs quantized blocks; `None` if there is no kernel for them.
fn packed_blocks(
    kernels: QuantizedKernels,
    dtype: WeightType,
    blocks: &[u8],
    shape: (usize, usize),
    memory: &mut WeightMemory,
) -> io::Result<Option<PackedMatrix>> {
    match dtype.block_type() {
        Some(block_type) => PackedMatrix::quantized(kernels, block_type, blocks, shape, memory),
        None => Ok(None),
    }
}

fn dense_product(weight: &Tensor, x: &Tensor) -> Result<Tensor> {
    if !x.device().is_cpu() && kernels::can_multiply(x, weight) {
        return kernels::product(x, weight);
    }
    x.matmul(&weight.t()?)
}

/// Candle's quantized product, with a single row doubled. For one row its Q6_K kernel sums in another order than for several,
/// so an answer would depend on the batch.
fn quantized_product(weight: &Arc<QTensor>, x: &Tensor) -> Result<Tensor> {
    if !x.device().is_cpu() {
        let product = x.to_dtype(DType::F32)?.apply_op1_no_bwd(weight.as_ref())?;
        return product.to_dtype(x.dtype());
    }
    if weight.dtype() == GgmlDType::Q6K && x.dim(0)? == 1 {
        let twice = Tensor::cat(&[x, x], 0)?;
        return twice.apply_op1_no_bwd(weight.as_ref())?.narrow(0, 0, 1);
    }
    x.apply_op1_no_bwd(weight.as_ref())
}

fn packed_product(parts: &[&PackedMatrix], bias: Option<&[f32]>, x: &Tensor) -> Result<Tensor> {
    let (rows, _) = x.dims2()?;
    let out_features: usize = parts.iter().map(|part| part.out_features()).sum();
    let product = host::read(x, |x| product(parts, bias, x, rows))?;
    Tensor::from_vec(product, (rows, out_features), x.device())
}

/// Matrices that share an input, concatenated: `[rows, in_features]` to `[rows, sum of out_features]`.
#[derive(Debug)]
pub(super) struct Linear {
    parts: Vec<Matrix>,
    bias: Option<Tensor>,
}

impl Linear {
    /// `bias`, if any, has one entry for each column of the result.
    pub(super) fn try_new(
        parts: Vec<Matrix>,
        bias: Option<Tensor>,
        memory: &mut WeightMemory,
    ) -> Result<Self> {
        let parts = side_by_side(parts)?
            .into_iter()
            .map(|part| part.into_packed(memory))
            .collect::<Result<_>>()?;
        Ok(Self { parts, bias })
    }

    /// Its matrices, side by side.
    pub(super) fn parts(&self) -> &[Matrix] {
        &self.parts
    }

    /// Whether any of its matrices is quantized.
    #[cfg(any(feature = "cuda", test))]
    pub(super) fn is_quantized(&self) -> bool {
        self.parts.iter().any(Matrix::is_quantized)
    }

    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let packed: Vec<&PackedMatrix> = self.parts.iter().filter_map(Matrix::packed).collect();
        if packed.len() == self.parts.len() {
            return match &self.bias {
                Some(bias) => host::read(bias, |bias| packed_product(&packed, Some(bias), x))?,
                None => packed_product(&packed, None, x),
            };
        }
        let products = self
            .parts
            .iter()
            .map(|part| part.forward(x))
            .collect::<Result<Vec<_>>>()?;
        let product = match products.as_slice() {
            [one] => one.clone(),
            several => Tensor::cat(several, D::Minus1)?,
        };
        match &self.bias {
            Some(bias) => product.broadcast_add(bias),
            None => Ok(product),
        }
    }
}

impl Linear {
    /// `activation(first half) * second half` of the product, if one GPU kernel computes both; else `None`.
    pub(super) fn gated(&self, x: &Tensor, activation: Activation) -> Result<Option<Tensor>> {
        let (None, [matrix]) = (&self.bias, self.parts.as_slice()) else {
            return Ok(None);
        };
        match matrix.dense_on_gpu() {
            Some(weight) if kernels::can_multiply(x, weight) => {
                kernels::gated_product(x, weight, activation).map(Some)
            }
            _ => Ok(None),
        }
    }
}

/// On a GPU, concatenates dense matrices into one, so that one product replaces several and a concatenation.
fn side_by_side(parts: Vec<Matrix>) -> Result<Vec<Matrix>> {
    let dense: Vec<&Tensor> = parts.iter().filter_map(Matrix::dense_on_gpu).collect();
    if parts.len() < 2 || dense.len() < parts.len() {
        return Ok(parts);
    }
    Ok(vec![Matrix::dense(Tensor::cat(&dense, 0)?)?])
}

impl Matrix {
    fn dense_on_gpu(&self) -> Option<&Tensor> {
        match &self.weight {
            Weight::Dense(weight) if !weight.device().is_cpu() => Some(weight),
            Weight::Dense(_) | Weight::Quantized(_) | Weight::Blocks(..) | Weight::Packed(_) => {
                None
            }
        }
    }

    fn packed(&self) -> Option<&PackedMatrix> {
        match &self.weight {
            Weight::Packed(packed) => Some(packed),
            Weight::Dense(_) | Weight::Quantized(_) | Weight::Blocks(..) => None,
        }
    }
}
