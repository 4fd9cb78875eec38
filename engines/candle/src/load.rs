//! Files to weights: opens a checkout folder or a GGUF file, reports the model and its memory, and passes its tensors to the
//! decoder.
//!
//! [`OpenModel::open`] reads only headers, and does all checks before any weights are read. [`OpenModel::weights`] then
//! reads, converts and places one tensor after the other. This module computes nothing with a model.

mod adapter;
mod checkout;
mod config;
mod embedder;
mod gguf;
mod kv;
mod map;
mod memory;
mod packed;
mod place;
mod plan;
mod quantize;
mod safetensors;
mod tensors;
mod tokenizer;
mod weights;

#[cfg(test)]
pub(crate) mod tests;

use std::path::{Path, PathBuf};
use std::{fs, io};

use genset_backend_common::card::MAX_ARTIFACT_BYTES;
use serde_json::Value;

pub use self::adapter::{AdapterError, AdapterReader};
pub use self::embedder::{OpenEmbedder, Purpose};
pub use self::kv::{KvCacheOptions, KvCacheSize, kv_bytes_per_block, kv_cache_size};
pub use self::memory::{MemoryEstimate, available_memory};
pub(crate) use self::plan::{PlannedTensor, plan};
pub use self::quantize::Quantization;
pub use self::weights::{LoadProgress, ModelWeights, WeightOptions};

use self::checkout::Naming;
use self::gguf::GgufFile;
use self::map::MappedFile;
use self::packed::Scheme;
use self::place::Place;
use self::safetensors::SafetensorsFolder;
use self::tensors::RawTensor;
use self::weights::to_u64;
use crate::error::{Bytes, LoadError};
use crate::model::config::ModelConfig;

/// The file that identifies a checkout folder.
const CONFIG: &str = "config.json";

/// Files about the tokenizer and about generation.
const TOKENIZER_FILES: [&str; 6] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
];

/// The files with a model's tensors.
trait TensorFiles: std::fmt::Debug {
    /// The folder or file.
    fn path(&self) -> &Path;

    /// Every required tensor.
    fn planned(&self) -> Vec<PlannedTensor>;

    /// The tensor of that name, as stored in the file, if it exists.
    fn tensor(&self, name: &str) -> Result<Option<RawTensor<'_>>, LoadError>;

    /// The files, mapped.
    fn mapped(&self) -> &[MappedFile];

    /// The files' name for a tensor, if it differs.
    fn own_name(&self, _name: &str) -> Option<String> {
        None
    }

    /// The tensor of that name, which must exist and have that shape.
    fn required(&self, name: &str, shape: &[usize]) -> Result<RawTensor<'_>, LoadError> {
        let Some(raw) = self.tensor(name)? else {
            return Err(LoadError::MissingTensor {
                path: self.path().to_owned(),
                name: self.own_name(name).unwrap_or_else(|| name.to_owned()),
            });
        };
        if raw.shape != shape {
            return Err(self.wrong_shape(raw.name, raw.shape.clone(), shape.to_vec()));
        }
        Ok(raw)
    }

    /// The error for a tensor of a wrong shape.
    fn wrong_shape(&self, name: &str, found: Vec<usize>, expected: Vec<usize>) -> LoadError {
        LoadError::WrongShape {
            path: self.path().to_owned(),
            name: name.to_owned(),
            found,
            expected,
        }
    }
}

/// A file that a worker publishes with its model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelFile {
    /// Its name in a checkout.
    pub name: &'static str,
    /// What it holds.
    pub content: Vec<u8>,
}

/// A model whose headers were read and checked, and whose weights are still on disk.
#[derive(Debug)]
pub struct OpenModel {
    /// The default name for clients: the folder's, or the file's without its extension (for a file in parts, the part numbers
    /// are left out).
    pub name: String,
    /// The decoder's configuration.
    pub config: ModelConfig,
    path: PathBuf,
    /// The architecture's name in GGUF files.
    architecture: String,
    source: Source,
}

#[derive(Debug)]
enum Source {
    Folder {
        files: SafetensorsFolder,
        naming: Naming,
        /// The packing of quantized weights in a checkout.
        packed: Option<Scheme>,
    },
    Gguf(GgufFile),
}

