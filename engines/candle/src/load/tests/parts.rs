//! GGUF files in parts.

use super::write::{Entry, FloatType, Info, encode, entries, write_gguf};
use super::*;
use crate::load::gguf::header::{Header, Kind, TensorInfo};
use crate::model::WeightType;

const COUNT: u32 = 3;

/// A model's file in three parts in their own folder. The first part has the metadata and no tensor.
fn parts() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let open = OpenModel::open(&reference("qwen3-moe")).unwrap();
    let whole = folder.path().join("whole.gguf");
    write_gguf(&open, &whole, FloatType::F16).unwrap();
    let bytes = fs::read(&whole).unwrap();
    let header = Header::parse(&bytes).unwrap();
    let mut tensors: Vec<(&String, &TensorInfo)> = header.tensors.iter().collect();
    tensors.sort_by_key(|(name, _)| *name);
    let (second, third) = tensors.split_at(tensors.len() / 2);
    for (number, tensors) in [(0, &[][..]), (1, second), (2, third)] {
        let mut all = if number == 0 {
            entries(&open)
        } else {
            Vec::new()
        };
        let count = u32::try_from(header.tensors.len()).unwrap();
        for (key, value) in [("no", number), ("count", COUNT), ("tensors.count", count)] {
            all.push((format!("split.{key}"), Entry::U32(value)));
        }
        fs::write(part(&folder, number + 1), file(&all, tensors, &bytes)).unwrap();
    }
    folder
}

fn part(folder: &TempDir, number: u32) -> PathBuf {
    let name = format!("model-{number:05}-of-{COUNT:05}.gguf");
    folder.path().join(name)
}

/// A file with these entries and tensors, whose bytes are copied from `from`.
fn file(entries: &[(String, Entry)], tensors: &[(&String, &TensorInfo)], from: &[u8]) -> Vec<u8> {
    let infos: Vec<Info<'_>> = tensors
        .iter()
        .map(|(name, info)| declared(name, info))
        .collect();
    let mut out = encode(entries, &infos);
    for (_, info) in tensors {
        out.extend(&from[info.start..info.end]);
        out.resize(out.len().next_multiple_of(32), 0);
    }
    out
}

fn declared<'a>(name: &'a str, info: &'a TensorInfo) -> Info<'a> {
    let dtype = match info.kind {
        Kind::Known(WeightType::F16) => 1,
        Kind::Known(_) | Kind::Unknown(_) => 0,
    };
    Info {
        name,
        dtype,
        shape: &info.shape,
        bytes: info.end - info.start,
    }
}

#[test]
fn parts_answer_as_the_whole_does() {
    let folder = parts();
    let first = part(&folder, 1);
    let whole = folder.path().join("whole.gguf");
    assert_eq!(
        logits(&first, Quantization::None, &PROMPT),
        logits(&whole, Quantization::None, &PROMPT)
    );
    let open = OpenModel::open(&first).unwrap();
    assert_eq!(open.name, "model");
    let of_whole = OpenModel::open(&whole).unwrap();
    let options = options(Quantization::Q8_0);
    assert_eq!(open.memory(&options), of_whole.memory(&options));
}

#[test]
fn a_part_that_is_not_the_first_names_the_first() {
    let folder = parts();
    let error = open_error(&part(&folder, 2)).to_string();
    assert!(
        error.contains("split.no: is part 2 of 3; give the first, ")
            && error.contains("model-00001-of-00003.gguf"),
        "{error}"
    );
}

#[test]
fn a_missing_part_is_a_download_that_has_not_ended() {
    let folder = parts();
    fs::remove_file(part(&folder, 3)).unwrap();
    let error = open_error(&part(&folder, 1)).to_string();
    assert!(
        error.contains("is not complete: of 3 parts 1 are not there, such as ")
            && error.contains("model-00003-of-00003.gguf"),
        "{error}"
    );
}

#[test]
fn parts_that_do_not_belong_together_are_refused() {
    let folder = parts();
    fs::copy(part(&folder, 3), part(&folder, 2)).unwrap();
    let error = open_error(&part(&folder, 1)).to_string();
    assert!(
        error.contains("split.no: is 2 and should be 1; is it another model's part?"),
        "{error}"
    );
    let bytes = fs::read(part(&folder, 1)).unwrap();
    let renamed = folder.path().join("renamed.gguf");
    fs::write(&renamed, bytes).unwrap();
    let error = open_error(&renamed).to_string();
    assert!(
        error.contains("split.count: is 3, but the file is not called NAME-00001-of-00003.gguf"),
        "{error}"
    );
}

#[test]
fn tensors_of_all_parts_are_counted() {
    let folder = parts();
    let entries = [("no", 2), ("count", COUNT)]
        .map(|(key, value)| (format!("split.{key}"), Entry::U32(value)));
    fs::write(part(&folder, 3), encode(&entries, &[])).unwrap();
    let error = open_error(&part(&folder, 1)).to_string();
    assert!(error.contains("split.tensors.count: is "), "{error}");
}

#[test]
fn a_tensor_of_two_parts_is_refused() {
    let folder = parts();
    let bytes = fs::read(part(&folder, 2)).unwrap();
    let header = Header::parse(&bytes).unwrap();
    let tensors: Vec<_> = header.tensors.iter().take(1).collect();
    let entries = [("no", 2), ("count", COUNT)]
        .map(|(key, value)| (format!("split.{key}"), Entry::U32(value)));
    fs::write(part(&folder, 3), file(&entries, &tensors, &bytes)).unwrap();
    let error = open_error(&part(&folder, 1)).to_string();
    assert!(error.contains("which a part before it has too"), "{error}");
}
