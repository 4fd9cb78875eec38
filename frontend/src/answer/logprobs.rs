//! [`LogprobQueue`]: the log probabilities of an answer's tokens, given out with the text they belong to.
//!
//! Text may wait (for the rest of a code point, for the end of a stop string that seems to begin) and part of it never comes
//! (behind a stop string). A token tells as much as its text does, so its log probability waits with the text, and that of a
//! token of which a part was cut off never comes. [`Answer`](super::Answer) keeps one of these where they were asked for.

use std::collections::VecDeque;
use std::sync::Arc;

use genset_backend_common::TokenId;
use genset_backend_common::output::TokenLogprob;

use crate::text::TextTokenizer;

/// A token of an answer, with its log probability and the most probable tokens in its place.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// The token.
    pub chosen: CandidateToken,
    /// The most probable ones, best first, as many as were asked for.
    pub top: Vec<CandidateToken>,
    /// Where its text begins in the answer's, in code points.
    pub text_offset: usize,
}

/// A token that could stand in a place.
#[derive(Debug, Clone, PartialEq)]
pub struct CandidateToken {
    /// What it adds to a text that has already begun; perhaps part of a code point.
    pub bytes: Vec<u8>,
    /// Natural logarithm of its probability.
    pub logprob: f32,
}

/// The ratings of one answer.
#[derive(Debug)]
pub(super) struct LogprobQueue {
    tokenizer: Arc<TextTokenizer>,
    /// Candidates asked for.
    top: usize,
    /// Text made so far, whether it was given out or not.
    bytes: usize,
    chars: usize,
    waiting: VecDeque<Waiting>,
    ready: Vec<TokenLogprobs>,
}

/// A token whose text was not all given out.
#[derive(Debug)]
struct Waiting {
    token: TokenId,
    rating: TokenLogprob,
    text_offset: usize,
    /// The length in bytes of the answer's text up to this token's end; `None` until text comes, which may be that of a
    /// later token: several make a code point, and some have none.
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

    /// How many candidates are asked for beside each token.
    pub(super) fn candidates(&self) -> usize {
        self.top
    }

    /// The next token, the text that came of it and of those before it, and whether all of its own is in that.
    pub(super) fn push(
        &mut self,
        token: TokenId,
        rating: TokenLogprob,
        text: &str,
        is_whole: bool,
    ) {
        let waiting = Waiting {
            token,
            rating,
            text_offset: self.chars,
            end: None,
        };
        // Text that came may be the replacement of a code point that this token did not end. The token's own is still
        // to come then, and might be cut off.
        if is_whole {
            self.waiting.push_back(waiting);
            self.add_some_text(text);
        } else {
            self.add_some_text(text);
            self.waiting.push_back(waiting);
        }
    }

    /// The tokens are over, and this text was still to come of them.
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

    /// The first `bytes` of the answer's text were given out.
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

    /// Those whose text was given out and that were not taken yet.
    pub(super) fn ready(&mut self) -> &mut Vec<TokenLogprobs> {
        &mut self.ready
    }
}
