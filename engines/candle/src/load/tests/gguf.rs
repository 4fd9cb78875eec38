//! GGUF files that are broken, cut short, or of kinds that are not supported.

use candle_core::Tensor;
use proptest::prelude::*;

use super::write::{
    Entry, GgmlDType, QTensor, encode, entries, f32s, i32s, tensors, text, texts, write_gguf,
};
use super::*;
use crate::load::gguf::header::{Header, Value};

/// A complete small file, and the length of its header.
fn small() -> (Vec<u8>, usize) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let open = OpenModel::open(&reference("qwen3")).unwrap();
    write_gguf(&open, &path, GgmlDType::F16);
    let bytes = fs::read(&path).unwrap();
    let header = Header::parse(&bytes).unwrap();
    let start = header
        .tensors
        .values()
        .map(|info| info.start)
        .min()
        .unwrap();
    (bytes, start)
}

/// The result of opening a file of these bytes.
fn opened(bytes: &[u8]) -> Result<OpenModel, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, bytes).unwrap();
    OpenModel::open(&path).map_err(|error| error.to_string())
}

#[track_caller]
fn assert_refused(bytes: &[u8], expected: &str) {
    let error = opened(bytes).unwrap_err();
    assert!(error.contains(expected), "{error}");
}

fn entry(key: &str, entry: Entry) -> (String, Entry) {
    (key.to_owned(), entry)
}

/// A header with these entries and no tensors.
fn only(entries: Vec<(String, Entry)>) -> Vec<u8> {
    encode(&entries, &[])
}

fn architecture(name: &str) -> (String, Entry) {
    entry("general.architecture", text(name))
}

#[test]
fn what_is_no_gguf_file_is_told() {
    assert_refused(b"", "it ends at byte 0");
    assert_refused(b"GGML\x03\0\0\0", "does not begin with GGUF");
    assert_refused(&only(vec![]), "general.architecture: missing");
}

#[test]
fn files_of_other_versions_and_byte_orders_are_unsupported_and_not_broken() {
    for version in [0u32, 1, 9] {
        let expected = format!("GGUF version = {version} is not supported; versions 2 and 3 are");
        let bytes = [b"GGUF".as_slice(), &version.to_le_bytes()].concat();
        let error = opened(&bytes).unwrap_err();
        assert!(error.ends_with(&expected), "{error}");
    }
    let expected = "byte order = big-endian is not supported";
    assert_refused(b"GGUF\0\0\0\x03", expected);
}

#[test]
fn counts_are_checked_before_anything_is_allocated() {
    let assert_counts = |tensors: u64, entries: u64, expected: &str| {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(tensors.to_le_bytes());
        bytes.extend(entries.to_le_bytes());
        bytes.extend([0; 64]);
        assert_refused(&bytes, expected);
    };
    assert_counts(u64::MAX, 0, "18446744073709551615 tensors");
    assert_counts(0, 1 << 40, "1099511627776 metadata entries");
    // An array of four billion numbers in a file of a hundred bytes.
    let mut bytes = only(vec![entry("a", i32s(&[7; 3]))]);
    let place = 8 + 16 + 8 + 1 + 4 + 4;
    bytes[place..place + 8].copy_from_slice(&u64::from(u32::MAX).to_le_bytes());
    assert_refused(&bytes, "4294967295 numbers follow");
    // A string as long as memory.
    let mut bytes = only(vec![entry("a", text("b"))]);
    let place = 8 + 16 + 8 + 1 + 4;
    bytes[place..place + 8].copy_from_slice(&(u64::MAX / 2).to_le_bytes());
    assert_refused(&bytes, "within its header");
}

#[test]
fn arrays_together_have_no_more_elements_than_a_vocabulary() {
    // Each array has the maximum number of one-byte numbers, except the last, which has one.
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend(0u64.to_le_bytes());
    bytes.extend(5u64.to_le_bytes());
    for length in [1 << 22, 1 << 22, 1 << 22, 1 << 22, 1usize] {
        bytes.extend(1u64.to_le_bytes());
        bytes.extend(b"a");
        bytes.extend(9u32.to_le_bytes());
        bytes.extend(0u32.to_le_bytes());
        bytes.extend(u64::try_from(length).unwrap().to_le_bytes());
        bytes.resize(bytes.len() + length, 0);
    }
    assert_refused(&bytes, "that 1 numbers follow");
}

#[test]
fn alignments_that_make_no_sense_are_refused() {
    for value in [0, 1, 12, 1 << 20] {
        let bytes = only(vec![
            architecture("llama"),
            entry("general.alignment", Entry::U32(value)),
        ]);
        assert_refused(&bytes, &format!("general.alignment is {value}"));
    }
}

#[test]
fn tensors_must_lie_in_the_file() {
    let name = "token_embd.weight";
    let zeros = Tensor::zeros((4, 4), DType::F32, &Device::Cpu).unwrap();
    let tensor = QTensor::quantize(&zeros, GgmlDType::F32).unwrap();
    let whole = encode(&[architecture("llama")], &[(name.to_owned(), tensor)]);
    let cut = &whole[..whole.len() - 1];
    assert_refused(cut, "tensor token_embd.weight ends at byte");
    // The sizes, the last one first, and the type.
    let assert_senseless = |sizes: [u64; 2], dtype: u32| {
        let mut bytes = whole.clone();
        let place = place_of(&bytes, name);
        let declared = [
            sizes.map(u64::to_le_bytes).as_flattened(),
            &dtype.to_le_bytes(),
        ]
        .concat();
        bytes[place..place + declared.len()].copy_from_slice(&declared);
        assert_refused(&bytes, "which makes no sense");
    };
    for sizes in [[u64::MAX, u64::MAX], [4, u64::MAX / 4]] {
        assert_senseless(sizes, 0);
    }
    // Half a block.
    assert_senseless([16, 2], 8);
}

