//! The canary: a small request on the path that clients use, which checks that the engine answers.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::{FutureExt, StreamExt};
use tokio::time::Instant;

use super::config::CanaryConfig;
use super::effects::{Reachable, Started};
use super::in_flight::InFlight;
use super::operations::port_panic;
use super::status::StatusBoard;
use crate::card::{EndpointType, ModelCard};
use crate::config::{EngineConfig, InputKind};
use crate::context::RequestContext;
use crate::engine::Role;
use crate::error::{EngineError, ErrorKind};
use crate::output::Output;
use crate::ports::Registration;
use crate::request::{ChatInput, GenerateRequest, Input, ScorePair};
use crate::transfer::TransferParams;

/// The header that marks a canary. Canaries bypass admission, so that clients that fill a worker without reading cannot make its
/// engine look dead.
pub(super) const PROBE_HEADER: &str = "genset-probe";

/// How often steps are sampled in the interval before a canary.
const LOOKS: u32 = 10;

/// Returns the probing request. A decode instance must compute its prompt itself.
pub(super) fn request(started: &Started) -> GenerateRequest {
    let mut request = request_of(&started.config, &started.card);
    if started.card.role == Role::Decode {
        request.transfer.get_or_insert_with(TransferParams::none);
    }
    request
}

/// Returns the engine's own canary, or one with one token in and one out.
fn request_of(config: &EngineConfig, card: &ModelCard) -> GenerateRequest {
    if let Some(request) = &config.canary {
        return (**request).clone();
    }
    let inputs = &config.capabilities.inputs;
    let mut request = GenerateRequest::from_tokens(config.model.clone(), vec![0]);
    if inputs.contains(&InputKind::Text) {
        request.input = Input::Text(match config.capabilities.whole_bodies {
            true => body_for(card).into(),
            false => "ping".into(),
        });
    } else if inputs.contains(&InputKind::Chat) {
        let message = serde_json::json!({"role": "user", "content": "ping"});
        request.input = Input::Chat(
            ChatInput {
                messages: vec![message],
                tools: Vec::new(),
            }
            .into(),
        );
    }
    if inputs.contains(&InputKind::Tokens) {
        request.input = Input::Tokens(vec![0].into());
    } else if !inputs.iter().any(|kind| kind.is_prompt()) {
        request.input = if inputs.contains(&InputKind::Embed) {
            Input::Embed(vec![vec![0]].into())
        } else {
            let pair = ScorePair {
                token_ids: vec![0],
                first_tokens: 1,
            };
            Input::Score([pair].into())
        };
    }
    request.stop.max_tokens = Some(1);
    request.stop.ignore_eos = true;
    request
}

/// Returns a whole request body for the API that the model serves.
fn body_for(card: &ModelCard) -> String {
    let mut body = serde_json::json!({"model": card.name, "max_tokens": 1, "stream": false});
    if card.endpoint_types.contains(&EndpointType::Chat) {
        body["messages"] = serde_json::json!([{"role": "user", "content": "ping"}]);
    } else {
        body["prompt"] = "ping".into();
    }
    body.to_string()
}

/// Sends one canary and waits for its terminal.
///
/// # Errors
/// The request's error, as one line; `DeadlineExceeded` when it took too long.
pub(super) async fn probe(
    registration: &dyn Registration,
    request: GenerateRequest,
    timeout: Duration,
) -> Result<(), EngineError> {
    let attempt = async {
        let ctx = RequestContext::new("canary").with_header(PROBE_HEADER, "canary");
        let mut outputs = registration.probe(request, ctx).await?;
        while let Some(item) = outputs.next().await {
            if let Output::Finished(_) = item? {
                return Ok(());
            }
        }
        Err(EngineError::new(
            ErrorKind::StreamIncomplete,
            "its stream ended without a terminal",
        ))
    };
    let contained = AssertUnwindSafe(attempt)
        .catch_unwind()
        .map(|result| result.unwrap_or_else(|panic| Err(port_panic("request plane", &*panic))));
    let answered = tokio::time::timeout(timeout, contained).await;
    answered
        .unwrap_or_else(|_| {
            let message = format!("no answer within {} s", timeout.as_secs_f64());
            Err(EngineError::new(ErrorKind::DeadlineExceeded, message))
        })
        .map_err(|error| {
            let message = format!("the canary failed: {error}");
            EngineError::new(error.kind(), message).with_source(error)
        })
}

/// Returns whether the engine's answers arrive only as a whole: embeddings, scores, and bodies that are not streamed.
fn answers_whole(config: &EngineConfig) -> bool {
    let can = &config.capabilities;
    can.whole_bodies || !can.inputs.iter().any(|kind| kind.is_prompt())
}

/// Monitors a serving engine: sends a canary after each interval without a sign of life. After a failed canary the worker is not
/// ready until the engine answers again. Returns the last error after too many consecutive failures.
pub(super) async fn watch(
    reachable: Reachable,
    config: CanaryConfig,
    in_flight: InFlight,
    board: StatusBoard,
) -> EngineError {
    let Some(interval) = config.interval else {
        return std::future::pending().await;
    };
    let (registration, started) = (reachable.registration, reachable.started);
    let (request, answers_whole) = (request(&started), answers_whole(&started.config));
    let mut failures = 0;
    let mut since = Instant::now();
    // The number of requests before the first canary of this silence. Later ones do not extend the silence.
    let mut first = None;
    loop {
        let (heard, steps) = (in_flight.heartbeats(), in_flight.steps());
        let last_step = wait(&in_flight, since + interval).await;
        let before = in_flight.steps();
        let is_heard = in_flight.heartbeats() != heard;
        let came = *first.get_or_insert(in_flight.came());
        let silence = match is_heard {
            true => None,
            false => probe(&*registration, request.clone(), config.timeout)
                .await
                .err()
                // A full engine is alive: it refuses, or the canary waits behind others. Only silence counts.
                .filter(|error| error.kind() != ErrorKind::Overloaded)
                .filter(|_| in_flight.heartbeats() == heard),
        };
        let is_late =
            (silence.as_ref()).is_some_and(|error| error.kind() == ErrorKind::DeadlineExceeded);
        // A canary behind a long prompt gets no item, but the engine computes steps.
        let has_stepped = is_late && in_flight.steps() != steps;
        since = match last_step {
            // The silence began at this step.
            Some(step) if has_stepped && in_flight.steps() == before => step,
            Some(_) | None => Instant::now(),
        };
        // A canary may wait behind an answer that arrives as a whole. Each such request has its own deadline.
        let may_wait = is_late && answers_whole && in_flight.has_one_of_first(came);
        if (in_flight.heartbeats(), in_flight.steps()) != (heard, steps) {
            first = None;
        }
        let Some(error) = silence.filter(|_| !has_stepped && !may_wait) else {
            failures = 0;
            board.canary_passed();
            continue;
        };
        failures += 1;
        board.canary_failed();
        tracing::warn!(failures, max_failures = config.max_failures, %error, "a canary failed");
        if failures >= config.max_failures {
            return error;
        }
    }
}

/// Waits until `until`. Returns an upper bound for the time of the last step in that period, if there was one.
async fn wait(in_flight: &InFlight, until: Instant) -> Option<Instant> {
    let begun = Instant::now();
    let pause = until.saturating_duration_since(begun) / LOOKS;
    let (mut steps, mut last_step) = (in_flight.steps(), None);
    for look in 1..=LOOKS {
        tokio::time::sleep_until(begun + pause * look).await;
        let now = in_flight.steps();
        if std::mem::replace(&mut steps, now) != now {
            last_step = Some(Instant::now());
        }
    }
    last_step
}
