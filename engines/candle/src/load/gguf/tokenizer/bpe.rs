//! Byte-level BPE vocabularies, which GGUF files call gpt2.

use serde_json::{Map, Value as Json, json};

use super::super::header::Value;
use super::Vocabulary;
use crate::error::LoadError;

/// Llama 3's pattern: digits in groups of three.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Qwen 2's: digits one by one.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Mistral Nemo's: splits letters between lower and upper case.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// GPT-4o's (`o200k_base`): as the one above, with contractions at the ends of words and digits in groups of three.
const GPT_4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Qwen 3.5's: as Qwen 2's, with marks as parts of words.
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// That of Seed-Coder and Seed-OSS: as Qwen 2's, but no line ends within a word of signs.
const SEED: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Those of DeepSeek-V3 and Hunyuan, one after another: digits in groups of three, Chinese and Japanese letters, the rest.
const DEEPSEEK3: [&str; 3] = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
];

/// How a vocabulary splits text before it merges.
struct Splitting {
    normalizer: Json,
    pre_tokenizer: Json,
    /// Whether a word that is itself a token needs no merges.
    ignores_merges: bool,
}

pub(super) fn tokenizer(vocabulary: &Vocabulary<'_>) -> Result<Json, LoadError> {
    let splitting = splitting(vocabulary)?;
    let Some(Value::Texts(merges)) = vocabulary.find("merges") else {
        let problem = "it has a vocabulary but no tokenizer.ggml.merges";
        return Err(LoadError::no_tokenizer(vocabulary.path, problem));
    };
    let mut vocab = Map::new();
    for (id, token) in vocabulary.tokens.iter().enumerate() {
        vocab.insert(token.clone(), id.into());
    }
    let merges = merges
        .iter()
        .map(|merge| pair(vocabulary, merge))
        .collect::<Result<Vec<Json>, LoadError>>()?;
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": vocabulary.added_tokens(),
        "normalizer": splitting.normalizer,
        "pre_tokenizer": splitting.pre_tokenizer,
        "post_processor": vocabulary.post_processor(),
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": splitting.ignores_merges, "vocab": vocab, "merges": merges,
        },
    }))
}

/// The two halves of a merge. In byte-level BPE neither can contain a space, but elsewhere the first half may begin with one.
fn pair(vocabulary: &Vocabulary<'_>, merge: &str) -> Result<Json, LoadError> {
    let space = merge
        .char_indices()
        .skip(1)
        .find(|(_, letter)| *letter == ' ')
        .map(|(at, _)| at);
    match space.map(|at| merge.split_at(at)) {
        Some((first, second)) => Ok(json!([first, second.trim_start_matches(' ')])),
        None => Err(LoadError::bad_config(
            vocabulary.path,
            "tokenizer.ggml.merges",
            format!("{merge:?} is no pair"),
        )),
    }
}

fn byte_level(use_regex: bool) -> Json {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex})
}

/// Splits by each pattern what those before it have left.
fn by_patterns(patterns: &[&str]) -> Json {
    let split = |pattern: &&str| {
        json!({
            "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false,
        })
    };
    let mut steps: Vec<Json> = patterns.iter().map(split).collect();
    steps.push(byte_level(false));
    json!({"type": "Sequence", "pretokenizers": steps})
}

fn by_digits() -> Json {
    let digits = json!({"type": "Digits", "individual_digits": true});
    json!({"type": "Sequence", "pretokenizers": [digits, byte_level(true)]})
}

/// Whether a vocabulary splits text as Llama 3's, with `<s>` or its equivalent before every prompt.
pub(super) fn is_llama3(pre: &str) -> bool {
    matches!(
        pre,
        "llama-bpe"
            | "llama3"
            | "llama-v3"
            | "falcon3"
            | "falcon-h1"
            | "pixtral"
            | "midm-2.0"
            | "lfm2"
    )
}

fn splitting(vocabulary: &Vocabulary<'_>) -> Result<Splitting, LoadError> {
    let form = |name: &str| json!({"type": name});
    let (normalizer, pre_tokenizer, ignores_merges) = match vocabulary.text("pre") {
        Some("gpt-2" | "gpt2") => (Json::Null, byte_level(true), false),
        // OLMoE's.
        Some("olmo") => (form("NFC"), byte_level(true), false),
        Some("exaone4") => (form("NFKC"), byte_level(true), false),
        Some(pre) if pre == "smaug-bpe" || is_llama3(pre) => {
            (Json::Null, by_patterns(&[LLAMA3]), true)
        }
        // Phi-4's and GLM-4's: the pattern of Llama 3, but words that are tokens are merged too.
        Some("dbrx" | "glm4" | "chatglm-bpe") => (Json::Null, by_patterns(&[LLAMA3]), false),
        // Phi-4-mini's.
        Some("gpt-4o") => (Json::Null, by_patterns(&[GPT_4O]), false),
        Some("qwen2" | "deepseek-r1-qwen" | "hunyuan" | "megrez" | "kormo") => {
            (form("NFC"), by_patterns(&[QWEN2]), false)
        }
        Some("qwen35") => (form("NFC"), by_patterns(&[QWEN35]), false),
        Some("seed-coder") => (form("NFC"), by_patterns(&[SEED]), false),
        Some("deepseek-v3" | "hunyuan-dense") => (Json::Null, by_patterns(&DEEPSEEK3), false),
        Some("tekken") => (Json::Null, by_patterns(&[TEKKEN]), true),
        Some("smollm" | "starcoder" | "refact") => (Json::Null, by_digits(), false),
        Some("command-r") => (form("NFC"), by_digits(), false),
        other => {
            let problem = format!(
                "how its tokenizer splits text (tokenizer.ggml.pre = {}) is not known",
                other.unwrap_or("not given")
            );
            return Err(LoadError::no_tokenizer(vocabulary.path, problem));
        }
    };
    Ok(Splitting {
        normalizer,
        pre_tokenizer,
        ignores_merges,
    })
}
