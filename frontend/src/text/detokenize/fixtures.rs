//! Small tokenizers of every family, made in code.

use std::sync::Arc;

use serde_json::{Value, json};
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::models::wordpiece::{WordPiece, WordPieceTrainer};
use tokenizers::models::{ModelWrapper, TrainerWrapper};
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

fn load(tokenizer: &Tokenizer) -> Value {
    serde_json::to_value(tokenizer).unwrap()
}

fn parse(json: &Value) -> Result<Arc<TextTokenizer>, TokenizerError> {
    TextTokenizer::from_bytes(json.to_string().as_bytes()).map(Arc::new)
}

fn add_tokens(tokenizer: &mut Tokenizer) {
    let special = ["<|bos|>", "<|eos|>", "Ġé"].map(|text| AddedToken::from(text, true));
    tokenizer.add_special_tokens(special).unwrap();
    let plain = ["<tool>", "é ☕", "▁▁x", "<0xFF>", " ."].map(|text| AddedToken::from(text, false));
    tokenizer.add_tokens(plain).unwrap();
}

fn train(
    model: ModelWrapper,
    pre: impl Into<PreTokenizerWrapper>,
    trainer: impl Into<TrainerWrapper>,
) -> Tokenizer {
    let mut tokenizer = Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(pre));
    tokenizer.train(&mut trainer.into(), CORPUS.iter()).unwrap();
    add_tokens(&mut tokenizer);
    tokenizer
}

fn byte_level_trainer() -> BpeTrainer {
    BpeTrainer::builder()
        .vocab_size(400)
        .show_progress(false)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build()
}

pub(in crate::text) fn byte_level_json() -> Value {
    let pre = ByteLevel::new(false, true, true);
    let mut tokenizer = train(BPE::default().into(), pre, byte_level_trainer());
    tokenizer.with_decoder(Some(ByteLevel::default()));
    load(&tokenizer)
}

/// As GPT-2.
pub(in crate::text) fn byte_level() -> Arc<TextTokenizer> {
    parse(&byte_level_json()).unwrap()
}

/// As Llama 3 and Qwen: the byte-level alphabet after a split by the model's own pattern.
pub(in crate::text) fn tiktoken() -> Arc<TextTokenizer> {
    let pattern = SplitPattern::Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            .to_owned(),
    );
    let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).unwrap();
    let pre = Sequence::new(vec![
        split.into(),
        ByteLevel::new(false, false, false).into(),
    ]);
    let mut tokenizer = train(BPE::default().into(), pre, byte_level_trainer());
    tokenizer.with_decoder(Some(ByteLevel::default()));
    parse(&load(&tokenizer)).unwrap()
}

/// A BPE vocabulary over `▁`-separated words, with all byte tokens and no decoder.
pub(in crate::text) fn sentence_piece_json() -> Value {
    let bytes = (0..=u8::MAX).map(|byte| AddedToken::from(format!("<0x{byte:02X}>"), false));
    let trainer = BpeTrainer::builder()
        .vocab_size(600)
        .show_progress(false)
        .special_tokens(bytes.collect())
        .build();
    let tokenizer = train(BPE::default().into(), Metaspace::default(), trainer);
    let mut json = load(&tokenizer);
    // As in real files, byte tokens belong to the model alone.
    let added = json["added_tokens"].as_array_mut().unwrap();
    added.retain(|token| !token["content"].as_str().unwrap().starts_with("<0x"));
    json["model"]["byte_fallback"] = true.into();
    json
}

pub(in crate::text) fn with_decoder(decoder: Value) -> Result<Arc<TextTokenizer>, TokenizerError> {
    let mut json = sentence_piece_json();
    json["decoder"] = decoder;
    parse(&json)
}

/// As Llama 2.
pub(in crate::text) fn sentence_piece() -> Arc<TextTokenizer> {
    with_decoder(json!({ "type": "Sequence", "decoders": [
        { "type": "Replace", "pattern": { "String": "▁" }, "content": " " },
        { "type": "ByteFallback" },
        { "type": "Fuse" },
        { "type": "Strip", "content": " ", "start": 1, "stop": 0 },
    ] }))
    .unwrap()
}

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
    let mut tokenizer = train(model.into(), BertPreTokenizer, trainer);
    tokenizer.with_decoder(Some(tokenizers::decoders::wordpiece::WordPiece::default()));
    load(&tokenizer)
}

/// As BERT.
pub(in crate::text) fn word_piece() -> Arc<TextTokenizer> {
    parse(&word_piece_json()).unwrap()
}
