//! An engine of text that takes whole bodies of OpenAI's API, too, and the faults that the check of WB catches.

use std::sync::Arc;

use futures_util::{StreamExt, stream};
use genset_backend_common::output::TextChunk;
use genset_backend_common::{
    EngineConfig, EngineError, GenerateRequest, Input, LLMEngine, Output, OutputStream,
    RequestContext, StartContext, async_trait,
};
use serde_json::{Value, json};

use super::fault::{Fault, with_fault};
use super::text::spelled;
use super::{Clean, Mutant};
use crate::subject::{Scenario, Subject};

pub(super) const CONTROLS: &[Mutant] = &[Mutant {
    name: "text-bodies",
    stands_for: "nothing: an engine that writes the API's objects itself",
    killed_by: &[],
    build: |clean, scenario| bodies(clean, scenario, Flaw::None),
}];

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "text-bodies-with-their-frames",
        stands_for: "events passed on as they stand on the wire, with \"data: \" before them",
        killed_by: &["WB01"],
        build: |clean, scenario| bodies(clean, scenario, Flaw::Framed),
    },
    Mutant {
        name: "text-bodies-always-streamed",
        stands_for: "\"stream\": false that the engine behind the body does not know",
        killed_by: &["WB01"],
        build: |clean, scenario| bodies(clean, scenario, Flaw::AlwaysStreams),
    },
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flaw {
    None,
    Framed,
    AlwaysStreams,
}

fn bodies(clean: &Clean, scenario: &Scenario, flaw: Flaw) -> Subject {
    let clean = Arc::clone(clean);
    let of_text: Clean = Arc::new(move |scenario: &Scenario| spelled(clean.build(scenario)));
    with_fault(&of_text, scenario, Bodies(flaw))
}

struct Bodies(Flaw);

/// A body, if a text is one.
fn body_of(input: &Input) -> Option<Value> {
    let Input::Text(text) = input else {
        return None;
    };
    let body: Value = serde_json::from_str(text).ok()?;
    body["messages"].is_array().then_some(body)
}

#[async_trait]
impl Fault for Bodies {
    async fn start(
        &self,
        inner: &Arc<dyn LLMEngine>,
        ctx: StartContext,
    ) -> Result<EngineConfig, EngineError> {
        let mut config = inner.start(ctx).await?;
        config.capabilities.whole_bodies = true;
        Ok(config)
    }

    async fn generate(
        &self,
        inner: &Arc<dyn LLMEngine>,
        mut request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let Some(body) = body_of(&request.input) else {
            return inner.generate(request, ctx).await;
        };
        let said = body["messages"][0]["content"].as_str().unwrap_or_default();
        request.input = Input::Text(said.to_owned().into());
        request.stop.max_tokens = body["max_tokens"]
            .as_u64()
            .and_then(|most| most.try_into().ok());
        let flaw = self.0;
        let outputs = inner.generate(request, ctx).await?;
        if body["stream"] == true || flaw == Flaw::AlwaysStreams {
            let events = outputs.map(move |mut item| {
                if let Ok(Output::Text(chunk)) = &mut item {
                    let event =
                        json!({"choices": [{"index": 0, "delta": {"content": chunk.text}}]});
                    chunk.text = match flaw {
                        Flaw::Framed => format!("data: {event}\n\n"),
                        Flaw::None | Flaw::AlwaysStreams => event.to_string(),
                    };
                }
                item
            });
            return Ok(OutputStream::from_raw(Box::pin(events)));
        }
        let whole = stream::once(whole(outputs)).flat_map(stream::iter);
        Ok(OutputStream::from_raw(Box::pin(whole)))
    }
}

/// The answer as one object, and its end.
async fn whole(outputs: OutputStream) -> Vec<Result<Output, EngineError>> {
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
    let message = json!({"role": "assistant", "content": said.text});
    said.text = json!({"choices": [{"index": 0, "message": message}]}).to_string();
    let mut items = vec![Ok(Output::Text(said))];
    items.extend(end);
    items
}
