//! Guided decoding: the tokens that keep the output inside a formal language.
//!
//! This is neither a sampler nor a validator: a [`Guide`] computes the allowed next tokens, and the sampler chooses among
//! them. llguidance implements the grammars.
//!
//! - [`GuideFactory`]: one per model, made from its tokenizer; compiles requests.
//! - [`Guide`]: one per sequence; call [`Guide::mask`] before each token, [`Guide::accept`] after it.
//! - [`GuideLimits`]: limits on a grammar's cost. [`Vocabulary`]: the bytes of each token.
//!
//! # Notations
//! - *JSON schema*: drafts 4 to 2020-12 as far as llguidance supports them; an unknown keyword is an error, not ignored.
//!   `$ref` only within the schema (`#/...`); `oneOf` only if its branches exclude each other. Numbers with bounds lie
//!   between -2^63 and 2^63; a bound that leaves none of these is an error, as are a `multipleOf` whose digits do not fit
//!   32 bits, also the least common multiple of several, and an integer in `const` or `enum` that no f64 holds.
//!   Between JSON tokens at most one space is allowed, or one line break with up to 32 spaces or tabs, so that no model
//!   generates white space without end. *JSON object* is the schema `{"type": "object"}`.
//! - *Regular expression*: the syntax of Rust's `regex`, matched against the whole text (`^` and `$` at the ends have no
//!   effect); Unicode classes; no look-around and no back references.
//! - *Choice*: one of the texts, byte for byte.
//! - *Grammar*: the Lark dialect of llguidance: rules in lower case, terminals in upper case, `start` first among them;
//!   `"text"`, `/regex/`, `|`, `( )`, `?`, `*`, `+`, `{n,m}`, `%ignore`, `%json { schema }`, special tokens as `<|name|>`.
//!
//! # Precedence
//! - The end-of-sequence tokens are allowed exactly where the text may end. They end a guided sequence even with
//!   `ignore_eos`, which cannot make a complete text longer.
//! - A complete text that cannot continue ends the sequence at once: [`Guide::is_finished`].
//! - `min_tokens` bans the end if the text may also continue, under `ignore_eos` too, by
//!   [`Sampler::with_ends`](crate::Sampler::with_ends). If the text cannot continue, the guide wins: a text longer than its
//!   language allows is useless.
//! - A stop token that the mask allows ends the sequence, even in the middle of a text. It is not accepted. The mask does
//!   not add stop tokens.
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

mod bounds;
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
