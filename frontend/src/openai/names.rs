//! OpenAI's names for positions in a request.

use std::borrow::Cow;

use genset_backend_common::RequestField;

use crate::error::Param;

/// The name in a chat.
#[must_use]
pub fn chat_name(param: &Param) -> Cow<'_, str> {
    named(param, "messages")
}

/// The name in a completion.
#[must_use]
pub fn completion_name(param: &Param) -> Cow<'_, str> {
    named(param, "prompt")
}

/// The name in a request for embeddings.
#[must_use]
pub fn embedding_name(param: &Param) -> Cow<'_, str> {
    named(param, "input")
}

/// The name in a rerank request.
#[must_use]
pub fn rerank_name(param: &Param) -> Cow<'_, str> {
    named(param, "documents")
}

/// The name in a score request.
#[must_use]
pub fn score_name(param: &Param) -> Cow<'_, str> {
    named(param, "text_2")
}

fn named<'a>(param: &'a Param, prompt: &'static str) -> Cow<'a, str> {
    match param {
        Param::Request(RequestField::Prompt) => prompt.into(),
        Param::Request(RequestField::Guided) => "response_format".into(),
        Param::Request(field) => field.name().into(),
        Param::Chat(path) | Param::Path(path) => path.into(),
    }
}
