//! What a model answers does not depend on the file that it comes from.

use super::write::{FloatType, write_gguf};
use super::*;

/// A GGUF file of a reference model.
fn as_gguf(name: &str, kind: FloatType) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    write_gguf(&OpenModel::open(&reference(name)).unwrap(), &path, kind).unwrap();
    (folder, path)
}

#[test]
fn a_gguf_file_answers_as_the_checkout_does() {
    for name in REFERENCES {
        let (_folder, path) = as_gguf(name, FloatType::F32);
        let expected = logits(&reference(name), Quantization::None, &PROMPT);
        let got = logits(&path, Quantization::None, &PROMPT);
        // Norms plus one and frequencies are rounded once more on their way.
        let difference = largest_difference(&expected, &got);
        assert!(difference < 1e-4, "{name}: {difference}");
    }
}

#[test]
fn halves_are_read_from_gguf_files_too() {
    for (kind, most) in [(FloatType::F16, 1e-3), (FloatType::Bf16, 1e-6)] {
        let (_folder, path) = as_gguf("llama", kind);
        let expected = logits(&reference("llama"), Quantization::None, &PROMPT);
        let got = logits(&path, Quantization::None, &PROMPT);
        let error = relative_error(&expected, &got);
        assert!(error < most, "{kind:?}: {error}");
    }
}

#[test]
fn configurations_survive_the_way_through_a_file() {
    for name in REFERENCES {
        let (_folder, path) = as_gguf(name, FloatType::F32);
        let mut expected = OpenModel::open(&reference(name)).unwrap().config;
        let got = OpenModel::open(&path).unwrap().config;
        // The file has the sum, and numbers instead of a rule.
        expected.norm_weight_offset = 0.0;
        if let crate::model::RopeScaling::Llama3 { .. } = expected.rope.scaling {
            expected.rope.scaling = got.rope.scaling.clone();
        }
        // Written as f32.
        assert!(
            (expected.rms_norm_eps - got.rms_norm_eps).abs() < 1e-10,
            "{name}"
        );
        expected.rms_norm_eps = got.rms_norm_eps;
        assert_eq!(got, expected, "{name}");
    }
}

#[test]
fn quantized_files_answer_as_weights_quantized_at_load_do() {
    for quantization in Quantization::ALL {
        if quantization == Quantization::None {
            continue;
        }
        let folder = tiny(quantization.name());
        let expected = logits(folder.path(), quantization, &PROMPT);
        // The same blocks, though the rows of queries and keys lie elsewhere in the file.
        let got = logits(
            &folder.path().join("model.gguf"),
            Quantization::None,
            &PROMPT,
        );
        assert_eq!(got, expected, "{quantization}");
    }
}
