//! WB: whole bodies of OpenAI's API, of engines that declare that they read them and write the answers by themselves.

use genset_backend_common::{GenerateRequest, Input, Output, config::InputKind};
use serde_json::{Value, json};

use crate::check::{Check, CheckResult, Stop, check, ensure, fail, skip};
use crate::trial::{Live, Trial};

pub(super) const CHECKS: &[Check] = &[
    check!("WB01", Core, Tokens, "a body of OpenAI's API is answered by objects of that API: one, or one an event",
        clause: "Capabilities::whole_bodies",
        breaks: "answers that pass through the frontend and that no client can read", answered_in_objects),
];

async fn answered_in_objects(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let can = &live.config.capabilities;
    if !can.whole_bodies {
        skip!(NotDeclared, "the engine does not declare whole_bodies");
    }
    ensure!(
        can.inputs.contains(&InputKind::Text),
        "whole_bodies is declared, and text is not: a body is an input of text"
    );
    let whole = objects(&live, false).await?;
    ensure!(
        whole.len() == 1,
        "a request that is not streamed is answered by {} objects",
        whole.len()
    );
    let message = &whole[0]["choices"][0]["message"];
    ensure!(
        message.is_object(),
        "the answer's first choice has no message: {}",
        shown(&whole[0])
    );
    let events = objects(&live, true).await?;
    let is_piece = |event: &&Value| event["choices"][0]["delta"].is_object();
    ensure!(
        events.iter().any(|event| is_piece(&event)),
        "none of {} events has a choice with a delta, such as {}",
        events.len(),
        shown(events.first().unwrap_or(&Value::Null))
    );
    Ok(())
}

/// What a chat is answered with.
async fn objects(live: &Live, is_stream: bool) -> Result<Vec<Value>, Stop> {
    let body = json!({
        "model": live.config.model,
        "messages": [{"role": "user", "content": "7 42 3"}],
        "max_tokens": 4,
        "stream": is_stream,
    });
    let mut request = GenerateRequest::from_tokens(live.config.model.clone(), Vec::new());
    request.input = Input::Text(body.to_string().into());
    let answer = live.answer(request).await?;
    if let Some(error) = answer.error() {
        fail!(
            "a chat with \"stream\": {is_stream} ended with {error} ({})",
            error.kind()
        );
    }
    let mut objects = Vec::new();
    for output in answer.items.iter().flatten() {
        match output {
            Output::Text(chunk) if chunk.text.is_empty() => {}
            Output::Text(chunk) => match serde_json::from_str::<Value>(&chunk.text) {
                Ok(object) if object.is_object() => objects.push(object),
                Ok(_) | Err(_) => fail!(
                    "a chat with \"stream\": {is_stream} is answered by a text that is no JSON object: {:?}",
                    chunk.text.chars().take(100).collect::<String>()
                ),
            },
            Output::Finished(_) => {}
            Output::Tokens(_) | Output::Embeddings(_) | Output::Scores(_) => {
                fail!("a body is answered by something else than text")
            }
        }
    }
    Ok(objects)
}

fn shown(value: &Value) -> String {
    value.to_string().chars().take(200).collect()
}
