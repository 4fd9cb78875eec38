//! [`LoadError`]: why a model cannot be loaded, for the person who started the worker. Each message names the file or tensor,
//! the problem, and the remedy.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use genset_backend_common::{EngineError, ErrorKind, error::At};

/// Why a model cannot be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The path is neither a folder nor a GGUF file.
    #[error("{} is no model: give the folder of a checkout (config.json and *.safetensors) or a .gguf file", path.display())]
    NotAModel {
        /// The path.
        path: PathBuf,
    },
    /// A required file is missing, or its download is incomplete.
    #[error("{} is not complete: {problem}. Download it again, or wait until its download has ended", path.display())]
    Incomplete {
        /// The folder or file.
        path: PathBuf,
        /// What is missing.
        problem: String,
    },
    /// A file cannot be opened or read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file ends too early, or its metadata is inconsistent.
    #[error("{} is broken: {problem}. Was its download cut short? Compare its size with the original's", path.display())]
    Broken {
        /// The file.
        path: PathBuf,
        /// What is inconsistent, and where.
        problem: String,
    },
    /// A value that the decoder needs is missing or out of its range.
    #[error("{}: {field}: {problem}", path.display())]
    BadConfig {
        /// `config.json` or the GGUF file.
        path: PathBuf,
        /// The key.
        field: String,
        /// What is wrong with its value.
        problem: String,
    },
    /// The decoder does not support this architecture.
    #[error("{}: the architecture {architecture} is not supported; supported are {}", path.display(), known.join(", "))]
    UnknownArchitecture {
        /// `config.json` or the GGUF file.
        path: PathBuf,
        /// The architecture that the file names.
        architecture: String,
        /// The supported architectures.
        known: Vec<&'static str>,
    },
    /// The decoder does not support this variant of a known architecture.
    #[error("{}: {field} = {value} is not supported{}", path.display(), hint(fix))]
    UnsupportedVariant {
        /// `config.json` or the GGUF file.
        path: PathBuf,
        /// The key.
        field: String,
        /// Its value.
        value: String,
        /// What would work instead, if anything.
        fix: &'static str,
    },
    /// A required tensor is in none of the model's files.
    #[error("{} has no tensor {name}, which its configuration calls for; do the weights belong to it?", path.display())]
    MissingTensor {
        /// The folder or file.
        path: PathBuf,
        /// The tensor, by the file's naming.
        name: String,
    },
    /// A tensor's shape differs from the configuration.
    #[error("{}: tensor {name} is {found:?} and should be {expected:?}; do the weights belong to the configuration?", path.display())]
    WrongShape {
        /// The folder or file.
        path: PathBuf,
        /// The tensor, by the file's naming.
        name: String,
        /// Its shape.
        found: Vec<usize>,
        /// The shape from the configuration.
        expected: Vec<usize>,
    },
    /// The type of a tensor's numbers is not supported.
    #[error("{}: tensor {name} is {found}; tensors may be {supported}", path.display())]
    UnsupportedDtype {
        /// The folder or file.
        path: PathBuf,
        /// The tensor, by the file's naming.
        name: String,
        /// Its type.
        found: String,
        /// The supported types.
        supported: &'static str,
    },
    /// The tokenizer produces tokens that the model does not have.
    #[error("{}: token {token:?} has the id {id}, but the model's vocabulary ends at {vocab_size}; is it another model's tokenizer?", path.display())]
    TokenizerMismatch {
        /// `tokenizer.json` or the GGUF file.
        path: PathBuf,
        /// A token beyond the vocabulary.
        token: String,
        /// Its id.
        id: u64,
        /// The size of the model's vocabulary.
        vocab_size: usize,
    },
    /// A GGUF file has no usable tokenizer, and no folder with one was given.
    #[error("{}: {problem}; give a folder with the model's tokenizer.json and tokenizer_config.json as --model-config", path.display())]
    NoTokenizer {
        /// The GGUF file.
        path: PathBuf,
        /// What is missing or unsupported.
        problem: String,
    },
    /// `--kv-cache-memory` is smaller than one KV block.
    #[error(
        "{} is too little: one KV block of {block_size} tokens takes {}; raise it, or lower --block-size",
        Bytes(*memory),
        Bytes(*block)
    )]
    KvCacheTooSmall {
        /// The memory for the cache, in bytes.
        memory: u64,
        /// Bytes per block.
        block: u64,
        /// Tokens per block.
        block_size: usize,
    },
    /// The model would not fit in memory; nothing was allocated.
    #[error("not enough memory: {estimate}, and {} is available; {fix}", Bytes(*available))]
    NotEnoughMemory {
        /// What is needed, in words and figures.
        estimate: String,
        /// Bytes available.
        available: u64,
        /// What to change.
        fix: String,
    },
    /// A candle operation failed.
    #[error("cannot load {name}: {source}")]
    Candle {
        /// The tensor or the device.
        name: String,
        /// Candle's error.
        source: candle_core::Error,
    },
}

