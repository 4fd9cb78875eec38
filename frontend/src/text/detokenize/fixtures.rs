//! Small tokenizers of every family, made in code by the library's own trainers.

use std::sync::{Arc, LazyLock};

use serde_json::{Value, json};
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::models::unigram::{Unigram, UnigramTrainer};
use tokenizers::models::wordpiece::{WordPiece, WordPieceTrainer};
use tokenizers::models::{ModelWrapper, TrainerWrapper};
use tokenizers::normalizers::NFKC;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::metaspace::Metaspace;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior, Tokenizer};

use crate::text::tokenizer::{TextTokenizer, TokenizerError};

/// Latin, emoji with joiners and modifiers, combining marks, right-to-left and unspaced scripts.
const CORPUS: &[&str] = &[
    "the quick brown fox jumps over the lazy dog, and the dog doesn't mind.",
    "The cafe\u{301} costs 3.50 €; naïve? Yes! Don't ' do n't.",
    "👩‍👩‍👧‍👦 🦊🦊 👍🏽 🇨🇭 and ☕️ — the end…",
    "שָׁלוֹם עולם, مرحبا بالعالم! the the",
    "日本語のテキスト、你好世界。 한국어",
    "fn main() {\n\tprintln!(\"hello\");\n}\r\n    x += 1;",
];

/// The texts that the tokenizers are trained on.
pub(in crate::text) fn corpus() -> impl Iterator<Item = &'static str> {
    CORPUS.iter().copied()
}

/// Llama 3's expression for words.
const LLAMA_3_WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The expression of tiktoken's `cl100k_base`.
const CL100K_WORDS: &str = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";

/// A tokenizer of one family.
pub(in crate::text) struct Family {
    pub(in crate::text) name: &'static str,
    pub(in crate::text) tokenizer: Arc<TextTokenizer>,
    /// Whether decoding an encoded text returns it unchanged.
    pub(in crate::text) is_lossless: bool,
}

/// Every family in common use.
pub(in crate::text) static FAMILIES: LazyLock<Vec<Family>> = LazyLock::new(|| {
    let family = |name, json: &Value, is_lossless| Family {
        name,
        tokenizer: parse(json).unwrap(),
        is_lossless,
    };
    vec![
        family("GPT-2", &byte_level_json(), true),
        family("Llama 3", &llama_3_json(), true),
        family("tiktoken", &tiktoken_json(), true),
        family("tiny-chat", &tiny_chat_json(), true),
        family("Llama 2", &llama_2_json(), false),
        family("Gemma", &gemma_json(), false),
        family("T5", &unigram_json(), false),
        family("BERT", &word_piece_json(), false),
    ]
});

fn to_json(tokenizer: &Tokenizer) -> Value {
    serde_json::to_value(tokenizer).unwrap()
}

fn parse(json: &Value) -> Result<Arc<TextTokenizer>, TokenizerError> {
    TextTokenizer::from_bytes(json.to_string().as_bytes()).map(Arc::new)
}

/// Adds special and other tokens, some of them spelled like vocabulary entries for other things.
fn add_tokens(tokenizer: &mut Tokenizer) {
    let special = ["<|bos|>", "<|eos|>", "Ġé"].map(|text| AddedToken::from(text, true));
    tokenizer.add_special_tokens(special).unwrap();
    let plain = ["<tool>", "é ☕", "▁▁x", "<0xFF>", " ."].map(|text| AddedToken::from(text, false));
    tokenizer.add_tokens(plain).unwrap();
}

fn train(
    model: impl Into<ModelWrapper>,
    pre: impl Into<PreTokenizerWrapper>,
    trainer: impl Into<TrainerWrapper>,
) -> Tokenizer {
    let mut tokenizer = Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(pre));
    tokenizer.train(&mut trainer.into(), CORPUS.iter()).unwrap();
    add_tokens(&mut tokenizer);
    tokenizer
}

fn train_byte_level(pre: impl Into<PreTokenizerWrapper>) -> Value {
    let trainer = BpeTrainer::builder()
        .vocab_size(400)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect());
    let mut tokenizer = train(BPE::default(), pre, trainer.build());
    tokenizer.with_decoder(Some(ByteLevel::default()));
    to_json(&tokenizer)
}

/// The byte-level alphabet after a split by the model's own pattern.
fn split_and_byte_level(words: &str) -> Value {
    let pattern = SplitPattern::Regex(words.to_owned());
    let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).unwrap();
    let byte_level = ByteLevel::new(false, false, false);
    train_byte_level(Sequence::new(vec![split.into(), byte_level.into()]))
}

/// Like GPT-2.
pub(in crate::text) fn byte_level_json() -> Value {
    train_byte_level(ByteLevel::new(false, true, true))
}

pub(in crate::text) fn byte_level() -> Arc<TextTokenizer> {
    parse(&byte_level_json()).unwrap()
}

/// Like Llama 3: looks up whole words before merges, and begins a text with a special token.
pub(in crate::text) fn llama_3_json() -> Value {
    let mut json = split_and_byte_level(LLAMA_3_WORDS);
    json["model"]["ignore_merges"] = true.into();
    let added = json["added_tokens"].as_array().unwrap();
    let bos = added.iter().find(|token| token["content"] == "<|bos|>");
    let id = bos.unwrap()["id"].clone();
    let begin = json!({ "SpecialToken": { "id": "<|bos|>", "type_id": 0 } });
    let text = |id, type_id| json!({ "Sequence": { "id": id, "type_id": type_id } });
    json["post_processor"] = json!({ "type": "TemplateProcessing",
        "single": [begin, text("A", 0)], "pair": [begin, text("A", 0), text("B", 1)],
        "special_tokens": { "<|bos|>": { "id": "<|bos|>", "ids": [id], "tokens": ["<|bos|>"] } } });
    json
}

