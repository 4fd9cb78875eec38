//! PEFT adapters: a folder with `adapter_config.json` and `adapter_model.safetensors` becomes [`AdapterWeights`].
//!
//! Anything that would change answers but is not supported is rejected, naming the field or tensor, before any numbers are
//! read. So is an adapter that exceeds the memory left.
//!
//! # Source
//! The file format of the library `peft`, <https://huggingface.co/docs/peft/developer_guides/checkpoint>.

mod config;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use genset_backend_common::{EngineError, ErrorKind, error::At};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use self::config::PeftConfig;
use super::place::row_order;
use super::safetensors::float_dtype;
use super::tensors::{Data, RawTensor, RowOrder, digest};
use crate::error::{Bytes, LoadError};
use crate::model::config::ModelConfig;
use crate::model::lora::scaled;
use crate::model::{AdapterTarget, AdapterWeights};

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// The file that older releases of the library wrote.
const PICKLED: &str = "adapter_model.bin";

/// The most bytes of `adapter_config.json`.
const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// The most bytes of the header, with names and shapes.
const MAX_HEADER_BYTES: u64 = 16 << 20;

/// Why an adapter cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdapterError {
    /// There is no such folder, or it lacks the files of an adapter.
    #[error("{} is no adapter: {problem}; give a folder with {CONFIG} and {WEIGHTS}, as the library peft saves it", path.display())]
    NotAnAdapter {
        /// The folder.
        path: PathBuf,
        /// What is missing.
        problem: String,
    },
    /// A file cannot be read, is broken, or does not fit the model.
    #[error(transparent)]
    File(#[from] LoadError),
    /// A tensor belongs to a module that adapters cannot change.
    #[error("{}: tensor {name} is not supported: an adapter may have lora_A and lora_B of {} in the layers of this model", path.display(), AdapterTarget::MODULES.join(", "))]
    UnknownTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
    },
    /// The weights exceed the memory for adapters.
    #[error("{} takes {}, and adapters may take {} more; raise --adapter-memory, or unload others", path.display(), Bytes(*bytes), Bytes(*left))]
    TooLarge {
        /// The folder.
        path: PathBuf,
        /// Bytes that it would take.
        bytes: u64,
        /// Bytes that are left.
        left: u64,
    },
}

impl AdapterError {
    /// The error's kind across crates.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NotAnAdapter { .. } => ErrorKind::NotFound,
            Self::UnknownTensor { .. } => ErrorKind::Unsupported,
            Self::File(error) => error.kind(),
            Self::TooLarge { .. } => ErrorKind::InvalidArgument,
        }
    }
}

impl From<AdapterError> for EngineError {
    fn from(error: AdapterError) -> Self {
        Self::new(error.kind(), error.to_string())
            .with_at(At::other("adapter"))
            .with_source(error)
    }
}

type Result<T> = std::result::Result<T, AdapterError>;

/// The target that adapters are read for.
#[derive(Debug, Clone)]
pub struct AdapterReader {
    /// The base model.
    pub config: ModelConfig,
    /// The device of its weights.
    pub device: Device,
    /// The type of its activations.
    pub dtype: DType,
}

impl AdapterReader {
    /// Reads the adapter in the folder `path`, which may take at most `left` bytes.
    ///
    /// # Errors
    /// [`AdapterError`]: any problem with the files.
    pub fn read(&self, path: &Path, left: u64) -> Result<AdapterWeights> {
        if !path.is_dir() {
            return Err(not_an_adapter(path, "it is no folder that can be read"));
        }
        let config = path.join(CONFIG);
        let peft = PeftConfig::read(&config, &read_file(path, CONFIG, MAX_CONFIG_BYTES)?)?;
        let file = path.join(WEIGHTS);
        if !file.exists() && path.join(PICKLED).exists() {
            let problem = format!("it has {PICKLED}, and pickled weights are not read");
            return Err(not_an_adapter(path, problem));
        }
        let most_bytes = left.saturating_add(MAX_HEADER_BYTES);
        let content = read_file(path, WEIGHTS, most_bytes)?;
        let tensors = SafeTensors::deserialize(&content).map_err(|error| broken(&file, error))?;
        let modules = self.modules(&file, &tensors, peft.rank)?;
        let bytes = modules.iter().map(|module| self.bytes(module, peft.rank));
        let bytes = bytes.fold(0, u64::saturating_add);
        if bytes > left {
            let path = path.to_owned();
            return Err(AdapterError::TooLarge { path, bytes, left });
        }
        let weights = AdapterWeights::new(self.config.num_layers);
        // The scale is not in that file.
        let mut weights = weights.with_digest(digest(peft.scale.to_bits(), &content));
        for module in &modules {
            self.add(&mut weights, &file, module, &peft)?;
        }
        Ok(weights)
    }

    /// Bytes of a module's numbers once loaded.
    fn bytes(&self, module: &Module<'_>, rank: usize) -> u64 {
        let (dtype, is_cpu) = (self.dtype, self.device.is_cpu());
        let target = module.target;
        let a = AdapterWeights::bytes_of((rank, target.in_features), dtype, is_cpu);
        let b = AdapterWeights::bytes_of((target.out_features, rank), dtype, is_cpu);
        a.saturating_add(b)
    }

