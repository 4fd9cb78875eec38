//! `/v1/responses`: an answer as items, whole or streamed, and the store of responses that later requests continue.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{FromRequestParts, Path, RawQuery, State};
use axum::response::Response;
use bytes::BytesMut;
use genset_backend_common::{ErrorKind, RequestContext, card::EndpointType};
use http::StatusCode;
use http::request::Parts;
use serde::Serialize;
use serde_json::json;

use super::access::Caller;
use super::apis::{Call, Reply, new_id};
use super::completions::WRITTEN_BYTES;
use super::handlers::App;
use super::held::holding;
use super::listing::{Page, Pages, is_include};
use super::replies::{json_response, whole_response};
use super::stream::{AnswerEvents, stream};
use crate::answer::{AnswerEnd, Ending, TokenLogprobs};
use crate::budget::MemoryShare;
use crate::clock::now;
use crate::error::ApiError;
use crate::json::JsonBody;
use crate::markup::Delta;
use crate::model::ServedModel;
use crate::openai::{ChatRequest, ParamLimits, json_text};
use crate::pipeline::{self, Job};
use crate::responses::{
    Item, ItemJson, Output, ResponseEncoder, ResponseEnd, ResponseHead, ResponseStore,
    ResponsesRequest, Stored,
};

pub(super) async fn create(call: &mut Call) -> Result<Reply, ApiError> {
    let find = finder(call);
    let parse = move |body: JsonBody<'_>, _: &ParamLimits| ResponsesRequest::parse(body, &find);
    let request = call.parse(parse).await?;
    let asked = Asked::new(call, request)?;
    let (asked, chat) = asked.chat(call, 0).await?;
    let name = chat.params.model.clone();
    let (endpoint, is_stream) = (Some(EndpointType::Chat), asked.request.is_stream);
    let (model, ctx) = call.enter_stream(&name, endpoint, is_stream).await?;
    let (job, asked) = asked.job(call, &ctx, &model, chat).await?;
    call.guard.ignores(&job.params().hints, "reasoning.effort");
    let Asked {
        request,
        history,
        mut held,
    } = asked;
    let items = history.iter().chain(&request.input).map(Arc::as_ref);
    let room = call.app.responses.room_behind(items);
    let store_bytes = room.filter(|_| request.store);
    let repeated = request.repeated.bytes_with_copies();
    let conversation = bytes_of(&request.input) + bytes_of(&history);
    let conversation = store_bytes.map_or(0, |_| conversation);
    held.resize(repeated.saturating_add(conversation))?;
    let mut head = ResponseHead {
        id: new_id("resp_"),
        created: now(),
        model: name,
        store_bytes,
        explanation: None,
        repeated: Arc::new(request.repeated),
    };
    let input = history.into_iter().chain(request.input);
    let keeper = Keeper {
        store: Arc::clone(&call.app.responses),
        owner: call.caller.name().map(str::to_owned),
        id: head.id.clone(),
        input: head.store_bytes.map(|_| input.collect()),
    };
    let answers = job.answers(&ctx).await?;
    head.explanation = answers.explanation().cloned();
    let answer = call.sole_answer(answers, request.is_stream).await?;
    if request.is_stream {
        let encoder = ResponseEncoder::new(head);
        let events = ResponseEvents { encoder, keeper };
        let keep_alive = call.app.config.stream_keep_alive;
        return Ok(Reply::Streamed(Box::new(move |guard| {
            stream(events, answer, guard, Some(held), keep_alive)
        })));
    }
    let mut memory = call.guard.memory().another();
    let mut output = Output::of(&head);
    let add = |delta: Delta<'_>, rated: &[TokenLogprobs]| output.add(delta, rated);
    let (end, ending) = answer.read_all(&mut memory, add).await?;
    output.add_rated(&ending.rated);
    output.ensure_item();
    let total = ending.total_usage(&end);
    call.guard.text();
    call.guard.add_usage(&total);
    let end = ResponseEnd::new(&end, total, now());
    let bytes = (output.bytes() + head.repeated.bytes()) / WRITTEN_BYTES;
    let write = move || {
        let _held = (memory, held);
        let json = head.ended(&output, &end);
        keeper.keep(&json, output);
        Ok(json)
    };
    call.reply(bytes, write).await
}

