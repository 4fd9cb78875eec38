//! [`LogprobQueue`]: the log probabilities of an answer's tokens, emitted with the text they belong to.
//!
//! Text may be held back (until a code point is complete, or a possible stop string is ruled out), and text after a
//! stop string is dropped. A token reveals as much as its text does. So its log probability waits with the text, and is
//! dropped if any part of the token was cut off. [`Answer`](super::Answer) has a queue if the request asked for log
//! probabilities.

use std::collections::VecDeque;
use std::sync::Arc;

use genset_backend_common::TokenId;
use genset_backend_common::output::TokenLogprob;

use crate::text::TextTokenizer;

/// A token of an answer, with its log probability and the most probable candidates in its position.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// The token.
    pub chosen: CandidateToken,
    /// The most probable candidates, best first, as many as the request asked for.
    pub top: Vec<CandidateToken>,
    /// Where its text begins in the answer, in code points.
    pub text_offset: usize,
}

/// A candidate token for a position.
#[derive(Debug, Clone, PartialEq)]
pub struct CandidateToken {
    /// Its text within a running text; may be part of a code point.
    pub bytes: Vec<u8>,
    /// The natural logarithm of its probability.
    pub logprob: f32,
}

/// The log probabilities of one answer.
#[derive(Debug)]
pub(super) struct LogprobQueue {
    tokenizer: Arc<TextTokenizer>,
    /// The number of candidates asked for.
    top: usize,
    /// Bytes of text detokenized so far, emitted or not.
    bytes: usize,
    chars: usize,
    waiting: VecDeque<Waiting>,
    ready: Vec<TokenLogprobs>,
}

/// A token whose text was not fully emitted.
#[derive(Debug)]
struct Waiting {
    token: TokenId,
    rating: TokenLogprob,
    text_offset: usize,
    /// The length in bytes of the answer's text up to this token's end; `None` until text comes, perhaps with a later
    /// token: several tokens may make one code point, and some have no text.
    end: Option<usize>,
}

impl LogprobQueue {
    pub(super) fn new(tokenizer: Arc<TextTokenizer>, top: u32) -> Self {
        Self {
            tokenizer,
            top: usize::try_from(top).unwrap_or(usize::MAX),
            bytes: 0,
            chars: 0,
            waiting: VecDeque::new(),
            ready: Vec::new(),
        }
    }

    /// How many candidates are asked for per token.
    pub(super) fn candidates(&self) -> usize {
        self.top
    }

    /// Adds the next token. `text` is the new text of this token and earlier ones; `is_whole` tells whether it includes
    /// all of this token's.
    pub(super) fn push(
        &mut self,
        token: TokenId,
        rating: TokenLogprob,
        text: &str,
        is_whole: bool,
    ) {
        // Text in front of the token's own belongs to earlier ones, as the replacement of half a code point does.
        let own = str::from_utf8(self.tokenizer.token_bytes(token)).ok();
        let own = own.filter(|_| is_whole);
        let before = own.and_then(|own| text.strip_suffix(own));
        let waiting = Waiting {
            token,
            rating,
            text_offset: self.chars + before.map_or(0, |before| before.chars().count()),
            end: None,
        };
        // The text may be the replacement of a code point that this token did not complete. The token's own text is
        // still to come then, and might be cut off.
        if is_whole {
            self.waiting.push_back(waiting);
            self.add_some_text(text);
        } else {
            self.add_some_text(text);
            self.waiting.push_back(waiting);
        }
    }

    /// Ends the tokens; `text` was held back until now.
    pub(super) fn finish(&mut self, text: &str) {
        self.add_text(text);
    }

    fn add_some_text(&mut self, text: &str) {
        if !text.is_empty() {
            self.add_text(text);
        }
    }

    fn add_text(&mut self, text: &str) {
        self.bytes += text.len();
        self.chars += text.chars().count();
        let fresh = self.waiting.iter_mut().rev();
        for waiting in fresh.take_while(|waiting| waiting.end.is_none()) {
            waiting.end = Some(self.bytes);
        }
    }

    /// Notes that the first `bytes` of the answer's text were emitted.
    pub(super) fn give(&mut self, bytes: usize) {
        while let Some(waiting) = self
            .waiting
            .pop_front_if(|waiting| waiting.end.is_some_and(|end| end <= bytes))
        {
            let rated = self.rated(&waiting);
            self.ready.push(rated);
        }
    }

    fn rated(&self, waiting: &Waiting) -> TokenLogprobs {
        let candidate = |token, logprob| CandidateToken {
            bytes: self.tokenizer.token_bytes(token).to_vec(),
            logprob,
        };
        let top = waiting.rating.top.iter().take(self.top);
        TokenLogprobs {
            chosen: candidate(waiting.token, waiting.rating.logprob),
            top: top
                .map(|other| candidate(other.token_id, other.logprob))
                .collect(),
            text_offset: waiting.text_offset,
        }
    }

    /// Log probabilities whose text was emitted and that were not taken yet.
    pub(super) fn ready(&mut self) -> &mut Vec<TokenLogprobs> {
        &mut self.ready
    }
}
