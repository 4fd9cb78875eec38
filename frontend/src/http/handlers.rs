//! The routes and what answers them.

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use axum::{Extension, Router};
use bytes::Bytes;
use futures_util::{FutureExt, StreamExt, TryStreamExt, stream};
use genset_backend_common::{
    EndpointType, EngineError, MetricsRegistry, OutputStream, RequestContext, TraceContext,
};
use genset_runtime::{METRICS_CONTENT_TYPE, Runtime};
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::access::{self, Caller};
use super::apis::{self, Given, Work};
use super::asked_model::find_model;
use super::body::EventBody;
use super::docs;
use super::held::held;
use super::messages;
use super::metrics::{HttpMetrics, IGNORED, RequestGuard};
use super::openapi;
use super::pages;
use super::request_body::{HeldBody, read_body};
use super::request_id::{self, request_id};
use super::responses;
use super::ui;
use super::whole::{self, Asked, WholeBody};
use crate::answer::{Completed, Spent};
use crate::budget::{MemoryBudget, MemoryShare};
use crate::config::FrontendConfig;
use crate::error::{ApiError, shown};
use crate::json::JsonBody;
use crate::keys::ApiKeys;
use crate::model::{Models, ServedModel};
use crate::openai::{
    Api, ChatRequest, ChunkEncoder, CompletionRequest, RequestLimits, ResponseHead,
    completed_choice, explanation_json, response_json,
};
use crate::pipeline::{Answers, Job, REASONING_EFFORT};
use crate::responses::ResponseStore;

/// The header with the seconds after which an answer is of no use to the client.
const REQUEST_TIMEOUT: &str = "x-request-timeout";

/// So many bytes of an answer's text are written in the time that a tokenizer takes for one.
const WRITTEN_BYTES: usize = 16;

/// What handlers share.
#[derive(Debug, Clone)]
pub(super) struct App {
    pub(super) models: Models,
    pub(super) config: Arc<FrontendConfig>,
    pub(super) metrics: HttpMetrics,
    pub(super) registry: MetricsRegistry,
    pub(super) responses: Arc<ResponseStore>,
    /// `None` where everybody may ask.
    pub(super) keys: Option<ApiKeys>,
    pub(super) draining: CancellationToken,
}

impl App {
    pub(super) fn new(
        runtime: &Runtime,
        models: Models,
        config: Arc<FrontendConfig>,
        keys: Option<ApiKeys>,
        draining: CancellationToken,
    ) -> Self {
        let stored_bytes = config.stored_bytes();
        let memory = MemoryBudget::new(config.memory_budget_bytes - stored_bytes);
        let metrics = HttpMetrics::register(runtime.metrics(), config.access_log, memory);
        let responses = ResponseStore::new(config.max_stored_responses, stored_bytes);
        Self {
            models,
            config,
            metrics,
            registry: runtime.metrics().clone(),
            responses: Arc::new(responses),
            keys,
            draining,
        }
    }
}