/// Like tokenizers made from tiktoken's files.
pub(in crate::text) fn tiktoken_json() -> Value {
    split_and_byte_level(CL100K_WORDS)
}

/// The file of the model in this repository.
pub(in crate::text) fn tiny_chat_json() -> Value {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../models/tiny-chat/tokenizer.json"
    );
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// A BPE vocabulary over `▁`-separated words, with all byte tokens and without a decoder.
pub(in crate::text) fn sentence_piece_json() -> Value {
    let bytes = (0..=u8::MAX).map(|byte| AddedToken::from(format!("<0x{byte:02X}>"), false));
    let trainer = BpeTrainer::builder()
        .vocab_size(600)
        .show_progress(false)
        .special_tokens(bytes.collect());
    let tokenizer = train(BPE::default(), Metaspace::default(), trainer.build());
    let mut json = to_json(&tokenizer);
    // As in real files, byte tokens are only in the model.
    let added = json["added_tokens"].as_array_mut().unwrap();
    added.retain(|token| !token["content"].as_str().unwrap().starts_with("<0x"));
    json["model"]["byte_fallback"] = true.into();
    json
}

/// A SentencePiece vocabulary with this decoder.
pub(in crate::text) fn with_decoder(decoder: Value) -> Result<Arc<TextTokenizer>, TokenizerError> {
    let mut json = sentence_piece_json();
    json["decoder"] = decoder;
    parse(&json)
}

/// The decoder of SentencePiece vocabularies, with further stages.
fn byte_fallback_decoder(further: impl IntoIterator<Item = Value>) -> Value {
    let mut stages = vec![
        json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " }),
        json!({ "type": "ByteFallback" }),
        json!({ "type": "Fuse" }),
    ];
    stages.extend(further);
    json!({ "type": "Sequence", "decoders": stages })
}

/// Like Llama 2: every text begins with a space, which decoding removes.
pub(in crate::text) fn llama_2_json() -> Value {
    let strip = json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 });
    let mut json = sentence_piece_json();
    json["decoder"] = byte_fallback_decoder([strip]);
    json
}

pub(in crate::text) fn llama_2() -> Arc<TextTokenizer> {
    parse(&llama_2_json()).unwrap()
}

/// Like Gemma: adds no space before the text, and removes none.
pub(in crate::text) fn gemma_json() -> Value {
    let mut json = sentence_piece_json();
    json["normalizer"] = json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" });
    json["pre_tokenizer"] = json!({ "type": "Split", "pattern": { "String": " " },
        "behavior": "MergedWithPrevious", "invert": false });
    json["decoder"] = byte_fallback_decoder([]);
    json
}

/// Like T5 and XLM-R: every piece has a score, and unscored text is unknown.
pub(in crate::text) fn unigram_json() -> Value {
    let trainer = UnigramTrainer::builder()
        .vocab_size(300)
        .show_progress(false)
        .special_tokens(vec![AddedToken::from("<unk>", true)])
        .unk_token(Some("<unk>".to_owned()))
        .build()
        .unwrap();
    let mut tokenizer = train(Unigram::default(), Metaspace::default(), trainer);
    tokenizer.with_normalizer(Some(NFKC)).unwrap();
    tokenizer.with_decoder(Some(Metaspace::default()));
    to_json(&tokenizer)
}

/// Like BERT.
pub(in crate::text) fn word_piece_json() -> Value {
    let model = WordPiece::builder()
        .unk_token("[UNK]".to_owned())
        .build()
        .unwrap();
    let trainer = WordPieceTrainer::builder()
        .vocab_size(300)
        .show_progress(false)
        .special_tokens(vec![AddedToken::from("[UNK]", true)])
        .build();
    let mut tokenizer = train(model, BertPreTokenizer, trainer);
    tokenizer.with_decoder(Some(tokenizers::decoders::wordpiece::WordPiece::default()));
    to_json(&tokenizer)
}

pub(in crate::text) fn word_piece() -> Arc<TextTokenizer> {
    parse(&word_piece_json()).unwrap()
}

/// Parts of texts that are hard to split.
pub(in crate::text) const PIECES: &[&str] = &[
    // White space, line ends and invisible characters.
    " ",
    "  ",
    "\n",
    "\r\n",
    "\t",
    "\0",
    "\u{1b}",
    "\u{7f}",
    "\u{a0}",
    "\u{200b}",
    "\u{feff}",
    // Emoji: with joiners, modifiers, variation selectors, flags and keycaps.
    "🦊",
    "👩‍👩‍👧‍👦",
    "👍🏽",
    "❤️‍🔥",
    "🇨🇭",
    "🇨",
    "🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    "1️⃣",
    // Combining marks.
    "e\u{301}",
    "\u{301}",
    "Z͑ͫ̓a̴͒",
    "नमस्ते",
    "ที่",
    // Right-to-left, with direction marks.
    "שָׁלוֹם ",
    "مرحبا",
    "\u{202e}abc\u{202c}",
    // Without spaces, and beyond the Basic Multilingual Plane.
    "日本語",
    "한국어",
    "𠮷𝔘",
    // Text that decoders clean up.
    "do not",
    " n't",
    " ' ",
    "don't .",
    // Text that looks like a token.
    "<0xE2>",
    "▁",
    "Ġ",
    "##ing",
    "\u{fffd}",
    "<|eos|>",
    "<|im_end|>",
    "<tool>",
    "é ☕",
];
