//! Checkout folders: whole, in shards, of every float type, and broken.

use std::borrow::Cow;
use std::collections::BTreeSet;

use ::safetensors::{Dtype, SafeTensors, View};
use proptest::prelude::*;

use super::*;

/// A tensor to write.
#[derive(Clone)]
pub(super) struct Written {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) data: Vec<u8>,
}

impl View for &Written {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.data)
    }

    fn data_len(&self) -> usize {
        self.data.len()
    }
}

fn tensors_of(folder: &Path) -> HashMap<String, Written> {
    let bytes = fs::read(folder.join("model.safetensors")).unwrap();
    let parsed = SafeTensors::deserialize(&bytes).unwrap();
    let written = parsed.iter().map(|(name, view)| {
        let written = Written {
            dtype: view.dtype(),
            shape: view.shape().to_vec(),
            data: view.data().to_vec(),
        };
        (name.to_owned(), written)
    });
    written.collect()
}

fn write(path: &Path, tensors: &HashMap<String, Written>) {
    ::safetensors::serialize_to_file(tensors, None, path).unwrap();
}

/// A copy of a model with its tensors changed.
pub(super) fn changed(name: &str, change: impl FnOnce(&mut HashMap<String, Written>)) -> TempDir {
    let copy = copy_of(name);
    change_tensors(copy.path(), change);
    copy
}

/// Changes the tensors of a checkout.
pub(super) fn change_tensors(folder: &Path, change: impl FnOnce(&mut HashMap<String, Written>)) {
    let mut tensors = tensors_of(folder);
    change(&mut tensors);
    write(&folder.join("model.safetensors"), &tensors);
}

/// A copy of a model in two shards with an index.
fn sharded(name: &str) -> TempDir {
    let copy = copy_of(name);
    let tensors = tensors_of(copy.path());
    let (first, second): (HashMap<_, _>, HashMap<_, _>) = tensors
        .into_iter()
        .partition(|(name, _)| name.contains("layers.0"));
    let shards = [
        ("model-00001-of-00002.safetensors", first),
        ("model-00002-of-00002.safetensors", second),
    ];
    let mut map = serde_json::Map::new();
    for (file, tensors) in &shards {
        write(&copy.path().join(file), tensors);
        map.extend(tensors.keys().map(|name| (name.clone(), (*file).into())));
    }
    let index = serde_json::json!({"metadata": {"total_size": 1}, "weight_map": map});
    fs::write(
        copy.path().join("model.safetensors.index.json"),
        index.to_string(),
    )
    .unwrap();
    fs::remove_file(copy.path().join("model.safetensors")).unwrap();
    copy
}

#[test]
fn shards_are_one_model() {
    let copy = sharded("llama");
    let whole = logits(&reference("llama"), Quantization::None);
    assert_eq!(logits(copy.path(), Quantization::None), whole);
}

/// With the names of tensors that both versions of `transformers` write.
#[test]
fn the_language_model_of_a_model_of_images_is_read() {
    for (name, architecture) in [
        ("gemma3", "Gemma3ForConditionalGeneration"),
        ("mistral", "Mistral3ForConditionalGeneration"),
        ("ministral3", "Mistral3ForConditionalGeneration"),
    ] {
        let alone = logits(&reference(name), Quantization::None);
        for (layers, head) in [
            ("language_model.model.", "language_model.lm_head."),
            ("model.language_model.", "lm_head."),
        ] {
            let copy = changed(name, |tensors| {
                let renamed = tensors.drain().map(|(name, tensor)| {
                    let name = match name.strip_prefix("model.") {
                        Some(rest) => format!("{layers}{rest}"),
                        None => name.replace("lm_head.", head),
                    };
                    (name, tensor)
                });
                *tensors = renamed.collect();
            });
            let path = copy.path().join(CONFIG);
            let own: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            let whole = json!({"architectures": [architecture], "text_config": own});
            fs::write(&path, whole.to_string()).unwrap();
            assert_eq!(logits(copy.path(), Quantization::None), alone, "{name}");
        }
    }
}

#[test]
fn a_whole_file_comes_before_an_index_that_does_not_name_it() {
    let whole = logits(&reference("llama"), Quantization::None);
    let copy = sharded("llama");
    let [first, second] =
        ["00001", "00002"].map(|part| format!("model-{part}-of-00002.safetensors"));
    let single = copy.path().join("model.safetensors");
    fs::rename(copy.path().join(&first), &single).unwrap();
    let index_path = copy.path().join("model.safetensors.index.json");
    let index = fs::read_to_string(&index_path).unwrap();
    let named = index.replace(&first, "model.safetensors");
    fs::write(&index_path, named).unwrap();
    assert_eq!(logits(copy.path(), Quantization::None), whole);
    fs::write(&index_path, index).unwrap();
    fs::remove_file(copy.path().join(second)).unwrap();
    fs::copy(reference("llama").join("model.safetensors"), single).unwrap();
    assert_eq!(logits(copy.path(), Quantization::None), whole);
}

