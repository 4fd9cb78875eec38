//! [`Withheld`]: tokens that a server counts but does not name, recovered from their text.

use genset_backend_common::{EngineError, TokenId};
use serde::Deserialize;

use super::unreadable;

/// Text that stands for more tokens than the event named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Withheld {
    /// The text of all these tokens.
    pub(crate) text: String,
    /// The number of tokens, by the server's own count; the named tokens are the last of them.
    pub(crate) count: usize,
    /// The named tokens.
    pub(crate) given: Vec<TokenId>,
}

/// A token and its bytes.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct Piece {
    id: TokenId,
    piece: PieceText,
}

/// Text, or bytes that are not text by themselves.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
enum PieceText {
    Text(String),
    Bytes(Vec<u8>),
}

impl Piece {
    fn bytes(&self) -> &[u8] {
        match &self.piece {
            PieceText::Text(text) => text.as_bytes(),
            PieceText::Bytes(bytes) => bytes,
        }
    }
}

impl Withheld {
    /// Recovers all token ids from the tokens of the text. Leaves out a space that the tokenizer may put first.
    ///
    /// # Errors
    /// `Disconnected` if the number of the text's tokens or the last of them differ from what the server reported. Then the
    /// generated tokens cannot be known.
    pub(crate) fn fill(&self, pieces: &[Piece]) -> Result<Vec<TokenId>, EngineError> {
        let last = pieces
            .len()
            .checked_sub(self.count)
            .and_then(|before| pieces.get(before..))
            .unwrap_or_default();
        let bytes = last.iter().flat_map(Piece::bytes);
        let ids: Vec<TokenId> = last.iter().map(|piece| piece.id).collect();
        let is_whole = ids.len() == self.count && bytes.eq(self.text.as_bytes());
        if is_whole && ids.ends_with(&self.given) {
            return Ok(ids);
        }
        Err(unreadable(format!(
            "{} tokens were withheld before {:?}, and the text {:?} does not tell which",
            self.count.saturating_sub(self.given.len()),
            self.given,
            self.text
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(json: &str) -> Vec<Piece> {
        serde_json::from_str(json).unwrap()
    }

    fn withheld(count: usize, given: &[TokenId]) -> Withheld {
        Withheld {
            text: "ん".into(),
            count,
            given: given.to_vec(),
        }
    }

    #[test]
    fn the_texts_tokens_are_those_that_were_withheld() {
        let own = r#"[{"id":162,"piece":[227]},{"id":227,"piece":[130]},{"id":244,"piece":[147]}]"#;
        let found = withheld(3, &[244]).fill(&pieces(own)).unwrap();
        assert_eq!(found, [162, 227, 244]);
        // As a sentencepiece tokenizer does it.
        let spaced = own.replace("[{\"id\":162", "[{\"id\":9,\"piece\":\" \"},{\"id\":162");
        assert_eq!(withheld(3, &[244]).fill(&pieces(&spaced)).unwrap(), found);
    }

    #[test]
    fn tokens_that_the_text_does_not_tell_are_an_error_that_names_them() {
        let own = r#"[{"id":162,"piece":[227]},{"id":227,"piece":[130]},{"id":244,"piece":[147]}]"#;
        for (count, given) in [(2, 244), (4, 244), (3, 243)] {
            let error = withheld(count, &[given]).fill(&pieces(own)).unwrap_err();
            assert!(error.message().contains("ん"), "{error}");
        }
        assert!(withheld(1, &[7]).fill(&[]).is_err());
        let nothing = Withheld {
            text: String::new(),
            ..withheld(2, &[])
        };
        assert!(nothing.fill(&[]).is_err());
    }
}