/// Counts the prompt tokens that a response would have.
pub(super) async fn input_tokens(call: &mut Call) -> Result<Reply, ApiError> {
    let find = finder(call);
    let parse =
        move |body: JsonBody<'_>, _: &ParamLimits| ResponsesRequest::parse_to_count(body, &find);
    let request = call.parse(parse).await?;
    let asked = Asked::new(call, request)?;
    let (asked, chat) = asked.chat(call, 0).await?;
    let name = &chat.params.model;
    let (model, ctx) = call.enter(name, Some(EndpointType::Chat)).await?;
    let (job, _) = asked.job(call, &ctx, &model, chat).await?;
    call.guard.ignores(&job.params().hints, "reasoning.effort");
    let tokens = job.prompt().ok_or_else(|| pipeline::no_tokenizer(&model))?;
    call.guard.account().charge_counted(tokens.len());
    let count = json!({"object": "response.input_tokens", "input_tokens": tokens.len()});
    Ok(Reply::Json(count.to_string()))
}

/// Finds items of the caller's stored responses.
fn finder(call: &Call) -> impl Fn(&str) -> Option<Arc<Item>> + Send + use<> {
    let store = Arc::clone(&call.app.responses);
    let owner = call.caller.name().map(str::to_owned);
    move |id| store.item(id, owner.as_deref())
}

/// The part of the context kept free for the answer when a conversation is truncated: one in this many, unless the request sets
/// the answer's length.
const ANSWER_DIVISOR: usize = 4;

const PAGES: Pages = Pages {
    usual_limit: 20,
    max_limit: 100,
    further: &["order", "include"],
};

/// A request and the conversation that it continues.
struct Asked {
    request: ResponsesRequest,
    history: Vec<Arc<Item>>,
    /// Holds both. The request's own memory becomes its prompt's.
    held: MemoryShare,
}

impl Asked {
    fn new(call: &mut Call, request: ResponsesRequest) -> Result<Self, ApiError> {
        let previous = request.previous_response_id.as_deref();
        let history = history(&call.app.responses, previous, &call.caller)?;
        let mut held = call.guard.memory().another();
        held.grow(request.bytes() + bytes_of(&history))?;
        Ok(Self {
            request,
            history,
            held,
        })
    }

    /// Its chat, without the first `skipped` items.
    async fn chat(
        mut self,
        call: &mut Call,
        skipped: usize,
    ) -> Result<(Self, ChatRequest), ApiError> {
        let history_bytes = bytes_of(&self.history) + self.request.found_bytes();
        // Without skipped items, the chat is made of what was parsed with the body, whose memory is already held.
        let read_bytes = if skipped > 0 { self.request.bytes() } else { 0 };
        call.guard.memory().grow(history_bytes + read_bytes)?;
        let further_bytes = call.body_bytes + history_bytes;
        let to_chat = move |body: JsonBody<'_>, limits: &ParamLimits| {
            let chat = (self.request).take_chat(&self.history, skipped, body.meter(), limits)?;
            Ok((self, chat))
        };
        let (asked, mut chat) = call.parse_further(further_bytes, to_chat).await?;
        call.guard.complete(&mut chat.params);
        Ok((asked, chat))
    }

    /// Prepares the job of its chat. If the conversation is too long and may be truncated, keeps as much of its end as leaves
    /// room for an answer. The memory of every job is held as long as the job exists.
    async fn job(
        mut self,
        call: &mut Call,
        ctx: &RequestContext,
        model: &Arc<ServedModel>,
        chat: ChatRequest,
    ) -> Result<(Job, Self), ApiError> {
        let context = usize::try_from(model.card.context_length_tokens).unwrap_or(usize::MAX);
        let answer = chat.params.stop.max_tokens;
        let answer = answer.map_or(context / ANSWER_DIVISOR, |max| max as usize);
        let room = context - answer.min(context / 2);
        let too_long = match prepared(call, ctx, model, chat).await {
            // A prompt must leave room for one token.
            Ok((job, share)) if !self.request.truncates || tokens_of(&job) < context => {
                call.guard.memory().absorb(share);
                return Ok((job, self));
            }
            Ok(_) => None,
            Err(error) if self.request.truncates && is_too_long(&error) => Some(error),
            Err(error) => return Err(error),
        };
        let cuts = self.request.cuts(&self.history);
        let (mut least, mut most) = (0, cuts.len());
        let (mut best, mut shortest) = (None, None);
        while least < most {
            let middle = usize::midpoint(least, most);
            let skipped = cuts.get(middle).copied().unwrap_or_default();
            let (asked, chat) = self.chat(call, skipped).await?;
            self = asked;
            match prepared(call, ctx, model, chat).await {
                Ok((job, share)) if tokens_of(&job) <= room => {
                    best = Some((job, share));
                    most = middle;
                }
                // A later cut leaves out more.
                Ok((job, share)) if tokens_of(&job) < context => {
                    shortest = Some((job, share));
                    least = middle + 1;
                }
                Ok(_) => least = middle + 1,
                Err(error) if is_too_long(&error) => least = middle + 1,
                Err(error) => return Err(error),
            }
        }
        match best.or(shortest) {
            Some((job, share)) => {
                call.guard.memory().absorb(share);
                Ok((job, self))
            }
            None => Err(too_long.unwrap_or_else(|| {
                let problem = "fills the model's context, and nothing of it can be left out";
                ApiError::invalid("input", problem)
            })),
        }
    }
}

