//! A model's answers do not depend on the file format.

use super::write::{Entry, GgmlDType, encode, entries, tensors, write_gguf};
use super::*;

/// A GGUF file of a reference model.
fn as_gguf(name: &str, kind: GgmlDType) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    write_gguf(&OpenModel::open(&reference(name)).unwrap(), &path, kind);
    (folder, path)
}

#[test]
fn a_gguf_file_answers_as_the_checkout_does() {
    for name in REFERENCES {
        let (_folder, path) = as_gguf(name, GgmlDType::F32);
        let expected = logits(&reference(name), Quantization::None);
        let got = logits(&path, Quantization::None);
        // Norms plus one, and frequencies, are rounded once more.
        let difference = largest_difference(&expected, &got);
        assert!(difference < 1e-4, "{name}: {difference}");
    }
}

#[test]
fn newer_files_of_mistral_small_are_those_of_mistral() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let mut open = OpenModel::open(&reference("mistral")).unwrap();
    open.architecture = "mistral3".to_owned();
    write_gguf(&open, &path, GgmlDType::F32);
    let expected = logits(&reference("mistral"), Quantization::None);
    let difference = largest_difference(&expected, &logits(&path, Quantization::None));
    assert!(difference < 1e-4, "{difference}");
}

#[test]
fn halves_are_read_from_gguf_files_too() {
    for (kind, most) in [(GgmlDType::F16, 1e-3), (GgmlDType::BF16, 1e-6)] {
        let (_folder, path) = as_gguf("llama", kind);
        let expected = logits(&reference("llama"), Quantization::None);
        let got = logits(&path, Quantization::None);
        let error = relative_error(&expected, &got);
        assert!(error < most, "{kind:?}: {error}");
    }
}

#[test]
fn configurations_survive_the_way_through_a_file() {
    for name in REFERENCES {
        let (_folder, path) = as_gguf(name, GgmlDType::F32);
        let mut expected = OpenModel::open(&reference(name)).unwrap().config;
        let got = OpenModel::open(&path).unwrap().config;
        // The file has the sum, and numbers instead of a rule.
        expected.norm_weight_offset = 0.0;
        if let crate::model::RopeScaling::Llama3 { .. } = expected.rope.scaling {
            expected.rope.scaling = got.rope.scaling.clone();
        }
        // Written as f32.
        assert!((expected.norm_eps - got.norm_eps).abs() < 1e-10, "{name}");
        expected.norm_eps = got.norm_eps;
        assert_eq!(got, expected, "{name}");
    }
}

#[test]
fn a_gguf_file_has_the_size_of_scores_under_yarn() {
    let copy = copy_of("qwen3-yarn");
    for key in ["mscale", "mscale_all_dim"] {
        set(
            &copy,
            CONFIG,
            &format!("/rope_parameters/{key}"),
            json!(1.0),
        );
    }
    let expected = OpenModel::open(copy.path()).unwrap();
    let file = copy.path().join("model.gguf");
    write_gguf(&expected, &file, GgmlDType::F32);
    let got = OpenModel::open(&file).unwrap();
    assert_eq!(got.config.rope.amplitude, 1.0);
    assert_eq!(got.config.rope, expected.config.rope);
    let mut bytes = fs::read(&file).unwrap();
    let place = place_of(&bytes, "qwen3.rope.scaling.yarn_log_multiplier");
    for value in [-1.0f32, f32::INFINITY] {
        bytes[place..place + 4].copy_from_slice(&value.to_le_bytes());
        fs::write(&file, &bytes).unwrap();
        assert_open_fails(&file, &["yarn_log_multiplier: is no finite number"]);
    }
}

#[test]
fn yarn_makes_the_context_longer_than_a_gguf_file_says() {
    let (_folder, path) = as_gguf("qwen3-yarn", GgmlDType::F32);
    let mut bytes = fs::read(&path).unwrap();
    let place = place_of(&bytes, "qwen3.context_length");
    assert_eq!(bytes[place..place + 4], 256u32.to_le_bytes());
    bytes[place..place + 4].copy_from_slice(&64u32.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    assert_eq!(OpenModel::open(&path).unwrap().config.context_length, 256);
}

#[test]
fn files_of_olmo3_have_the_whole_amplitude() {
    let open = OpenModel::open(&reference("olmo3")).unwrap();
    let mut entries = entries(&open);
    let key = "olmo2.rope.scaling.attn_factor".to_owned();
    entries.push((key, Entry::F32(1.5)));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, encode(&entries, &tensors(&open, GgmlDType::F32))).unwrap();
    let config = OpenModel::open(&path).unwrap().config;
    assert_eq!(config.rope.amplitude, 1.5);
}

#[test]
fn windows_without_a_period_are_refused() {
    let (_folder, path) = as_gguf("olmo3", GgmlDType::F32);
    let mut bytes = fs::read(&path).unwrap();
    // Behind the type and the number of the list's elements.
    let place = place_of(&bytes, "olmo2.attention.sliding_window_pattern") + 12;
    assert_eq!(bytes[place..place + 5], [1, 1, 1, 0, 1]);
    bytes[place] = 0;
    fs::write(&path, bytes).unwrap();
    assert_open_fails(&path, &["sliding_window_pattern = a list without a period"]);
}

#[test]
fn quantized_files_answer_as_weights_quantized_at_load_do() {
    for quantization in Quantization::ALL {
        if quantization == Quantization::None {
            continue;
        }
        let folder = tiny(quantization.name());
        let expected = logits(folder.path(), quantization);
        // The blocks are the same, but the rows of queries and keys are in other places of the file.
        let got = logits(&folder.path().join("model.gguf"), Quantization::None);
        assert_eq!(got, expected, "{quantization}");
    }
}
