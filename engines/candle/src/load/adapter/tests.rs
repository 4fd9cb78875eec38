//! What is read of an adapter, and what is rejected by name.

use std::path::Path;

use candle_core::{DType, Device};
use genset_backend_common::{EngineError, ErrorKind};
use genset_devtools::synthetic::SyntheticSize;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;
use crate::load::tests::{USUAL_MODULES, config_of, make_adapter, set};

fn reader() -> AdapterReader {
    AdapterReader {
        config: config_of(SyntheticSize::Tiny),
        device: Device::Cpu,
        dtype: DType::F32,
    }
}

/// A valid adapter.
fn adapter() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    make_adapter(folder.path(), &reader().config, &USUAL_MODULES, 4, 1);
    folder
}

fn read(folder: &Path) -> std::result::Result<AdapterWeights, EngineError> {
    reader().read(folder, 1 << 30).map_err(EngineError::from)
}

/// Reads an adapter, which must fail with an error of this kind that has this text.
#[track_caller]
fn assert_refused(folder: &Path, kind: ErrorKind, text: &str) {
    let error = read(folder).unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.message().contains(text), "{error}");
}

/// A valid adapter, except for one field.
fn with_field(name: &str, value: Value) -> TempDir {
    let folder = adapter();
    set(&folder, CONFIG, &format!("/{name}"), value);
    folder
}

/// A valid configuration with these tensors, of `f32` zeros.
fn with_tensors(tensors: &[(&str, &[usize])]) -> TempDir {
    with_numbers(tensors, 0.0)
}

fn with_numbers(tensors: &[(&str, &[usize])], number: f32) -> TempDir {
    let folder = adapter();
    let elements = |shape: &[usize]| shape.iter().product::<usize>();
    let bytes: Vec<Vec<u8>> = tensors
        .iter()
        .map(|(_, shape)| number.to_le_bytes().repeat(elements(shape)))
        .collect();
    let views = tensors.iter().zip(&bytes).map(|((name, shape), bytes)| {
        let view = TensorView::new(Dtype::F32, shape.to_vec(), bytes).unwrap();
        (*name, view)
    });
    let path = folder.path().join(WEIGHTS);
    safetensors::serialize_to_file(views, None, &path).unwrap();
    folder
}

const Q_A: &str = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";
const Q_B: &str = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight";

#[test]
fn an_adapter_takes_what_its_matrices_do() {
    let weights = read(adapter().path()).unwrap();
    // Whole tiles of sixteen rows of A, and B, in each of two layers.
    let a = 16 * (6 * 256 + 512);
    let b = 4 * (256 + 128 + 128 + 256 + 512 + 512 + 256);
    assert_eq!(weights.bytes(), 2 * 4 * (a + b));
    assert!(!weights.is_empty());
}

#[test]
fn adapters_of_other_numbers_or_another_scale_are_told_apart() {
    let digest = |folder: TempDir| read(folder.path()).unwrap().digest();
    let other = tempfile::tempdir().unwrap();
    make_adapter(other.path(), &reader().config, &USUAL_MODULES, 4, 2);
    let digests = [
        digest(adapter()),
        digest(with_field("lora_alpha", json!(3))),
        digest(other),
    ];
    assert_eq!(digest(adapter()), digests[0]);
    assert_eq!(digest(with_field("task_type", json!("other"))), digests[0]);
    assert!(digests[0] != digests[1] && digests[1] != digests[2] && digests[0] != digests[2]);
}

#[test]
fn what_is_not_computed_is_refused_by_its_field() {
    let cases = [
        ("peft_type", json!("IA3")),
        ("use_dora", json!(true)),
        ("modules_to_save", json!(["lm_head"])),
        ("bias", json!("all")),
        ("lora_bias", json!(true)),
        ("rank_pattern", json!({"q_proj": 8})),
        ("alpha_pattern", json!({"q_proj": 8})),
        ("fan_in_fan_out", json!(true)),
        ("layer_replication", json!([[0, 2]])),
        ("trainable_token_indices", json!([1])),
        ("target_parameters", json!(["mlp.experts"])),
        ("init_lora_weights", json!("pissa_niter_4")),
        ("init_lora_weights", json!("lora_ga")),
        ("target_modules", json!(["q_proj", "lm_head"])),
    ];
    for (field, value) in cases {
        let (folder, said) = (with_field(field, value), format!("{field} = "));
        assert_refused(folder.path(), ErrorKind::Unsupported, &said);
    }
}

#[test]
fn what_is_switched_off_is_no_reason_to_refuse() {
    let cases = [
        ("use_dora", json!(false)),
        ("modules_to_save", json!([])),
        ("rank_pattern", json!({})),
        ("init_lora_weights", json!("gaussian")),
        ("target_modules", json!(".*_proj")),
        ("target_modules", json!(["model.layers.0.self_attn.q_proj"])),
        ("something_new", json!({"of": "tomorrow"})),
    ];
    for (field, value) in cases {
        read(with_field(field, value).path()).unwrap();
    }
}

#[test]
fn values_that_make_no_sense_are_refused_by_their_field() {
    let cases = [
        ("r", json!(0)),
        ("r", json!(-1)),
        ("r", json!(1_000_000)),
        ("r", Value::Null),
        ("lora_alpha", json!("16")),
        ("lora_alpha", json!(1e300)),
        ("use_rslora", json!("yes")),
    ];
    for (field, value) in cases {
        let (folder, said) = (with_field(field, value), format!("{field}: "));
        assert_refused(folder.path(), ErrorKind::InvalidArgument, &said);
    }
}