    /// The modules in the file, all known and with the right shapes.
    fn modules<'a>(
        &self,
        file: &Path,
        tensors: &SafeTensors<'a>,
        rank: usize,
    ) -> Result<Vec<Module<'a>>> {
        let mut pairs: BTreeMap<(usize, String), Pair<'a>> = BTreeMap::new();
        // Sorted, so that the same file always fails with the same tensor.
        let tensors: BTreeMap<&str, TensorView<'a>> = tensors.iter().collect();
        for (name, view) in tensors {
            let unknown = || AdapterError::UnknownTensor {
                path: file.to_owned(),
                name: name.to_owned(),
            };
            let parsed = TensorName::parse(name).ok_or_else(unknown)?;
            let pair = pairs.entry((parsed.layer, parsed.module.to_owned()));
            let pair = pair.or_default();
            pair.name = parsed.stem.to_owned();
            let matrix = match parsed.matrix {
                'A' => &mut pair.a,
                _ => &mut pair.b,
            };
            if matrix.replace((name.to_owned(), view)).is_some() {
                return Err(broken(file, format!("tensor {name} is there twice")));
            }
        }
        if pairs.is_empty() {
            return Err(broken(file, "it has no tensors"));
        }
        pairs
            .into_iter()
            .map(|((layer, module), pair)| self.module(file, layer, module, pair, rank))
            .collect()
    }

    fn module<'a>(
        &self,
        file: &Path,
        layer: usize,
        module: String,
        pair: Pair<'a>,
        rank: usize,
    ) -> Result<Module<'a>> {
        let missing = |matrix: char| LoadError::MissingTensor {
            path: file.to_owned(),
            name: format!("{}.lora_{matrix}.weight", pair.name),
        };
        let (a_name, a) = pair.a.clone().ok_or_else(|| missing('A'))?;
        let (b_name, b) = pair.b.clone().ok_or_else(|| missing('B'))?;
        let target = AdapterTarget::of(&self.config, &module);
        let target = target.filter(|_| layer < self.config.num_layers);
        let target = target.ok_or_else(|| AdapterError::UnknownTensor {
            path: file.to_owned(),
            name: a_name.clone(),
        })?;
        let shapes = [
            (&a_name, &a, [rank, target.in_features]),
            (&b_name, &b, [target.out_features, rank]),
        ];
        for (name, view, expected) in shapes {
            if view.shape() != expected {
                let error = LoadError::WrongShape {
                    path: file.to_owned(),
                    name: name.clone(),
                    found: view.shape().to_vec(),
                    expected: expected.to_vec(),
                };
                return Err(error.into());
            }
        }
        Ok(Module {
            layer,
            module,
            target,
            a: (a_name, a),
            b: (b_name, b),
        })
    }

    fn add(
        &self,
        weights: &mut AdapterWeights,
        file: &Path,
        module: &Module<'_>,
        peft: &PeftConfig,
    ) -> Result<()> {
        let target = module.target;
        let candle = |source| LoadError::candle(&module.a.0, source);
        let tensor = |numbers, shape, scale| {
            scaled(numbers, shape, scale, self.dtype, &self.device).map_err(candle)
        };
        let a = numbers(file, &module.a, |row| row)?;
        let a = tensor(a, (peft.rank, target.in_features), 1.0)?;
        let (order, rotated) = self.rows(module);
        let b = numbers(file, &module.b, |row| {
            if row < rotated {
                order.source(row)
            } else {
                row
            }
        })?;
        if !self.holds(&b, peft.scale).map_err(candle)? {
            let problem = format!(
                "with it, numbers of the tensor {} are larger than {} holds",
                module.b.0,
                self.dtype.as_str()
            );
            let config = file.with_file_name(CONFIG);
            return Err(LoadError::bad_config(&config, "lora_alpha", problem).into());
        }
        let b = tensor(b, (target.out_features, peft.rank), peft.scale)?;
        Ok(weights.add(module.layer, target, a, b).map_err(candle)?)
    }

    /// Whether finite numbers stay finite in the stored type. If not, every answer with the adapter would fail.
    fn holds(&self, numbers: &[f32], scale: f64) -> candle_core::Result<bool> {
        let sizes = numbers.iter().map(|number| number.abs());
        let largest = vec![sizes.fold(0.0, f32::max)];
        let kept = scaled(largest, (1, 1), scale, self.dtype, &Device::Cpu)?;
        let kept: Vec<f32> = kept.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
        Ok(kept.iter().all(|number| number.is_finite()))
    }

    /// The model's order of the module's rows, and the number of leading rows that it applies to: those of queries and keys.
    fn rows(&self, module: &Module<'_>) -> (RowOrder, usize) {
        let config = &self.config;
        let order = row_order("self_attn.q_proj.weight", config, false);
        let rotated = match module.module.as_str() {
            "self_attn.q_proj" | "self_attn.k_proj" => module.target.out_features,
            "self_attn.qkv_proj" => (config.num_heads + config.num_kv_heads) * config.head_dim,
            _ => 0,
        };
        (order, rotated)
    }
}