/// Every route. Those that say how the server is are for everybody, the others for callers with a key, where there are keys.
pub(super) fn router(app: App) -> Router {
    let asked = Router::new()
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/completions", post(completions))
        .route(
            "/v1/embeddings",
            openai("embeddings", apis::embeddings, apis::embeddings_error),
        )
        .route(
            "/v1/responses",
            openai("responses", responses::create, apis::responses_error),
        )
        .route(
            "/v1/responses/{id}",
            get(responses::retrieve).delete(responses::delete),
        )
        .route(
            "/v1/responses/input_tokens",
            openai(
                "input_tokens",
                responses::input_tokens,
                apis::responses_error,
            ),
        )
        .route("/v1/responses/{id}/cancel", post(responses::cancel))
        .route(
            "/v1/responses/{id}/input_items",
            get(responses::input_items),
        )
        .route("/v1/messages", anthropic("messages", messages::messages))
        .route(
            "/v1/messages/count_tokens",
            anthropic("count_tokens", messages::count_tokens),
        )
        .route(
            "/tokenize",
            openai("tokenize", apis::tokenize, apis::openai_error),
        )
        .route(
            "/detokenize",
            openai("detokenize", apis::detokenize, apis::openai_error),
        )
        .route("/v1/models", get(list_models))
        .route("/v1/models/{*id}", get(get_model))
        .route_layer(middleware::from_fn_with_state(
            app.clone(),
            access::identify,
        ));
    let router = asked
        .route("/live", get(|| async { "live\n" }))
        .route("/ready", get(ready))
        .route("/health", get(ready))
        .route("/metrics", get(metrics))
        .route("/openapi.json", get(openapi::serve(&app.config)))
        .route("/docs", get(docs::serve(&app.config)));
    let router = if app.config.ui {
        router.merge(ui::routes())
    } else {
        router
    };
    let router = router
        .method_not_allowed_fallback(wrong_method)
        .fallback(unknown_route);
    // Within the layer below, so that pages of listed origins can read what they are told.
    let router = router.layer(middleware::from_fn_with_state(app.clone(), pages::guard));
    let router = match access::cors(&app.config.cors_origins) {
        Some(cors) => router.layer(cors),
        None => router,
    };
    // Around everything else, so that no answer is without.
    let router = router.layer(middleware::from_fn(request_id::carry));
    router.with_state(app)
}

/// A route with errors in OpenAI's shape; `endpoint` is its name in metrics.
fn openai(endpoint: &'static str, work: Work, write_error: apis::WriteError) -> MethodRouter<App> {
    post(
        move |State(app): State<App>,
              Extension(caller): Extension<Caller>,
              headers: HeaderMap,
              body: Body| {
            let given = Given {
                endpoint,
                caller,
                headers,
                body,
            };
            apis::answer(app, given, work, write_error)
        },
    )
}

/// A route with errors in Anthropic's shape.
fn anthropic(endpoint: &'static str, work: Work) -> MethodRouter<App> {
    post(
        async move |State(app): State<App>,
                    Extension(caller): Extension<Caller>,
                    headers: HeaderMap,
                    body: Body| {
            let given = Given {
                endpoint,
                caller,
                headers,
                body,
            };
            apis::answer(app, given, work, messages::anthropic_error).await
        },
    )
}

async fn chat_completions(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    complete(app, Api::Chat, caller, headers, body).await
}

async fn completions(
    State(app): State<App>,
    Extension(caller): Extension<Caller>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    complete(app, Api::Completions, caller, headers, body).await
}

/// Answers a request, whatever happens on the way.
async fn complete(app: App, api: Api, caller: Caller, headers: HeaderMap, body: Body) -> Response {
    let request_id = request_id(&headers);
    let endpoint = match api {
        Api::Chat => "chat_completions",
        Api::Completions => "completions",
    };
    let mut guard = app.metrics.request(endpoint, &request_id);
    let answered = async {
        guard.admit(caller)?;
        let deadline = deadline_of(&headers)?;
        guard.read_rank(&headers)?;
        let ctx = context(&app.config, &request_id, &headers, deadline);
        let memory = guard.memory().another();
        let body = read_body(&app.config, memory, &headers, body).await?;
        guard.body_read();
        answer(&app, api, ctx, body.until(deadline), &mut guard).await
    };
    let answered = AssertUnwindSafe(answered)
        .catch_unwind()
        .await
        .unwrap_or_else(|_panic| {
            tracing::error!(request_id, "a handler panicked");
            Err(EngineError::internal("the server failed on this request").into())
        });
    let ignored = guard.ignored();
    let response = match answered {
        Ok(Answered::Passed(outputs)) => event_response(WholeBody::new(api, outputs, guard)),
        Ok(Answered::Whole(response)) => {
            guard.set_status(StatusCode::OK);
            response
        }
        Ok(Answered::Streamed {
            encoder,
            answers,
            has_usage,
        }) => event_response(EventBody::new(encoder, answers, has_usage, guard)),
        Err(error) => {
            guard.fail(&error);
            tracing::debug!(
                request_id,
                status = error.status.as_u16(),
                error = %shown(&error.to_string()),
                "refused"
            );
            error.response(api.param_name())
        }
    };
    with_ignored(response, ignored)
}

