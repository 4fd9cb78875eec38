//! A model's files: a checkout's own, and those made from a GGUF file.

use serde_json::{Value as Json, json};
use tokenizers::Tokenizer;

use super::write::{Entry, GgmlDType, encode, f32s, i32s, text, texts, write_gguf};
use super::*;
use crate::load::gguf::config::Metadata;
use crate::load::gguf::header::Header;
use crate::load::gguf::tokenizer::{computed, files};

fn json_of(files: &[ModelFile], name: &str) -> Json {
    let file = files.iter().find(|file| file.name == name).unwrap();
    serde_json::from_slice(&file.content).unwrap()
}

fn tokenizer_of(files: &[ModelFile]) -> Tokenizer {
    let file = files
        .iter()
        .find(|file| file.name == "tokenizer.json")
        .unwrap();
    str::from_utf8(&file.content).unwrap().parse().unwrap()
}

fn ids(tokenizer: &Tokenizer, text: &str, adds_special: bool) -> Vec<u32> {
    tokenizer
        .encode(text, adds_special)
        .unwrap()
        .get_ids()
        .to_vec()
}

#[test]
fn a_tokenizer_survives_the_way_through_a_gguf_file() {
    let folder = tiny("f32");
    let checkout = OpenModel::open(folder.path()).unwrap().files(None).unwrap();
    let own = tokenizer_of(&checkout);
    let open = OpenModel::open(&folder.path().join("model.gguf")).unwrap();
    let made = open.files(None).unwrap();
    let other = tokenizer_of(&made);
    for text in [
        "What is the capital of France?",
        "  two  spaces\n\nand lines\t1234567",
        "<|im_start|>user\nHé, 你好 🙂<|im_end|>",
        "",
    ] {
        let expected = ids(&own, text, true);
        assert_eq!(ids(&other, text, true), expected, "{text:?}");
        let decoded = other.decode(&expected, false).unwrap();
        assert_eq!(decoded, own.decode(&expected, false).unwrap());
        assert_eq!(decoded, text);
    }
    let ends = |files: &[ModelFile]| {
        let generation = json_of(files, "generation_config.json");
        generation["eos_token_id"].clone()
    };
    assert_eq!(ends(&made), ends(&checkout));
    let config = json_of(&made, "tokenizer_config.json");
    assert_eq!(config["eos_token"], "<|im_end|>");
    assert!(
        config["chat_template"]
            .as_str()
            .unwrap()
            .contains("<|im_start|>")
    );
    let config = json_of(&made, "config.json");
    assert_eq!(
        (
            config["vocab_size"].as_u64(),
            config["max_position_embeddings"].as_u64()
        ),
        (Some(2048), Some(4096))
    );
}

#[test]
fn a_file_without_a_tokenizer_asks_for_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let open = OpenModel::open(&reference("llama")).unwrap();
    write_gguf(&open, &path, GgmlDType::F32);
    let open = OpenModel::open(&path).unwrap();
    let error = EngineError::from(open.files(None).unwrap_err());
    assert_eq!(error.at().map(|at| at.name()), Some("--model-config"));
    assert!(
        error
            .message()
            .contains("it has no tokenizer; give a folder"),
        "{error}"
    );
    // Tiny-chat's tokenizer has more tokens than the model.
    let error = open.files(Some(tiny_chat::folder()));
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("has the id 2047, but the model's vocabulary ends at 96"),
        "{error}"
    );
    let error = open.files(Some(folder.path())).unwrap_err().to_string();
    assert!(error.contains("there is no tokenizer.json"), "{error}");
    let small = json!({"model": {"type": "BPE", "vocab": {"a": 95}, "merges": []}, "added_tokens": [{"id": 96, "content": "<image>"}]});
    fs::write(folder.path().join("tokenizer.json"), small.to_string()).unwrap();
    let files = open.files(Some(folder.path())).unwrap();
    let names: Vec<&str> = files.iter().map(|file| file.name).collect();
    assert_eq!(names, ["config.json", "tokenizer.json"]);
}

