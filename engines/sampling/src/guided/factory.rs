//! [`GuideFactory`]: what all guided requests of a model share.

use std::fmt;
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
/// Building one takes time in proportion to the vocabulary, about a second for 128,000 tokens: do it while the weights
/// load. Compiling takes from less than a millisecond to a second: keep it off async threads. Cheap to share behind an `Arc`.
pub struct GuideFactory {
    parsers: ParserFactory,
    limits: GuideLimits,
    vocabulary: Vocabulary,
    eos: Arc<[TokenId]>,
}

/// A token id that no vocabulary holds: the trie's way of saying that nothing ends a sequence.
const NO_TOKEN: TokenId = TokenId::MAX;

impl GuideFactory {
    /// The kinds of grammars that it compiles, as its engine declares them.
    pub const KINDS: [GuidedKind; 5] = [
        GuidedKind::JsonObject,
        GuidedKind::JsonSchema,
        GuidedKind::Regex,
        GuidedKind::Choice,
        GuidedKind::Grammar,
    ];

    /// For the tokenizer in `tokenizer_json`, rows of `vocab_size` logits, and the model's own end-of-sequence ids. Without
    /// any, only a text that cannot go on ends a sequence.
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
        let limits = GuideLimits::default();
        // The trie asserts what it cannot hold.
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

    /// With other limits than the default ones.
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

    /// A guide at the start of its text. A resumed request accepts its resumed tokens first.
    ///
    /// # Errors
    /// `InvalidArgument` for `RequestField::Guided`, with the reason, for what cannot be compiled, exceeds the limits or allows no
    /// first token.
    pub fn compile(&self, guided: &GuidedDecoding) -> Result<Guide, EngineError> {
        let parser = compile::compile(&self.parsers, &self.limits, guided)?;
        let eos = Arc::clone(&self.eos);
        Ok(Guide::try_new(parser, eos, self.vocabulary.len())?)
    }

    /// Looks for what is wrong with a grammar by itself: its syntax, and what is no part of its notation or over a limit of its
    /// size. It takes far less than to [`compile`](Self::compile) it, which may find more.
    ///
    /// # Errors
    /// As [`compile`](Self::compile).
    pub fn check(&self, guided: &GuidedDecoding) -> Result<(), EngineError> {
        compile::check(&self.parsers, &self.limits, guided)
    }

    /// The guide of a request, if it has one to follow. That of a resumed request stands where its tokens left it.
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
    // Not canonical: nothing is forced, so the model keeps its own way of splitting text into tokens.
    let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let slices = SlicedBiasComputer::general_slices();
    let mut parsers = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)?;
    parsers.quiet();
    *parsers.limits_mut() = limits.parser();
    Ok(parsers)
}

impl fmt::Debug for GuideFactory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuideFactory")
            .field("vocab_size", &self.vocabulary.len())
            .field("eos", &self.eos)
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}
