//! [`Infill`]: the prompt format for fill-in-the-middle.
//!
//! No file of a model says whether it was trained for that; the special tokens of its tokenizer do.

use crate::text::TextTokenizer;

/// The special tokens around the prefix and the suffix, and which of the two comes first.
#[derive(Debug, PartialEq, Eq)]
pub struct Infill {
    prefix: &'static str,
    suffix: &'static str,
    /// Where the answer begins.
    middle: &'static str,
    order: Order,
}

#[derive(Debug, PartialEq, Eq)]
enum Order {
    PrefixFirst,
    SuffixFirst,
}

/// # Source
/// The model cards and tokenizers of Qwen2.5-Coder and CodeGemma, StarCoder and Granite, SantaCoder, DeepSeek-Coder, GLM-4 and
/// Codestral.
static DIALECTS: [Infill; 6] = [
    prefix_first("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    prefix_first("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    prefix_first("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    prefix_first("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    prefix_first("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    Infill {
        prefix: "[PREFIX]",
        suffix: "[SUFFIX]",
        middle: "",
        order: Order::SuffixFirst,
    },
];

const fn prefix_first(prefix: &'static str, suffix: &'static str, middle: &'static str) -> Infill {
    Infill {
        prefix,
        suffix,
        middle,
        order: Order::PrefixFirst,
    }
}

impl Infill {
    /// The dialect of which the tokenizer has all tokens.
    #[must_use]
    pub fn of(tokenizer: &TextTokenizer) -> Option<&'static Self> {
        DIALECTS.iter().find(|infill| {
            let tokens = [infill.prefix, infill.suffix, infill.middle];
            let mut tokens = tokens.iter().filter(|token| !token.is_empty());
            tokens.all(|token| tokenizer.token_id(token).is_some())
        })
    }

    /// The prompt for the text between `before` and `behind`.
    #[must_use]
    pub fn prompt(&self, before: &str, behind: &str) -> String {
        let (prefix, suffix, middle) = (self.prefix, self.suffix, self.middle);
        match self.order {
            Order::PrefixFirst => format!("{prefix}{before}{suffix}{behind}{middle}"),
            Order::SuffixFirst => format!("{suffix}{behind}{prefix}{before}{middle}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_comes_last() {
        let prompts: Vec<String> = DIALECTS
            .iter()
            .map(|infill| infill.prompt("a", "b"))
            .collect();
        assert_eq!(prompts[1], "<fim_prefix>a<fim_suffix>b<fim_middle>");
        assert_eq!(prompts[3], "<｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>");
        assert_eq!(prompts[5], "[SUFFIX]b[PREFIX]a");
    }
}