#[test]
fn the_files_of_an_architecture_that_others_compute_are_made_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = tiny_chat::folder().join("tiny-chat-q8_0.gguf");
    let known = gguf_files(&path).unwrap();
    let mut bytes = fs::read(&path).unwrap();
    // The architecture, and the keys that begin with it.
    for start in 0..1000 {
        if bytes[start..].starts_with(b"llama") {
            bytes[start..start + 5].copy_from_slice(b"other");
        }
    }
    let path = folder.path().join("other.gguf");
    fs::write(&path, bytes).unwrap();
    assert_open_fails(&path, &["the architecture other is not supported"]);
    let files = gguf_files(&path).unwrap();
    assert_eq!(files[1..], known[1..]);
    let expected = json!({
        "model_type": "other", "vocab_size": 2048, "max_position_embeddings": 2048,
        "eos_token_id": json_of(&known, "config.json")["eos_token_id"],
    });
    assert_eq!(json_of(&files, "config.json"), expected);
}

#[test]
fn another_models_tokenizer_in_a_checkout_is_refused() {
    let copy = copy_of("llama");
    let tokenizer = tiny_chat_tokenizer();
    fs::write(copy.path().join("tokenizer.json"), &tokenizer[0].content).unwrap();
    assert_open_fails(copy.path(), &["is it another model's tokenizer?"]);
    fs::write(copy.path().join("tokenizer.json"), "{").unwrap();
    assert_open_fails(copy.path(), &["tokenizer.json is broken"]);
}

/// The files made from these entries, for a model of the size of `llama`.
fn made(entries: Vec<(&str, Entry)>) -> Result<Vec<ModelFile>, LoadError> {
    made_for("llama", entries)
}

/// The same for another architecture.
fn made_for(architecture: &str, entries: Vec<(&str, Entry)>) -> Result<Vec<ModelFile>, LoadError> {
    let entries = entries
        .into_iter()
        .map(|(key, entry)| (format!("tokenizer.{key}"), entry));
    let mut all = vec![("general.architecture".to_owned(), text(architecture))];
    all.extend(entries);
    let header = Header::parse(&encode(&all, &[])).unwrap();
    let config = OpenModel::open(&reference("llama")).unwrap().config;
    let metadata = Metadata::new(Path::new("m.gguf"), &header).unwrap();
    files(metadata, computed(metadata, &config))
}

