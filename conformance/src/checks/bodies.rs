//! WB: whole bodies of OpenAI's API, for engines that declare that they parse them and write the answers themselves.

use genset_backend_common::{EngineError, ErrorKind, GenerateRequest, Output, config::InputKind};
use serde_json::Value;

use crate::check::{Check, CheckResult, Stop, check, ensure, fail};
use crate::medium::Api;
use crate::trial::{Live, Trial};

pub(super) const CHECKS: &[Check] = &[
    check!("WB01", Core, Bodies, "a body of OpenAI's API is answered by objects of that API: one, or one an event",
        clause: "Capabilities::whole_bodies",
        breaks: "answers that pass through the frontend and that no client can read", answered_in_objects),
];

async fn answered_in_objects(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let can = &live.config.capabilities;
    ensure!(
        can.inputs.contains(&InputKind::Text),
        "whole_bodies is declared, and text is not: a body is an input of text"
    );
    let (api, whole) = match objects(&live, Api::Chat, false).await? {
        Ok(whole) => (Api::Chat, whole),
        Err(broken) if broken.may_be_refusal() => {
            let completion = objects(&live, Api::Completion, false).await?;
            let whole = completion.map_err(|_refused_too| broken.told(Api::Chat, false))?;
            (Api::Completion, whole)
        }
        Err(broken) => return Err(broken.told(Api::Chat, false)),
    };
    ensure!(
        whole.len() == 1,
        "a request that is not streamed is answered by {} objects",
        whole.len()
    );
    ensure!(
        api.is_answer(&whole[0]),
        "the answer's first choice has no {}: {}",
        api.answers_in(),
        shown(&whole[0])
    );
    let events = objects(&live, api, true).await?;
    let events = events.map_err(|broken| broken.told(api, true))?;
    ensure!(
        events.iter().any(|event| api.is_piece(event)),
        "none of {} events has a choice with a {}, such as {}",
        events.len(),
        api.streams_in(),
        shown(events.first().unwrap_or(&Value::Null))
    );
    Ok(())
}

impl Api {
    fn name(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completion => "completion",
        }
    }

    /// The field of a choice that contains the answer.
    fn answers_in(self) -> &'static str {
        match self {
            Self::Chat => "message",
            Self::Completion => "text",
        }
    }

    /// The field of a choice that contains a part of the answer.
    fn streams_in(self) -> &'static str {
        match self {
            Self::Chat => "delta",
            Self::Completion => "text",
        }
    }

    fn is_answer(self, object: &Value) -> bool {
        self.is_said(&object["choices"][0][self.answers_in()])
    }

    fn is_piece(self, event: &Value) -> bool {
        self.is_said(&event["choices"][0][self.streams_in()])
    }

    fn is_said(self, value: &Value) -> bool {
        match self {
            Self::Chat => value.is_object(),
            Self::Completion => value.is_string(),
        }
    }
}

/// An answer that ended with an error.
struct Broken {
    error: EngineError,
    /// Whether an item came before it.
    has_begun: bool,
}

impl Broken {
    /// Whether the error may mean that the API is not offered. Not every handler looks at the API of a body before it fails.
    fn may_be_refusal(&self) -> bool {
        let refusals = [
            ErrorKind::InvalidArgument,
            ErrorKind::Unsupported,
            ErrorKind::Internal,
        ];
        !self.has_begun && refusals.contains(&self.error.kind())
    }

    fn told(&self, api: Api, is_stream: bool) -> Stop {
        let (name, error, kind) = (api.name(), &self.error, self.error.kind());
        Stop::Fail(format!(
            "a {name} with \"stream\": {is_stream} ended with {error} ({kind})"
        ))
    }
}

/// The answer to a body, or the error that it ends with.
async fn objects(
    live: &Live,
    api: Api,
    is_stream: bool,
) -> Result<Result<Vec<Value>, Broken>, Stop> {
    let mut request = GenerateRequest::from_tokens(live.config.model.clone(), Vec::new());
    request.input = live.body(api, &[7, 42, 3], is_stream);
    let ctx = live.context(&request);
    let answer = live.outcome(request, ctx).await?;
    if let Some(error) = answer.error() {
        return Ok(Err(Broken {
            error: error.clone(),
            has_begun: answer.items.iter().any(Result::is_ok),
        }));
    }
    let mut objects = Vec::new();
    for output in answer.items.iter().flatten() {
        match output {
            Output::Text(chunk) if chunk.text.is_empty() => {}
            Output::Text(chunk) => match serde_json::from_str::<Value>(&chunk.text) {
                Ok(object) if object.is_object() => objects.push(object),
                Ok(_) | Err(_) => fail!(
                    "a {} with \"stream\": {is_stream} is answered by a text that is no JSON object: {:?}",
                    api.name(),
                    chunk.text.chars().take(100).collect::<String>()
                ),
            },
            Output::Finished(_) => {}
            Output::Tokens(_) | Output::Embeddings(_) | Output::Scores(_) => {
                fail!("a body is answered by something else than text")
            }
        }
    }
    Ok(Ok(objects))
}

fn shown(value: &Value) -> String {
    value.to_string().chars().take(200).collect()
}
