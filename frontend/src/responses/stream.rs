//! [`ResponseEncoder`]: the events of one streamed response, written straight into a buffer.

use bytes::{BufMut, BytesMut};
use serde::Serialize;
use serde_json::value::RawValue;

use super::item::Item;
use super::item_json::{ItemJson, PartJson};
use super::output::Output;
use super::response::{ResponseEnd, ResponseHead, ResponseJson};
use crate::answer::TokenLogprobs;
use crate::markup::Delta;
use crate::openai::{put_event, put_json, put_parts};

/// Writes the events of one response in order: `response.created`, `response.in_progress`, each item's beginning, deltas and
/// end, then how the response ended.
///
/// # Source
/// <https://platform.openai.com/docs/api-reference/responses-streaming>
#[derive(Debug)]
pub struct ResponseEncoder {
    head: ResponseHead,
    output: Output,
    /// Whether the last item is still open.
    is_open: bool,
    sequence_number: u64,
}

impl ResponseEncoder {
    /// An encoder for one response.
    #[must_use]
    pub fn new(head: ResponseHead) -> Self {
        Self {
            output: Output::of(&head),
            head,
            is_open: false,
            sequence_number: 0,
        }
    }

    /// Writes the first events.
    pub fn start(&mut self, out: &mut BytesMut) {
        for kind in ["response.created", "response.in_progress"] {
            let response = self.head.begun();
            put(
                &mut self.sequence_number,
                kind,
                BegunEvent { response },
                out,
            );
        }
    }

    /// Writes a delta. Begins its item and ends the one before, if needed.
    pub fn delta(&mut self, delta: Delta<'_>, rated: &[TokenLogprobs], out: &mut BytesMut) {
        if self.output.begins_item(delta) {
            self.close("completed", out);
            self.output.begin(delta);
            self.open(out);
        }
        self.output.append(delta, rated);
        match delta {
            Delta::Content(text) => {
                let kind = "response.output_text.delta";
                self.put_delta(kind, true, text, Some(rated.len()), out);
            }
            Delta::Reasoning(text) => {
                self.put_delta("response.reasoning_text.delta", true, text, None, out);
            }
            Delta::Arguments {
                text, is_custom, ..
            } => {
                let kind = match is_custom {
                    true => "response.custom_tool_call_input.delta",
                    false => "response.function_call_arguments.delta",
                };
                self.put_delta(kind, false, text, None, out);
            }
            Delta::ToolCall { .. } => {}
        }
    }

    /// Adds log probabilities that no delta carried.
    pub fn add_rated(&mut self, rated: &[TokenLogprobs]) {
        self.output.add_rated(rated);
    }

    /// Writes the last events. Returns the response as JSON, and its items. A response without items gets an empty message.
    pub fn finish(mut self, end: &ResponseEnd, out: &mut BytesMut) -> (String, Output) {
        if self.output.is_empty() && !matches!(end, ResponseEnd::Failed(_)) {
            self.output.begin(Delta::Content(""));
            self.open(out);
        }
        self.close(end.last_item_status(), out);
        let response = self.head.ended(&self.output, end);
        let kind = end.status();
        let begin = [
            "event: response.",
            kind,
            "\ndata: {\"response\":",
            response.as_str(),
        ];
        put_parts(begin, out);
        let own = [",\"type\":\"response.", kind, "\",\"sequence_number\":"];
        put_parts(own, out);
        put_json(&self.sequence_number, out);
        out.put_slice(b"}\n\n");
        (response, self.output)
    }

    fn output_index(&self) -> usize {
        self.output.len().saturating_sub(1)
    }

    fn open(&mut self, out: &mut BytesMut) {
        self.is_open = true;
        let output_index = self.output_index();
        let Some(item) = self.output.last_json("in_progress") else {
            return;
        };
        let number = &mut self.sequence_number;
        let begun = ItemJson {
            has_just_begun: true,
            ..item
        };
        let added = ItemEvent {
            output_index,
            item: begun,
        };
        put(number, "response.output_item.added", added, out);
        if let Some(part) = item.parts().into_iter().next() {
            let added = PartEvent::new(item, output_index, part);
            put(number, "response.content_part.added", added, out);
        }
    }

