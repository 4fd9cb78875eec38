//! GGUF files that are broken, cut short, or of kinds that are not supported.

use candle_core::Tensor;
use proptest::prelude::*;

use super::write::{Entry, GgmlDType, QTensor, encode, f32s, i32s, text, texts, write_gguf};
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

fn refused(bytes: &[u8]) -> String {
    opened(bytes).map(|open| open.name).unwrap_err()
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
    assert!(refused(b"").contains("it ends at byte 0"));
    assert!(refused(b"GGML\x03\0\0\0").contains("does not begin with GGUF"));
    assert!(refused(b"GGUF\x01\0\0\0").contains("of GGUF version 1; versions 2 and 3 are read"));
    assert!(refused(b"GGUF\0\0\0\x03").contains("big-endian"));
    assert!(refused(&only(vec![])).contains("general.architecture: missing"));
}

#[test]
fn counts_are_checked_before_anything_is_allocated() {
    let with = |tensors: u64, entries: u64| {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(tensors.to_le_bytes());
        bytes.extend(entries.to_le_bytes());
        bytes.extend([0; 64]);
        refused(&bytes)
    };
    assert!(with(u64::MAX, 0).contains("18446744073709551615 tensors"));
    assert!(with(0, 1 << 40).contains("1099511627776 metadata entries"));
    // An array of four billion numbers in a file of a hundred bytes.
    let mut bytes = only(vec![entry("a", i32s(&[7; 3]))]);
    let place = 8 + 16 + 8 + 1 + 4 + 4;
    bytes[place..place + 8].copy_from_slice(&u64::from(u32::MAX).to_le_bytes());
    assert!(
        refused(&bytes).contains("4294967295 numbers follow"),
        "{}",
        refused(&bytes)
    );
    // A string as long as memory.
    let mut bytes = only(vec![entry("a", text("b"))]);
    let place = 8 + 16 + 8 + 1 + 4;
    bytes[place..place + 8].copy_from_slice(&(u64::MAX / 2).to_le_bytes());
    assert!(refused(&bytes).contains("within its header"));
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
    let error = Header::parse(&bytes).unwrap_err();
    assert!(error.contains("that 1 numbers follow"), "{error}");
}

#[test]
fn alignments_that_make_no_sense_are_refused() {
    for value in [0, 1, 12, 1 << 20] {
        let bytes = only(vec![
            architecture("llama"),
            entry("general.alignment", Entry::U32(value)),
        ]);
        let error = refused(&bytes);
        assert!(
            error.contains(&format!("general.alignment is {value}")),
            "{error}"
        );
    }
}

#[test]
fn tensors_must_lie_in_the_file() {
    let name = "token_embd.weight";
    let zeros = Tensor::zeros((4, 4), DType::F32, &Device::Cpu).unwrap();
    let tensor = QTensor::quantize(&zeros, GgmlDType::F32).unwrap();
    let whole = encode(&[architecture("llama")], &[(name.to_owned(), tensor)]);
    let error = refused(&whole[..whole.len() - 1]);
    assert!(
        error.contains("tensor token_embd.weight ends at byte"),
        "{error}"
    );
    // The sizes, the last one first, and the type.
    let declared = |sizes: [u64; 2], dtype: u32| {
        let mut bytes = whole.clone();
        let place = place_of(&bytes, name);
        let declared = [
            sizes.map(u64::to_le_bytes).as_flattened(),
            &dtype.to_le_bytes(),
        ]
        .concat();
        bytes[place..place + declared.len()].copy_from_slice(&declared);
        refused(&bytes)
    };
    for sizes in [[u64::MAX, u64::MAX], [4, u64::MAX / 4]] {
        assert!(declared(sizes, 0).contains("which makes no sense"));
    }
    // Half a block.
    assert!(declared([16, 2], 8).contains("which makes no sense"));
}

#[test]
fn variants_that_would_be_computed_wrongly_are_refused() {
    let of =
        |name: &str, key: &str, value| refused(&only(vec![architecture(name), entry(key, value)]));
    let error = of("qwen2", "qwen2.expert_count", Entry::U32(8));
    assert!(
        error.contains("qwen2.expert_count = 8 is not supported; files of llama and qwen3moe"),
        "{error}"
    );
    let error = of("qwen3moe", "a", Entry::Bool(true));
    assert!(error.contains("qwen3moe.expert_count: missing"), "{error}");
    let error = of("llama", "llama.expert_count", Entry::U32(8));
    assert!(
        error.contains("llama.expert_used_count: missing"),
        "{error}"
    );
    let error = of("mamba", "a", Entry::Bool(true));
    assert!(
        error.contains("mamba is not supported; supported are llama, qwen2"),
        "{error}"
    );
    let error = of("llama", "llama.embedding_length", text("x"));
    assert!(
        error.contains("llama.embedding_length: is no size"),
        "{error}"
    );
    let error = of("llama", "llama.attention.head_count", i32s(&[4, 8]));
    assert!(error.contains("embedding_length: missing"), "{error}");
}

#[test]
fn a_tensor_of_an_unknown_type_is_named() {
    let (mut bytes, _) = small();
    // Behind its two sizes.
    let place = place_of(&bytes, "blk.0.ffn_up.weight") + 16;
    assert_eq!(bytes[place..place + 4], 1u32.to_le_bytes());
    bytes[place..place + 4].copy_from_slice(&22u32.to_le_bytes());
    let error = refused(&bytes);
    assert!(
        error.contains("tensor blk.0.ffn_up.weight is IQ2_S; tensors may be F32"),
        "{error}"
    );
}

#[test]
fn a_missing_tensor_has_the_name_of_the_file() {
    let (mut bytes, _) = small();
    let name = b"blk.1.ffn_norm.weight";
    let renamed = b"blk.9.ffn_norm.weight";
    let mut windows = bytes.windows(name.len());
    let at = windows.position(|window| window == name).unwrap();
    bytes[at..at + name.len()].copy_from_slice(renamed);
    let error = refused(&bytes);
    assert!(
        error.contains("has no tensor blk.1.ffn_norm.weight"),
        "{error}"
    );
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
    let error = refused(&bytes[..bytes.len() - 100]);
    assert!(error.contains("but the file at"), "{error}");
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
