//! [`MockerArgs`]: the settings, read from a JSON or YAML file.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use genset_backend_common::spelling::none_of;
use genset_backend_common::text_file::read_text;
use genset_backend_common::{EngineError, config::MAX_DATA_PARALLEL_SIZE};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::time::TimeModel;

/// The flag with the path of the file.
const FLAG: &str = "--extra-engine-args";

/// The largest accepted file, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The most KV blocks of all ranks together: a gigabyte of bookkeeping.
const MAX_BLOCKS: u64 = 1 << 24;

/// A year. Nobody waits longer, and a clock may not reach it.
const LONGEST: Duration = Duration::from_hours(24 * 366);

/// The settings. Those that vLLM also has use its names; the others are the mocker's own.
#[derive(Debug, Clone, PartialEq)]
pub struct MockerArgs {
    /// Tokens per KV block, at least 1.
    pub block_size: u32,
    /// KV blocks of each rank: at least 1, and at most 2^24 for all ranks together.
    pub num_gpu_blocks: u32,
    /// Sequences that run at once on each rank, at least 1.
    pub max_num_seqs: u32,
    /// Tokens of one step of a rank, at least `max_num_seqs`.
    pub max_num_batched_tokens: u32,
    /// Whether KV blocks of earlier prompts are reused.
    pub enable_prefix_caching: bool,
    /// Whether a prompt may be computed in several steps. Without it, the context is at most `max_num_batched_tokens`.
    pub enable_chunked_prefill: bool,
    /// How many times faster steps and transfers go than the models of their time say, above 0.
    pub speedup_ratio: f64,
    /// Data-parallel ranks, `1..=1024`: each has a scheduler and a KV cache of its own.
    pub dp_size: u32,
    /// Share of the KV blocks that stays free for running sequences when another is admitted, `0.0..1.0`.
    pub watermark: f64,
    /// Time to prefill a step's tokens, as a function of their number.
    pub prefill_ms: TimeModel,
    /// Time of a step's decode rows, as a function of the share of KV blocks in use.
    pub decode_ms: TimeModel,
    /// Bandwidth between a prefill and a decode instance, in gigabits per second, above 0.
    pub kv_transfer_gbps: f64,
    /// Bytes of a token's keys and values in all layers, at least 1.
    pub kv_bytes_per_token: u32,
    /// How long a prefill instance holds blocks that are not fetched: above 0, at most a year.
    pub kv_lease: Duration,
    /// Duration of the engine's start, at most a year.
    pub startup_time: Duration,
    /// Varies the tokens of every answer. Instances with the same seed give the same answers.
    pub seed: u64,
}

impl Default for MockerArgs {
    fn default() -> Self {
        Self {
            block_size: 16,
            num_gpu_blocks: 16_384,
            max_num_seqs: 256,
            max_num_batched_tokens: 8192,
            enable_prefix_caching: true,
            enable_chunked_prefill: true,
            speedup_ratio: 1.0,
            dp_size: 1,
            watermark: 0.01,
            prefill_ms: TimeModel {
                quadratic: 4.21e-7,
                linear: 1.52e-2,
                constant: 16.5,
                min: 0.0,
            },
            decode_ms: TimeModel {
                quadratic: -25.7,
                linear: 54.0,
                constant: 5.74,
                min: 1.0,
            },
            kv_transfer_gbps: 64.0,
            kv_bytes_per_token: 131_072,
            kv_lease: Duration::from_secs(30),
            startup_time: Duration::ZERO,
            seed: 0,
        }
    }
}

/// The names of the settings.
const NAMES: [&str; 16] = [
    "block_size",
    "num_gpu_blocks",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "speedup_ratio",
    "dp_size",
    "watermark",
    "prefill_ms",
    "decode_ms",
    "kv_transfer_gbps",
    "kv_bytes_per_token",
    "kv_lease_s",
    "startup_time_s",
    "seed",
];

