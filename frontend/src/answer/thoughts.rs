//! [`ReasoningCounter`]: how many of an answer's tokens were thoughts.
//!
//! Only the splitter knows what text is, and it gets text, some time after the tokens that made it: stop strings hold it
//! back. So the place where each token's text ends is kept until the splitter has read that far.

use std::collections::VecDeque;

use crate::markup::Splitter;

/// The count, and the tokens that the splitter has not read yet.
#[derive(Debug, Default)]
pub(super) struct ReasoningCounter {
    /// Where the text of tokens ends, in bytes from the answer's beginning, and how many they are.
    waiting: VecDeque<(usize, u32)>,
    /// Bytes that the splitter has read.
    read: usize,
    /// Whether the text was thoughts where the latest token ended.
    was_thinking: bool,
    count: u32,
}

impl ReasoningCounter {
    /// Of an answer that this splitter will read; `None` where it looks for no thoughts.
    pub(super) fn of(splitter: &Splitter) -> Option<Self> {
        splitter.is_thinking().map(|was_thinking| Self {
            was_thinking,
            ..Self::default()
        })
    }

    /// The next `tokens` have text up to `end`; as far as they have some.
    pub(super) fn note(&mut self, tokens: u32, end: usize) {
        if tokens > 0 {
            self.waiting.push_back((end, tokens));
        }
    }

    /// Has the splitter read `text`, and looks at what each token of it is. A token with the marker that begins the
    /// thoughts is one of them, and so is one with the marker that ends them.
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

    /// How many tokens the splitter read as thoughts.
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
        let mut thoughts = ReasoningCounter::of(&splitter).expect("it looks for thoughts");
        let mut end = 0;
        for token in tokens {
            end += token.len();
            thoughts.note(1, end);
        }
        for piece in pieces {
            thoughts.feed(&mut splitter, piece);
        }
        thoughts.count()
    }

    #[test]
    fn markers_are_thoughts_and_what_is_around_is_not() {
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
        let mut thoughts = ReasoningCounter::of(&splitter).expect("it looks for thoughts");
        thoughts.note(1, 7);
        thoughts.note(1, 7);
        thoughts.feed(&mut splitter, "<think>");
        thoughts.feed(&mut splitter, "");
        assert_eq!(thoughts.count(), 2);
    }

    proptest! {
        /// Whatever the tokens are, and however their text is cut on its way, those are counted that lie between the end of
        /// the first marker and the end of the last, in whole or in part.
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