impl OpenModel {
    /// Opens a checkout folder or a `.gguf` file (the first part of several), and checks that all tensors exist with the right
    /// shapes.
    ///
    /// # Errors
    /// [`LoadError`]: any problem with the files.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let model = if path.is_dir() {
            Self::open_folder(path)?
        } else {
            Self::open_file(path)?
        };
        for tensor in plan(&model.config) {
            model.required(&tensor.name, &tensor.shape)?;
        }
        Ok(model)
    }

    fn open_folder(path: &Path) -> Result<Self, LoadError> {
        let (config_path, text) = read_config(path)?;
        let checkout = config::read(&config_path, &text)?;
        let config = checkout.config;
        check_tokenizer(path, config.vocab_size)?;
        let mut files = SafetensorsFolder::open(path)?;
        if checkout.is_multimodal {
            files.name_as_language_model();
        }
        Ok(Self {
            name: folder_name(path),
            config,
            path: path.to_owned(),
            architecture: checkout.gguf_name.to_owned(),
            source: Source::Folder {
                files,
                naming: checkout.naming,
                packed: checkout.packed,
            },
        })
    }

    fn open_file(path: &Path) -> Result<Self, LoadError> {
        let has_ending = path
            .extension()
            .is_some_and(|ending| ending.eq_ignore_ascii_case("gguf"));
        if !has_ending {
            return Err(LoadError::NotAModel {
                path: path.to_owned(),
            });
        }
        let file = GgufFile::open(path)?;
        Ok(Self {
            name: gguf_name(path),
            config: file.config()?,
            path: path.to_owned(),
            architecture: file.metadata().architecture.to_owned(),
            source: Source::Gguf(file),
        })
    }

    /// The context length of the model in a checkout folder, from its `config.json` alone. It is longer than what the file states
    /// if YaRN extends it.
    ///
    /// # Errors
    /// [`LoadError`]: the file cannot be read, or the decoder does not support the model.
    pub fn context_length(folder: &Path) -> Result<usize, LoadError> {
        let (path, text) = read_config(folder)?;
        Ok(config::read(&path, &text)?.config.context_length)
    }

    /// The path of the model.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The files that a worker publishes: a checkout's own, or for a GGUF file those made from its metadata. The tokenizer comes
    /// from `model_config`, if given.
    ///
    /// # Errors
    /// There is no usable tokenizer, or it belongs to another model.
    pub fn files(&self, model_config: Option<&Path>) -> Result<Vec<ModelFile>, LoadError> {
        let vocab_size = self.config.vocab_size;
        let config = match &self.source {
            Source::Gguf(file) => {
                let config = gguf::tokenizer::computed(file.metadata(), &self.config);
                if model_config.is_none() {
                    return files_of(file, config, vocab_size, &self.path);
                }
                gguf::tokenizer::config_file(&config)
            }
            Source::Folder { .. } => ModelFile {
                name: CONFIG,
                content: read_file(&self.path.join(CONFIG))?,
            },
        };
        let origin = model_config.unwrap_or(&self.path);
        let mut files = vec![config];
        files.extend(tokenizer_files(origin)?);
        let Some(file) = files.iter().find(|file| file.name == "tokenizer.json") else {
            let problem = "there is no tokenizer.json";
            return Err(LoadError::no_tokenizer(origin, problem));
        };
        // A checkout's own was checked when it was opened.
        if model_config.is_some() {
            tokenizer::check(&origin.join(file.name), &file.content, vocab_size)?;
        }
        Ok(files)
    }

    /// Prepares to read the weights, which the decoder then requests one by one.
    ///
    /// `progress` is called after each tensor. Its error ends loading.
    #[must_use]
    pub fn weights<'a>(
        &'a self,
        options: WeightOptions,
        progress: impl FnMut(LoadProgress) -> Result<(), LoadError> + 'a,
    ) -> ModelWeights<'a> {
        ModelWeights::new(self, options, Box::new(progress))
    }

    /// The memory that the model will take on the device with steps of `step_tokens`, before anything is allocated.
    #[must_use]
    pub fn memory(&self, options: &WeightOptions, step_tokens: usize) -> MemoryEstimate {
        let numbers = self.config.step_numbers_per_token();
        let bytes = numbers
            .saturating_mul(step_tokens)
            .saturating_mul(options.dtype.size_in_bytes());
        let mut estimate = MemoryEstimate::new(self, options);
        estimate.workspace = estimate.workspace.max(to_u64(bytes));
        estimate
    }

    /// The place of the tensor in the files; `None` if they have no equivalent.
    fn place(&self, name: &str) -> Option<Place> {
        match &self.source {
            Source::Folder { naming, .. } => Some(naming.place(name, &self.config)),
            Source::Gguf(_) => gguf::place(&self.architecture, name, &self.config),
        }
    }
}

impl TensorFiles for OpenModel {
    fn path(&self) -> &Path {
        &self.path
    }

    fn planned(&self) -> Vec<PlannedTensor> {
        plan(&self.config)
    }

