//! Splits a text into chunks.

/// How a text is split.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Split {
    /// Into words, each with its leading white space; in token mode, into tokens.
    Natural,
    /// Into pieces of this number of characters, at least 1.
    Chars(usize),
}

impl Split {
    /// The pieces of a text in order; concatenated, they are the text.
    pub(crate) fn split(self, text: &str) -> Vec<String> {
        match self {
            Self::Natural => words(text),
            Self::Chars(count) => {
                let chars: Vec<char> = text.chars().collect();
                chars
                    .chunks(count)
                    .map(|piece| piece.iter().collect())
                    .collect()
            }
        }
    }
}

/// Words with their leading white space; trailing white space is a word of its own.
fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word = String::new();
    for c in text.chars() {
        if c.is_whitespace() && word.ends_with(|last: char| !last.is_whitespace()) {
            words.push(std::mem::take(&mut word));
        }
        word.push(c);
    }
    words.push(word);
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_keep_the_white_space_before_them() {
        assert_eq!(words("one  two\nthree "), ["one", "  two", "\nthree", " "]);
    }

    #[test]
    fn characters_are_never_halved() {
        assert_eq!(Split::Chars(2).split("aé🦀b¢"), ["aé", "🦀b", "¢"]);
    }

    #[test]
    fn the_pieces_are_the_text() {
        for text in [
            "",
            " ",
            "a",
            "  lead",
            "trail  ",
            "<think>a b</think>\n\n c",
        ] {
            for split in [
                Split::Natural,
                Split::Chars(1),
                Split::Chars(3),
                Split::Chars(99),
            ] {
                assert_eq!(split.split(text).concat(), text, "{split:?}");
            }
        }
    }
}
