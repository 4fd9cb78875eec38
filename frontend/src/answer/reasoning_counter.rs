//! [`ReasoningCounter`]: counts an answer's reasoning tokens.
//!
//! Only the splitter knows which text is reasoning, and it gets text some time after the tokens, because stop strings
//! hold it back. So the counter keeps where each token's text ends until the splitter has read that far.

use std::collections::VecDeque;

use crate::markup::Splitter;

/// The count, and the tokens that the splitter has not read yet.
#[derive(Debug, Default)]
pub(super) struct ReasoningCounter {
    /// Where the text of tokens ends, in bytes from the answer's beginning, and the number of tokens.
    waiting: VecDeque<(usize, u32)>,
    /// Bytes that the splitter has read.
    read: usize,
    /// Whether the text at the end of the latest token was reasoning.
    was_thinking: bool,
    count: u32,
}

impl ReasoningCounter {
    /// A counter for `splitter`; `None` if it does not look for reasoning.
    pub(super) fn of(splitter: &Splitter) -> Option<Self> {
        splitter.is_thinking().map(|was_thinking| Self {
            was_thinking,
            ..Self::default()
        })
    }

    /// Notes that the text of the next `tokens`, if they have any, ends at `end`.
    pub(super) fn note(&mut self, tokens: u32, end: usize) {
        if tokens > 0 {
            self.waiting.push_back((end, tokens));
        }
    }

    /// Feeds `text` to the splitter and classifies each of its tokens. Tokens with the marker that begins or ends the
    /// reasoning count as reasoning.
    pub(super) fn feed(&mut self, splitter: &mut Splitter, mut text: &str) {
        let end_of_text = self.read + text.len();
        while let Some((end, tokens)) = self.waiting.pop_front_if(|(end, _)| *end <= end_of_text) {
            let length = end.saturating_sub(self.read);
            let (piece, rest) = text.split_at_checked(length).unwrap_or((text, ""));
            text = rest;
            self.read = end;
            if !piece.is_empty() {
                splitter.feed(piece);
            }
            let is_thinking = splitter.is_thinking().unwrap_or(false);
            if std::mem::replace(&mut self.was_thinking, is_thinking) || is_thinking {
                self.count = self.count.saturating_add(tokens);
            }
        }
        if !text.is_empty() {
            splitter.feed(text);
            self.read = end_of_text;
        }
    }

    /// How many tokens the splitter read as reasoning.
    pub(super) fn count(&self) -> u32 {
        self.count
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop_assert_eq, proptest};

    use super::*;
    use crate::markup::IdStyle;
    use crate::markup::testing::cut;
    use crate::reasoning::ReasoningDialect;
    use crate::tools::ToolDialect;

    const TEXT: &str = "So: <think>\nHm, é.\n</think>\n\nYes, <b>.";

    fn splitter() -> Splitter {
        let parser = ReasoningDialect::find("qwen3").unwrap().parser(None, false);
        Splitter::new(parser, None, IdStyle::Call)
    }

    fn counted(mut splitter: Splitter, tokens: &[&str], pieces: &[&str]) -> u32 {
        let mut counter = ReasoningCounter::of(&splitter).expect("it looks for reasoning");
        let mut end = 0;
        for token in tokens {
            end += token.len();
            counter.note(1, end);
        }
        for piece in pieces {
            counter.feed(&mut splitter, piece);
        }
        counter.count()
    }

    #[test]
    fn markers_are_reasoning_and_what_is_around_is_not() {
        let tokens = [
            "So", ":", " ", "<", "think", ">", "\n", "Hm", "</", "think", ">", "\n\n", "Yes",
        ];
        let text = tokens.concat();
        assert_eq!(counted(splitter(), &tokens, &[&text]), 6);
        let tokens = [
            "<|channel|>",
            "analysis",
            "<|message|>",
            "Hm",
            ".",
            "<|end|>",
            "<|start|>",
        ];
        let harmony = Splitter::new(
            Some(ToolDialect::harmony_without_tools()),
            None,
            IdStyle::Call,
        );
        assert_eq!(counted(harmony, &tokens, &[&tokens.concat()]), 4);
    }

    #[test]
    fn a_token_without_text_is_what_the_text_is() {
        let mut splitter = splitter();
        let mut counter = ReasoningCounter::of(&splitter).expect("it looks for reasoning");
        counter.note(1, 7);
        counter.note(1, 7);
        counter.feed(&mut splitter, "<think>");
        counter.feed(&mut splitter, "");
        assert_eq!(counter.count(), 2);
    }

    proptest! {
        /// Whatever the tokens and however their text is cut, the count is of the tokens that lie, in whole or in part,
        /// between the end of the first marker and the end of the last.
        #[test]
        fn any_cutting_is_counted_alike(
            tokens in proptest::collection::vec(any::<usize>(), 0..24),
            cuts in proptest::collection::vec(any::<usize>(), 0..12),
        ) {
            let (tokens, pieces) = (cut(TEXT, &tokens), cut(TEXT, &cuts));
            let begin = TEXT.find("\nHm").unwrap();
            let end = TEXT.find("\n\nYes").unwrap();
            let is_thought = |at: usize| begin <= at && at < end;
            let mut at = 0;
            let expected = tokens.iter().filter(|token| {
                let before = at;
                at += token.len();
                is_thought(before) || is_thought(at)
            });
            let expected = u32::try_from(expected.count()).unwrap();
            prop_assert_eq!(counted(splitter(), &tokens, &pieces), expected);
        }
    }
}