/// Why settings were rejected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MockerArgsError {
    /// The file cannot be read, or is too large.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The file was read but its content was rejected.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The error in its content.
        #[source]
        source: Box<MockerArgsError>,
    },
    /// The text is not valid in the format that the file's name implies.
    #[error("is no {format}: {problem}")]
    Syntax {
        /// JSON or YAML.
        format: &'static str,
        /// The parser's message.
        problem: String,
    },
    /// The top level is not a mapping of names to values.
    #[error("must hold one object, a name and a value for each setting")]
    NotAnObject,
    /// No setting has this name.
    #[error("the mocker has no such setting: {}", none_of(name, NAMES))]
    Unknown {
        /// The name.
        name: String,
    },
    /// A setting's value is not allowed.
    #[error("{name}: {problem}")]
    Value {
        /// The setting.
        name: &'static str,
        /// What is wrong with the value.
        problem: String,
    },
}

impl From<MockerArgsError> for EngineError {
    fn from(error: MockerArgsError) -> Self {
        Self::invalid_argument(FLAG, error.to_string()).with_source(error)
    }
}

impl MockerArgs {
    /// Reads a file: as JSON if its name says so, else as YAML. Missing settings have their defaults.
    ///
    /// # Errors
    /// [`MockerArgsError`], which names the file and the setting.
    pub fn load(path: &Path) -> Result<Self, MockerArgsError> {
        let text = read_text(path, MAX_FILE_BYTES).map_err(|source| MockerArgsError::Read {
            path: path.to_owned(),
            source,
        })?;
        let is_json = path
            .extension()
            .is_some_and(|extension| extension.eq_ignore_ascii_case("json"));
        let read = if is_json {
            Self::from_json(&text)
        } else {
            Self::from_yaml(&text)
        };
        read.map_err(|source| MockerArgsError::File {
            path: path.to_owned(),
            source: Box::new(source),
        })
    }

