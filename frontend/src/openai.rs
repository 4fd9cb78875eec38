//! The OpenAI API as data: parses requests field by field, and writes responses. Nothing here knows HTTP or engines.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "JSON has six kinds of values for good; whatever is not the expected one is refused"
)]

mod chat;
mod chat_body;
mod common;
mod completions;
mod custom;
mod embeddings;
mod fields;
mod guided;
mod hints;
mod logprobs;
mod names;
mod parts;
mod prompts;
mod rerank;
mod response;
mod score;
mod short_texts;
mod text_pairs;
mod tokenize;
mod tools;

pub use chat::ChatRequest;
pub(crate) use common::json_bytes;
pub use common::{CommonParams, ParamLimits, Streaming};
pub use completions::{CompletionRequest, Prompt};
pub(crate) use custom::{GRAMMAR_IS_SHOWN, read_custom};
pub use embeddings::{EmbeddingRequest, EncodingFormat, embeddings_json};
pub use fields::Fields;
pub use guided::GuidedOptions;
pub(crate) use guided::guided_bytes;
pub use hints::Hints;
pub(crate) use logprobs::chat_token;
pub use logprobs::{LogprobOptions, logprobs_json};
pub use names::{chat_name, completion_name, embedding_name, rerank_name, score_name};
pub use parts::ChatMedium;
pub(crate) use parts::{check_shown, within};
pub use rerank::{RerankRequest, RerankedDocuments};
pub use response::{Api, ChunkEncoder, CompletionHead, completed_choice, response_json};
pub(crate) use response::{
    call_json, explanation_json, finish_reason, json_text, put_event, put_json, put_parts,
};
pub use score::{ScoreRequest, scores_json};
pub(crate) use short_texts::{check_options, is_short, short_texts};
pub use text_pairs::{TextList, TextPairs};
pub(crate) use tokenize::detokenize_json;
pub use tokenize::{DetokenizeRequest, TokenizeInput, TokenizeRequest, tokenize_json};
pub use tools::{ToolChoice, ToolOptions};
pub(crate) use tools::{arguments_as_text, check_function, check_tool_name};

#[cfg(test)]
mod tests;
