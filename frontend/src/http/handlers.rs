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
use futures_util::FutureExt;
use futures_util::future::try_join_all;
use genset_backend_common::{
    EndpointType, EngineError, MetricsRegistry, RequestContext, TraceContext,
};
use genset_runtime::METRICS_CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::access::{self, Caller};
use super::apis::{self, Given, Work};
use super::body::EventBody;
use super::docs;
use super::messages;
use super::metrics::{HttpMetrics, RequestGuard};
use super::openapi;
use super::request_body::{BodyBudget, HeldBody, read_body};
use super::request_id::{self, request_id};
use super::responses;
use crate::answer::{Answer, Spent};
use crate::config::FrontendConfig;
use crate::error::ApiError;
use crate::keys::ApiKeys;
use crate::model::{Models, ServedModel};
use crate::openai::{
    Api, ChatRequest, ChunkEncoder, CompletionRequest, RequestLimits, ResponseHead,
    completed_choice, response_json,
};
use crate::pipeline::{self, Job};
use crate::responses::ResponseStore;

/// The header with the seconds after which an answer is of no use to the client.
const REQUEST_TIMEOUT: &str = "x-request-timeout";

/// What handlers share.
#[derive(Debug, Clone)]
pub(super) struct App {
    pub(super) models: Models,
    pub(super) config: Arc<FrontendConfig>,
    pub(super) metrics: HttpMetrics,
    pub(super) registry: MetricsRegistry,
    pub(super) responses: Arc<ResponseStore>,
    pub(super) bodies: BodyBudget,
    /// `None` where everybody may ask.
    pub(super) keys: Option<ApiKeys>,
    pub(super) draining: CancellationToken,
}

/// Every route. Those that say how the server is are for everybody, the others for callers with a key, where there are keys.
pub(super) fn router(app: App) -> Router {
    let asked = Router::new()
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/completions", post(completions))
        .route("/v1/embeddings", openai("embeddings", apis::embeddings))
        .route("/v1/responses", openai("responses", responses::create))
        .route(
            "/v1/responses/{id}",
            get(responses::retrieve).delete(responses::delete),
        )
        .route(
            "/v1/responses/input_tokens",
            openai("input_tokens", responses::input_tokens),
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
        .route("/tokenize", openai("tokenize", apis::tokenize))
        .route("/detokenize", openai("detokenize", apis::detokenize))
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
        .route("/docs", get(docs::serve(&app.config)))
        .method_not_allowed_fallback(wrong_method)
        .fallback(unknown_route);
    let router = match access::cors(&app.config.cors_origins) {
        Some(cors) => router.layer(cors),
        None => router,
    };
    // Around everything else, so that no answer is without.
    let router = router.layer(middleware::from_fn(request_id::carry));
    router.with_state(app)
}

/// A route with errors in OpenAI's shape; `endpoint` is its name in metrics.
fn openai(endpoint: &'static str, work: Work) -> MethodRouter<App> {
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
            apis::answer(app, given, work, apis::openai_error)
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
        let body = read_body(&app.config, &app.bodies, &headers, body).await?;
        guard.body_read();
        answer(&app, api, &request_id, &headers, body, &mut guard).await
    };
    let answered = AssertUnwindSafe(answered)
        .catch_unwind()
        .await
        .unwrap_or_else(|_panic| {
            tracing::error!(request_id, "a handler panicked");
            Err(EngineError::internal("the server failed on this request").into())
        });
    match answered {
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
            let error = error.in_the_words_of(api);
            guard.fail(&error);
            tracing::debug!(
                request_id,
                status = error.status.as_u16(),
                message = error.message,
                "refused"
            );
            error.into_response()
        }
    }
}

enum Answered {
    Whole(Response),
    Streamed {
        encoder: ChunkEncoder,
        answers: Vec<Answer>,
        has_usage: bool,
    },
}