#[test]
fn a_missing_shard_is_a_download_that_has_not_ended() {
    let copy = sharded("llama");
    fs::remove_file(copy.path().join("model-00002-of-00002.safetensors")).unwrap();
    fs::write(
        copy.path().join("model-00002-of-00002.safetensors.part"),
        "",
    )
    .unwrap();
    assert_open_fails(
        copy.path(),
        &[
            "is not complete",
            "1 are not there: model-00002-of-00002.safetensors (an unfinished download: model-00002-of-00002.safetensors.part)",
        ],
    );
}

#[test]
fn an_index_that_leads_out_of_the_folder_is_refused() {
    let copy = sharded("llama");
    let index = r#"{"weight_map": {"a": "../../etc/passwd"}}"#;
    fs::write(copy.path().join("model.safetensors.index.json"), index).unwrap();
    assert_open_fails(copy.path(), &["which is no file of the folder"]);
}

#[test]
fn what_is_no_regular_file_or_too_large_is_not_read() {
    let copy = sharded("llama");
    for name in ["model.safetensors.index.json", CONFIG] {
        let path = copy.path().join(name);
        let expected = [name, "no regular file of at most 64.0 MiB"];
        let content = fs::read(&path).unwrap();
        let large = fs::File::create(&path).unwrap();
        large.set_len(MAX_ARTIFACT_BYTES + 1).unwrap();
        assert_open_fails(copy.path(), &expected);
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/dev/null", &path).unwrap();
        assert_open_fails(copy.path(), &expected);
        fs::remove_file(&path).unwrap();
        fs::write(&path, content).unwrap();
    }
}

#[test]
fn a_folder_without_its_parts_says_which() {
    let empty = tempfile::tempdir().unwrap();
    fs::write(empty.path().join("blobs.incomplete"), "").unwrap();
    assert_open_fails(
        empty.path(),
        &["has no config.json (an unfinished download: blobs.incomplete)"],
    );
    let copy = copy_of("llama");
    fs::remove_file(copy.path().join("model.safetensors")).unwrap();
    assert_open_fails(copy.path(), &["neither model.safetensors nor"]);
    fs::write(copy.path().join("pytorch_model.bin"), "").unwrap();
    assert_open_fails(copy.path(), &["pytorch_model.bin", "pickled"]);
    assert_open_fails(
        Path::new("/nowhere/at/all"),
        &["/nowhere/at/all is no model"],
    );
}

#[test]
fn a_missing_tensor_is_named() {
    let copy = changed("qwen3", |tensors| {
        tensors
            .remove("model.layers.1.self_attn.k_norm.weight")
            .unwrap();
    });
    assert_open_fails(
        copy.path(),
        &["has no tensor model.layers.1.self_attn.k_norm.weight"],
    );
}

#[test]
fn a_tensor_of_the_wrong_shape_is_named() {
    let copy = changed("llama", |tensors| {
        let tensor = tensors.get_mut("model.norm.weight").unwrap();
        tensor.shape = vec![24];
        tensor.data.truncate(48);
    });
    let error = EngineError::from(OpenModel::open(copy.path()).unwrap_err());
    let text = "tensor model.norm.weight is [24] and should be [48]";
    assert!(error.message().contains(text), "{error}");
    assert_eq!(error.at().map(|at| at.name()), Some("MODEL"));
}

#[test]
fn a_tensor_of_integers_is_refused() {
    let copy = changed("llama", |tensors| {
        let tensor = tensors.get_mut("model.norm.weight").unwrap();
        tensor.dtype = Dtype::I16;
    });
    assert_open_fails(copy.path(), &["is I16; tensors may be F32, F16 or BF16"]);
}

#[test]
fn every_float_type_gives_the_same_answers() {
    let expected = logits(&reference("llama"), Quantization::None);
    let to_f32 = |bytes: &[u8; 2]| half::bf16::from_le_bytes(*bytes).to_f32();
    let as_f32 = changed("llama", |tensors| {
        for tensor in tensors.values_mut() {
            let values = tensor.data.as_chunks::<2>().0.iter().map(to_f32);
            tensor.data = values.flat_map(f32::to_le_bytes).collect();
            tensor.dtype = Dtype::F32;
        }
    });
    assert_eq!(logits(as_f32.path(), Quantization::None), expected);
    let as_f16 = changed("llama", |tensors| {
        for tensor in tensors.values_mut() {
            let values = tensor.data.as_chunks::<2>().0.iter().map(to_f32);
            let values = values.flat_map(|value| half::f16::from_f32(value).to_le_bytes());
            tensor.data = values.collect();
            tensor.dtype = Dtype::F16;
        }
    });
    // Small bf16 numbers lose bits in f16.
    let got = logits(as_f16.path(), Quantization::None);
    assert!(relative_error(&expected, &got) < 1e-4);
}

