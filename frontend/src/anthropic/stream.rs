//! [`MessageEncoder`]: the events of one streamed message, written straight into a buffer.

use bytes::{BufMut, BytesMut};
use genset_backend_common::output::Usage;
use serde_json::{Value, json};

use super::error::error_json;
use super::response::{MessageHead, stop_reason, usage_json};
use crate::answer::{AnswerEnd, Ending, TotalUsage};
use crate::error::ApiError;
use crate::markup::Delta;
use crate::openai::{put_event, put_json, put_parts};

/// Writes the events of one message in order: `message_start`, `ping`, each block's start, deltas and stop, then
/// `message_delta` and `message_stop`.
///
/// # Source
/// <https://docs.anthropic.com/en/docs/build-with-claude/streaming>
///
/// # Examples
/// ```
/// use bytes::BytesMut;
/// use genset_frontend::anthropic::{MessageEncoder, MessageHead};
/// use genset_frontend::markup::Delta;
///
/// let head = MessageHead { id: "msg_1".into(), model: "m".into(), shows_thinking: false, stop_sequences: [].into() };
/// let mut encoder = MessageEncoder::new(head);
/// let mut out = BytesMut::new();
/// encoder.delta(Delta::Reasoning("Hm."), &mut out);
/// assert!(out.is_empty(), "reasoning is not shown");
/// encoder.delta(Delta::Content("Hi"), &mut out);
/// assert!(out.starts_with(b"event: content_block_start\ndata: {"));
/// ```
#[derive(Debug)]
pub struct MessageEncoder {
    head: MessageHead,
    /// The open block, if any.
    open: Option<BlockKind>,
    /// Its index, or the next block's.
    index: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BlockKind {
    Text,
    Thinking,
    ToolUse,
}

impl MessageEncoder {
    /// The event that tells nothing. A stream may have any number of them.
    pub const PING: &'static [u8] = b"event: ping\ndata: {\"type\":\"ping\"}\n\n";

    /// An encoder for one message.
    #[must_use]
    pub fn new(head: MessageHead) -> Self {
        Self {
            head,
            open: None,
            index: 0,
        }
    }

    /// Writes the first events. `prompt_tokens` is 0 if only the engine will know it.
    pub fn start(&self, prompt_tokens: u32, out: &mut BytesMut) {
        let usage = Usage {
            prompt_tokens,
            ..Usage::default()
        };
        let total = TotalUsage {
            usage,
            ..TotalUsage::default()
        };
        let message = self.head.begun(&total);
        let start = json!({"type": "message_start", "message": message});
        put_event("message_start", &start, out);
        out.put_slice(Self::PING);
    }

    /// Writes a delta. Opens its block and closes the one before, if needed.
    pub fn delta(&mut self, delta: Delta<'_>, out: &mut BytesMut) {
        match delta {
            Delta::Content(text) => {
                let block = || json!({"type": "text", "text": "", "citations": null});
                self.open(BlockKind::Text, block, out);
                self.put_delta("text_delta", "text", text, out);
            }
            Delta::Reasoning(_) if !self.head.shows_thinking => {}
            Delta::Reasoning(text) => {
                let block = || json!({"type": "thinking", "thinking": "", "signature": ""});
                self.open(BlockKind::Thinking, block, out);
                self.put_delta("thinking_delta", "thinking", text, out);
            }
            Delta::ToolCall { name, id, .. } => {
                self.close(out);
                let block = || json!({"type": "tool_use", "id": id, "name": name, "input": {}});
                self.open(BlockKind::ToolUse, block, out);
            }
            Delta::Arguments { text, .. } => {
                self.put_delta("input_json_delta", "partial_json", text, out);
            }
        }
    }

    /// Writes the last events.
    pub fn finish(&mut self, end: &AnswerEnd, ending: &Ending, out: &mut BytesMut) {
        self.close(out);
        let reason = stop_reason(end, ending.has_calls);
        let delta = json!({
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": self.head.stop_sequence(end)},
            "usage": usage_json(&ending.total_usage(end)),
        });
        put_event("message_delta", &delta, out);
        put_event("message_stop", &json!({"type": "message_stop"}), out);
    }

    /// Writes an error after the first byte; it ends the stream.
    pub fn error(&self, error: &ApiError, request_id: &str, out: &mut BytesMut) {
        put_event("error", &error_json(error, request_id), out);
    }

    fn open(&mut self, kind: BlockKind, block: impl FnOnce() -> Value, out: &mut BytesMut) {
        if self.open == Some(kind) && kind != BlockKind::ToolUse {
            return;
        }
        self.close(out);
        let start = json!({
            "type": "content_block_start",
            "index": self.index,
            "content_block": block(),
        });
        put_event("content_block_start", &start, out);
        self.open = Some(kind);
    }

    fn close(&mut self, out: &mut BytesMut) {
        let Some(kind) = self.open.take() else {
            return;
        };
        if kind == BlockKind::Thinking {
            // Empty, but clients drop streamed reasoning without one from their next request.
            self.put_delta("signature_delta", "signature", "", out);
        }
        let stop = json!({"type": "content_block_stop", "index": self.index});
        put_event("content_block_stop", &stop, out);
        self.index += 1;
    }

    /// Writes a piece of the open block's text. Every token takes this path, so it builds no JSON value.
    fn put_delta(&self, kind: &str, field: &str, text: &str, out: &mut BytesMut) {
        out.put_slice(
            b"event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":",
        );
        put_json(&self.index, out);
        let delta = [",\"delta\":{\"type\":\"", kind, "\",\"", field, "\":"];
        put_parts(delta, out);
        put_json(text, out);
        out.put_slice(b"}}\n\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::markup::testing::read_call;

    #[test]
    fn pieces_of_arguments_belong_to_a_block_of_their_call() {
        for is_whole in [true, false] {
            let mut encoder = MessageEncoder::new(MessageHead {
                id: "msg_1".into(),
                model: "m".into(),
                shows_thinking: false,
                stop_sequences: [].into(),
            });
            let mut out = BytesMut::new();
            read_call(is_whole, |delta| encoder.delta(delta, &mut out));
            let (mut calls, mut input) = (Vec::new(), String::new());
            let lines = std::str::from_utf8(&out).unwrap().lines();
            for data in lines.filter_map(|line| line.strip_prefix("data: ")) {
                let event: Value = serde_json::from_str(data).unwrap();
                if event["content_block"]["type"] == "tool_use" {
                    calls.push(event["index"].clone());
                }
                if event["delta"]["type"] == "input_json_delta" {
                    assert!(calls.contains(&event["index"]), "{event}");
                    input += event["delta"]["partial_json"].as_str().unwrap();
                }
            }
            assert_eq!(calls, [json!(0)]);
            let input: Value = serde_json::from_str(&input).unwrap();
            assert_eq!(input, json!({"text": "see ", "path": "a"}));
        }
    }
}
