//! `/v1/responses`: an answer as items, whole or streamed, and the store of those that later requests go on from.

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Extension;
use axum::extract::{Path, RawQuery, State};
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use genset_backend_common::output::Usage;
use genset_backend_common::{EndpointType, EngineError};
use http::StatusCode;
use http_body::{Body, Frame};
use serde_json::json;

use super::access::Caller;
use super::apis::{Call, Reply};
use super::body::FRAME_BYTES;
use super::handlers::{App, event_response, find_model, json_response};
use super::metrics::RequestGuard;
use crate::answer::{Answer, AnswerEnd};
use crate::error::ApiError;
use crate::pipeline::Job;
use crate::responses::{
    EventEncoder, Item, Output, ResponseEnd, ResponseHead, ResponseStore, ResponsesRequest, Stored,
    in_our_words,
};

pub(super) fn create(call: &mut Call) -> BoxFuture<'_, Result<Reply, ApiError>> {
    async move {
        let request = ResponsesRequest::parse(&call.body)?;
        let history = history(
            &call.app.responses,
            request.previous_response_id.as_deref(),
            &call.caller,
        )?;
        let chat = request.to_chat(&history, &call.limits())?;
        let head = ResponseHead {
            id: format!("resp_{:032x}", rand::random::<u128>()),
            created: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_secs()),
            model: chat.params.model.clone(),
            store: request.store && call.app.responses.keeps(),
            repeated: Arc::new(request.repeated),
        };
        let input = history
            .into_iter()
            .chain(request.input.into_iter().map(Arc::new));
        let keeper = Keeper {
            store: Arc::clone(&call.app.responses),
            owner: call.caller.name().map(str::to_owned),
            id: head.id.clone(),
            input: head.store.then(|| input.collect()),
        };
        call.guard.model(&head.model);
        let model = find_model(&call.app, &head.model, EndpointType::Chat)?;
        let job = Job::chat(model, chat).await.map_err(in_our_words)?;
        let ctx = call.context()?;
        // One prompt and one choice have one answer.
        let answers = job.start(&ctx).await;
        let mut answers = answers.map_err(|error| in_our_words(error.into()))?;
        call.guard.measure(&mut answers);
        let answer = answers.pop();
        let answer = answer.ok_or_else(|| EngineError::internal("the request has no answer"))?;
        if request.is_stream {
            let encoder = EventEncoder::new(head);
            return Ok(Reply::Streamed(Box::new(|guard| {
                stream(encoder, answer, keeper, guard)
            })));
        }
        let (output, end) = whole(answer).await?;
        call.guard.text();
        call.guard.usage(&usage_of(&end));
        let end = ResponseEnd::new(&end);
        let response = head.ended(output.to_json(end.last_item_status()), &end);
        let json = response.to_string();
        keeper.keep(response, output);
        Ok(Reply::Json(json))
    }
    .boxed()
}

/// The conversation that the request goes on from.
fn history(
    store: &ResponseStore,
    previous: Option<&str>,
    caller: &Caller,
) -> Result<Vec<Arc<Item>>, ApiError> {
    let Some(id) = previous else {
        return Ok(Vec::new());
    };
    match store.get(id, caller.name()) {
        Some(stored) => Ok(stored.conversation()),
        None => Err(ApiError {
            param: Some("previous_response_id".into()),
            code: Some("previous_response_not_found"),
            ..ApiError::new(
                StatusCode::BAD_REQUEST,
                format!(
                    "Previous response with id '{id}' not found. This server keeps the latest ones in memory; \
                     send the conversation in 'input' instead."
                ),
            )
        }),
    }
}

/// Puts a response into the store once it has ended.
struct Keeper {
    store: Arc<ResponseStore>,
    owner: Option<String>,
    id: String,
    /// `None` where nothing is to be kept.
    input: Option<Vec<Arc<Item>>>,
}

