//! The OpenAI API as data: requests read from JSON field by field, responses written. Nothing here knows HTTP or engines.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "JSON has six kinds of values for good; whatever is not the expected one is refused"
)]

mod chat;
mod common;
mod completions;
mod fields;
mod response;

pub use chat::ChatRequest;
pub use common::{CommonParams, RequestLimits};
pub use completions::{CompletionRequest, Prompt};
pub use fields::Fields;
pub use response::{Api, ChunkEncoder, ResponseHead, completed_choice, response_json, usage_json};

#[cfg(test)]
mod tests;