async fn answer(
    app: &App,
    api: Api,
    request_id: &str,
    headers: &HeaderMap,
    body: HeldBody,
    guard: &mut RequestGuard,
) -> Result<Answered, ApiError> {
    if app.draining.is_cancelled() {
        return Err(ApiError::draining());
    }
    let limits = RequestLimits::from(&*app.config);
    let bytes = body.len();
    let ctx = guard.trace(context(request_id, headers)?);
    let job = match api {
        Api::Chat => {
            let parse = move || ChatRequest::parse(&body, &limits);
            let request = pipeline::off_async_threads(bytes, parse).await?;
            guard.model(&request.params.model);
            let model = find_model(app, &request.params.model, EndpointType::Chat)?;
            guard.enter(&model, ctx.deadline()).await?;
            Job::chat(model, request).await?
        }
        Api::Completions => {
            let parse = move || CompletionRequest::parse(&body, &limits);
            let request = pipeline::off_async_threads(bytes, parse).await?;
            guard.model(&request.params.model);
            let model = find_model(app, &request.params.model, EndpointType::Completions)?;
            guard.enter(&model, ctx.deadline()).await?;
            Job::completion(model, request).await?
        }
    };
    let head = ResponseHead {
        api,
        id: format!("{}{:032x}", api.id_prefix(), rand::random::<u128>()),
        created: SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs()),
        model: job.params().model.clone(),
    };
    let (is_stream, has_usage) = (job.params().stream, job.params().include_usage);
    let mut answers = job.answers(&ctx)?;
    guard.measure(&mut answers);
    pipeline::begin(&mut answers).await?;
    if is_stream {
        return Ok(Answered::Streamed {
            encoder: ChunkEncoder::new(&head, has_usage),
            answers,
            has_usage,
        });
    }
    let answers = try_join_all(answers.into_iter().map(Answer::collect)).await?;
    let mut spent = Spent::default();
    let mut choices = Vec::with_capacity(answers.len());
    for (index, answer) in answers.iter().enumerate() {
        choices.push(completed_choice(api, index, answer));
        spent.add(&answer.end, answer.reasoning_tokens);
    }
    guard.text();
    guard.spent(&spent);
    Ok(Answered::Whole(json_response(&response_json(
        &head, choices, &spent,
    ))))
}

pub(super) fn find_any_model(app: &App, name: &str) -> Result<Arc<ServedModel>, ApiError> {
    let model = app.models.get(name);
    model.ok_or_else(|| ApiError::model_not_found(name))
}

pub(super) fn find_model(
    app: &App,
    name: &str,
    endpoint: EndpointType,
) -> Result<Arc<ServedModel>, ApiError> {
    let model = find_any_model(app, name)?;
    if model.card.endpoint_types.contains(&endpoint) {
        return Ok(model);
    }
    let message = format!("The model '{name}' does not offer {endpoint}.");
    Err(ApiError {
        param: Some("model".into()),
        ..ApiError::new(StatusCode::BAD_REQUEST, message)
    })
}

/// What the engine is told of a request: a unique id, its trace, and when its answer is of no use any more.
///
/// # Errors
/// A 400 that names the header at fault.
pub(super) fn context(request_id: &str, headers: &HeaderMap) -> Result<RequestContext, ApiError> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    // The client's id may come twice; ids are unique among the requests in flight.
    let mut ctx = RequestContext::new(format!("{request_id}.{:08x}", rand::random::<u32>()));
    if let Some(value) = headers.get(REQUEST_TIMEOUT) {
        let seconds = value.to_str().ok().and_then(|value| value.parse().ok());
        let timeout = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let timeout = timeout.filter(|timeout| !timeout.is_zero());
        let timeout = timeout.ok_or_else(|| {
            let problem = "expected seconds, more than 0, as in \"2.5\"";
            ApiError::invalid(REQUEST_TIMEOUT, problem)
        })?;
        // One that is too far away to be written down is none.
        if let Some(deadline) = Instant::now().checked_add(timeout) {
            ctx = ctx.with_deadline(deadline);
        }
    }
    let (parent, state) = (text("traceparent"), text("tracestate"));
    let trace = TraceContext::parse(parent.unwrap_or_default(), state.unwrap_or_default());
    Ok(match trace {
        Some(trace) => ctx.with_trace(trace),
        None => ctx,
    })
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
    (
        [(header::CONTENT_TYPE, "application/json")],
        value.to_string(),
    )
        .into_response()
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

/// As in the list, and who serves it.
fn model_detail(app: &App, model: &ServedModel) -> Value {
    let mut detail = model_json(model);
    let Some(live) = app.models.workers(&model.card.name) else {
        return detail;
    };
    let workers: Vec<String> = live.instances.iter().map(ToString::to_string).collect();
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
        "endpoint": live.endpoint.to_string(),
        "workers": workers,
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
        app.registry.encode(),
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