impl Keeper {
    fn keep(self, response: serde_json::Value, output: Output) {
        if let Some(input) = self.input {
            let output = output.into_items().into_iter().map(Arc::new).collect();
            let stored = Stored {
                owner: self.owner,
                response,
                input,
                output,
            };
            self.store.put(self.id, stored);
        }
    }
}

/// Reads an answer to its end.
async fn whole(mut answer: Answer) -> Result<(Output, AnswerEnd), EngineError> {
    let mut output = Output::default();
    let mut text = String::new();
    let end = loop {
        let end = poll_fn(|cx| answer.poll_text(cx, &mut text)).await?;
        if !text.is_empty() {
            answer.deliver(&text, |delta, rated| output.add(delta, rated));
            text.clear();
        }
        if let Some(end) = end {
            break end;
        }
    };
    let ending = answer.end(|delta, rated| output.add(delta, rated));
    output.add_rated(&ending.rated);
    output.ensure_item();
    Ok((output, end))
}

fn usage_of(end: &AnswerEnd) -> Usage {
    let mut usage = Usage::default();
    end.add_to(&mut usage);
    usage
}

fn stream(
    mut encoder: EventEncoder,
    answer: Answer,
    keeper: Keeper,
    guard: RequestGuard,
) -> Response {
    let mut buffer = BytesMut::new();
    encoder.start(&mut buffer);
    event_response(ResponseBody {
        running: Some(Running {
            encoder,
            answer,
            keeper,
        }),
        guard,
        buffer,
        text: String::new(),
        has_sent_text: false,
    })
}

/// The events of one response, written as the tokens come. Dropping it cancels what still runs; nothing is kept then.
struct ResponseBody {
    /// Gone when it has ended.
    running: Option<Running>,
    guard: RequestGuard,
    buffer: BytesMut,
    /// Text of the present item of the engine's; empty between two.
    text: String,
    has_sent_text: bool,
}

struct Running {
    encoder: EventEncoder,
    answer: Answer,
    keeper: Keeper,
}

impl ResponseBody {
    /// Writes what is ready, until nothing is or the frame is full. The first text leaves at once.
    fn fill(&mut self, cx: &mut Context<'_>) {
        while self.buffer.len() < FRAME_BYTES {
            let Some(Running {
                encoder, answer, ..
            }) = &mut self.running
            else {
                return;
            };
            let Poll::Ready(result) = answer.poll_text(cx, &mut self.text) else {
                return;
            };
            let before = self.buffer.len();
            if !self.text.is_empty() {
                let buffer = &mut self.buffer;
                answer.deliver(&self.text, |delta, rated| {
                    encoder.delta(delta, rated, buffer);
                });
                self.text.clear();
                self.guard.text();
            }
            let has_text = self.buffer.len() > before;
            match result {
                Ok(None) => {}
                Ok(Some(end)) => self.end(&end),
                Err(error) => self.fail(error),
            }
            if has_text && !std::mem::replace(&mut self.has_sent_text, true) {
                return;
            }
        }
    }

    fn end(&mut self, end: &AnswerEnd) {
        let Some(Running {
            mut encoder,
            answer,
            keeper,
        }) = self.running.take()
        else {
            return;
        };
        let buffer = &mut self.buffer;
        let ending = answer.end(|delta, rated| encoder.delta(delta, rated, buffer));
        encoder.add_rated(&ending.rated);
        let (response, output) = encoder.finish(&ResponseEnd::new(end), buffer);
        keeper.keep(response, output);
        self.guard.set_status(StatusCode::OK);
        self.guard.usage(&usage_of(end));
    }

    fn fail(&mut self, error: EngineError) {
        let error = in_our_words(ApiError::from(error));
        self.guard.fail(&error);
        if let Some(Running { encoder, .. }) = self.running.take() {
            let end = ResponseEnd::Failed(Box::new(error));
            encoder.finish(&end, &mut self.buffer);
        }
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        this.fill(cx);
        if !this.buffer.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(this.buffer.split().freeze()))));
        }
        if this.running.is_some() {
            Poll::Pending
        } else {
            Poll::Ready(None)
        }
    }

    fn is_end_stream(&self) -> bool {
        self.running.is_none() && self.buffer.is_empty()
    }
}

