//! A whole message.

use std::sync::Arc;

use genset_backend_common::FinishReason;
use serde_json::{Map, Value, json};

use crate::answer::{AnswerEnd, Ending, TotalUsage};
use crate::markup::{Delta, ToolCall};

/// What every message and event of one request repeats.
#[derive(Debug, Clone)]
pub struct MessageHead {
    /// The message's id.
    pub id: String,
    /// The model's name, as the client wrote it.
    pub model: String,
    /// Whether the answer's reasoning is shown.
    pub shows_thinking: bool,
    /// The request's `stop_sequences`.
    pub stop_sequences: Arc<[String]>,
}

impl MessageHead {
    /// The stop sequence that cut the answer.
    pub(super) fn stop_sequence(&self, end: &AnswerEnd) -> Option<&str> {
        let sequence = end
            .stop_string
            .and_then(|index| self.stop_sequences.get(index));
        sequence.map(String::as_str)
    }

    /// An empty message, for an answer that has just begun.
    pub(super) fn begun(&self, total: &TotalUsage) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [],
            "stop_reason": null,
            "stop_sequence": null,
            "usage": usage_json(total),
        })
    }
}

/// Why a message ended, in Anthropic's terms. If the answer was cut short, that takes precedence over calls.
pub(super) fn stop_reason(end: &AnswerEnd, has_calls: bool) -> &'static str {
    match end.reason {
        FinishReason::Stop if end.stop_string.is_some() => "stop_sequence",
        FinishReason::Stop if has_calls => "tool_use",
        FinishReason::Stop => "end_turn",
        // Nobody reads a cancelled answer; if somebody does, it was cut short.
        FinishReason::Length | FinishReason::Cancelled => "max_tokens",
        FinishReason::ContentFilter => "refusal",
    }
}

/// The `usage` object. Anthropic counts cached tokens separately from the rest of the input.
pub(super) fn usage_json(total: &TotalUsage) -> Value {
    let usage = &total.usage;
    let cached = usage.cached_tokens.unwrap_or(0);
    json!({
        "input_tokens": usage.prompt_tokens.saturating_sub(cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": total.reasoning_tokens},
        "service_tier": "standard",
    })
}

/// The content blocks of a message, built from an answer's deltas in order.
///
/// # Examples
/// ```
/// use genset_frontend::anthropic::Blocks;
/// use genset_frontend::markup::Delta;
///
/// let mut blocks = Blocks::new(false);
/// blocks.add(Delta::Reasoning("Hm."));
/// blocks.add(Delta::Content("Good "));
/// blocks.add(Delta::Content("day"));
/// let content = blocks.into_content();
/// assert_eq!(content.len(), 1);
/// assert_eq!(content[0]["text"], "Good day");
/// ```
#[derive(Debug, Default)]
pub struct Blocks {
    shows_thinking: bool,
    blocks: Vec<Block>,
}

#[derive(Debug)]
enum Block {
    Thinking(String),
    Text(String),
    Call(ToolCall),
}

impl Blocks {
    /// No blocks yet. Reasoning is dropped unless it is shown.
    #[must_use]
    pub fn new(shows_thinking: bool) -> Self {
        Self {
            shows_thinking,
            blocks: Vec::new(),
        }
    }

    /// Adds a delta.
    pub fn add(&mut self, delta: Delta<'_>) {
        match (delta, self.blocks.last_mut()) {
            (Delta::Reasoning(_), _) if !self.shows_thinking => {}
            (Delta::Reasoning(text), Some(Block::Thinking(thinking))) => thinking.push_str(text),
            (Delta::Reasoning(text), _) => self.blocks.push(Block::Thinking(text.to_owned())),
            (Delta::Content(text), Some(Block::Text(content))) => content.push_str(text),
            (Delta::Content(text), _) => self.blocks.push(Block::Text(text.to_owned())),
            (Delta::ToolCall { name, id, .. }, _) => self.blocks.push(Block::Call(ToolCall {
                id: id.to_owned(),
                name: name.to_owned(),
                arguments: String::new(),
                is_custom: false,
            })),
            (Delta::Arguments { text, .. }, Some(Block::Call(call))) => {
                call.arguments.push_str(text);
            }
            // Arguments follow their call.
            (Delta::Arguments { .. }, _) => {}
        }
    }

    /// The message's `content`.
    #[must_use]
    pub fn into_content(self) -> Vec<Value> {
        self.blocks.into_iter().map(Block::into_json).collect()
    }
}

impl Block {
    fn into_json(self) -> Value {
        match self {
            Self::Thinking(text) => json!({"type": "thinking", "thinking": text, "signature": ""}),
            Self::Text(text) => json!({"type": "text", "text": text, "citations": null}),
            Self::Call(call) => json!({
                "type": "tool_use",
                "id": call.id,
                "name": call.name,
                "input": input_of(&call.arguments),
            }),
        }
    }
}

/// A whole message with these blocks.
#[must_use]
pub fn message_json(head: &MessageHead, blocks: Blocks, end: &AnswerEnd, ending: &Ending) -> Value {
    let mut response = head.begun(&ending.total_usage(end));
    response["content"] = blocks.into_content().into();
    response["stop_reason"] = stop_reason(end, ending.has_calls).into();
    response["stop_sequence"] = head.stop_sequence(end).into();
    response
}

/// The arguments as an object, which the API requires. If the model wrote invalid or incomplete JSON, they are kept as
/// text under a name that says so.
fn input_of(arguments: &str) -> Value {
    if arguments.trim().is_empty() {
        return json!({});
    }
    match serde_json::from_str::<Map<String, Value>>(arguments) {
        Ok(input) => Value::Object(input),
        Err(_) => json!({"INVALID_JSON": arguments}),
    }
}