/// Prepares a chat's job. Returns it with the memory that holds it, so that the request's own share is free for another.
async fn prepared(
    call: &mut Call,
    ctx: &RequestContext,
    model: &Arc<ServedModel>,
    chat: ChatRequest,
) -> Result<(Job, MemoryShare), ApiError> {
    let model = Arc::clone(model);
    let job = (call.guard).prepare(ctx, |room| Job::chat(model, chat, room));
    let job = job.await?;
    let memory = call.guard.memory();
    let empty = memory.another();
    Ok((job, std::mem::replace(memory, empty)))
}

fn is_too_long(error: &ApiError) -> bool {
    error.cause == Some(ErrorKind::ContextLengthExceeded)
}

fn tokens_of(job: &Job) -> usize {
    job.prompt().map_or(0, <[_]>::len)
}

/// The conversation that the request continues.
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

fn bytes_of(items: &[Arc<Item>]) -> usize {
    items.iter().map(|item| item.bytes()).sum()
}

/// Puts a response into the store once it has ended.
struct Keeper {
    store: Arc<ResponseStore>,
    owner: Option<String>,
    id: String,
    /// `None` if nothing is to be stored.
    input: Option<Vec<Arc<Item>>>,
}

impl Keeper {
    fn keep(self, response: &str, output: Output) {
        if let Some(input) = self.input {
            let output = output.into_items().into_iter().map(Arc::new).collect();
            let stored = Stored {
                owner: self.owner,
                response: response.to_owned(),
                input,
                output,
            };
            self.store.put(self.id, stored);
        }
    }
}

/// The events of one response. The response is stored once it has ended; if dropped earlier, nothing is stored.
struct ResponseEvents {
    encoder: ResponseEncoder,
    keeper: Keeper,
}

impl AnswerEvents for ResponseEvents {
    fn start(&mut self, out: &mut BytesMut) {
        self.encoder.start(out);
    }

    fn delta(&mut self, delta: Delta<'_>, rated: &[TokenLogprobs], out: &mut BytesMut) {
        self.encoder.delta(delta, rated, out);
    }

    fn keeps_text(&self) -> bool {
        true
    }

    fn finish(mut self, end: &AnswerEnd, ending: Ending, out: &mut BytesMut) {
        self.encoder.add_rated(&ending.rated);
        let end = ResponseEnd::new(end, ending.total_usage(end), now());
        let (response, output) = self.encoder.finish(&end, out);
        self.keeper.keep(&response, output);
    }

    fn fail(self, error: ApiError, out: &mut BytesMut) {
        let end = ResponseEnd::Failed(Box::new(error));
        self.encoder.finish(&end, out);
    }
}

/// The 404 of a response that is not, or no longer, stored.
fn not_found(id: &str) -> ApiError {
    let message =
        format!("Response with id '{id}' not found. This server keeps the latest ones in memory.");
    ApiError {
        param: Some("response_id".into()),
        ..ApiError::new(StatusCode::NOT_FOUND, message)
    }
}