#[test]
fn variants_that_would_be_computed_wrongly_are_refused() {
    let assert_variant = |name: &str, key: &str, value, expected: &str| {
        let entries = vec![architecture(name), entry(&format!("{name}.{key}"), value)];
        assert_refused(&only(entries), expected);
    };
    let expected = "qwen2.expert_count = 8 is not supported; files of llama, qwen2moe";
    assert_variant("qwen2", "expert_count", Entry::U32(8), expected);
    let expected = "qwen3moe.expert_count: missing";
    assert_variant("qwen3moe", "a", Entry::Bool(true), expected);
    let expected = "llama.expert_used_count: missing";
    assert_variant("llama", "expert_count", Entry::U32(8), expected);
    let expected = "glm4.nextn_predict_layers = 1 is not supported";
    assert_variant("glm4", "nextn_predict_layers", Entry::U32(1), expected);
    let expected = "mamba is not supported; supported are llama, qwen2";
    assert_variant("mamba", "a", Entry::Bool(true), expected);
    let expected = "llama.embedding_length: is no size";
    assert_variant("llama", "embedding_length", text("x"), expected);
    let expected = "embedding_length: missing";
    assert_variant("llama", "attention.head_count", i32s(&[4, 8]), expected);
}

#[test]
fn without_the_width_of_an_expert_qwen2_moe_has_that_of_a_tokens_experts() {
    let model = OpenModel::open(&reference("qwen2-moe")).unwrap();
    let width = model.config.intermediate_size;
    let of_token = width * model.config.experts.unwrap().per_token;
    let mut all = entries(&model);
    all.retain(|(key, _)| !key.ends_with(".expert_feed_forward_length"));
    for (key, value) in &mut all {
        if key == "qwen2moe.feed_forward_length" {
            *value = Entry::U32(u32::try_from(of_token).unwrap());
        }
    }
    let file = opened(&encode(&all, &tensors(&model, GgmlDType::F32))).unwrap();
    assert_eq!(file.config.intermediate_size, width);
}

#[test]
fn a_tensor_of_an_unknown_type_is_named() {
    let (mut bytes, _) = small();
    // Behind its two sizes.
    let place = place_of(&bytes, "blk.0.ffn_up.weight") + 16;
    assert_eq!(bytes[place..place + 4], 1u32.to_le_bytes());
    bytes[place..place + 4].copy_from_slice(&22u32.to_le_bytes());
    let expected = "tensor blk.0.ffn_up.weight is IQ2_S; tensors may be F32";
    assert_refused(&bytes, expected);
}

#[test]
fn a_missing_tensor_has_the_name_of_the_file() {
    let (mut bytes, _) = small();
    let name = b"blk.1.ffn_norm.weight";
    let renamed = b"blk.9.ffn_norm.weight";
    let mut windows = bytes.windows(name.len());
    let at = windows.position(|window| window == name).unwrap();
    bytes[at..at + name.len()].copy_from_slice(renamed);
    assert_refused(&bytes, "has no tensor blk.1.ffn_norm.weight");
}

#[test]
fn every_kind_of_value_is_read() {
    let bytes = only(vec![
        entry("text", text("é")),
        entry("size", Entry::U32(7)),
        entry("float", Entry::F32(0.5)),
        entry("flag", Entry::Bool(true)),
        entry("texts", texts(&["a", ""])),
        entry("ints", i32s(&[-1, 2])),
        entry("floats", f32s(&[0.25])),
    ]);
    let header = Header::parse(&bytes).unwrap();
    let of = |key: &str| header.metadata.get(key).unwrap().clone();
    assert_eq!(of("text"), Value::Text("é".into()));
    assert_eq!(of("size"), Value::Integer(7));
    assert_eq!(of("float"), Value::Float(0.5));
    assert_eq!(of("flag"), Value::Bool(true));
    assert_eq!(of("texts"), Value::Texts(vec!["a".into(), String::new()]));
    assert_eq!(of("ints"), Value::Numbers(vec![-1.0, 2.0]));
    assert_eq!(of("floats"), Value::Numbers(vec![0.25]));
}

#[test]
fn a_file_cut_at_every_byte_of_its_header_is_refused() {
    let (bytes, header_end) = small();
    for length in 0..header_end {
        Header::parse(&bytes[..length]).unwrap_err();
    }
    assert_refused(&bytes[..bytes.len() - 100], "but the file at");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// The file's size limits what a header may claim: nothing here may panic, or take more memory than a small multiple of the
    /// file.
    #[test]
    fn changed_headers_never_panic(changes in prop::collection::vec((0.0f64..1.0, any::<u64>(), 1usize..9), 1..6)) {
        thread_local! {
            static SMALL: (Vec<u8>, usize) = small();
        }
        SMALL.with(|(bytes, header_end)| {
            let mut bytes = bytes.clone();
            for (part, value, width) in changes {
                #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "a place in a small file")]
                let place = (*header_end as f64 * part) as usize;
                bytes[place..place + width].copy_from_slice(&value.to_le_bytes()[..width]);
            }
            if let Ok(header) = Header::parse(&bytes) {
                for info in header.tensors.values() {
                    assert!(info.start <= info.end && info.end <= bytes.len());
                }
            }
            // The steps after the header must not panic either.
            match opened(&bytes) {
                Ok(open) => { let _ = open.files(None); }
                Err(error) => assert!(!error.is_empty()),
            }
        });
    }
}
