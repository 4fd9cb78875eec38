//! Real files, small and made for the test: folders, GGUF files, and every error in them.

mod embedder;
mod folder;
mod gguf;
mod memory;
mod packed;
mod parts;
mod reference;
mod tokenizer;
mod write;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use genset_backend_common::EngineError;
use genset_devtools::checkout::read_weights;
use genset_devtools::gguf::to_bytes;
use genset_devtools::synthetic::{self, SyntheticSize, make_model};
use genset_devtools::tiny_chat;
use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::model::tests::{MODELS, cache, prefill};
use crate::model::{AdapterTarget, Model};

/// The folder of a model that `transformers` made.
pub(crate) fn reference(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/reference");
    folder.join(name)
}

/// The folder of an embedder or a cross-encoder that it made.
pub(crate) fn encoder(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/encoders");
    folder.join(name)
}

/// Reference models that GGUF files can hold.
const REFERENCES: &[&str] = MODELS.split_at(30).0;

/// A copy of a reference model that a test may change.
fn copy_of(name: &str) -> TempDir {
    copied(&reference(name))
}

/// A copy of a folder that a test may change.
fn copied(folder: &Path) -> TempDir {
    fn copy(from: &Path, to: &Path) {
        for entry in fs::read_dir(from).unwrap() {
            let from = entry.unwrap().path();
            let to = to.join(from.file_name().unwrap());
            if from.is_dir() {
                fs::create_dir(&to).unwrap();
                copy(&from, &to);
            } else {
                fs::copy(&from, to).unwrap();
            }
        }
    }
    let copied = tempfile::tempdir().unwrap();
    copy(folder, copied.path());
    copied
}

/// Changes one key of a JSON file, which may be missing; `null` removes the key.
pub(crate) fn set(folder: &TempDir, file: &str, pointer: &str, to: Value) {
    let path = folder.path().join(file);
    let mut value: Value = match fs::read(&path) {
        Ok(text) => serde_json::from_slice(&text).unwrap(),
        Err(_) => json!({}),
    };
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    let parent = value.pointer_mut(parent).unwrap();
    if let Some(object) = parent.as_object_mut() {
        object.remove(key);
        if !to.is_null() {
            object.insert(key.to_owned(), to);
        }
    } else {
        parent[key.parse::<usize>().unwrap()] = to;
    }
    fs::write(path, value.to_string()).unwrap();
}

/// The built-in model's tokenizer.
fn tiny_chat_tokenizer() -> Vec<ModelFile> {
    tokenizer_files(tiny_chat::folder()).unwrap()
}

/// A checkout with the built-in model's tokenizer, and a GGUF file of that type beside it.
fn tiny(kind: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    make_model(folder.path(), SyntheticSize::Tiny, 1).unwrap();
    for file in tiny_chat_tokenizer() {
        fs::write(folder.path().join(file.name), file.content).unwrap();
    }
    let weights = read_weights(folder.path()).unwrap();
    let config = SyntheticSize::Tiny.config();
    let gguf = to_bytes(&config, &weights, folder.path(), kind.parse().unwrap()).unwrap();
    fs::write(folder.path().join("model.gguf"), gguf).unwrap();
    folder
}

/// The decoder's configuration of a random model.
pub(crate) fn config_of(size: SyntheticSize) -> ModelConfig {
    let read = config::read(Path::new(CONFIG), size.config_json().as_bytes());
    read.unwrap().config
}

/// The modules of a layer that adapters usually change.
pub(crate) const USUAL_MODULES: [&str; 7] = [
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
];

/// Writes a random adapter to `folder` that changes those of `modules` that the model has.
pub(crate) fn make_adapter(
    folder: &Path,
    config: &ModelConfig,
    modules: &[&str],
    rank: usize,
    seed: u64,
) {
    let modules: Vec<_> = { modules.iter() }
        .filter_map(|module| {
            let target = AdapterTarget::of(config, module)?;
            Some((*module, [target.in_features, target.out_features]))
        })
        .collect();
    synthetic::make_adapter(folder, &modules, config.num_layers, rank, seed).unwrap();
}

fn options(quantization: Quantization) -> WeightOptions {
    WeightOptions {
        quantization,
        ..WeightOptions::exact()
    }
}

/// The logits of every position of a prompt, in order.
fn logits(path: &Path, quantization: Quantization) -> Vec<f32> {
    // For a vocabulary of at least 96.
    const PROMPT: [u32; 20] = [
        1, 17, 42, 95, 3, 8, 8, 64, 50, 21, 77, 2, 90, 33, 12, 5, 61, 29, 70, 44,
    ];
    let open = OpenModel::open(path).unwrap();
    let mut weights = open.weights(options(quantization), |_| Ok(()));
    let model = Model::try_new(&open.config, &mut weights).unwrap();
    prefill(&model, &mut cache(&open.config), &PROMPT).concat()
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let pairs = a.iter().zip(b);
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// The distance of `b` from `a`, relative to the size of `a`.
pub(crate) fn relative_error(a: &[f32], b: &[f32]) -> f32 {
    let square = |values: &mut dyn Iterator<Item = f32>| values.map(|it| it * it).sum::<f32>();
    let error = square(&mut a.iter().zip(b).map(|(a, b)| a - b));
    (error / square(&mut a.iter().copied())).sqrt()
}

/// The offset in a GGUF file of what follows a key and its type, or a tensor's name and the number of its sizes.
fn place_of(file: &[u8], key: &str) -> usize {
    let mut windows = file.windows(key.len());
    let found = windows.position(|window| window == key.as_bytes());
    found.unwrap() + key.len() + 4
}

/// Opens a model, which must fail with these texts in the error.
#[track_caller]
fn assert_open_fails(path: &Path, expected: &[&str]) {
    let error = OpenModel::open(path).unwrap_err().to_string();
    for text in expected {
        assert!(error.contains(text), "{error}");
    }
}
