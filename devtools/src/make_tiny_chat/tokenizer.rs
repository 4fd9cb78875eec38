//! The tokenizer of tiny-chat: byte-level BPE like GPT-2's, with ChatML's special tokens.
//!
//! Every byte is a token, so any text can be encoded; the rest of the vocabulary is learned from the corpus.
//!
//! # Source
//! Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2), section 2.2, for byte-level BPE.

use anyhow::{Context as _, ensure};
use genset_devtools::tiny_chat::{END_OF_TEXT, MESSAGE_END, MESSAGE_START};
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer};

/// Entries of the vocabulary, special tokens included; a multiple of 64, so the model needs no padding rows.
pub(super) const VOCABULARY_SIZE: usize = 2048;

/// A merge must occur this often in the corpus to be learned.
const MIN_FREQUENCY: u64 = 2;

/// The ids of the special tokens in the trained vocabulary.
#[derive(Debug)]
pub(super) struct SpecialIds {
    pub(super) end_of_text: u32,
    pub(super) message_start: u32,
    pub(super) message_end: u32,
}

impl SpecialIds {
    /// # Errors
    /// If the tokenizer lacks one of them.
    pub(super) fn look_up(tokenizer: &Tokenizer) -> anyhow::Result<Self> {
        let id = |token| {
            tokenizer
                .token_to_id(token)
                .with_context(|| format!("the tokenizer has no {token}"))
        };
        Ok(Self {
            end_of_text: id(END_OF_TEXT)?,
            message_start: id(MESSAGE_START)?,
            message_end: id(MESSAGE_END)?,
        })
    }
}

/// Learns a vocabulary of [`VOCABULARY_SIZE`] entries from the texts.
///
/// The same texts in the same order yield the same tokenizer: merges of equal frequency are learned in the order of their
/// ids.
///
/// # Errors
/// If the texts have too few repeated pairs to fill the vocabulary.
pub(super) fn train(texts: &[String]) -> anyhow::Result<Tokenizer> {
    let bytes = ByteLevel::new(false, true, true);
    let mut tokenizer = Tokenizer::new(BPE::default());
    tokenizer
        .with_pre_tokenizer(Some(bytes))
        .with_decoder(Some(bytes));
    let mut trainer = TrainerWrapper::from(
        BpeTrainer::builder()
            .show_progress(false)
            .vocab_size(VOCABULARY_SIZE)
            .min_frequency(MIN_FREQUENCY)
            .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
            .special_tokens(
                [END_OF_TEXT, MESSAGE_START, MESSAGE_END]
                    .map(|token| AddedToken::from(token, true))
                    .into(),
            )
            .build(),
    );
    tokenizer
        .train(&mut trainer, texts.iter())
        .map_err(anyhow::Error::from_boxed)?;
    let learned = tokenizer.get_vocab_size(true);
    ensure!(
        learned == VOCABULARY_SIZE,
        "the corpus fills {learned} of {VOCABULARY_SIZE} vocabulary entries"
    );
    Ok(tokenizer)
}
