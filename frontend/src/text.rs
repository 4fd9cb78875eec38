//! Text on one side, token ids on the other.
//!
//! Everything here is synchronous, knows neither HTTP nor engines, and does no I/O:
//!
//! - [`template`] turns chat messages into a prompt, as the model was trained to read them;
//! - [`tokenizer`] turns the prompt into token ids;
//! - [`detokenize`] turns generated token ids back into text, one id at a time;
//! - [`stop`] cuts that text at the first stop string, without leaking any part of one.
//!
//! A request passes through them in that order. The first two can take milliseconds for a long prompt,
//! so callers keep them off async threads. The last two cost nanoseconds per token and run inside the
//! stream.

mod bounded;
pub mod detokenize;
mod growth;
mod longest;
mod pair_template;
mod prefix_cache;
pub mod stop;
pub mod template;
pub mod tokenizer;

pub use detokenize::Detokenizer;
pub use pair_template::{EncodedPair, PairTemplate};
pub use stop::{StopMatcher, StopOutcome, StopStrings};
pub use template::{
    ChatTemplate, TemplateError, TemplateInput, TemplateSource, TemplateSourceError,
};
pub use tokenizer::{EncodeLimits, EncodedPrompt, TextTokenizer, TokenizerError};