#[test]
fn weights_quantized_at_load_stay_near() {
    let folder = tiny("f32");
    let expected = logits(folder.path(), Quantization::None);
    // Two layers of random weights double an error; blocks in a wrong order would differ by more than 1.
    for (quantization, most) in [
        (Quantization::Q8_0, 0.05),
        (Quantization::Q6K, 0.15),
        (Quantization::Q5K, 0.3),
        (Quantization::Q4K, 0.5),
        (Quantization::Q4_0, 0.5),
    ] {
        let got = logits(folder.path(), quantization);
        let error = relative_error(&expected, &got);
        assert!(error > 0.0 && error < most, "{quantization}: {error}");
    }
}

#[test]
fn rows_that_are_no_whole_blocks_take_another_type() {
    use candle_core::quantized::GgmlDType;
    let dtype = |row_len| Quantization::Q4K.dtype_for(row_len, quantize::Part::Layer);
    assert_eq!(dtype(512), GgmlDType::Q4K);
    assert_eq!(dtype(96), GgmlDType::Q8_0);
    assert_eq!(dtype(80), GgmlDType::F32);
    // In this model one matrix per layer has whole blocks of 32; the others do not.
    let exact = logits(&reference("llama"), Quantization::None);
    let got = logits(&reference("llama"), Quantization::Q4K);
    let error = relative_error(&exact, &got);
    assert!(error > 0.0 && error < 0.05, "{error}");
}

/// A decode instance takes KV blocks of nothing but what it computes with itself.
#[test]
fn models_are_told_apart_by_their_numbers_types_and_configuration() {
    let digest = |folder: &TempDir, quantization| {
        let open = OpenModel::open(folder.path()).unwrap();
        let weights = open.weights(options(quantization), |_| Ok(()));
        let mut weights = weights.with_digest(&open.config);
        Model::try_new(&open.config, &mut weights).unwrap();
        weights.digest().unwrap()
    };
    let made = |seed| {
        let folder = tempfile::tempdir().unwrap();
        make_model(folder.path(), SyntheticSize::Tiny, seed).unwrap();
        folder
    };
    let configured = |pointer: &str, to: Value| {
        let folder = made(1);
        set(&folder, CONFIG, pointer, to);
        folder
    };
    let one_bit = made(1);
    let path = one_bit.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&path, bytes).unwrap();
    let usual = Quantization::Q8_0;
    let digests = [
        digest(&made(1), usual),
        digest(&made(1), Quantization::Q4_0),
        digest(&made(2), usual),
        digest(&one_bit, usual),
        digest(&configured("/rope_theta", json!(20_000.0)), usual),
    ];
    let apart: BTreeSet<u64> = digests.into_iter().collect();
    assert_eq!(apart.len(), digests.len(), "{digests:?}");
    assert_eq!(digest(&made(1), usual), digests[0]);
    let shorter = configured("/max_position_embeddings", json!(128));
    assert_eq!(digest(&shorter, usual), digests[0]);
}

#[test]
fn progress_ends_at_all() {
    let open = OpenModel::open(&reference("qwen2")).unwrap();
    let mut last = None;
    let mut weights = open.weights(options(Quantization::None), |done| {
        last = Some(done);
        Ok(())
    });
    Model::try_new(&open.config, &mut weights).unwrap();
    drop(weights);
    let last = last.unwrap();
    assert_eq!(
        (last.tensors, last.bytes),
        (last.all_tensors, last.all_bytes)
    );
    assert!(last.all_bytes > 50_000, "{last:?}");
}

#[test]
fn an_error_of_the_report_ends_loading() {
    let open = OpenModel::open(&reference("qwen2")).unwrap();
    let mut loaded = 0;
    let mut weights = open.weights(options(Quantization::None), |done| {
        loaded = done.tensors;
        let problem = candle_core::Error::Msg("enough".into());
        Err(LoadError::candle("the model", problem))
    });
    assert!(Model::try_new(&open.config, &mut weights).is_err());
    drop(weights);
    assert_eq!(loaded, 1);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_file_cut_anywhere_is_refused(part in 0.0f64..1.0) {
        let copy = copy_of("llama");
        let path = copy.path().join("model.safetensors");
        let bytes = fs::read(&path).unwrap();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "a place in a small file")]
        let length = (bytes.len() as f64 * part) as usize;
        fs::write(&path, &bytes[..length]).unwrap();
        assert_open_fails(copy.path(), &["model.safetensors is broken"]);
    }

    #[test]
    fn a_changed_header_never_panics(place in 0usize..4000, byte: u8) {
        let copy = copy_of("llama");
        let path = copy.path().join("model.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        bytes[place] = byte;
        fs::write(&path, &bytes).unwrap();
        // Whether it is still a valid model depends on the byte.
        if let Err(error) = OpenModel::open(copy.path()) {
            prop_assert!(!error.to_string().is_empty());
        }
    }
}
