//! Checkouts of embedders: how they are read, and every error in them.

mod cross_encoders;
mod refusals;

use super::folder::change_tensors;
use super::*;
use crate::model::{BackboneConfig, HeadConfig, HeadStep, Pooling, Positions};

/// A copy of a checkout that a test may change.
fn copy_of_encoder(name: &str) -> TempDir {
    copied(&encoder(name))
}

/// Changes one key of a copy. The error must have both texts.
fn assert_refused(name: &str, file: &str, pointer: &str, to: Value, expected: [&str; 2]) {
    let folder = copy_of_encoder(name);
    set(&folder, file, pointer, to);
    let error = OpenEmbedder::open(folder.path()).unwrap_err().to_string();
    for part in expected {
        assert!(error.contains(part), "{name} {pointer}: {error}");
    }
}

/// Changes each key of a copy. The error must name the file and the key, and have the text.
fn assert_keys_are_named(name: &str, file: &str, cases: &[(&str, Value, &str)]) {
    for (key, value, text) in cases {
        let (pointer, place) = (format!("/{key}"), format!("{file}: {key}"));
        assert_refused(name, file, &pointer, value.clone(), [&place, text]);
    }
}

#[test]
fn encoders_and_decoders_with_a_pooling_are_embedders_and_others_are_not() {
    for name in ["bert", "xlm-roberta", "modernbert", "qwen3"] {
        assert!(OpenEmbedder::is_at(&encoder(name)), "{name}");
    }
    for name in REFERENCES {
        assert!(!OpenEmbedder::is_at(&reference(name)), "{name}");
    }
    assert!(!OpenEmbedder::is_at(Path::new("/nowhere")));
}

#[test]
fn pooling_and_what_follows_are_the_checkouts() {
    let head = |name: &str| OpenEmbedder::open(&encoder(name)).unwrap().head;
    assert_eq!(
        head("bert"),
        HeadConfig {
            pooling: vec![Pooling::Mean],
            steps: vec![HeadStep::Normalize],
        }
    );
    assert_eq!(head("qwen3").pooling, [Pooling::LastToken]);
    let many = head("xlm-roberta");
    assert_eq!(
        many.pooling,
        [Pooling::Cls, Pooling::Max, Pooling::MeanSqrtLen]
    );
    assert_eq!((many.steps.len(), many.width(48)), (0, 3 * 48));
    assert_eq!(head("bert-dense").width(48), 24);
}

#[test]
fn without_modules_it_is_the_mean() {
    let folder = copy_of_encoder("bert");
    fs::remove_file(folder.path().join("modules.json")).unwrap();
    let head = OpenEmbedder::open(folder.path()).unwrap().head;
    assert_eq!((head.pooling, head.steps.len()), (vec![Pooling::Mean], 0));
}

#[test]
fn inputs_are_as_long_as_files_and_positions_say() {
    let most = |folder: &TempDir| OpenEmbedder::open(folder.path()).unwrap().max_tokens;
    let folder = copy_of_encoder("xlm-roberta");
    assert_eq!(most(&folder), 150, "of sentence_bert_config.json");
    set(
        &folder,
        "sentence_bert_config.json",
        "/max_seq_length",
        json!(500),
    );
    assert_eq!(most(&folder), 158, "positions behind the padding's");
    set(
        &folder,
        "sentence_bert_config.json",
        "/max_seq_length",
        Value::Null,
    );
    set(
        &folder,
        "tokenizer_config.json",
        "/model_max_length",
        json!(64),
    );
    assert_eq!(most(&folder), 64);
    let open = OpenEmbedder::open(folder.path()).unwrap();
    let BackboneConfig::Encoder(config) = open.backbone else {
        panic!("an encoder");
    };
    assert!(matches!(
        config.positions,
        Positions::Absolute { first: 2, .. }
    ));
}

/// Puts `prefix` before the name of each tensor of a checkout.
fn rename_tensors(folder: &TempDir, prefix: &str) {
    change_tensors(folder.path(), |tensors| {
        let renamed = tensors.drain();
        let renamed = renamed.map(|(name, tensor)| (format!("{prefix}{name}"), tensor));
        *tensors = renamed.collect();
    });
}

#[test]
fn tensors_may_have_the_prefix_of_a_model_with_a_head() {
    for (name, architecture, prefix) in [
        ("bert", "BertForMaskedLM", "bert."),
        ("xlm-roberta", "XLMRobertaForMaskedLM", "roberta."),
        ("xlm-roberta", "CamembertForMaskedLM", "roberta."),
        ("modernbert", "ModernBertForMaskedLM", "model."),
    ] {
        let folder = copy_of_encoder(name);
        set(
            &folder,
            "config.json",
            "/architectures/0",
            json!(architecture),
        );
        rename_tensors(&folder, prefix);
        OpenEmbedder::open(folder.path()).unwrap();
        rename_tensors(&folder, "another.");
        assert!(OpenEmbedder::open(folder.path()).is_err(), "{name}");
    }
}

#[test]
fn texts_are_lowered_by_the_tokenizer_or_not_at_all() {
    let folder = copy_of_encoder("bert");
    let file = "sentence_bert_config.json";
    set(&folder, file, "/do_lower_case", json!(true));
    for (normalizer, is_taken) in [
        (json!({"type": "Lowercase"}), true),
        (json!({"type": "BertNormalizer", "lowercase": true}), true),
        (
            json!({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}),
            true,
        ),
        (json!({"type": "NFC"}), false),
        (json!({"type": "BertNormalizer", "lowercase": false}), false),
        (json!({"type": "Sequence", "normalizers": []}), false),
        (Value::Null, false),
    ] {
        set(&folder, "tokenizer.json", "/normalizer", normalizer.clone());
        let opened = OpenEmbedder::open(folder.path()).map_err(|error| error.to_string());
        assert_eq!(opened.is_ok(), is_taken, "{normalizer}: {opened:?}");
        if let Err(error) = opened {
            assert!(error.contains("do_lower_case"), "{error}");
        }
    }
}

#[test]
fn a_missing_or_misshapen_tensor_is_named() {
    let folder = copy_of_encoder("bert");
    set(&folder, "config.json", "/num_hidden_layers", json!(4));
    let error = OpenEmbedder::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("encoder.layer.3."), "{error}");
    let folder = copy_of_encoder("bert-dense");
    fs::remove_file(folder.path().join("2_Dense/model.safetensors")).unwrap();
    let error = OpenEmbedder::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("2_Dense"), "{error}");
}

#[test]
fn a_step_that_would_not_fit_in_memory_is_refused_with_the_flag() {
    let open = OpenEmbedder::open(&encoder("bert")).unwrap();
    let options = options(Quantization::None);
    assert!(open.check_memory(&options, 512, 1 << 30).is_ok());
    let error = open.check_memory(&options, 1 << 30, 1 << 30).unwrap_err();
    assert!(
        error.to_string().contains("--max-num-batched-tokens"),
        "{error}"
    );
}
