//! [`ModelWeights`]: a model's tensors, converted and placed as the decoder requests them.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fmt;

use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;

use super::TensorFiles;
use super::quantize::{MIN_ROWS, Part, Quantization, floats, quantize};
use super::tensors::{RawTensor, bytes_of, digest};
use crate::error::LoadError;
use crate::model::ModelConfig;
use crate::model::linear::{Matrix, WeightType};
use crate::model::weights::Weights;

/// The destination and the form of weights.
#[derive(Debug, Clone)]
pub struct WeightOptions {
    /// The device of the tensors.
    pub device: Device,
    /// The type of weights and activations on a GPU: BF16 or F16. On the CPU activations are f32.
    pub dtype: DType,
    /// The type that matrices of floats are quantized to on the CPU. Matrices quantized in a GGUF file stay as they are.
    pub quantization: Quantization,
}

impl WeightOptions {
    /// As in the file, in f32 on the CPU.
    #[cfg(test)]
    pub(crate) fn exact() -> Self {
        Self {
            device: Device::Cpu,
            dtype: DType::F32,
            quantization: Quantization::None,
        }
    }
}

/// Bytes read before the memory of their pages is released: converted data is not read again.
const RELEASED: u64 = 64 << 20;

/// The progress of loading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadProgress {
    /// Tensors loaded so far.
    pub tensors: usize,
    /// All tensors.
    pub all_tensors: usize,
    /// Bytes read so far.
    pub bytes: u64,
    /// All bytes.
    pub all_bytes: u64,
}

/// Told about each tensor that was loaded. Its error ends loading.
type Report<'a> = Box<dyn FnMut(LoadProgress) -> Result<(), LoadError> + 'a>;

/// Reads a model's weights. Made by [`OpenModel::weights`](super::OpenModel::weights).
pub struct ModelWeights<'a> {
    model: &'a dyn TensorFiles,
    options: WeightOptions,
    progress: LoadProgress,
    report: Report<'a>,
    /// The part of the model that uses each matrix.
    parts: HashMap<String, Part>,
    /// Matrices whose rows do not fit the requested quantization.
    fallbacks: usize,
    /// Bytes read whose pages are still in memory.
    unreleased: u64,
    /// The number of matrices in packed forms, by the form and the resulting type.
    converted: BTreeMap<(&'static str, String), usize>,
    /// The digest so far; `None` if nobody wants it.
    digest: Option<u64>,
}

impl fmt::Debug for ModelWeights<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelWeights")
            .field("model", &self.model.path())
            .field("options", &self.options)
            .field("progress", &self.progress)
            .finish_non_exhaustive()
    }
}

impl<'a> ModelWeights<'a> {
    pub(super) fn new(
        model: &'a dyn TensorFiles,
        options: WeightOptions,
        report: Report<'a>,
    ) -> Self {
        let planned = model.planned();
        let bytes_of = |name: &str| match model.tensor(name) {
            Ok(Some(raw)) => to_u64(raw.file_bytes()),
            Ok(None) | Err(_) => 0,
        };
        let progress = LoadProgress {
            tensors: 0,
            all_tensors: planned.len(),
            bytes: 0,
            all_bytes: planned.iter().map(|tensor| bytes_of(&tensor.name)).sum(),
        };
        let parts = planned
            .into_iter()
            .filter_map(|tensor| Some((tensor.name, tensor.matrix?)));
        Self {
            model,
            options,
            progress,
            report,
            parts: parts.collect(),
            fallbacks: 0,
            unreleased: 0,
            converted: BTreeMap::new(),
            digest: None,
        }
    }

    /// Makes it compute a [digest](Self::digest), for which it reads each byte of the tensors once more.
    #[must_use]
    pub(crate) fn with_digest(mut self, config: &ModelConfig) -> Self {
        // No token's keys and values depend on how many tokens there may be.
        let config = ModelConfig {
            context_length: 0,
            ..config.clone()
        };
        self.digest = Some(digest(0, format!("{config:?}").as_bytes()));
        self
    }

    /// A number that identifies the model as it is computed: its configuration, its tensors loaded so far, and the types that they
    /// are kept in. `None` if it is not computed.
    pub(crate) fn digest(&self) -> Option<u64> {
        self.digest
    }

    /// Adds a tensor to the digest. `became` is the type that it is kept in.
    fn identify(&mut self, name: &str, raw: &RawTensor<'_>, became: &str) {
        let Some(all) = &mut self.digest else { return };
        let rows = (0..raw.num_rows()).into_par_iter().with_min_len(MIN_ROWS);
        let rows: Vec<u64> = rows.map(|row| digest(0, &raw.row(row)).to_le()).collect();
        let of_names = digest(digest(0, name.as_bytes()), became.as_bytes());
        // A sum: the order in which tensors are requested does not matter.
        *all = all.wrapping_add(digest(of_names, bytemuck::cast_slice(&rows)));
    }