    /// Ends the open item.
    fn close(&mut self, status: &str, out: &mut BytesMut) {
        if !std::mem::replace(&mut self.is_open, false) {
            return;
        }
        let output_index = self.output_index();
        let Some(item) = self.output.last_json(status) else {
            return;
        };
        let number = &mut self.sequence_number;
        let item_id = item.item.id();
        match item.item {
            Item::Message { parts, .. } => {
                let done = TextEvent {
                    item_id,
                    output_index,
                    content_index: 0,
                    text: parts.first().map_or("", String::as_str),
                    logprobs: Some(item.logprobs),
                };
                put(number, "response.output_text.done", done, out);
            }
            Item::Reasoning { text, .. } => {
                let done = TextEvent {
                    item_id,
                    output_index,
                    content_index: 0,
                    text,
                    logprobs: None,
                };
                put(number, "response.reasoning_text.done", done, out);
            }
            Item::Call {
                arguments: input,
                is_custom: true,
                ..
            } => {
                let done = InputEvent {
                    item_id,
                    output_index,
                    input,
                };
                put(number, "response.custom_tool_call_input.done", done, out);
            }
            Item::Call {
                name, arguments, ..
            } => {
                let done = CallEvent {
                    item_id,
                    output_index,
                    name,
                    arguments,
                };
                put(number, "response.function_call_arguments.done", done, out);
            }
            Item::CallOutput { .. } => {}
        }
        if let Some(part) = item.parts().into_iter().next() {
            let done = PartEvent::new(item, output_index, part);
            put(number, "response.content_part.done", done, out);
        }
        let done = ItemEvent { output_index, item };
        put(number, "response.output_item.done", done, out);
    }

    /// Writes a piece of the open item; for text, with its log probabilities. Every token takes this path, so it builds no
    /// JSON value.
    fn put_delta(
        &mut self,
        kind: &str,
        has_part: bool,
        text: &str,
        rated: Option<usize>,
        out: &mut BytesMut,
    ) {
        put_parts(["event: ", kind, "\ndata: {\"type\":\"", kind], out);
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
        if let Some(rated) = rated {
            let all = self.output.last_logprobs();
            let (_, new) = all.split_at(all.len().saturating_sub(rated));
            out.put_slice(b",\"logprobs\":");
            put_json(new, out);
        }
        out.put_slice(b"}\n\n");
    }
}

/// The common fields of all events, after an event's own.
#[derive(Serialize)]
struct Event<'a, T> {
    #[serde(flatten)]
    own: T,
    r#type: &'a str,
    sequence_number: u64,
}

#[derive(Serialize)]
struct BegunEvent<'a> {
    response: ResponseJson<'a>,
}

#[derive(Serialize)]
struct ItemEvent<'a> {
    output_index: usize,
    item: ItemJson<'a>,
}

#[derive(Serialize)]
struct PartEvent<'a> {
    item_id: &'a str,
    output_index: usize,
    content_index: usize,
    part: PartJson<'a>,
}

impl<'a> PartEvent<'a> {
    fn new(item: ItemJson<'a>, output_index: usize, part: PartJson<'a>) -> Self {
        Self {
            item_id: item.item.id(),
            output_index,
            content_index: 0,
            part,
        }
    }
}

#[derive(Serialize)]
struct TextEvent<'a> {
    item_id: &'a str,
    output_index: usize,
    content_index: usize,
    text: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<&'a [Box<RawValue>]>,
}

#[derive(Serialize)]
struct CallEvent<'a> {
    item_id: &'a str,
    output_index: usize,
    name: &'a str,
    arguments: &'a str,
}

#[derive(Serialize)]
struct InputEvent<'a> {
    item_id: &'a str,
    output_index: usize,
    input: &'a str,
}

/// Writes the next event.
fn put(sequence_number: &mut u64, kind: &str, own: impl Serialize, out: &mut BytesMut) {
    let event = Event {
        own,
        r#type: kind,
        sequence_number: *sequence_number,
    };
    put_event(kind, &event, out);
    *sequence_number += 1;
}