/// Returns the caller's stored response of this id.
fn stored(app: &App, caller: &Caller, id: &str) -> Result<Arc<Stored>, ApiError> {
    let stored = app.responses.get(id, caller.name());
    stored.ok_or_else(|| not_found(id))
}

/// The id in a path.
pub(super) struct Id(pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for Id {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let path = Path::<String>::from_request_parts(parts, state).await;
        let problem = "the id in the path is not valid UTF-8";
        path.map(|Path(id)| Self(id))
            .map_err(|_| ApiError::invalid("id", problem))
    }
}

pub(super) async fn retrieve(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Id(id): Id,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    check_query(query.as_deref().unwrap_or_default())?;
    let stored = stored(&app, &caller, &id)?;
    let mut share = app.metrics.share();
    share.grow(stored.response.len())?;
    Ok(whole_response(holding(StoredText(stored), share)))
}

/// The text of a stored response, which is sent without a copy. The store may drop it before the client has taken it.
struct StoredText(Arc<Stored>);

impl AsRef<[u8]> for StoredText {
    fn as_ref(&self) -> &[u8] {
        self.0.response.as_bytes()
    }
}

/// Refuses what a stored response does not support. Its own request decided what it includes.
fn check_query(query: &str) -> Result<(), ApiError> {
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        match name {
            "stream" if value == "true" => {
                let why = "a response that was given cannot be streamed again";
                return Err(ApiError::unsupported("stream", why));
            }
            "stream" | "starting_after" | "include_obfuscation" => {}
            name if is_include(name) => {}
            other => return Err(ApiError::invalid(other, "there is no such parameter")),
        }
    }
    Ok(())
}

pub(super) async fn delete(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Id(id): Id,
) -> Result<Response, ApiError> {
    if !app.responses.delete(&id, caller.name()) {
        return Err(not_found(&id));
    }
    let deleted = json!({"id": id, "object": "response", "deleted": true});
    Ok(json_response(&deleted))
}

/// There is nothing to cancel: a response is stored when it has ended.
pub(super) async fn cancel(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Id(id): Id,
) -> ApiError {
    match stored(&app, &caller, &id) {
        Err(error) => error,
        Ok(_) => {
            let message = "Only responses in the background can be cancelled, and this server has none. Close the \
                connection of the request instead.";
            ApiError::new(StatusCode::BAD_REQUEST, message)
        }
    }
}

pub(super) async fn input_items(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    Id(id): Id,
    RawQuery(query): RawQuery,
) -> Result<Response, ApiError> {
    let stored = stored(&app, &caller, &id)?;
    let page = PAGES.parse(query.as_deref())?;
    let (items, has_more) = part_of(&page, &stored.input)?;
    let bytes = bytes_of(&items);
    let mut share = app.metrics.share();
    share.grow(bytes)?;
    let write = move |_: &_| Ok(items_json(&items, has_more));
    let work = app.models.work();
    let json = work.run(bytes / WRITTEN_BYTES, None, write).await?;
    share.resize(json.len())?;
    Ok(whole_response(holding(json, share)))
}

#[derive(Serialize)]
struct ItemList<'a> {
    object: &'static str,
    data: Vec<ItemJson<'a>>,
    first_id: &'a str,
    last_id: &'a str,
    has_more: bool,
}

fn items_json(items: &[Arc<Item>], has_more: bool) -> String {
    json_text(&ItemList {
        object: "list",
        data: items.iter().map(|item| item.json("completed")).collect(),
        first_id: items.first().map_or("", |item| item.id()),
        last_id: items.last().map_or("", |item| item.id()),
        has_more,
    })
}

/// The items of a page, and whether there are more.
///
/// # Errors
/// A 400 if no item has the id given as `after`.
fn part_of(page: &Page, items: &[Arc<Item>]) -> Result<(Vec<Arc<Item>>, bool), ApiError> {
    let mut ordered: Vec<&Arc<Item>> = items.iter().collect();
    if !page.is_ascending {
        ordered.reverse();
    }
    if let Some(after) = &page.after {
        let from = ordered.iter().position(|item| item.id() == after);
        let from = from.ok_or_else(|| ApiError::invalid("after", "there is no such item"))?;
        ordered.drain(..=from);
    }
    let has_more = ordered.len() > page.limit;
    ordered.truncate(page.limit);
    Ok((ordered.into_iter().cloned().collect(), has_more))
}