fn hint(fix: &str) -> String {
    if fix.is_empty() {
        String::new()
    } else {
        format!("; {fix}")
    }
}

impl LoadError {
    /// The error's kind across crates, which says whose fault it is.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::UnknownArchitecture { .. }
            | Self::UnsupportedVariant { .. }
            | Self::UnsupportedDtype { .. } => ErrorKind::Unsupported,
            Self::Candle { .. } => ErrorKind::Internal,
            Self::NotAModel { .. }
            | Self::Incomplete { .. }
            | Self::Read { .. }
            | Self::Broken { .. }
            | Self::BadConfig { .. }
            | Self::MissingTensor { .. }
            | Self::WrongShape { .. }
            | Self::TokenizerMismatch { .. }
            | Self::NoTokenizer { .. }
            | Self::KvCacheTooSmall { .. }
            | Self::NotEnoughMemory { .. } => ErrorKind::InvalidArgument,
        }
    }

    /// The cause: a setting, as the command line calls it, or the model.
    #[must_use]
    pub fn at(&self) -> At {
        match self {
            Self::NoTokenizer { .. } => At::from("--model-config"),
            Self::KvCacheTooSmall { .. } => At::from("--kv-cache-memory"),
            // Not a flag: free memory depends on the machine, and may be larger at the next start.
            Self::NotEnoughMemory { .. }
            | Self::NotAModel { .. }
            | Self::Incomplete { .. }
            | Self::Read { .. }
            | Self::Broken { .. }
            | Self::BadConfig { .. }
            | Self::UnknownArchitecture { .. }
            | Self::UnsupportedVariant { .. }
            | Self::MissingTensor { .. }
            | Self::WrongShape { .. }
            | Self::UnsupportedDtype { .. }
            | Self::TokenizerMismatch { .. }
            | Self::Candle { .. } => At::other("MODEL"),
        }
    }

    pub(crate) fn read(path: &Path, source: io::Error) -> Self {
        Self::Read {
            path: path.to_owned(),
            source,
        }
    }

    pub(crate) fn broken(path: &Path, problem: impl fmt::Display) -> Self {
        Self::Broken {
            path: path.to_owned(),
            problem: problem.to_string(),
        }
    }

    pub(crate) fn incomplete(path: &Path, problem: impl fmt::Display) -> Self {
        Self::Incomplete {
            path: path.to_owned(),
            problem: problem.to_string(),
        }
    }

    pub(crate) fn bad_config(path: &Path, field: &str, problem: impl fmt::Display) -> Self {
        Self::BadConfig {
            path: path.to_owned(),
            field: field.to_owned(),
            problem: problem.to_string(),
        }
    }

    pub(crate) fn unsupported(
        path: &Path,
        field: &str,
        value: impl fmt::Display,
        fix: &'static str,
    ) -> Self {
        Self::UnsupportedVariant {
            path: path.to_owned(),
            field: field.to_owned(),
            value: value.to_string(),
            fix,
        }
    }

    pub(crate) fn no_tokenizer(path: &Path, problem: impl fmt::Display) -> Self {
        Self::NoTokenizer {
            path: path.to_owned(),
            problem: problem.to_string(),
        }
    }

    pub(crate) fn candle(name: &str, source: candle_core::Error) -> Self {
        Self::Candle {
            name: name.to_owned(),
            source,
        }
    }
}

impl From<LoadError> for EngineError {
    fn from(error: LoadError) -> Self {
        Self::new(error.kind(), error.to_string())
            .with_at(error.at())
            .with_source(error)
    }
}

/// Bytes in human-readable form: `1.5 GiB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bytes(
    /// The number of bytes.
    pub u64,
);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, u32); 3] = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
        for (unit, shift) in UNITS {
            let one = 1u64 << shift;
            if self.0 >= one {
                let tenths = (u128::from(self.0) * 10 + u128::from(one / 2)) / u128::from(one);
                return write!(f, "{}.{} {unit}", tenths / 10, tenths % 10);
            }
        }
        write!(f, "{} bytes", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_rounded_to_a_tenth() {
        let shown = |bytes| Bytes(bytes).to_string();
        assert_eq!(shown(0), "0 bytes");
        assert_eq!(shown(1023), "1023 bytes");
        assert_eq!(shown(1536), "1.5 KiB");
        assert_eq!(shown(3 << 30), "3.0 GiB");
        assert_eq!(shown(u64::MAX), "17179869184.0 GiB");
    }

    #[test]
    fn an_engine_error_names_the_setting_and_keeps_the_kind() {
        let error = LoadError::UnknownArchitecture {
            path: "m/config.json".into(),
            architecture: "BertModel".into(),
            known: vec!["LlamaForCausalLM", "Qwen3ForCausalLM"],
        };
        let error = EngineError::from(error);
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert_eq!(error.at().map(|at| at.name()), Some("MODEL"));
        assert_eq!(
            error.to_string(),
            "MODEL: m/config.json: the architecture BertModel is not supported; supported are LlamaForCausalLM, Qwen3ForCausalLM"
        );
    }
}
