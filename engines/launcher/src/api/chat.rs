//! Chats with images and audio, through OpenAI's `/v1/chat/completions` of vLLM and SGLang. The servers' own processors know
//! where in the prompt a medium belongs and how many tokens it takes. Messages are forwarded unchanged, with the media as
//! base64.
//!
//! # Source
//! vLLM 0.32 (`return_token_ids` with `stream`, `continuous_usage_stats`) and SGLang 0.5.23 (the same usage; it refuses
//! `return_token_ids` with `stream`, so its answers come as text), from their sources. Likewise the effect of `tool_choice`.

use genset_backend_common::request::ChatInput;
use genset_backend_common::{EngineError, GenerateRequest, Input, RequestField};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{Call, unreadable};

pub(super) const PATH: &str = "/v1/chat/completions";

/// The chat of a request that is one.
pub(super) fn chat_of(request: &GenerateRequest) -> Option<&ChatInput> {
    match &request.input {
        Input::Chat(chat) => Some(chat),
        Input::Tokens(_) | Input::Text(_) | Input::Embed(_) | Input::Score(_) => None,
    }
}

/// The fields of every chat besides its options. `tool_choice`: the value that makes the server show the tools to its model and
/// leave the calls in the text, for our caller to parse.
pub(super) fn begin(body: &mut Map<String, Value>, chat: &ChatInput, tool_choice: &'static str) {
    body.insert("stream".into(), true.into());
    // Every event reports the number of prompt tokens.
    let usage = json!({"include_usage": true, "continuous_usage_stats": true});
    body.insert("stream_options".into(), usage);
    if !chat.tools.is_empty() {
        body.insert("tool_choice".into(), tool_choice.into());
    }
}

/// Builds the call. Messages are serialized once, without copies.
pub(super) fn call(body: &Map<String, Value>, chat: &ChatInput) -> Result<Call, EngineError> {
    #[derive(Serialize)]
    struct Body<'a> {
        #[serde(flatten)]
        options: &'a Map<String, Value>,
        messages: &'a [Value],
        #[serde(skip_serializing_if = "<[Value]>::is_empty")]
        tools: &'a [Value],
    }
    let body = Body {
        options: body,
        messages: &chat.messages,
        tools: &chat.tools,
    };
    Ok(Call {
        path: PATH,
        body: serde_json::to_vec(&body).map_err(unreadable)?.into(),
        headers: Vec::new(),
    })
}

/// Refuses chats in disaggregated serving.
pub(super) fn refuse_legs(request: &GenerateRequest) -> Result<(), EngineError> {
    match chat_of(request) {
        None => Ok(()),
        Some(_) => {
            let problem =
                "a chat with images or audio is not computed by prefill and decode instances apart";
            Err(EngineError::unsupported(RequestField::Prompt, problem))
        }
    }
}