    /// Reads settings from a JSON object.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn from_json(text: &str) -> Result<Self, MockerArgsError> {
        let value = serde_json::from_str(text).map_err(|error| MockerArgsError::Syntax {
            format: "JSON",
            problem: error.to_string(),
        })?;
        Self::from_value(value)
    }

    /// Reads settings from a YAML mapping. An empty text is an empty mapping.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn from_yaml(text: &str) -> Result<Self, MockerArgsError> {
        let value: Value =
            serde_norway::from_str(text).map_err(|error| MockerArgsError::Syntax {
                format: "YAML",
                problem: error.to_string(),
            })?;
        if value.is_null() {
            return Ok(Self::default());
        }
        Self::from_value(value)
    }

    fn from_value(value: Value) -> Result<Self, MockerArgsError> {
        let Value::Object(entries) = value else {
            return Err(MockerArgsError::NotAnObject);
        };
        let args = Self::from_entries(entries)?;
        args.validate()?;
        Ok(args)
    }

    /// Accepts dashes in place of underscores in names, as vLLM does.
    fn from_entries(entries: Map<String, Value>) -> Result<Self, MockerArgsError> {
        let mut args = Self::default();
        for (given, value) in entries {
            let name = given.replace('-', "_");
            let known = NAMES.iter().copied().find(|known| *known == name);
            let name = known.ok_or(MockerArgsError::Unknown { name: given })?;
            args.set(name, value)
                .map_err(|problem| MockerArgsError::Value { name, problem })?;
        }
        Ok(args)
    }

    fn set(&mut self, name: &'static str, value: Value) -> Result<(), String> {
        match name {
            "block_size" => self.block_size = read(value)?,
            "num_gpu_blocks" => self.num_gpu_blocks = read(value)?,
            "max_num_seqs" => self.max_num_seqs = read(value)?,
            "max_num_batched_tokens" => self.max_num_batched_tokens = read(value)?,
            "enable_prefix_caching" => self.enable_prefix_caching = read(value)?,
            "enable_chunked_prefill" => self.enable_chunked_prefill = read(value)?,
            "speedup_ratio" => self.speedup_ratio = read(value)?,
            "dp_size" => self.dp_size = read(value)?,
            "watermark" => self.watermark = read(value)?,
            "prefill_ms" => self.prefill_ms = TimeModel::read(value)?,
            "decode_ms" => self.decode_ms = TimeModel::read(value)?,
            "kv_transfer_gbps" => self.kv_transfer_gbps = read(value)?,
            "kv_bytes_per_token" => self.kv_bytes_per_token = read(value)?,
            "kv_lease_s" => self.kv_lease = seconds(value)?,
            "startup_time_s" => self.startup_time = seconds(value)?,
            "seed" => self.seed = read(value)?,
            _ => return Err("is listed and cannot be set; please report it".into()),
        }
        Ok(())
    }

    /// Checks every setting against its range.
    ///
    /// # Errors
    /// [`MockerArgsError::Value`], which names the first setting out of its range.
    pub fn validate(&self) -> Result<(), MockerArgsError> {
        self.problem().map_or(Ok(()), |(name, problem)| {
            Err(MockerArgsError::Value { name, problem })
        })
    }

    fn problem(&self) -> Option<(&'static str, String)> {
        let least_one = [
            ("block_size", self.block_size),
            ("num_gpu_blocks", self.num_gpu_blocks),
            ("max_num_seqs", self.max_num_seqs),
            ("dp_size", self.dp_size),
            ("kv_bytes_per_token", self.kv_bytes_per_token),
        ];
        if let Some((name, _)) = least_one.into_iter().find(|(_, number)| *number == 0) {
            return Some((name, "must be at least 1".into()));
        }
        let above_zero = [
            ("speedup_ratio", self.speedup_ratio),
            ("kv_transfer_gbps", self.kv_transfer_gbps),
            ("kv_lease_s", self.kv_lease.as_secs_f64()),
        ];
        let is_bad = |number: f64| !(number.is_finite() && number > 0.0);
        if let Some((name, number)) = above_zero.into_iter().find(|(_, n)| is_bad(*n)) {
            let problem = format!("must be a finite number above 0, got {number}");
            return Some((name, problem));
        }
        for (name, model) in [
            ("prefill_ms", self.prefill_ms),
            ("decode_ms", self.decode_ms),
        ] {
            if let Err(problem) = model.check() {
                return Some((name, problem.into()));
            }
        }
        self.problem_of_sizes()
    }

    fn problem_of_sizes(&self) -> Option<(&'static str, String)> {
        if self.dp_size > MAX_DATA_PARALLEL_SIZE {
            let problem = format!(
                "must be at most {MAX_DATA_PARALLEL_SIZE}, got {}",
                self.dp_size
            );
            return Some(("dp_size", problem));
        }
        let blocks = u64::from(self.num_gpu_blocks) * u64::from(self.dp_size);
        if blocks > MAX_BLOCKS {
            let problem =
                format!("of all ranks together must be at most {MAX_BLOCKS}, got {blocks}");
            return Some(("num_gpu_blocks", problem));
        }
        if self.max_num_batched_tokens < self.max_num_seqs {
            let problem = format!(
                "must not be below max_num_seqs ({}), got {}: each running sequence computes a token a step",
                self.max_num_seqs, self.max_num_batched_tokens
            );
            return Some(("max_num_batched_tokens", problem));
        }
        if !(0.0..1.0).contains(&self.watermark) {
            let problem = format!("must be at least 0 and below 1, got {}", self.watermark);
            return Some(("watermark", problem));
        }
        let times = [
            ("startup_time_s", self.startup_time),
            ("kv_lease_s", self.kv_lease),
        ];
        let too_long = times.into_iter().find(|(_, time)| *time > LONGEST);
        too_long.map(|(name, time)| (name, format!("must be at most a year, got {time:?}")))
    }
}

/// Reads a time in seconds.
fn seconds(value: Value) -> Result<Duration, String> {
    let seconds = read(value)?;
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| format!("must be between 0 and a year, got {seconds}"))
}