    fn done(&mut self, bytes: usize) -> Result<(), LoadError> {
        self.progress.tensors += 1;
        self.progress.bytes += to_u64(bytes);
        self.unreleased += to_u64(bytes);
        if self.unreleased >= RELEASED {
            self.unreleased = 0;
            for file in self.model.mapped() {
                file.release();
            }
        }
        if self.progress.tensors == self.progress.all_tensors {
            for ((form, became), matrices) in &self.converted {
                tracing::info!(form, became, matrices, "packed weights are read");
            }
        }
        (self.report)(self.progress)
    }

    fn load(&mut self, name: &str, shape: [usize; 2]) -> Result<Matrix, LoadError> {
        let raw = self.model.required(name, &shape)?;
        let part = self.parts.get(name).copied().unwrap_or(Part::Layer);
        let device = &self.options.device;
        let matrix = if let Some(dtype) = candle_blocks(raw.dtype) {
            Matrix::quantized(as_it_is(&raw, dtype, device)?)
        } else if !raw.dtype.is_float() {
            own_blocks(&raw, shape, &self.options)
        } else if device.is_cpu() {
            let dtype = self.options.quantization.dtype_for(raw.row_len(), part);
            if dtype == GgmlDType::F32 {
                Matrix::dense(dense(&raw)?)
            } else {
                Matrix::quantized(quantize(&raw, dtype)?)
            }
        } else {
            Matrix::dense(on_device(&raw, device, self.options.dtype)?)
        };
        let matrix = matrix.map_err(|error| LoadError::candle(raw.name, error))?;
        let (bytes, row_len, is_floats) = (raw.file_bytes(), raw.row_len(), raw.dtype.is_float());
        if is_floats && self.options.device.is_cpu() {
            self.tell_fallback(name, row_len, part);
        }
        let became = became(raw.dtype, &self.options, row_len, part);
        self.identify(name, &raw, &became);
        if let Some(form) = raw.form() {
            *self.converted.entry((form, became)).or_default() += 1;
        }
        self.done(bytes)?;
        Ok(matrix)
    }

    /// Logs once that rows do not fit; further cases go to the debug log.
    fn tell_fallback(&mut self, name: &str, row_len: usize, part: Part) {
        let wanted = self.options.quantization;
        let got = wanted.dtype_for(row_len, part);
        // A row length of 0 is a multiple of every block size, so this is the type without a fallback.
        if got == wanted.dtype_for(0, part) {
            return;
        }
        self.fallbacks += 1;
        if self.fallbacks == 1 {
            tracing::warn!(
                %wanted, got = ?got, tensor = name, row_len,
                "rows are not whole blocks of the requested quantization; such matrices use another (logged once)"
            );
        } else {
            tracing::debug!(%wanted, got = ?got, tensor = name, row_len, "another quantization");
        }
    }
}

impl Weights for ModelWeights<'_> {
    fn device(&self) -> &Device {
        &self.options.device
    }

    fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<Tensor, LoadError> {
        let raw = self.model.required(name, shape)?;
        let on_cpu = if raw.dtype.is_float() {
            dense(&raw)?
        } else if let Some(dtype) = candle_blocks(raw.dtype) {
            let quantized = as_it_is(&raw, dtype, &Device::Cpu)?;
            let values = quantized.dequantize(&Device::Cpu);
            values.map_err(|error| LoadError::candle(raw.name, error))?
        } else {
            return Err(LoadError::UnsupportedDtype {
                path: self.model.path().to_owned(),
                name: raw.name.to_owned(),
                found: raw.dtype.to_string(),
                supported: "F32, F16 or BF16 where they are no matrix",
            });
        };
        let bytes = raw.file_bytes();
        self.identify(name, &raw, "");
        let device = &self.options.device;
        let placed = if device.is_cpu() {
            Ok(on_cpu)
        } else {
            on_cpu
                .to_dtype(self.options.dtype)
                .and_then(|tensor| tensor.to_device(device))
        };
        let placed = placed.map_err(|error| LoadError::candle(name, error))?;
        self.done(bytes)?;
        Ok(placed)
    }

    fn matrix(
        &mut self,
        name: &str,
        out_features: usize,
        in_features: usize,
    ) -> Result<Matrix, LoadError> {
        self.load(name, [out_features, in_features])
    }
}