/// An answer that names the fields without an effect.
pub(super) fn with_ignored(mut response: Response, ignored: Option<HeaderValue>) -> Response {
    if let Some(ignored) = ignored {
        response.headers_mut().insert(IGNORED, ignored);
    }
    response
}

pub(super) enum Answered {
    Whole(Response),
    /// A stream of what an engine wrote itself.
    Passed(OutputStream),
    Streamed {
        encoder: ChunkEncoder,
        answers: Answers,
        has_usage: bool,
    },
}

async fn answer(
    app: &App,
    api: Api,
    ctx: RequestContext,
    body: HeldBody,
    guard: &mut RequestGuard,
) -> Result<Answered, ApiError> {
    if app.draining.is_cancelled() {
        return Err(ApiError::draining());
    }
    let limits = RequestLimits::from(&*app.config);
    let ctx = guard.trace(ctx);
    let work = app.models.work();
    let job = match api {
        Api::Chat => {
            let models = app.models.clone();
            let parse = move |body: JsonBody<'_>| {
                whole::read(body, &models, |body| ChatRequest::parse(body, &limits))
            };
            let mut request = match body.read(work, 0, guard.memory(), parse).await? {
                Asked::Whole(asked) => return whole::answer(app, api, ctx, asked, guard).await,
                Asked::Known(request) => request,
            };
            guard.model(&request.params.model);
            guard.complete(&mut request.params);
            let name = &request.params.model;
            let model = find_model(app, name, EndpointType::Chat, ctx.deadline()).await?;
            guard.enter(&model, ctx.deadline()).await?;
            let job = guard.prepare(&ctx, |room| Job::chat(model, request, room));
            job.await?
        }
        Api::Completions => {
            let models = app.models.clone();
            let parse = move |body: JsonBody<'_>| {
                whole::read(body, &models, |body| {
                    CompletionRequest::parse(body, &limits)
                })
            };
            let mut request = match body.read(work, 0, guard.memory(), parse).await? {
                Asked::Whole(asked) => return whole::answer(app, api, ctx, asked, guard).await,
                Asked::Known(request) => request,
            };
            guard.model(&request.params.model);
            guard.complete(&mut request.params);
            let name = &request.params.model;
            let model = find_model(app, name, EndpointType::Completions, ctx.deadline()).await?;
            guard.enter(&model, ctx.deadline()).await?;
            let job = guard.prepare(&ctx, |room| Job::completion(model, request, room));
            job.await?
        }
    };
    guard.ignores(&job.params().hints, REASONING_EFFORT);
    let head = ResponseHead {
        api,
        id: format!("{}{:032x}", api.id_prefix(), rand::random::<u128>()),
        created: SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs()),
        model: job.params().model.clone(),
    };
    let (is_stream, has_usage) = (job.params().stream, job.params().include_usage);
    let mut answers = job.answers(&ctx).await?;
    guard.measure(&mut answers);
    answers.begin().await?;
    if is_stream {
        return Ok(Answered::Streamed {
            encoder: ChunkEncoder::new(&head, has_usage),
            answers,
            has_usage,
        });
    }
    let explanation = answers.explanation().cloned();
    let (answers, memory) = collect(answers, guard.memory().another()).await?;
    let mut spent = Spent::default();
    for answer in &answers {
        spent.add(&answer.end, answer.reasoning_tokens);
    }
    guard.text();
    guard.spent(&spent);
    // A token takes about as long to write as a byte to tokenize.
    let text: usize = answers
        .iter()
        .map(|answer| answer.message.content.len())
        .sum();
    let tokens = usize::try_from(spent.usage.completion_tokens).unwrap_or(usize::MAX);
    let bytes = tokens.saturating_add(text / WRITTEN_BYTES);
    let write = move |_: &_| {
        let _memory = memory;
        let choices = answers.iter().enumerate();
        let choices = choices.map(|(index, answer)| completed_choice(api, index, answer));
        let mut response = response_json(&head, choices.collect(), &spent);
        if let Some(explanation) = &explanation {
            response["genset"] = explanation_json(explanation);
        }
        Ok(response.to_string())
    };
    let json = work.run(bytes, ctx.deadline(), write).await?;
    let json = held(json, guard.memory().another())?;
    Ok(Answered::Whole(whole_response(json)))
}