fn read<T: DeserializeOwned>(value: Value) -> Result<T, String> {
    serde_json::from_value(value).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_read_under_its_name() {
        let text = r#"{
            "block_size": 32, "num_gpu_blocks": 100, "max_num_seqs": 4, "max_num_batched_tokens": 64,
            "enable_prefix_caching": false, "enable_chunked_prefill": false, "speedup_ratio": 10.0, "dp_size": 2,
            "watermark": 0.5, "prefill_ms": 3, "decode_ms": {"constant": 2}, "kv_transfer_gbps": 400,
            "kv_bytes_per_token": 1024, "kv_lease_s": 5,
            "startup_time_s": 1.5, "seed": 7
        }"#;
        let expected = MockerArgs {
            block_size: 32,
            num_gpu_blocks: 100,
            max_num_seqs: 4,
            max_num_batched_tokens: 64,
            enable_prefix_caching: false,
            enable_chunked_prefill: false,
            speedup_ratio: 10.0,
            dp_size: 2,
            watermark: 0.5,
            prefill_ms: TimeModel::constant(3.0),
            decode_ms: TimeModel::constant(2.0),
            kv_transfer_gbps: 400.0,
            kv_bytes_per_token: 1024,
            kv_lease: Duration::from_secs(5),
            startup_time: Duration::from_millis(1500),
            seed: 7,
        };
        assert_eq!(MockerArgs::from_json(text).unwrap(), expected);
        // JSON is YAML, and the list of names is complete.
        assert_eq!(MockerArgs::from_yaml(text).unwrap(), expected);
        let entries: Map<String, Value> = serde_json::from_str(text).unwrap();
        let (mut keys, mut names): (Vec<_>, _) = (entries.keys().collect(), NAMES.to_vec());
        keys.sort_unstable();
        names.sort_unstable();
        assert_eq!(keys, names);
    }

    #[test]
    fn yaml_is_read_with_dashes_and_may_be_empty() {
        let args = MockerArgs::from_yaml("max-num-seqs: 8\nspeedup_ratio: 2\n").unwrap();
        assert_eq!((args.max_num_seqs, args.speedup_ratio), (8, 2.0));
        assert_eq!(MockerArgs::from_yaml("").unwrap(), MockerArgs::default());
        assert_eq!(MockerArgs::from_json("{}").unwrap(), MockerArgs::default());
        let wide = MockerArgs::from_json(r#"{"dp_size": 1024}"#).unwrap();
        assert_eq!(wide.dp_size, 1024);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let cases = [
            (
                r#"{"speedup_ration": 1}"#,
                r#"did you mean "speedup_ratio"?"#,
            ),
            (r#"{"num-blocks": 1}"#, r#"did you mean "num_gpu_blocks"?"#),
            (r#"{"x": 1}"#, "\"x\" is none of block_size, "),
            (r#"{"block_size": "x"}"#, "block_size: invalid type"),
            (r#"{"block_size": 0}"#, "block_size: must be at least 1"),
            (r#"{"max_num_batched_tokens": 1}"#, "max_num_seqs (256)"),
            (r#"{"speedup_ratio": 0}"#, "speedup_ratio: must be a finite"),
            (
                r#"{"speedup_ratio": -1}"#,
                "speedup_ratio: must be a finite",
            ),
            (r#"{"dp_size": 1025}"#, "dp_size: must be at most 1024"),
            (
                r#"{"num_gpu_blocks": 4294967295}"#,
                "num_gpu_blocks: of all",
            ),
            (r#"{"watermark": 1}"#, "watermark: must be"),
            (r#"{"startup_time_s": -1}"#, "startup_time_s: must be"),
            (r#"{"startup_time_s": 4e7}"#, "startup_time_s: must be"),
            (r#"{"kv_lease_s": 0}"#, "kv_lease_s: must be"),
            (
                r#"{"prefill_ms": {"quadratc": 1}}"#,
                r#"did you mean "quadratic"?"#,
            ),
            (r#"{"decode_ms": {"min": -1}}"#, "decode_ms: its min"),
            ("[1]", "one object"),
            ("{", "is no JSON"),
        ];
        for (text, expected) in cases {
            let error = MockerArgs::from_json(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
        let error = MockerArgs::from_yaml("a: [").unwrap_err().to_string();
        assert!(error.contains("is no YAML"), "{error}");
    }

    #[test]
    fn errors_of_a_file_name_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("args.json");
        let error = MockerArgs::load(&path).unwrap_err();
        assert!(error.to_string().contains("cannot read"), "{error}");
        std::fs::write(&path, r#"{"sped": 1}"#).unwrap();
        let error = EngineError::from(MockerArgs::load(&path).unwrap_err());
        assert_eq!(error.at().map(|at| at.name()), Some(FLAG));
        assert!(error.message().contains("args.json: the mocker has no"));
        std::fs::write(&path, " ".repeat((1 << 20) + 1)).unwrap();
        let error = MockerArgs::load(&path).unwrap_err();
        assert!(error.to_string().contains("larger than"), "{error}");
    }
}
