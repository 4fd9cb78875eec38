//! [`ResponseEncoder`]: the events of one streamed response, written straight into a buffer.

use bytes::{BufMut, BytesMut};
use serde::Serialize;
use serde_json::{Value, json};

use super::item::{Item, text_part};
use super::output::{Output, logprobs};
use super::response::{ResponseEnd, ResponseHead};
use crate::answer::TokenLogprobs;
use crate::markup::Delta;

/// Writes the events of one response in their order: `response.created`, `response.in_progress`, the items one after the
/// other, each with its beginning, deltas and end, then how the response ended.
///
/// # Source
/// <https://platform.openai.com/docs/api-reference/responses-streaming>
#[derive(Debug)]
pub struct ResponseEncoder {
    head: ResponseHead,
    output: Output,
    /// Whether the last item is still in the making.
    is_open: bool,
    sequence_number: u64,
}

impl ResponseEncoder {
    /// An encoder for one response.
    #[must_use]
    pub fn new(head: ResponseHead) -> Self {
        Self {
            head,
            output: Output::default(),
            is_open: false,
            sequence_number: 0,
        }
    }

    /// The first events.
    pub fn start(&mut self, out: &mut BytesMut) {
        for kind in ["response.created", "response.in_progress"] {
            let response = self.head.begun();
            self.put(kind, json!({"response": response}), out);
        }
    }

    /// A piece of the answer; begins its item and ends the one before.
    pub fn delta(&mut self, delta: Delta<'_>, rated: &[TokenLogprobs], out: &mut BytesMut) {
        if self.output.begins_item(delta) {
            self.close("completed", out);
            self.output.begin(delta);
            self.open(out);
        }
        self.output.append(delta, rated);
        match delta {
            Delta::Content(text) => {
                self.put_delta("response.output_text.delta", true, text, rated, out);
            }
            Delta::Reasoning(text) => {
                self.put_delta("response.reasoning_text.delta", true, text, &[], out);
            }
            Delta::Arguments { text, .. } => {
                let kind = "response.function_call_arguments.delta";
                self.put_delta(kind, false, text, &[], out);
            }
            Delta::ToolCall { .. } => {}
        }
    }

    /// Log probabilities that no piece took along.
    pub fn add_rated(&mut self, rated: &[TokenLogprobs]) {
        self.output.add_rated(rated);
    }

    /// The last events. Gives back the response and its items. A response always has an item: one without any has an empty
    /// message.
    pub fn finish(mut self, end: &ResponseEnd, out: &mut BytesMut) -> (Value, Output) {
        if self.output.is_empty() && !matches!(end, ResponseEnd::Failed(_)) {
            self.output.begin(Delta::Content(""));
            self.open(out);
        }
        self.close(end.last_item_status(), out);
        let output = self.output.to_json(end.last_item_status());
        let response = self.head.ended(output, end);
        let kind = match end {
            ResponseEnd::Completed(..) => "response.completed",
            ResponseEnd::Incomplete(..) => "response.incomplete",
            ResponseEnd::Failed(_) => "response.failed",
        };
        self.put(kind, json!({"response": &response}), out);
        (response, self.output)
    }

    fn output_index(&self) -> usize {
        self.output.len().saturating_sub(1)
    }

    fn open(&mut self, out: &mut BytesMut) {
        self.is_open = true;
        let (Some(mut item), Some(id)) = (self.output.last_json("in_progress"), self.last_id())
        else {
            return;
        };
        let part = match self.output.last() {
            Some(Item::Message { .. }) => Some(text_part("", json!([]))),
            Some(Item::Reasoning { .. }) => Some(json!({"type": "reasoning_text", "text": ""})),
            Some(Item::Call { .. } | Item::CallOutput { .. }) | None => None,
        };
        if part.is_some() {
            item["content"] = json!([]);
        }
        let index = self.output_index();
        let added = json!({"output_index": index, "item": item});
        self.put("response.output_item.added", added, out);
        if let Some(part) = part {
            let added =
                json!({"item_id": id, "output_index": index, "content_index": 0, "part": part});
            self.put("response.content_part.added", added, out);
        }
    }

    /// Ends the item that is open.
    fn close(&mut self, status: &str, out: &mut BytesMut) {
        if !std::mem::replace(&mut self.is_open, false) {
            return;
        }
        let index = self.output_index();
        let Some(item) = self.output.last_json(status) else {
            return;
        };
        let id = item["id"].clone();
        let part = item["content"][0].clone();
        match self.output.last() {
            Some(Item::Message { .. }) => {
                let logprobs = self.output.last_logprobs().to_vec();
                let done = json!({
                    "item_id": id, "output_index": index, "content_index": 0,
                    "text": part["text"], "logprobs": logprobs,
                });
                self.put("response.output_text.done", done, out);
            }
            Some(Item::Reasoning { .. }) => {
                let done = json!({
                    "item_id": id, "output_index": index, "content_index": 0, "text": part["text"],
                });
                self.put("response.reasoning_text.done", done, out);
            }
            Some(Item::Call { .. }) => {
                let done = json!({
                    "item_id": id, "output_index": index,
                    "name": item["name"], "arguments": item["arguments"],
                });
                self.put("response.function_call_arguments.done", done, out);
            }
            Some(Item::CallOutput { .. }) | None => {}
        }
        if !part.is_null() {
            let done =
                json!({"item_id": id, "output_index": index, "content_index": 0, "part": part});
            self.put("response.content_part.done", done, out);
        }
        let done = json!({"output_index": index, "item": item});
        self.put("response.output_item.done", done, out);
    }

    fn last_id(&self) -> Option<String> {
        self.output.last().map(|item| item.id().to_owned())
    }

    fn put(&mut self, kind: &str, mut event: Value, out: &mut BytesMut) {
        event["type"] = kind.into();
        event["sequence_number"] = self.sequence_number.into();
        self.sequence_number += 1;
        for part in ["event: ", kind, "\ndata: "] {
            out.put_slice(part.as_bytes());
        }
        put_json(&event, out);
        out.put_slice(b"\n\n");
    }

    /// A piece of the open item. This is the path of every token: no value is made of it.
    fn put_delta(
        &mut self,
        kind: &str,
        has_part: bool,
        text: &str,
        rated: &[TokenLogprobs],
        out: &mut BytesMut,
    ) {
        for part in ["event: ", kind, "\ndata: {\"type\":\"", kind] {
            out.put_slice(part.as_bytes());
        }
        out.put_slice(b"\",\"sequence_number\":");
        put_json(&self.sequence_number, out);
        self.sequence_number += 1;
        out.put_slice(b",\"item_id\":");
        put_json(self.output.last().map_or("", Item::id), out);
        out.put_slice(b",\"output_index\":");
        put_json(&self.output_index(), out);
        if has_part {
            out.put_slice(b",\"content_index\":0");
        }
        out.put_slice(b",\"delta\":");
        put_json(text, out);
        if kind == "response.output_text.delta" {
            out.put_slice(b",\"logprobs\":");
            put_json(&logprobs(rated), out);
        }
        out.put_slice(b"}\n\n");
    }
}

fn put_json<T: Serialize + ?Sized>(value: &T, out: &mut BytesMut) {
    let written = serde_json::to_writer(out.writer(), value);
    debug_assert!(
        written.is_ok(),
        "a buffer takes whatever is written, and these values are JSON"
    );
}