/// Reads all answers to their end, so many at once; each on an account beside `memory`.
async fn collect(
    answers: Answers,
    memory: MemoryShare,
) -> Result<(Vec<Completed>, Vec<MemoryShare>), ApiError> {
    let (at_once, count) = (answers.at_once().get(), answers.len());
    let collected = answers.enumerate().map(move |(index, answer)| {
        let memory = memory.another();
        async move { Ok::<_, ApiError>((index, answer.collect_on(memory).await?)) }
    });
    let mut collected = stream::iter(collected).buffer_unordered(at_once);
    let mut all = Vec::with_capacity(count);
    while let Some(answer) = collected.try_next().await? {
        all.push(answer);
    }
    all.sort_unstable_by_key(|(index, _)| *index);
    Ok(all.into_iter().map(|(_, answer)| answer).unzip())
}

/// When the answer to a request that has just come is of no use any more, if its client says so.
///
/// # Errors
/// A 400 that names the header.
pub(super) fn deadline_of(headers: &HeaderMap) -> Result<Option<Instant>, ApiError> {
    let Some(value) = headers.get(REQUEST_TIMEOUT) else {
        return Ok(None);
    };
    let seconds = value.to_str().ok().and_then(|value| value.parse().ok());
    let timeout = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let timeout = timeout.filter(|timeout| !timeout.is_zero());
    let timeout = timeout.ok_or_else(|| {
        let problem = "expected seconds, more than 0, as in \"2.5\"";
        ApiError::invalid(REQUEST_TIMEOUT, problem)
    })?;
    // One that is too far away to be written down is none.
    Ok(Instant::now().checked_add(timeout))
}

/// What the engine is told of a request: a unique id, its trace, and when its answer is of no use any more.
pub(super) fn context(
    config: &FrontendConfig,
    request_id: &str,
    headers: &HeaderMap,
    deadline: Option<Instant>,
) -> RequestContext {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    // The client's id may come twice; ids are unique among the requests in flight.
    let mut ctx = RequestContext::new(format!("{request_id}.{:08x}", rand::random::<u32>()));
    if let Some(deadline) = deadline {
        ctx = ctx.with_deadline(deadline);
    }
    let key = config.affinity_header.as_ref();
    if let Some(key) = key.and_then(|name| text(name.as_str())) {
        ctx = ctx.with_affinity(key);
    }
    let (parent, state) = (text("traceparent"), text("tracestate"));
    let trace = TraceContext::parse(parent.unwrap_or_default(), state.unwrap_or_default());
    match trace {
        Some(trace) => ctx.with_trace(trace),
        None => ctx,
    }
}

pub(super) fn event_response<B>(body: B) -> Response
where
    B: http_body::Body<Data = Bytes, Error = Infallible> + Send + 'static,
{
    let mut response = Response::new(Body::new(body));
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream; charset=utf-8"),
    );
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

pub(super) fn json_response(value: &Value) -> Response {
    whole_response(value.to_string().into())
}