    fn tensor(&self, name: &str) -> Result<Option<RawTensor<'_>>, LoadError> {
        let Some(place) = self.place(name) else {
            return Ok(None);
        };
        let found = match &self.source {
            Source::Folder { files, packed, .. } => match packed {
                Some(scheme) => scheme.tensor(files, &place.name)?,
                None => files.tensor(&place.name)?,
            },
            Source::Gguf(file) => file.tensor(&place.name)?,
        };
        let Some(raw) = found else {
            return Ok(None);
        };
        let shape = raw.shape.clone();
        match place.cut(raw) {
            Ok(raw) => Ok(Some(raw)),
            Err(expected) => Err(self.wrong_shape(&place.name, shape, expected)),
        }
    }

    fn mapped(&self) -> &[MappedFile] {
        match &self.source {
            Source::Folder { files, .. } => files.mapped(),
            Source::Gguf(file) => file.mapped(),
        }
    }

    fn own_name(&self, name: &str) -> Option<String> {
        self.place(name).map(|place| place.name)
    }
}

/// The files that a worker publishes for a GGUF file, made from its metadata. The tensors may be missing and the architecture
/// unknown: this is for engines that compute the model themselves.
///
/// # Errors
/// It is not a GGUF file of a language model; there is no usable tokenizer, or it belongs to another model.
pub fn gguf_files(path: &Path) -> Result<Vec<ModelFile>, LoadError> {
    let file = GgufFile::open(path)?;
    let metadata = file.metadata();
    let (config, vocab_size) = match file.config() {
        Ok(config) => {
            let described = gguf::tokenizer::computed(metadata, &config);
            (described, config.vocab_size)
        }
        Err(error) => {
            tracing::debug!(%error, "out=candle would not compute this model");
            let vocab_size = gguf::config::vocab_size(metadata)?;
            (gguf::tokenizer::said(metadata, vocab_size)?, vocab_size)
        }
    };
    files_of(&file, config, vocab_size, path)
}

/// The files of a GGUF file. `config` is the start of `config.json`.
fn files_of(
    file: &GgufFile,
    config: Value,
    vocab_size: usize,
    path: &Path,
) -> Result<Vec<ModelFile>, LoadError> {
    let files = gguf::tokenizer::files(file.metadata(), config)?;
    let Some(tokenizer) = files.iter().find(|file| file.name == "tokenizer.json") else {
        return Err(LoadError::no_tokenizer(path, "it has no tokenizer"));
    };
    let shown = path.join(tokenizer.name);
    tokenizer::check(&shown, &tokenizer.content, vocab_size)?;
    Ok(files)
}

/// The name of the model in a GGUF file: the file's name without its extension and part number.
#[must_use]
pub fn gguf_name(path: &Path) -> String {
    if let Some((name, ..)) = gguf::parts::parse_name(path) {
        return name.to_owned();
    }
    path.file_stem()
        .map_or_else(default_name, |name| name.to_string_lossy().into_owned())
}

/// The name of the model in a checkout folder.
fn folder_name(path: &Path) -> String {
    let full = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    full.file_name()
        .map_or_else(default_name, |name| name.to_string_lossy().into_owned())
}

fn default_name() -> String {
    "model".to_owned()
}

/// Reads a file other than weights. In a folder from elsewhere it may be a link to a pipe, or to a device without an end.
fn read_file(path: &Path) -> Result<Vec<u8>, LoadError> {
    let read = |error| LoadError::read(path, error);
    let found = fs::metadata(path).map_err(read)?;
    if !found.is_file() || found.len() > MAX_ARTIFACT_BYTES {
        let most = Bytes(MAX_ARTIFACT_BYTES);
        let problem = format!("it is no regular file of at most {most}");
        return Err(read(io::Error::other(problem)));
    }
    fs::read(path).map_err(read)
}

/// The path and the content of a checkout's `config.json`.
fn read_config(folder: &Path) -> Result<(PathBuf, Vec<u8>), LoadError> {
    let path = folder.join(CONFIG);
    if !path.exists() {
        let problem = format!("it has no {CONFIG}{}", safetensors::unfinished(folder));
        return Err(LoadError::incomplete(folder, problem));
    }
    let text = read_file(&path)?;
    Ok((path, text))
}

/// Checks the tokenizer of a checkout, if it has one.
fn check_tokenizer(folder: &Path, vocab_size: usize) -> Result<(), LoadError> {
    let path = folder.join("tokenizer.json");
    if path.exists() {
        tokenizer::check(&path, &read_file(&path)?, vocab_size)?;
    }
    Ok(())
}

fn tokenizer_files(folder: &Path) -> Result<Vec<ModelFile>, LoadError> {
    let there = TOKENIZER_FILES
        .into_iter()
        .map(|name| (name, folder.join(name)))
        .filter(|(_, path)| path.exists());
    there
        .map(|(name, path)| {
            let content = read_file(&path)?;
            Ok(ModelFile { name, content })
        })
        .collect()
}