#[test]
fn sentencepiece_vocabularies_become_tokenizers() {
    let tokens = [
        "<unk>",
        "<s>",
        "</s>",
        "<0x21>",
        "\u{2581}",
        "a",
        "b",
        "ab",
        "\u{2581}ab",
        "<end_of_turn>",
    ];
    let files = made(vec![
        ("ggml.model", text("llama")),
        ("ggml.tokens", texts(&tokens)),
        (
            "ggml.scores",
            f32s(&[0., 0., 0., 0., -3., -4., -5., -1., -2., 0.]),
        ),
        ("ggml.token_type", i32s(&[2, 3, 3, 6, 1, 1, 1, 1, 1, 4])),
        ("ggml.bos_token_id", Entry::U32(1)),
        ("ggml.eos_token_id", Entry::U32(2)),
        ("ggml.unknown_token_id", Entry::U32(0)),
        ("chat_template", text("a")),
        ("chat_template.tool_use", text("b")),
    ])
    .unwrap();
    let templates =
        json!([{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]);
    assert_eq!(
        json_of(&files, "tokenizer_config.json")["chat_template"],
        templates
    );
    let tokenizer = tokenizer_of(&files);
    assert_eq!(
        ids(&tokenizer, "ab b!<end_of_turn>", true),
        [1, 8, 4, 6, 3, 9]
    );
    assert_eq!(ids(&tokenizer, "ab", false), [8]);
    assert_eq!(tokenizer.decode(&[1, 8, 4, 6, 3], true).unwrap(), "ab b!");
    let generation = json_of(&files, "generation_config.json");
    assert_eq!(
        (&generation["bos_token_id"], &generation["eos_token_id"]),
        (&json!(1), &json!([2, 9]))
    );
}

#[test]
fn a_message_within_an_answer_of_gpt_oss_does_not_end_it() {
    let ends = |others: &[&str]| {
        let known = ["a", "b", "ab", "<|endoftext|>", "<|end|>"];
        let tokens = [known.as_slice(), others].concat();
        let mut types = vec![1, 1, 1];
        types.resize(tokens.len(), 3);
        let files = made_for(
            "gpt-oss",
            vec![
                ("ggml.model", text("gpt2")),
                ("ggml.pre", text("gpt-4o")),
                ("ggml.tokens", texts(&tokens)),
                ("ggml.merges", texts(&["a b"])),
                ("ggml.token_type", i32s(&types)),
                ("ggml.eos_token_id", Entry::U32(5)),
            ],
        );
        json_of(&files.unwrap(), "generation_config.json")["eos_token_id"].clone()
    };
    let of_gpt_oss = ends(&["<|return|>", "<|start|>", "<|call|>"]);
    assert_eq!(of_gpt_oss, json!([5, 3, 7]));
    // Phi-4-mini has the same pre-tokenizer, and its token ends an answer.
    assert_eq!(ends(&["<|user|>"]), json!([5, 3, 4]));
}

#[test]
fn tokens_of_phi3_take_the_space_behind_them() {
    let tokens = [
        "<unk>",
        "<s>",
        "</s>",
        "<0x0A>",
        "\u{2581}",
        "H",
        "i",
        "Hi",
        "\u{2581}Hi",
        "<|endoftext|>",
        "<|assistant|>",
        "<|end|>",
        "<|user|>",
    ];
    let of = |architecture: &str, prompt: &str| {
        let files = made_for(
            architecture,
            vec![
                ("ggml.model", text("llama")),
                ("ggml.tokens", texts(&tokens)),
                (
                    "ggml.scores",
                    f32s(&[0., 0., 0., 0., -3., -4., -5., -1., -2., 0., 0., 0., 0.]),
                ),
                (
                    "ggml.token_type",
                    i32s(&[2, 3, 4, 6, 1, 1, 1, 1, 1, 3, 3, 3, 4]),
                ),
                ("ggml.bos_token_id", Entry::U32(1)),
                ("ggml.eos_token_id", Entry::U32(9)),
                ("ggml.unknown_token_id", Entry::U32(0)),
            ],
        );
        ids(&tokenizer_of(&files.unwrap()), prompt, false)
    };
    let chat = "<|user|>\nHi<|end|>\n<|assistant|>\n";
    assert_eq!(of("phi3", chat), [12, 8, 11, 10]);
    assert_eq!(of("phi3", "</s> Hi<|endoftext|>\n"), [2, 8, 9, 4, 3]);
    assert_eq!(of("llama", chat), [12, 4, 3, 7, 11, 4, 3, 10, 4, 3]);
}

#[test]
fn ways_of_splitting_text_are_kept_apart() {
    let split = |pre: &str| {
        made(vec![
            ("ggml.model", text("gpt2")),
            ("ggml.pre", text(pre)),
            ("ggml.tokens", texts(&["1", "2", "12", "123", "3", "<s>"])),
            ("ggml.merges", texts(&["1 2", "12 3"])),
            ("ggml.token_type", i32s(&[1, 1, 1, 1, 1, 3])),
            ("ggml.bos_token_id", Entry::U32(5)),
        ])
    };
    for (pre, expected) in [
        ("gpt-2", vec![3]),
        ("llama-bpe", vec![5, 3]),
        ("llama-v3", vec![5, 3]),
        ("smaug-bpe", vec![3]),
        ("qwen2", vec![0, 1, 4]),
        ("smollm", vec![0, 1, 4]),
        ("tekken", vec![5, 0, 1, 4]),
        ("falcon3", vec![5, 3]),
        ("glm4", vec![3]),
        ("exaone4", vec![3]),
        ("olmo", vec![3]),
        ("hunyuan", vec![0, 1, 4]),
        ("hunyuan-dense", vec![3]),
        ("qwen35", vec![0, 1, 4]),
        ("seed-coder", vec![0, 1, 4]),
    ] {
        let tokenizer = tokenizer_of(&split(pre).unwrap());
        assert_eq!(ids(&tokenizer, "123", true), expected, "{pre}");
    }
    let error = split("somebody-elses").unwrap_err().to_string();
    assert!(
        error.contains("tokenizer.ggml.pre = somebody-elses") && error.contains("--model-config"),
        "{error}"
    );
}

#[test]
fn words_of_phi4_are_split_as_its_tokenizers_do() {
    let split = |pre: &str, prompt: &str| {
        let entries = vec![
            ("ggml.model", text("gpt2")),
            ("ggml.pre", text(pre)),
            (
                "ggml.tokens",
                texts(&["a", "B", "'", "s", "aB", "'s", "a's", "BB"]),
            ),
            ("ggml.merges", texts(&["a B", "' s", "a 's"])),
        ];
        let files = made_for("phi3", entries).unwrap();
        ids(&tokenizer_of(&files), prompt, true)
    };
    for (pre, text, expected) in [
        ("dbrx", "aB", vec![4]),
        ("gpt-4o", "aB", vec![0, 1]),
        ("dbrx", "a's", vec![0, 5]),
        ("gpt-4o", "a's", vec![6]),
        // A word that is itself a token, but that no merges produce.
        ("dbrx", "BB", vec![1, 1]),
        ("gpt-4o", "BB", vec![1, 1]),
    ] {
        assert_eq!(split(pre, text), expected, "{pre}: {text}");
    }
}

#[test]
fn words_of_newer_families_are_split_as_their_tokenizers_do() {
    // In byte-level letters 一 (E4 B8 80) is ä¸Ģ, and é (C3 A9) is Ã©.
    let tokens = ["a", "!", "Ċ", "!Ċ", "Ģa", "ä", "¸", "Ģ", "Ã", "©"];
    let split = |pre: &str, prompt: &str| {
        let files = made(vec![
            ("ggml.model", text("gpt2")),
            ("ggml.pre", text(pre)),
            ("ggml.tokens", texts(&tokens)),
            ("ggml.merges", texts(&["! Ċ", "Ģ a"])),
        ]);
        ids(&tokenizer_of(&files.unwrap()), prompt, true)
    };
    for (pre, prompt, expected) in [
        ("qwen2", "!\n", vec![3]),
        ("seed-coder", "!\n", vec![1, 2]),
        ("glm4", "一a", vec![5, 6, 4]),
        ("hunyuan-dense", "一a", vec![5, 6, 7, 0]),
        // As one letter, with an accent; a wide letter as a usual one.
        ("seed-coder", "e\u{301}", vec![8, 9]),
        ("olmo", "e\u{301}", vec![8, 9]),
        ("command-r", "e\u{301}", vec![8, 9]),
        ("exaone4", "\u{ff41}", vec![0]),
    ] {
        assert_eq!(split(pre, prompt), expected, "{pre}: {prompt:?}");
    }
}

#[test]
fn vocabularies_that_make_no_sense_are_refused() {
    let model = |kind: &str| ("ggml.model", text(kind));
    let tokens = || ("ggml.tokens", texts(&["a", "b"]));
    for (entries, expected) in [
        (vec![model("bert"), tokens()], "of the kind bert"),
        (vec![model("llama"), tokens()], "not a score for each token"),
        (
            vec![
                model("llama"),
                ("ggml.tokens", texts(&["a", &"a".repeat(1025)])),
                ("ggml.scores", f32s(&[0., 0.])),
            ],
            "a token of 1025 bytes",
        ),
        (
            vec![model("gpt2"), tokens(), ("ggml.pre", text("gpt-2"))],
            "no tokenizer.ggml.merges",
        ),
        (
            vec![model("gpt2"), tokens(), ("ggml.token_type", i32s(&[1]))],
            "1 types for 2 tokens",
        ),
        (
            vec![
                model("gpt2"),
                tokens(),
                ("ggml.pre", text("gpt-2")),
                ("ggml.merges", texts(&["ab"])),
            ],
            "\"ab\" is no pair",
        ),
    ] {
        let error = made(entries).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}