/// As [`json_response`], of what may be large: it takes of the memory budget until it is sent.
pub(super) fn large_json_response(app: &App, value: &Value) -> Response {
    match held(value.to_string(), app.metrics.share()) {
        Ok(json) => whole_response(json),
        Err(error) => error.into_response(),
    }
}

/// An answer in one piece, of JSON.
pub(super) fn whole_response(json: Bytes) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], json).into_response()
}

fn model_json(model: &ServedModel) -> Value {
    json!({
        "id": model.card.name,
        "object": "model",
        "created": model.created,
        "owned_by": "genset",
        "shutdown_date": null,
        "max_model_len": model.card.context_length_tokens,
    })
}

/// As in the list, and where only this machine can ask, who serves it.
fn model_detail(app: &App, model: &ServedModel) -> Value {
    let mut detail = model_json(model);
    // Who serves it is for those who run the server, not for every client.
    let live = app.models.workers(&model.card.name);
    let Some(live) = live.filter(|_| app.config.is_for_this_machine()) else {
        return detail;
    };
    let workers: Vec<String> = live.instances().iter().map(ToString::to_string).collect();
    let pools: serde_json::Map<String, Value> = live
        .pools
        .iter()
        .map(|(role, pool)| (role.to_string(), pool.instances.len().into()))
        .collect();
    let left_out: Vec<Value> = live
        .left_out
        .iter()
        .map(|worker| {
            json!({
                "instance": worker.instance.to_string(),
                "endpoint": worker.endpoint.to_string(),
                "differences": worker.differences,
            })
        })
        .collect();
    detail["genset"] = json!({
        "endpoint": live.endpoint().to_string(),
        "workers": workers,
        "pools": pools,
        "left_out_workers": left_out,
    });
    detail
}

async fn list_models(State(app): State<App>) -> Response {
    let data: Vec<Value> = app
        .models
        .all()
        .iter()
        .map(|model| model_json(model))
        .collect();
    json_response(&json!({"object": "list", "data": data}))
}

async fn get_model(State(app): State<App>, id: Result<Path<String>, PathRejection>) -> Response {
    let Ok(Path(id)) = id else {
        let message = "The model's name in the path is not valid UTF-8.";
        return ApiError::new(StatusCode::BAD_REQUEST, message).into_response();
    };
    match app.models.get(&id) {
        Some(model) => json_response(&model_detail(&app, &model)),
        None => ApiError::model_not_found(&id).into_response(),
    }
}

/// Ready while at least one model is served and the server is not shutting down.
async fn ready(State(app): State<App>) -> Response {
    let models: Vec<String> = app
        .models
        .all()
        .iter()
        .map(|model| model.card.name.clone())
        .collect();
    let (status, word) = if app.draining.is_cancelled() {
        (StatusCode::SERVICE_UNAVAILABLE, "draining")
    } else if models.is_empty() {
        (StatusCode::SERVICE_UNAVAILABLE, "no model is served yet")
    } else {
        (StatusCode::OK, "ready")
    };
    (
        status,
        json_response(&json!({"status": word, "models": models})),
    )
        .into_response()
}

async fn metrics(State(app): State<App>) -> Response {
    (
        [(header::CONTENT_TYPE, METRICS_CONTENT_TYPE)],
        app.registry.encode_public(),
    )
        .into_response()
}

/// What a route has no answer for. The router adds the methods that it has.
async fn wrong_method(method: Method, uri: Uri) -> Response {
    if method == Method::OPTIONS {
        return StatusCode::NO_CONTENT.into_response();
    }
    let message = format!("{method} is not allowed on {}.", uri.path());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message).into_response()
}

async fn unknown_route(method: Method, uri: Uri) -> Response {
    let message = format!(
        "Unknown route: {method} {}. The API is under /v1.",
        uri.path()
    );
    ApiError {
        code: Some("unknown_url"),
        ..ApiError::new(StatusCode::NOT_FOUND, message)
    }
    .into_response()
}