/// The tensors of a module in the file.
#[derive(Debug, Default)]
struct Pair<'a> {
    /// The part of the name before `.lora_A.weight`.
    name: String,
    a: Option<(String, TensorView<'a>)>,
    b: Option<(String, TensorView<'a>)>,
}

/// A module that the adapter changes.
struct Module<'a> {
    layer: usize,
    /// Its name inside the layer in `transformers`.
    module: String,
    target: AdapterTarget,
    a: (String, TensorView<'a>),
    b: (String, TensorView<'a>),
}

/// The parts of a tensor's name.
#[derive(Debug, PartialEq, Eq)]
struct TensorName<'a> {
    /// The part before `.lora_A.weight`.
    stem: &'a str,
    layer: usize,
    module: &'a str,
    /// `A` or `B`.
    matrix: char,
}

impl<'a> TensorName<'a> {
    /// Parses `base_model.model.model.layers.LAYER.MODULE.lora_A.weight`; the layers of multimodal models have another prefix.
    fn parse(name: &'a str) -> Option<Self> {
        const PREFIXES: [&str; 3] = [
            "model.layers.",
            "model.language_model.layers.",
            "language_model.model.layers.",
        ];
        let of = |matrix: char| {
            let stem = name.strip_suffix(match matrix {
                'A' => ".lora_A.weight",
                _ => ".lora_B.weight",
            });
            stem.map(|stem| (stem, matrix))
        };
        let (stem, matrix) = of('A').or_else(|| of('B'))?;
        let rest = stem.strip_prefix("base_model.model.")?;
        let rest = PREFIXES
            .iter()
            .find_map(|prefix| rest.strip_prefix(prefix))?;
        let (layer, module) = rest.split_once('.')?;
        let is_number = !layer.is_empty() && layer.bytes().all(|byte| byte.is_ascii_digit());
        Some(Self {
            stem,
            layer: layer.parse().ok().filter(|_| is_number)?,
            module,
            matrix,
        })
    }
}

/// A tensor's numbers; row `row` is row `source(row)` of the file.
fn numbers(
    file: &Path,
    (name, view): &(String, TensorView<'_>),
    source: impl Fn(usize) -> usize,
) -> Result<Vec<f32>> {
    let unread = |dtype: Dtype| {
        broken(
            file,
            format!("tensor {name} is {dtype}; tensors may be F32, F16 or BF16"),
        )
    };
    let raw = RawTensor {
        name,
        dtype: float_dtype(view.dtype()).ok_or_else(|| unread(view.dtype()))?,
        shape: view.shape().to_vec(),
        data: Data::InFile(view.data()),
        rows: RowOrder::Halves,
    };
    let mut numbers = vec![0.0; raw.elements()];
    for (row, numbers) in numbers.chunks_mut(raw.row_len().max(1)).enumerate() {
        raw.read_row(source(row), numbers);
    }
    // A non-finite number would make every answer with the adapter fail.
    if numbers.iter().all(|number| number.is_finite()) {
        Ok(numbers)
    } else {
        Err(broken(
            file,
            format!("tensor {name} has numbers that are not finite"),
        ))
    }
}

fn not_an_adapter(path: &Path, problem: impl Into<String>) -> AdapterError {
    AdapterError::NotAnAdapter {
        path: path.to_owned(),
        problem: problem.into(),
    }
}

fn broken(path: &Path, problem: impl std::fmt::Display) -> AdapterError {
    LoadError::broken(path, problem).into()
}

/// Reads a file of the folder of at most `most_bytes`. Refuses non-files such as pipes, which might never end.
fn read_file(folder: &Path, name: &str, most_bytes: u64) -> Result<Vec<u8>> {
    let path = folder.join(name);
    let read = |source: io::Error| {
        if source.kind() == io::ErrorKind::NotFound {
            return not_an_adapter(folder, format!("it has no {name}"));
        }
        LoadError::read(&path, source).into()
    };
    let metadata = fs::metadata(&path).map_err(read)?;
    if !metadata.is_file() {
        return Err(not_an_adapter(folder, format!("its {name} is no file")));
    }
    let too_large = |bytes| match name {
        WEIGHTS => AdapterError::TooLarge {
            path: folder.to_owned(),
            bytes,
            left: most_bytes,
        },
        _ => broken(&path, format!("it has more than {}", Bytes(most_bytes))),
    };
    if metadata.len() > most_bytes {
        return Err(too_large(metadata.len()));
    }
    let mut content = Vec::new();
    let mut file = File::open(&path)
        .map_err(read)?
        .take(most_bytes.saturating_add(1));
    file.read_to_end(&mut content).map_err(read)?;
    let bytes = u64::try_from(content.len()).unwrap_or(u64::MAX);
    if bytes > most_bytes {
        return Err(too_large(bytes));
    }
    Ok(content)
}
