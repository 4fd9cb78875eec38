//! GGUF files in parts.

use super::write::{Entry, GgmlDType, QTensor, encode, entries, tensors};
use super::*;

const COUNT: u32 = 3;

fn open() -> OpenModel {
    OpenModel::open(&reference("qwen3-moe")).unwrap()
}

/// The tensors of the model, in the order of the parts.
fn halves() -> Vec<(String, QTensor)> {
    tensors(&open(), GgmlDType::F16)
}

/// A model's file in three parts in their own folder. The first part has the metadata and no tensor.
fn parts() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let (metadata, tensors) = (entries(&open()), halves());
    let whole = folder.path().join("whole.gguf");
    fs::write(whole, encode(&metadata, &tensors)).unwrap();
    let count = u32::try_from(tensors.len()).unwrap();
    let (second, third) = tensors.split_at(tensors.len() / 2);
    for (number, tensors, mut all) in [
        (0, &[][..], metadata),
        (1, second, Vec::new()),
        (2, third, Vec::new()),
    ] {
        all.extend(place(number));
        all.push(("split.tensors.count".to_owned(), Entry::U32(count)));
        fs::write(part(&folder, number + 1), encode(&all, tensors)).unwrap();
    }
    folder
}

/// The metadata of the part of this number, from 0.
fn place(number: u32) -> [(String, Entry); 2] {
    [("no", number), ("count", COUNT)]
        .map(|(key, value)| (format!("split.{key}"), Entry::U32(value)))
}

fn part(folder: &TempDir, number: u32) -> PathBuf {
    let name = format!("model-{number:05}-of-{COUNT:05}.gguf");
    folder.path().join(name)
}

#[test]
fn parts_answer_as_the_whole_does() {
    let folder = parts();
    let first = part(&folder, 1);
    let whole = folder.path().join("whole.gguf");
    assert_eq!(
        logits(&first, Quantization::None),
        logits(&whole, Quantization::None)
    );
    let open = OpenModel::open(&first).unwrap();
    assert_eq!(open.name, "model");
    let of_whole = OpenModel::open(&whole).unwrap();
    let options = options(Quantization::Q8_0);
    assert_eq!(open.memory(&options, 512), of_whole.memory(&options, 512));
}

#[test]
fn a_part_that_is_not_the_first_names_the_first() {
    let folder = parts();
    assert_open_fails(
        &part(&folder, 2),
        &[
            "split.no: is part 2 of 3; give the first, ",
            "model-00001-of-00003.gguf",
        ],
    );
}

#[test]
fn a_missing_part_is_a_download_that_has_not_ended() {
    let folder = parts();
    fs::remove_file(part(&folder, 3)).unwrap();
    assert_open_fails(
        &part(&folder, 1),
        &[
            "is not complete: of 3 parts 1 are not there, such as ",
            "model-00003-of-00003.gguf",
        ],
    );
}

#[test]
fn parts_that_do_not_belong_together_are_refused() {
    let folder = parts();
    fs::copy(part(&folder, 3), part(&folder, 2)).unwrap();
    assert_open_fails(
        &part(&folder, 1),
        &["split.no: is 2 and should be 1; is it another model's part?"],
    );
    let bytes = fs::read(part(&folder, 1)).unwrap();
    let renamed = folder.path().join("renamed.gguf");
    fs::write(&renamed, bytes).unwrap();
    assert_open_fails(
        &renamed,
        &["split.count: is 3, but the file is not called NAME-00001-of-00003.gguf"],
    );
}

#[test]
fn tensors_of_all_parts_are_counted() {
    let folder = parts();
    fs::write(part(&folder, 3), encode(&place(2), &[])).unwrap();
    assert_open_fails(&part(&folder, 1), &["split.tensors.count: is "]);
}

#[test]
fn a_tensor_of_two_parts_is_refused() {
    let folder = parts();
    let third = encode(&place(2), &halves()[..1]);
    fs::write(part(&folder, 3), third).unwrap();
    assert_open_fails(&part(&folder, 1), &["which a part before it has too"]);
}
