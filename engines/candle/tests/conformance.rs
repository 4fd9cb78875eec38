//! The whole conformance kit on the candle engine with a real model, one test per check: plain and with drafts of a model. With
//! lookups, the checks that they affect.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::{Arc, LazyLock};

use genset_backend_common::byte_size::ByteSize;
use genset_backend_common::controls::Adapter;
use genset_conformance::{Detokenize, Scenario, Subject, catalogue, suite};
use genset_devtools::checkout::read_tokenizer;
use genset_devtools::synthetic::make_adapter;
use genset_devtools::tiny_chat;
use genset_engine_candle::load::OpenModel;
use genset_engine_candle::model::AdapterTarget;
use genset_engine_candle::{CandleArgs, CandleEngine, DeviceChoice, DtypeChoice, SpeculationArgs};
use tempfile::TempDir;

/// The variable that names the device; by default `cpu`.
const DEVICE_VARIABLE: &str = "GENSET_TEST_DEVICE";

static DEVICE: LazyLock<DeviceChoice> = LazyLock::new(|| match std::env::var(DEVICE_VARIABLE) {
    Ok(device) => device.parse().unwrap(),
    Err(_) => DeviceChoice::Cpu,
});

/// The variable that names the type of numbers on a GPU; by default `auto`.
const DTYPE_VARIABLE: &str = "GENSET_TEST_DTYPE";

static DTYPE: LazyLock<DtypeChoice> = LazyLock::new(|| match std::env::var(DTYPE_VARIABLE) {
    Ok(dtype) => dtype.parse().unwrap(),
    Err(_) => DtypeChoice::Auto,
});

static TEXT: LazyLock<Detokenize> = LazyLock::new(|| {
    let tokenizer = read_tokenizer(tiny_chat::folder()).unwrap();
    Arc::new(move |tokens: &[u32]| tokenizer.decode(tokens, true).unwrap())
});

static ADAPTER: LazyLock<TempDir> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let config = OpenModel::open(tiny_chat::folder()).unwrap().config;
    let targets = [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    ];
    let targets = targets.map(|module| {
        let target = AdapterTarget::of(&config, module).unwrap();
        (module, [target.in_features, target.out_features])
    });
    make_adapter(folder.path(), &targets, config.num_layers, 8, 1).unwrap();
    folder
});

fn args() -> CandleArgs {
    CandleArgs {
        device: *DEVICE,
        dtype: *DTYPE,
        // Small enough to fill up.
        kv_cache_memory: Some(ByteSize(8 << 20)),
        max_num_seqs: Some(16),
        max_num_batched_tokens: Some(256),
        // The model is small, so a second thread would only spin.
        threads: Some(1),
        ..CandleArgs::default()
    }
}

fn subject(args: &CandleArgs) -> Subject {
    Subject::new(CandleEngine::from_args(args, tiny_chat::folder()))
        .with_text(Arc::clone(&TEXT))
        .with_adapter(Adapter {
            name: "poems".into(),
            source: ADAPTER.path().display().to_string(),
        })
}

/// Checks that must not be skipped, so that a lost declaration is noticed.
const DECLARED: [&str; 20] = [
    "DT02", "DT03", "DT07", "GD01", "KV01", "KV06", "KV08", "KV09", "MG01", "MG04", "MT02", "MT07",
    "MT08", "LR01", "LR02", "LR03", "LR04", "LR05", "LR06", "ER06",
];

/// All other checks.
fn may_be_skipped() -> Vec<&'static str> {
    // On a GPU an answer may depend on the batch, but this check requires that it does not.
    let needs_the_cpu = |id: &str| id == "LR05" && *DEVICE != DeviceChoice::Cpu;
    let ids = catalogue().map(|check| check.id);
    ids.filter(|id| !DECLARED.contains(id) || needs_the_cpu(id))
        .collect()
}

suite!(|_: &Scenario| subject(&args()), skips: may_be_skipped());

/// The same with drafts.
mod with_drafts {
    use super::*;

    /// The same weights again: nearly every draft is right.
    fn draft_model() -> CandleArgs {
        CandleArgs {
            speculation: SpeculationArgs {
                draft_model: Some(tiny_chat::folder().join("tiny-chat-q8_0.gguf")),
                ..SpeculationArgs::default()
            },
            // For both models.
            kv_cache_memory: Some(ByteSize(16 << 20)),
            ..args()
        }
    }

    suite!(|_: &Scenario| subject(&draft_model()));
}

/// Lookups change where drafts come from, and nothing else: lives, adapters, metrics and roles are checked above. So only the
/// checks of answers run again.
mod with_lookups {
    use genset_conformance::{Options, run_conformance_with};

    use super::*;

    fn ngram() -> CandleArgs {
        CandleArgs {
            speculation: SpeculationArgs {
                speculate: "ngram".parse().ok(),
                ..SpeculationArgs::default()
            },
            ..args()
        }
    }

    fn keep(groups: &[&str]) {
        let options = Options {
            only: groups.iter().map(ToString::to_string).collect(),
            is_measuring: false,
            ..Options::default()
        };
        run_conformance_with(|_: &Scenario| subject(&ngram()), &options).assert_conformant();
    }

    #[test]
    fn answers() {
        keep(&["ST", "FN", "US", "MG", "RD"]);
    }

    #[test]
    fn sampling_and_grammars() {
        keep(&["DT", "GD"]);
    }

    #[test]
    fn requests_beside_each_other() {
        keep(&["CC", "CN", "KV", "SQ"]);
    }
}
