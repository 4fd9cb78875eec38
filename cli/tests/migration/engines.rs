//! The engines of the matrix. A [`Fleet`] is one engine and the configuration of its workers.

use std::path::Path;
use std::sync::Arc;

use genset_backend_common::LLMEngine;
use genset_backend_common::byte_size::ByteSize;
use genset_backend_common::worker::WorkerConfig;
use genset_engine_candle::{CandleArgs, CandleEngine, DeviceChoice};
use genset_engine_mocker::{MockerArgs, MockerEngine, MockerModel};
use genset_engine_sample::{SampleArgs, SampleEngine};
use genset_engine_subprocess::{SubprocessConfig, SubprocessEngine};

use crate::recital::Recital;
use crate::support::{python_engine, tiny_chat};

/// Tokens of the test model.
const VOCAB_SIZE: u32 = 2048;

type Make = Box<dyn Fn() -> Arc<dyn LLMEngine>>;

/// Workers that are all identical.
pub(crate) struct Fleet {
    /// Makes the engine of one worker.
    pub(crate) engine: Make,
    /// Configures one worker.
    pub(crate) config: fn(&mut WorkerConfig),
}

impl Fleet {
    fn of<E: LLMEngine + 'static>(engine: impl Fn() -> E + 'static) -> Self {
        Self {
            engine: Box::new(move || Arc::new(engine())),
            config: |_| {},
        }
    }
}

/// The test model, quantized.
pub(crate) fn gguf() -> Fleet {
    Fleet::of(|| candle(&tiny_chat().join("tiny-chat-q8_0.gguf")))
}

/// The test model as it was trained.
pub(crate) fn safetensors() -> Fleet {
    Fleet::of(|| candle(&tiny_chat()))
}

fn candle(model: &Path) -> CandleEngine {
    let args = CandleArgs {
        device: DeviceChoice::Cpu,
        kv_cache_memory: Some(ByteSize(8 << 20)),
        max_num_seqs: Some(8),
        threads: Some(1),
        ..CandleArgs::default()
    };
    CandleEngine::from_args(&args, model)
}

pub(crate) fn sample() -> Fleet {
    let args = SampleArgs {
        vocab_size: VOCAB_SIZE,
        token_delay_ms: 0,
    };
    Fleet::of(move || SampleEngine::from_args(&args))
}

pub(crate) fn mocker() -> Fleet {
    Fleet::of(|| {
        let args = MockerArgs {
            speedup_ratio: 1000.0,
            ..MockerArgs::default()
        };
        MockerEngine::try_new(args, MockerModel::new(VOCAB_SIZE, 2048)).unwrap()
    })
}

/// The sample engine in Python. Each worker has its own process.
pub(crate) fn python() -> Fleet {
    child("sample_engine.py")
}

/// The Python engine that generates a token for many requests in one step.
pub(crate) fn python_batching() -> Fleet {
    child("batching_engine.py")
}

fn child(script: &str) -> Fleet {
    let (command, environment) = python_engine(script);
    let config = SubprocessConfig::try_from_command_line(&command).unwrap();
    let config = config.with_env("PYTHONDONTWRITEBYTECODE", "");
    let config = environment.iter().fold(config, |config, (name, value)| {
        config.with_env(*name, value.display().to_string())
    });
    Fleet::of(move || SubprocessEngine::new(config.clone()))
}

/// An engine that produces the output of a model with reasoning and tools.
pub(crate) fn recital() -> Fleet {
    Fleet {
        config: |config| {
            config.tool_parser = Some("hermes".into());
            config.reasoning_parser = Some("deepseek_r1".into());
        },
        ..Fleet::of(Recital::new)
    }
}
