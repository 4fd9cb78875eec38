//! Guided decoding: which tokens keep the output inside a language.
//!
//! Not a sampler and not a validator: a [`Guide`] says what may come next, the sampler chooses among that. The grammars
//! themselves are llguidance's.
//!
//! - [`GuideFactory`]: one per model, made of its tokenizer; compiles requests.
//! - [`Guide`]: one per sequence; [`Guide::mask`] before each token, [`Guide::accept`] after it.
//! - [`GuideLimits`]: what a grammar may cost. [`Vocabulary`]: the bytes of each token.
//!
//! # Notations
//! - *JSON schema*: drafts 4 to 2020-12 as far as llguidance goes; a keyword it does not know is an error, not ignored.
//!   `$ref` within the schema (`#/...`) alone; `oneOf` where its branches exclude each other. Between tokens of the JSON one space, or one line break with up to 32
//!   spaces or tabs, is allowed, no more, so that no model loses itself in white space. *JSON object* is the schema
//!   `{"type": "object"}`.
//! - *Regular expression*: the syntax of Rust's `regex`, matched from end to end (`^` and `$` at the ends mean nothing);
//!   Unicode classes; no look-around and no back references.
//! - *Choice*: one of the texts, byte for byte.
//! - *Grammar*: the Lark dialect of llguidance: rules in lower case, terminals in upper case, `start` first among them;
//!   `"text"`, `/regex/`, `|`, `( )`, `?`, `*`, `+`, `{n,m}`, `%ignore`, `%json { schema }`, special tokens as `<|name|>`.
//!
//! # What wins
//! - The end-of-sequence tokens are allowed exactly where the text may end. They end a guided sequence even with
//!   `ignore_eos`, which cannot make a complete text longer.
//! - A text that is complete and cannot go on ends the sequence at once: [`Guide::is_finished`].
//! - `min_tokens` bans the end where the text may also go on, under `ignore_eos` too, by
//!   [`Sampler::with_ends`](crate::Sampler::with_ends). Where it cannot go on, the guide wins: a text that is longer than its
//!   language allows helps nobody.
//! - A stop token that the mask allows ends the sequence where it comes, in the middle of a text if need be; it is not
//!   accepted. The mask does not add stop tokens.
//!
//! # Examples
//! ```
//! use genset_backend_common::GuidedDecoding;
//! use genset_sampling::guided::GuideFactory;
//!
//! let tokenizer = br#"{"decoder": {"type": "ByteLevel"}, "added_tokens": [{"id": 3, "content": "</s>", "special": true}],
//!     "model": {"type": "BPE", "vocab": {"y": 0, "es": 1, "no": 2}}}"#;
//! let factory = GuideFactory::try_new(tokenizer, 4, &[3]).expect("a tokenizer");
//! let mut guide = factory.compile(&GuidedDecoding::Choice(vec!["yes".into(), "no".into()]))?;
//! assert_eq!(guide.mask()?.iter().collect::<Vec<_>>(), [0, 2]);
//! guide.accept(2)?;
//! assert!(guide.is_finished());
//! # Ok::<(), genset_backend_common::EngineError>(())
//! ```

mod compile;
mod error;
mod factory;
mod guide;
mod limits;
mod schema;
mod vocabulary;

pub use error::{GuideError, VocabularyError};
pub use factory::GuideFactory;
pub use guide::Guide;
pub use limits::GuideLimits;
pub use vocabulary::Vocabulary;

#[cfg(test)]
mod tests;
