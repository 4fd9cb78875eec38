//! `/v1/responses`: an answer as items, whole or streamed, and the store of those that later requests go on from.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Extension;
use axum::extract::{FromRequestParts, Path, RawQuery, State};
use axum::response::{IntoResponse, Response};
use bytes::BytesMut;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use genset_backend_common::{EndpointType, EngineError};
use http::StatusCode;
use http::request::Parts;
use serde_json::json;

use super::access::Caller;
use super::apis::{Call, Reply};
use super::handlers::{App, find_model, json_response};
use super::stream::{AnswerEvents, stream};
use crate::answer::{Answer, AnswerEnd, Ending, RatedToken, Spent};
use crate::error::ApiError;
use crate::markup::Delta;
use crate::pipeline::{self, Job};
use crate::responses::{
    EventEncoder, Item, Output, ResponseEnd, ResponseHead, ResponseStore, ResponsesRequest, Stored,
    in_our_words,
};

pub(super) fn create(call: &mut Call) -> BoxFuture<'_, Result<Reply, ApiError>> {
    async move {
        let request = call.parse(|body, _| ResponsesRequest::parse(body)).await?;
        let history = history(
            &call.app.responses,
            request.previous_response_id.as_deref(),
            &call.caller,
        )?;
        let to_chat = move |_: &[u8], limits: &_| {
            let chat = request.to_chat(&history, limits)?;
            Ok((request, history, chat))
        };
        let (request, history, chat) = call.parse(to_chat).await?;
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
        let ctx = call.admit(&model).await?;
        let job = Job::chat(model, chat).await.map_err(in_our_words)?;
        let refused = |error: EngineError| in_our_words(error.into());
        let mut answers = job.answers(&ctx).map_err(refused)?;
        call.guard.measure(&mut answers);
        pipeline::begin(&mut answers).await.map_err(refused)?;
        // One prompt and one choice have one answer.
        let answer = answers.pop();
        let answer = answer.ok_or_else(|| EngineError::internal("the request has no answer"))?;
        if request.is_stream {
            let encoder = EventEncoder::new(head);
            let events = ResponseEvents { encoder, keeper };
            return Ok(Reply::Streamed(Box::new(|guard| {
                stream(events, answer, guard)
            })));
        }
        let (output, end, spent) = whole(answer).await?;
        call.guard.text();
        call.guard.spent(&spent);
        let end = ResponseEnd::new(&end, spent);
        let response = head.ended(output.to_json(end.last_item_status()), &end);
        let json = response.to_string();
        keeper.keep(response, output);
        Ok(Reply::Json(json))
    }
    .boxed()
}

/// Counts the tokens of the prompt that a response would have.
pub(super) fn input_tokens(call: &mut Call) -> BoxFuture<'_, Result<Reply, ApiError>> {
    async move {
        let request = call
            .parse(|body, _| ResponsesRequest::parse_to_count(body))
            .await?;
        let history = history(
            &call.app.responses,
            request.previous_response_id.as_deref(),
            &call.caller,
        )?;
        let to_chat = move |_: &[u8], limits: &_| request.to_chat(&history, limits);
        let chat = call.parse(to_chat).await?;
        call.guard.model(&chat.params.model);
        let model = find_model(&call.app, &chat.params.model, EndpointType::Chat)?;
        let job = Job::chat(model.clone(), chat).await.map_err(in_our_words)?;
        let tokens = job.prompt().ok_or_else(|| pipeline::no_tokenizer(&model))?;
        let count = json!({"object": "response.input_tokens", "input_tokens": tokens.len()});
        Ok(Reply::Json(count.to_string()))
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
async fn whole(mut answer: Answer) -> Result<(Output, AnswerEnd, Spent), EngineError> {
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
    Ok((output, end, ending.spent(&end)))
}

/// The events of one response. It is kept once it has ended; dropped before, nothing is.
struct ResponseEvents {
    encoder: EventEncoder,
    keeper: Keeper,
}

impl AnswerEvents for ResponseEvents {
    fn start(&mut self, out: &mut BytesMut) {
        self.encoder.start(out);
    }

    fn delta(&mut self, delta: Delta<'_>, rated: &[RatedToken], out: &mut BytesMut) {
        self.encoder.delta(delta, rated, out);
    }

    fn finish(mut self, end: &AnswerEnd, ending: Ending, out: &mut BytesMut) {
        self.encoder.add_rated(&ending.rated);
        let end = ResponseEnd::new(end, ending.spent(end));
        let (response, output) = self.encoder.finish(&end, out);
        self.keeper.keep(response, output);
    }

    fn fail(self, error: ApiError, out: &mut BytesMut) {
        let end = ResponseEnd::Failed(Box::new(in_our_words(error)));
        self.encoder.finish(&end, out);
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

/// A response's id in a path.
pub(super) struct Id(String);

impl<S: Send + Sync> FromRequestParts<S> for Id {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let path = Path::<String>::from_request_parts(parts, state).await;
        let problem = "the id in the path is not valid UTF-8";
        path.map(|Path(id)| Self(id))
            .map_err(|_| ApiError::invalid("response_id", problem))
    }
}

pub(super) async fn retrieve(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Id(id): Id,
    RawQuery(query): RawQuery,
) -> Response {
    if let Err(error) = check_query(query.as_deref().unwrap_or_default()) {
        return error.into_response();
    }
    match app.responses.get(&id, caller.name()) {
        Some(stored) => json_response(&stored.response),
        None => not_found(&id).into_response(),
    }
}

/// Refuses what a response that was given cannot be asked for. What it includes was decided with its request.
fn check_query(query: &str) -> Result<(), ApiError> {
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        match name {
            "stream" if value == "true" => {
                let why = "a response that was given cannot be streamed again";
                return Err(ApiError::unsupported("stream", why));
            }
            "stream" | "starting_after" => {}
            name if name.starts_with("include") => {}
            other => return Err(ApiError::invalid(other, "there is no such parameter")),
        }
    }
    Ok(())
}

pub(super) async fn delete(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Id(id): Id,
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
    Id(id): Id,
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
    Id(id): Id,
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
