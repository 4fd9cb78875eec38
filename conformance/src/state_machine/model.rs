//! The reference model: what the contract allows an engine and its streams in each state. Pure; the driver consults it.

use genset_backend_common::output::{Finished, Violation};
use genset_backend_common::{EngineError, ErrorKind, FinishReason, Output, TokenId};

use super::operation::Asked;
use crate::medium::Medium;
use crate::trial::Live;

/// The phases of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Built,
    Started,
    Draining,
    Stopped,
}

impl Phase {
    /// The phase after a `start` with this result.
    ///
    /// # Errors
    /// Only the first start must succeed. Later ones may succeed or fail.
    pub(super) fn started(self, start: Result<(), &EngineError>) -> Result<Self, String> {
        match (self, start) {
            (Self::Built | Self::Stopped, Ok(())) => Ok(Self::Started),
            (Self::Built, Err(error)) => Err(format!("start failed: {error} ({})", error.kind())),
            (Self::Started | Self::Draining, _) | (Self::Stopped, Err(_)) => Ok(self),
        }
    }

    pub(super) fn draining(self) -> Self {
        match self {
            Self::Started | Self::Draining => Self::Draining,
            Self::Built | Self::Stopped => self,
        }
    }

    pub(super) fn is_serving(self) -> bool {
        matches!(self, Self::Started | Self::Draining)
    }

    /// Whether a request may be refused with this error.
    pub(super) fn allows_refusal(self, error: &EngineError, is_alone: bool) -> Result<(), String> {
        let kind = error.kind();
        match self {
            Self::Built | Self::Stopped if kind == ErrorKind::EngineShutdown => Ok(()),
            Self::Built => Err(format!(
                "generate before start should be refused with engine_shutdown, but was with {kind}: {error}"
            )),
            Self::Stopped => Err(format!(
                "generate after cleanup should be refused with engine_shutdown, but was with {kind}: {error}"
            )),
            Self::Draining if error.policy().is_retryable => Ok(()),
            Self::Started if kind == ErrorKind::Overloaded && !is_alone => Ok(()),
            Self::Started | Self::Draining => {
                Err(format!("a good request was refused: {error} ({kind})"))
            }
        }
    }
}

/// How many tokens may still come after a cancel, from an engine's buffers: four times the capacity of the kit's own channel.
const BUFFERED_TOKENS: u32 = 256;

/// The state of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    Live,
    /// Cancelled after this number of tokens.
    Cancelled {
        delivered: u32,
    },
    Ended,
    Dropped,
}

/// What is known of one stream, and so which items it may yield next.
#[derive(Debug)]
pub(super) struct StreamModel {
    asked: Asked,
    vocab_size: u32,
    medium: Medium,
    /// The engine's phase when it accepted the request.
    accepted_in: Phase,
    /// Whether no other request was in flight then.
    is_alone: bool,
    tokens: u32,
    has_items: bool,
    standing: Standing,
}

impl StreamModel {
    /// A request sent to `live`.
    pub(super) fn new(asked: Asked, live: &Live, accepted_in: Phase, is_alone: bool) -> Self {
        Self {
            asked,
            vocab_size: live.vocab_size(),
            medium: live.medium(),
            accepted_in,
            is_alone,
            tokens: 0,
            has_items: false,
            standing: Standing::Live,
        }
    }

    /// Whether its terminal has not come yet.
    pub(super) fn is_open(&self) -> bool {
        matches!(self.standing, Standing::Live | Standing::Cancelled { .. })
    }

    pub(super) fn is_cancelled(&self) -> bool {
        matches!(self.standing, Standing::Cancelled { .. })
    }

    pub(super) fn is_ended(&self) -> bool {
        self.standing == Standing::Ended
    }

    pub(super) fn name(&self) -> String {
        format!("request #{}", self.asked.request)
    }

    /// How many tokens may still come.
    pub(super) fn remaining(&self) -> u32 {
        self.asked.max_tokens.saturating_sub(self.tokens)
    }

    pub(super) fn cancel(&mut self) {
        if self.standing == Standing::Live {
            self.standing = Standing::Cancelled {
                delivered: self.tokens,
            };
        }
    }

    /// Notes that the engine refused it.
    pub(super) fn refuse(&mut self) {
        self.standing = Standing::Ended;
    }

    pub(super) fn drop(&mut self) {
        if self.is_open() {
            self.standing = Standing::Dropped;
        }
    }

