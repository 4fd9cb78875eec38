//! Engines that take whole bodies of OpenAI's API, with chat messages or alone, and the faults that the check of WB catches.

use futures_util::{StreamExt, stream};
use genset_backend_common::output::TextChunk;
use genset_backend_common::{
    EngineConfig, EngineError, Input, Output, OutputStream, RequestField, async_trait,
    config::InputKind,
};
use serde_json::{Value, json};

use super::fault::{Call, Fault, Inner, faulty, raw};
use super::text::spelled;
use super::{Clean, Mutant};
use crate::subject::{Scenario, Subject};

pub(super) const CONTROLS: &[Mutant] = &[
    Mutant {
        name: "text-bodies",
        stands_for: "nothing: an engine of chat messages that writes the API's objects itself, too",
        killed_by: &[],
        build: |clean, scenario| bodies(clean, scenario, Takes::ChatsBeside, Flaw::None),
    },
    Mutant {
        name: "text-bodies-alone",
        stands_for: "nothing: an engine that takes bodies of chats and nothing else",
        killed_by: &[],
        build: |clean, scenario| bodies(clean, scenario, Takes::Chats, Flaw::None),
    },
    Mutant {
        name: "text-bodies-of-completions",
        stands_for: "nothing: an engine that takes bodies of completions and nothing else",
        killed_by: &[],
        build: |clean, scenario| bodies(clean, scenario, Takes::Completions, Flaw::None),
    },
];

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "text-bodies-with-their-frames",
        stands_for: "events passed on as they stand on the wire, with \"data: \" before them",
        killed_by: &["WB01"],
        build: |clean, scenario| bodies(clean, scenario, Takes::ChatsBeside, Flaw::Framed),
    },
    Mutant {
        name: "text-bodies-always-streamed",
        stands_for: "\"stream\": false that the engine behind the body does not know",
        killed_by: &["WB01"],
        build: |clean, scenario| bodies(clean, scenario, Takes::Chats, Flaw::AlwaysStreams),
    },
    Mutant {
        name: "text-bodies-of-completions-with-their-frames",
        stands_for: "the same frames, in an engine that offers no chats",
        killed_by: &["WB01"],
        build: |clean, scenario| bodies(clean, scenario, Takes::Completions, Flaw::Framed),
    },
    Mutant {
        name: "text-bodies-of-chats-break",
        stands_for: "an engine offered by both APIs that fails in the middle of every chat",
        killed_by: &["WB01"],
        build: |clean, scenario| bodies(clean, scenario, Takes::Both, Flaw::BreaksChats),
    },
];

/// The bodies that the engine takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Takes {
    /// Chats, and chat messages too.
    ChatsBeside,
    /// Only chats.
    Chats,
    /// Only completions.
    Completions,
    /// Completions and chats.
    Both,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    Framed,
    AlwaysStreams,
    BreaksChats,
}

fn bodies(clean: &Clean, scenario: &Scenario, takes: Takes, flaw: Flaw) -> Subject {
    faulty(spelled(clean.build(scenario)), Bodies { takes, flaw })
}

#[derive(Debug, Clone, Copy)]
struct Bodies {
    takes: Takes,
    flaw: Flaw,
}

impl Bodies {
    /// Parses a body; returns it and its prompt.
    fn read(&self, text: &str) -> Option<(Value, String)> {
        let body: Value = serde_json::from_str(text).ok()?;
        body["model"].as_str()?;
        let said = match self.takes {
            Takes::ChatsBeside | Takes::Chats => &body["messages"][0]["content"],
            Takes::Completions => &body["prompt"],
            Takes::Both if is_chat(&body) => &body["messages"][0]["content"],
            Takes::Both => &body["prompt"],
        };
        let said = said.as_str()?.to_owned();
        Some((body, said))
    }

    /// An API object with a text, which is a part of an answer or all of it.
    fn object(&self, text: &str, is_part: bool) -> Value {
        let choice = match (self.takes, is_part) {
            // With both, chats fail before anybody reads them.
            (Takes::Completions | Takes::Both, _) => json!({"index": 0, "text": text}),
            (Takes::ChatsBeside | Takes::Chats, true) => {
                json!({"index": 0, "delta": {"content": text}})
            }
            (Takes::ChatsBeside | Takes::Chats, false) => {
                json!({"index": 0, "message": {"role": "assistant", "content": text}})
            }
        };
        json!({"choices": [choice]})
    }
}

#[async_trait]
impl Fault for Bodies {
    fn declare(&self, config: &mut EngineConfig) {
        let can = &mut config.capabilities;
        can.whole_bodies = true;
        if self.takes != Takes::ChatsBeside {
            can.inputs = [InputKind::Text].into();
        }
    }

    async fn generate(&self, inner: &Inner, call: Call) -> Result<OutputStream, EngineError> {
        let (mut request, ctx) = (call.request, call.ctx);
        let Input::Text(text) = &request.input else {
            return inner.generate(request, ctx).await;
        };
        let Some((body, said)) = self.read(text) else {
            let problem = "must be the body of a request that this model is offered by";
            return Err(EngineError::invalid_argument(RequestField::Prompt, problem));
        };
        request.input = Input::Text(said.into());
        request.stop.max_tokens = body["max_tokens"]
            .as_u64()
            .and_then(|most| most.try_into().ok());
        let (writer, flaw) = (*self, self.flaw);
        let outputs = inner.generate(request, ctx).await?;
        if flaw == Flaw::BreaksChats && is_chat(&body) {
            let error = stream::iter([Err(EngineError::internal("the chat broke"))]);
            let broken = outputs.take(1).chain(error);
            return Ok(raw(broken));
        }
        if body["stream"] == true || flaw == Flaw::AlwaysStreams {
            let events = outputs.map(move |mut item| {
                if let Ok(Output::Text(chunk)) = &mut item {
                    let event = writer.object(&chunk.text, true);
                    chunk.text = match flaw {
                        Flaw::Framed => format!("data: {event}\n\n"),
                        Flaw::None | Flaw::AlwaysStreams | Flaw::BreaksChats => event.to_string(),
                    };
                }
                item
            });
            return Ok(raw(events));
        }
        let whole = stream::once(whole(outputs, writer)).flat_map(stream::iter);
        Ok(raw(whole))
    }
}

fn is_chat(body: &Value) -> bool {
    body["messages"].is_array()
}

/// The answer as one object, and its end.
async fn whole(outputs: OutputStream, writer: Bodies) -> Vec<Result<Output, EngineError>> {
    let mut said = TextChunk::default();
    let mut end = Vec::new();
    for item in outputs.collect::<Vec<_>>().await {
        match item {
            Ok(Output::Text(chunk)) => {
                said.text.push_str(&chunk.text);
                said.token_count += chunk.token_count;
            }
            other => end.push(other),
        }
    }
    said.text = writer.object(&said.text, false).to_string();
    let mut items = vec![Ok(Output::Text(said))];
    items.extend(end);
    items
}