#[test]
fn the_scale_is_that_of_the_library() {
    let scale = |is_rank_stabilized: bool| {
        let json = json!({"peft_type": "LORA", "r": 16, "lora_alpha": 8, "use_rslora": is_rank_stabilized});
        let content = json.to_string();
        PeftConfig::read(Path::new("a"), content.as_bytes()).unwrap()
    };
    assert_eq!((scale(false).rank, scale(false).scale), (16, 0.5));
    assert_eq!(scale(true).scale, 2.0);
}

#[test]
fn tensors_that_belong_to_nothing_are_refused_by_their_name() {
    for name in [
        "base_model.model.lm_head.lora_A.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight",
        "base_model.model.model.layers.0.mlp.experts.0.down_proj.lora_A.weight",
        "base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.+0.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.99999999999999999999.self_attn.q_proj.lora_A.weight",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
    ] {
        let b = name.replace("lora_A", "lora_B");
        let mut tensors: Vec<(&str, &[usize])> = vec![(name, &[4, 256])];
        if b != name {
            tensors.push((&b, &[256, 4]));
        }
        let folder = with_tensors(&tensors);
        assert_refused(folder.path(), ErrorKind::Unsupported, name);
    }
}

#[test]
fn shapes_that_are_not_the_models_are_refused_by_the_tensors_name() {
    let cases: [(&[usize], &[usize], &str); 4] = [
        (&[4, 128], &[256, 4], Q_A),
        (&[8, 256], &[256, 8], Q_A),
        (&[4, 256], &[128, 4], Q_B),
        (&[4, 256], &[1024], Q_B),
    ];
    for (a, b, name) in cases {
        let folder = with_tensors(&[(Q_A, a), (Q_B, b)]);
        assert_refused(folder.path(), ErrorKind::InvalidArgument, name);
    }
    read(with_tensors(&[(Q_A, &[4, 256]), (Q_B, &[256, 4])]).path()).unwrap();
}

#[test]
fn half_a_module_is_refused_by_what_is_missing() {
    for (there, missing, shape) in [(Q_A, Q_B, [4, 256]), (Q_B, Q_A, [256, 4])] {
        let folder = with_tensors(&[(there, &shape)]);
        assert_refused(folder.path(), ErrorKind::InvalidArgument, missing);
    }
    let folder = with_tensors(&[]);
    assert_refused(folder.path(), ErrorKind::InvalidArgument, "no tensors");
}

#[test]
fn one_module_under_two_names_is_refused() {
    let other = "base_model.model.language_model.model.layers.0.self_attn.q_proj.lora_A.weight";
    let shapes: [(&str, &[usize]); 3] = [(Q_A, &[4, 256]), (Q_B, &[256, 4]), (other, &[4, 256])];
    let folder = with_tensors(&shapes);
    assert_refused(folder.path(), ErrorKind::InvalidArgument, "twice");
}

#[test]
fn numbers_that_are_not_finite_are_refused() {
    let shapes: [(&str, &[usize]); 2] = [(Q_A, &[4, 256]), (Q_B, &[256, 4])];
    for number in [f32::NAN, f32::INFINITY] {
        let folder = with_numbers(&shapes, number);
        assert_refused(folder.path(), ErrorKind::InvalidArgument, "not finite");
    }
}

#[test]
fn what_is_no_adapter_is_not_found() {
    let empty = tempfile::tempdir().unwrap();
    let gone = empty.path().join("gone");
    let no_weights = adapter();
    fs::remove_file(no_weights.path().join(WEIGHTS)).unwrap();
    let pickled = adapter();
    fs::rename(pickled.path().join(WEIGHTS), pickled.path().join(PICKLED)).unwrap();
    let folder_within = adapter();
    fs::remove_file(folder_within.path().join(WEIGHTS)).unwrap();
    fs::create_dir(folder_within.path().join(WEIGHTS)).unwrap();
    let file = adapter();
    let paths = [
        (empty.path(), "no adapter_config.json"),
        (&gone, "no folder"),
        (no_weights.path(), "no adapter_model.safetensors"),
        (pickled.path(), "pickled"),
        (folder_within.path(), "is no file"),
        (&file.path().join(CONFIG), "no folder"),
    ];
    for (path, problem) in paths {
        assert_refused(path, ErrorKind::NotFound, problem);
    }
}

#[test]
fn an_adapter_beyond_the_limit_is_refused_before_its_numbers_are_read() {
    let folder = adapter();
    let bytes = read(folder.path()).unwrap().bytes();
    reader().read(folder.path(), bytes).unwrap();
    let error = reader().read(folder.path(), bytes - 1).unwrap_err();
    assert!(
        matches!(error, AdapterError::TooLarge { bytes: all, left, .. } if all == bytes && left == bytes - 1),
        "{error}"
    );
    for (file, said) in [(WEIGHTS, "--adapter-memory"), (CONFIG, "1.0 MiB")] {
        let mut options = fs::File::options();
        let huge = options.write(true).open(folder.path().join(file));
        huge.unwrap().set_len(1 << 40).unwrap();
        assert_refused(folder.path(), ErrorKind::InvalidArgument, said);
    }
}

#[test]
fn files_cut_short_or_of_other_bytes_are_broken() {
    for content in [&b""[..], b"{}", b"\xff\xff\xff\xff\xff\xff\xff\x7f{}"] {
        let folder = adapter();
        fs::write(folder.path().join(WEIGHTS), content).unwrap();
        assert_refused(folder.path(), ErrorKind::InvalidArgument, WEIGHTS);
        let folder = adapter();
        fs::write(folder.path().join(CONFIG), content).unwrap();
        assert!(read(folder.path()).is_err());
    }
}