/// The 404 of a response that is not kept (any more).
fn not_found(id: &str) -> ApiError {
    let message =
        format!("Response with id '{id}' not found. This server keeps the latest ones in memory.");
    ApiError {
        param: Some("response_id".into()),
        ..ApiError::new(StatusCode::NOT_FOUND, message)
    }
}

pub(super) async fn retrieve(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
) -> Response {
    let is_stream = query.is_some_and(|query| query.split('&').any(|pair| pair == "stream=true"));
    if is_stream {
        let why = "a response that was given cannot be streamed again";
        return ApiError::unsupported("stream", why).into_response();
    }
    match app.responses.get(&id, caller.name()) {
        Some(stored) => json_response(&stored.response),
        None => not_found(&id).into_response(),
    }
}

pub(super) async fn delete(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Response {
    if app.responses.delete(&id, caller.name()) {
        json_response(&json!({"id": id, "object": "response", "deleted": true}))
    } else {
        not_found(&id).into_response()
    }
}

/// There is nothing to cancel: a response is stored when it has ended.
pub(super) async fn cancel(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
) -> Response {
    match app.responses.get(&id, caller.name()) {
        None => not_found(&id).into_response(),
        Some(_) => {
            let message = "Only responses in the background can be cancelled, and this server has none. Close the \
                connection of the request instead.";
            ApiError::new(StatusCode::BAD_REQUEST, message).into_response()
        }
    }
}

pub(super) async fn input_items(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
) -> Response {
    let Some(stored) = app.responses.get(&id, caller.name()) else {
        return not_found(&id).into_response();
    };
    match Page::parse(query.as_deref().unwrap_or_default()) {
        Ok(page) => json_response(&page.of(&stored.input)),
        Err(error) => error.into_response(),
    }
}

/// Which of the items are asked for.
struct Page {
    after: Option<String>,
    limit: usize,
    is_ascending: bool,
}

impl Page {
    fn parse(query: &str) -> Result<Self, ApiError> {
        let mut page = Self {
            after: None,
            limit: 20,
            is_ascending: false,
        };
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            match name {
                "after" => page.after = Some(value.to_owned()),
                "limit" => {
                    let limit = value.parse().ok().filter(|limit| (1..=100).contains(limit));
                    let problem = "must be between 1 and 100";
                    page.limit = limit.ok_or_else(|| ApiError::invalid("limit", problem))?;
                }
                "order" if value == "asc" || value == "desc" => page.is_ascending = value == "asc",
                "order" => {
                    let problem = "expected \"asc\" or \"desc\"";
                    return Err(ApiError::invalid("order", problem));
                }
                name if name.starts_with("include") => {}
                other => return Err(ApiError::invalid(other, "there is no such parameter")),
            }
        }
        Ok(page)
    }

    fn of(&self, items: &[Arc<Item>]) -> serde_json::Value {
        let mut ordered: Vec<&Arc<Item>> = items.iter().collect();
        if !self.is_ascending {
            ordered.reverse();
        }
        if let Some(after) = &self.after {
            let from = ordered.iter().position(|item| item.id() == after);
            ordered.drain(..from.map_or(0, |index| index + 1));
        }
        let has_more = ordered.len() > self.limit;
        ordered.truncate(self.limit);
        let data: Vec<_> = ordered
            .iter()
            .map(|item| item.to_json("completed"))
            .collect();
        json!({
            "object": "list",
            "data": data,
            "first_id": ordered.first().map_or("", |item| item.id()),
            "last_id": ordered.last().map_or("", |item| item.id()),
            "has_more": has_more,
        })
    }
}
