//! A model's files, except its weights.

use std::fs;
use std::path::Path;

use genset_engine_candle::fuzzing::memory;
use genset_engine_candle::load::{OpenModel, gguf_files};
use tempfile::TempDir;

use crate::input::first;

/// A valid file without tensors.
const NO_TENSORS: &[u8] = b"\x02\0\0\0\0\0\0\0{}";

/// The sizes of a small model.
const CONFIG: &str = r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8,
    "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
    "vocab_size": 4, "max_position_embeddings": 16, "rms_norm_eps": 1e-5, "tie_word_embeddings": true}"#;

fn folder() -> TempDir {
    tempfile::tempdir().expect("temporary folders can be made")
}

fn write(folder: &Path, name: &str, content: &[u8]) {
    fs::write(folder.join(name), content).expect("temporary files can be written");
}

/// Opens a model, and computes its memory needs.
fn open(path: &Path) {
    if let Ok(model) = OpenModel::open(path) {
        drop(model.files(None));
        let _ = memory(&model);
    }
}

/// A GGUF file: its header, and the configuration and tokenizer made from its metadata.
pub fn gguf(file: &[u8]) {
    let folder = folder();
    write(folder.path(), "model.gguf", file);
    let path = folder.path().join("model.gguf");
    open(&path);
    drop(gguf_files(&path));
}

/// A `config.json`, beside weights without tensors.
pub fn config(file: &[u8]) {
    let folder = folder();
    write(folder.path(), "config.json", file);
    write(folder.path(), "model.safetensors", NO_TENSORS);
    open(folder.path());
}

/// 0 and a safetensors file, or 1 and an index of several.
pub fn safetensors(input: &[u8]) {
    let (kind, file) = first(input);
    let folder = folder();
    write(folder.path(), "config.json", CONFIG.as_bytes());
    if kind % 2 == 0 {
        write(folder.path(), "model.safetensors", file);
    } else {
        write(folder.path(), "model.safetensors.index.json", file);
        write(folder.path(), "a.safetensors", NO_TENSORS);
    }
    open(folder.path());
}
