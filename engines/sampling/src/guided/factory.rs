//! [`GuideFactory`]: the state that all guided requests of a model share.

use std::sync::Arc;

use genset_backend_common::config::GuidedKind;
use genset_backend_common::{EngineError, GenerateRequest, GuidedDecoding, TokenId};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{ParserFactory, panic_utils};

use super::compile;
use super::error::VocabularyError;
use super::guide::Guide;
use super::limits::GuideLimits;
use super::vocabulary::Vocabulary;
use crate::sampler::prompt_and_resumed;

/// Compiles guided requests for one model's vocabulary.
///
/// Building one takes time proportional to the vocabulary, about a second for 128,000 tokens: do it while the weights
/// load. Compiling takes from less than a millisecond to a second: keep it off async threads. Share it behind an `Arc`.
pub struct GuideFactory {
    parsers: ParserFactory,
    limits: GuideLimits,
    vocabulary: Vocabulary,
    eos: Arc<[TokenId]>,
}

/// A token id outside every vocabulary: tells the trie that no token ends a sequence.
const NO_TOKEN: TokenId = TokenId::MAX;

impl GuideFactory {
    /// The kinds of grammars that it compiles, for the engine to declare.
    pub const KINDS: [GuidedKind; 5] = GuidedKind::ALL;

    /// Builds a factory from the content of `tokenizer.json`, the length `vocab_size` of a row of logits, and the model's
    /// end-of-sequence ids. Without ids, a sequence ends only when its text cannot continue.
    ///
    /// # Errors
    /// As [`Vocabulary::try_from_tokenizer_json`], and for end-of-sequence ids or tokens that do not fit.
    pub fn try_new(
        tokenizer_json: &[u8],
        vocab_size: usize,
        eos: &[TokenId],
    ) -> Result<Self, VocabularyError> {
        Self::of_vocabulary(
            Vocabulary::try_from_tokenizer_json(tokenizer_json, vocab_size)?,
            eos,
        )
    }

    /// As [`try_new`](Self::try_new), for an engine that knows the bytes of its tokens.
    ///
    /// # Errors
    /// For end-of-sequence ids or tokens that do not fit.
    pub fn of_vocabulary(vocabulary: Vocabulary, eos: &[TokenId]) -> Result<Self, VocabularyError> {
        let vocab_size = vocabulary.len();
        let is_outside =
            |token: &&TokenId| usize::try_from(**token).is_ok_and(|id| id >= vocab_size);
        if let Some(token) = eos.iter().find(is_outside) {
            return Err(VocabularyError::EosOutside {
                token: *token,
                vocab_size,
            });
        }
        let vocabulary = vocabulary.with_ends(eos);
        let limits = GuideLimits::default();
        // The trie panics on what it does not support.
        let parsers = panic_utils::catch_unwind(std::panic::AssertUnwindSafe(|| {
            parsers(&vocabulary, eos, &limits)
        }));
        let too_large = |error| VocabularyError::TooLarge {
            reason: compile::reason(&error),
        };
        Ok(Self {
            parsers: parsers.map_err(too_large)?,
            limits,
            vocabulary,
            eos: eos.into(),
        })
    }

    /// Replaces the default limits.
    #[must_use]
    pub fn with_limits(mut self, limits: GuideLimits) -> Self {
        *self.parsers.limits_mut() = limits.parser();
        self.limits = limits;
        self
    }

    /// The limits in force.
    #[must_use]
    pub fn limits(&self) -> &GuideLimits {
        &self.limits
    }

    /// The bytes of the tokens.
    #[must_use]
    pub fn vocabulary(&self) -> &Vocabulary {
        &self.vocabulary
    }

    /// Compiles a guide at the start of its text. A resumed request then accepts its resumed tokens.
    ///
    /// # Errors
    /// `InvalidArgument` for `RequestField::Guided`, with the reason, if the grammar cannot be compiled, exceeds the limits or
    /// allows no first token.
    pub fn compile(&self, guided: &GuidedDecoding) -> Result<Guide, EngineError> {
        let parser = compile::compile(&self.parsers, &self.limits, guided)?;
        let eos = Arc::clone(&self.eos);
        Ok(Guide::try_new(parser, eos, self.vocabulary.len())?)
    }

    /// Checks a grammar by itself: its syntax, unsupported notation, and the limits of its size. This is far cheaper than
    /// [`compile`](Self::compile), which may find more errors.
    ///
    /// # Errors
    /// As [`compile`](Self::compile).
    pub fn check(&self, guided: &GuidedDecoding) -> Result<(), EngineError> {
        compile::check(&self.parsers, &self.limits, guided)
    }

    /// Compiles the guide of a request, if it has one. For a resumed request, the guide has accepted the resumed tokens.
    ///
    /// # Errors
    /// As [`compile`](Self::compile), and as [`Guide::accept`] for resumed tokens; `Unsupported` for a request that has no tokens.
    pub fn compile_for(&self, request: &GenerateRequest) -> Result<Option<Guide>, EngineError> {
        let Some(guided) = &request.guided else {
            return Ok(None);
        };
        let (_, resumed) = prompt_and_resumed(request)?;
        let mut guide = self.compile(guided)?;
        for token in resumed {
            guide.accept(*token)?;
        }
        Ok(Some(guide))
    }
}

fn parsers(
    vocabulary: &Vocabulary,
    eos: &[TokenId],
    limits: &GuideLimits,
) -> anyhow::Result<ParserFactory> {
    let words = vocabulary.words();
    let size = u32::try_from(words.len())?;
    let mut trie = TokTrie::from(&TokRxInfo::new(size, NO_TOKEN), &words);
    if !eos.is_empty() {
        trie = trie.with_eos_tokens(eos);
    }
    // Not canonical: no token is forced, so the model keeps its own way of splitting text into tokens.
    let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let slices = SlicedBiasComputer::general_slices();
    let mut parsers = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)?;
    parsers.quiet();
    *parsers.limits_mut() = limits.parser();
    Ok(parsers)
}

genset_backend_common::debug_as!(|it| GuideFactory {
    vocab_size: it.vocabulary.len(),
    eos: it.eos,
    limits: it.limits,
    ..
});