    /// Checks the next item of an open stream.
    ///
    /// # Errors
    /// The rule that the item violates.
    pub(super) fn observe(
        &mut self,
        item: &Result<Output, EngineError>,
        phase: Phase,
    ) -> Result<(), String> {
        let is_first = !std::mem::replace(&mut self.has_items, true);
        match item {
            Ok(output) if !self.accepted_in.is_serving() => Err(format!(
                "{} was sent to an engine that does not run, and gave {output:?}",
                self.name()
            )),
            Ok(Output::Tokens(chunk)) => self.observe_tokens(&chunk.token_ids),
            Ok(Output::Finished(finished)) => {
                self.observe_tokens(&finished.last.token_ids)?;
                self.observe_end(finished)?;
                self.standing = Standing::Ended;
                Ok(())
            }
            Ok(Output::Text(chunk)) if !self.medium.is_tokens() => self.count(chunk.token_count),
            Ok(other @ (Output::Text(_) | Output::Embeddings(_) | Output::Scores(_))) => {
                Err(format!(
                    "{} was asked for {:?} and gave {other:?}",
                    self.name(),
                    self.medium
                ))
            }
            Err(error) => {
                self.observe_error(error, phase, is_first)?;
                self.standing = Standing::Ended;
                Ok(())
            }
        }
    }

    /// Checks what came after the terminal.
    ///
    /// # Errors
    /// The rule that it violates.
    pub(super) fn observe_rest(
        &self,
        rest: Option<&Result<Output, EngineError>>,
        violation: Option<Violation>,
    ) -> Result<(), String> {
        match (rest, violation) {
            (None, None) => Ok(()),
            (Some(item), _) => Err(format!(
                "{} went on after its end with {item:?}",
                self.name()
            )),
            (None, Some(violation)) => Err(format!(
                "{} broke a rule of streams: {violation}",
                self.name()
            )),
        }
    }

    fn observe_tokens(&mut self, tokens: &[TokenId]) -> Result<(), String> {
        let name = self.name();
        if let Some(token) = tokens.iter().find(|token| **token >= self.vocab_size) {
            let size = self.vocab_size;
            return Err(format!(
                "{name} gave token {token} of a vocabulary of {size}"
            ));
        }
        self.count(u32::try_from(tokens.len()).unwrap_or(u32::MAX))
    }

    fn count(&mut self, count: u32) -> Result<(), String> {
        let (name, max) = (self.name(), self.asked.max_tokens);
        self.tokens = self.tokens.saturating_add(count);
        if self.tokens > max {
            let tokens = self.tokens;
            return Err(format!("{name} gave {tokens} tokens, max_tokens is {max}"));
        }
        match self.standing {
            Standing::Cancelled { delivered } if self.tokens - delivered > BUFFERED_TOKENS => {
                Err(format!(
                    "{name} was cancelled after {delivered} tokens and gave more than {BUFFERED_TOKENS} after that"
                ))
            }
            Standing::Live | Standing::Cancelled { .. } | Standing::Ended | Standing::Dropped => {
                Ok(())
            }
        }
    }

    fn observe_end(&self, finished: &Finished) -> Result<(), String> {
        let (name, tokens, max) = (self.name(), self.tokens, self.asked.max_tokens);
        let is_cancelled = self.is_cancelled();
        match finished.reason {
            FinishReason::Cancelled if is_cancelled => {}
            FinishReason::Cancelled => {
                return Err(format!(
                    "{name} ended as cancelled, and nobody cancelled it"
                ));
            }
            // Also when a cancel came too late to matter.
            FinishReason::Length if tokens == max => {}
            reason @ (FinishReason::Stop | FinishReason::Length | FinishReason::ContentFilter) => {
                let cancelled = if is_cancelled {
                    "was cancelled and "
                } else {
                    ""
                };
                return Err(format!(
                    "{name} {cancelled}ended as {reason:?} after {tokens} of {max} tokens, with ignore_eos"
                ));
            }
        }
        let usage = finished.usage;
        let prompt = self.asked.prompt_len;
        // For text, only the engine knows the number of tokens.
        if self.medium.is_tokens() && usage.prompt_tokens != prompt {
            let counted = usage.prompt_tokens;
            return Err(format!(
                "{name} has {prompt} prompt tokens, its usage says {counted}"
            ));
        }
        if usage.completion_tokens != tokens {
            let counted = usage.completion_tokens;
            return Err(format!(
                "{name} delivered {tokens} tokens, its usage says {counted}"
            ));
        }
        Ok(())
    }

    fn observe_error(
        &self,
        error: &EngineError,
        phase: Phase,
        is_first: bool,
    ) -> Result<(), String> {
        if self.accepted_in.is_serving() && phase == Phase::Stopped && error.policy().is_retryable {
            return Ok(());
        }
        // A refusal may also come as the only item, before the engine notices a cancel.
        let is_full = error.kind() == ErrorKind::Overloaded;
        if is_first && (is_full || !self.is_cancelled()) {
            return self.accepted_in.allows_refusal(error, self.is_alone);
        }
        let name = self.name();
        Err(format!("{name} ended with {}: {error}", error.kind()))
    }
}