/// The type that a matrix is kept in.
fn became(dtype: WeightType, options: &WeightOptions, row_len: usize, part: Part) -> String {
    if !dtype.is_float() {
        dtype.to_string()
    } else if options.device.is_cpu() {
        WeightType::from(options.quantization.dtype_for(row_len, part)).to_string()
    } else {
        format!("{:?}", options.dtype)
    }
}

/// A tensor of floats in f32 on the CPU.
pub(super) fn dense(raw: &RawTensor<'_>) -> Result<Tensor, LoadError> {
    Tensor::from_vec(floats(raw), raw.shape.as_slice(), &Device::Cpu)
        .map_err(|error| LoadError::candle(raw.name, error))
}

/// A tensor of floats on a GPU, copied in the file's type and converted there.
fn on_device(raw: &RawTensor<'_>, device: &Device, dtype: DType) -> Result<Tensor, LoadError> {
    let from = if raw.dtype == WeightType::F32 {
        DType::F32
    } else if raw.dtype == WeightType::F16 {
        DType::F16
    } else {
        DType::BF16
    };
    let bytes = in_order(raw);
    Tensor::from_raw_buffer(bytes.bytes(), from, &raw.shape, device)
        .and_then(|tensor| tensor.to_dtype(dtype))
        .map_err(|error| LoadError::candle(raw.name, error))
}

/// Candle's equivalent of a block type, if it has one.
fn candle_blocks(dtype: WeightType) -> Option<GgmlDType> {
    match dtype {
        WeightType::Candle(blocks) if !dtype.is_float() => Some(blocks),
        WeightType::Candle(_) | WeightType::Iq4Nl | WeightType::Iq4Xs | WeightType::Mxfp4 => None,
    }
}

/// A matrix of blocks that candle does not support; on a GPU it is converted to numbers.
fn own_blocks(
    raw: &RawTensor<'_>,
    [out_features, in_features]: [usize; 2],
    options: &WeightOptions,
) -> candle_core::Result<Matrix> {
    let shape = (out_features, in_features);
    let matrix = Matrix::blocks(raw.dtype, in_order(raw).bytes(), shape)?;
    if options.device.is_cpu() {
        return Ok(matrix);
    }
    let ids: Vec<u32> = (0..).take(out_features).collect();
    let numbers = matrix.rows(&ids, &Device::Cpu, options.dtype)?;
    Matrix::dense(numbers.to_device(&options.device)?)
}

/// A quantized tensor with the file's blocks.
fn as_it_is(raw: &RawTensor<'_>, dtype: GgmlDType, device: &Device) -> Result<QTensor, LoadError> {
    let bytes = in_order(raw);
    QStorage::from_data(Cow::Borrowed(bytes.bytes()), device, dtype)
        .and_then(|storage| QTensor::new(storage, raw.shape.as_slice()))
        .map_err(|error| LoadError::candle(raw.name, error))
}

/// A tensor's bytes with rows in the model's order. Quantized rows are whole blocks, so they can be moved.
fn in_order<'a>(raw: &RawTensor<'a>) -> Aligned<'a> {
    let in_place = raw.in_place();
    if let Some(bytes) = in_place.filter(|bytes| bytes.as_ptr().addr().is_multiple_of(ALIGNMENT)) {
        return Aligned::InPlace(bytes);
    }
    let row_bytes = bytes_of(raw.dtype, raw.row_len()).unwrap_or(0);
    let length = raw.num_rows() * row_bytes;
    let mut words = vec![0u64; length.div_ceil(ALIGNMENT)];
    let places: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
    let places = places.get_mut(..length).unwrap_or_default();
    places
        .par_chunks_mut(row_bytes.max(1))
        .with_min_len(MIN_ROWS)
        .enumerate()
        .for_each(|(row, place)| {
            let bytes = raw.row(row);
            if let Some(place) = place.get_mut(..bytes.len()) {
                place.copy_from_slice(&bytes);
            }
        });
    Aligned::Moved { words, length }
}

/// The minimum alignment of all block types, which candle requires: that of `u64`.
const ALIGNMENT: usize = 8;

enum Aligned<'a> {
    InPlace(&'a [u8]),
    Moved {
        words: Vec<u64>,
        /// In bytes.
        length: usize,
    },
}

impl Aligned<'_> {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::InPlace(bytes) => bytes,
            Self::Moved { words, length } => {
                let bytes: &[u8] = bytemuck::cast_slice(words);
                bytes.get(..*length).unwrap_or_default()
            }
        }
    }
}

pub(super) fn to_u64(bytes: usize) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}
