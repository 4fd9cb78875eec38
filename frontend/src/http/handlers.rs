//! The routes, what handlers share, and the server's health.

use std::ops::Deref;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get, post};
use axum::{Extension, Router};
use futures_util::FutureExt;
use genset_backend_common::{MetricsRegistry, RequestContext};
use genset_runtime::{LoadClient, METRICS_CONTENT_TYPE, Runtime};
use http::{HeaderMap, Method, StatusCode, Uri, header};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::access::{self, Caller};
use super::apis::{self, Given, Work, WriteError};
use super::batches;
use super::completions;
use super::docs;
use super::files;
use super::local::LocalFrontend;
use super::messages;
use super::metrics::HttpMetrics;
use super::models;
use super::openapi;
use super::pages;
use super::replies::json_response;
use super::request_id;
use super::responses;
use super::scores;
use super::ui;
use crate::batch::run::{Batches, Stops};
use crate::batch::store::BatchStore;
use crate::budget::MemoryBudget;
use crate::config::FrontendConfig;
use crate::error::{ApiError, Param};
use crate::keys::ApiKeys;
use crate::model::Models;
use crate::openai::{chat_name, completion_name, embedding_name, rerank_name, score_name};
use crate::responses::{ResponseStore, param_name};

/// What handlers share. Clones are cheap: every layer and handler gets one.
#[derive(Clone)]
pub(super) struct App(Arc<AppState>);

// Without stored responses: a server's debug output may reach a log.
genset_backend_common::debug_as!(|it| App {
    models: it.models,
    ..
});

impl Deref for App {
    type Target = AppState;

    fn deref(&self) -> &AppState {
        &self.0
    }
}

/// The state of an [`App`].
#[derive(Clone)]
pub(super) struct AppState {
    pub(super) models: Models,
    /// Asks the models' workers for their load.
    pub(super) loads: LoadClient,
    pub(super) config: Arc<FrontendConfig>,
    pub(super) metrics: HttpMetrics,
    pub(super) registry: MetricsRegistry,
    pub(super) responses: Arc<ResponseStore>,
    /// `None` if the server requires no keys.
    pub(super) keys: Option<ApiKeys>,
    /// `None` if the server keeps no files.
    pub(super) batches: Option<Batches>,
    pub(super) draining: CancellationToken,
    /// Every request is a child of it.
    pub(super) all_requests: RequestContext,
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
        Self(Arc::new(AppState {
            models,
            loads: LoadClient::new(runtime),
            config,
            metrics,
            registry: runtime.metrics().clone(),
            responses: Arc::new(responses),
            keys,
            batches: None,
            draining,
            // Without an id, because every request would copy it first.
            all_requests: RequestContext::new(""),
        }))
    }

    /// The same app with the files and batches in `store`.
    pub(super) fn with_batches(&self, store: BatchStore, stops: Stops) -> Self {
        let asked = (LocalFrontend::within(self.clone()), self.models.clone());
        let (linger, keys) = (self.config.model_linger, self.keys.clone());
        Self(Arc::new(AppState {
            batches: Some(Batches::new(store, asked, linger, keys, stops)),
            ..AppState::clone(self)
        }))
    }
}

/// A route that takes a JSON body: its name in metrics, what answers it, and how its errors are written.
macro_rules! api {
    ($endpoint:literal, $answer:path, $write_error:expr $(,)?) => {
        api($endpoint, |call| $answer(call).boxed(), $write_error)
    };
}

/// The routes of requests to models.
fn routes_to_models() -> Router<App> {
    use WriteError::{Anthropic, OpenAi};
    let plain = OpenAi(Param::plain);
    let of_response = OpenAi(param_name);
    let embeddings = api!("embeddings", apis::embeddings, OpenAi(embedding_name));
    let rerank = || api!("rerank", scores::rerank, OpenAi(rerank_name));
    let score = || api!("score", scores::score, OpenAi(score_name));
    let chat = api!("chat_completions", completions::chat, OpenAi(chat_name));
    let completions = api!(
        "completions",
        completions::completions,
        OpenAi(completion_name),
    );
    let create = api!("responses", responses::create, of_response);
    let kept = get(responses::retrieve).delete(responses::delete);
    let input_tokens = api!("input_tokens", responses::input_tokens, of_response);
    let messages = api!("messages", messages::messages, Anthropic);
    let count_tokens = api!("count_tokens", messages::count_tokens, Anthropic);
    let tokenize = api!("tokenize", apis::tokenize, plain);
    let detokenize = api!("detokenize", apis::detokenize, plain);
    let items = get(responses::input_items);
    Router::new()
        .route("/v1/chat/completions", chat)
        .route("/v1/completions", completions)
        .route("/v1/embeddings", embeddings)
        .route("/v1/rerank", rerank())
        // The path that Jina's and Cohere's clients use, whatever base address they have.
        .route("/v2/rerank", rerank())
        .route("/rerank", rerank())
        .route("/v1/score", score())
        .route("/score", score())
        .route("/v1/responses", create)
        .route("/v1/responses/{id}", kept)
        .route("/v1/responses/input_tokens", input_tokens)
        .route("/v1/responses/{id}/cancel", post(responses::cancel))
        .route("/v1/responses/{id}/input_items", items)
        .route("/v1/messages", messages)
        .route("/v1/messages/count_tokens", count_tokens)
        .route("/tokenize", tokenize)
        .route("/detokenize", detokenize)
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::get))
}

/// The routes of files and batches.
fn routes_to_batches() -> Router<App> {
    let create = api!("batches", batches::create, WriteError::OpenAi(Param::plain));
    Router::new()
        .route("/v1/files", get(files::list).post(files::upload))
        .route("/v1/files/{id}", get(files::retrieve).delete(files::delete))
        .route("/v1/files/{id}/content", get(files::content))
        .route("/v1/batches", get(batches::list).merge(create))
        .route("/v1/batches/{id}", get(batches::retrieve))
        .route("/v1/batches/{id}/cancel", post(batches::cancel))
}

/// The routes for the program itself: without keys, pages or other state.
pub(super) fn local_router(app: App) -> Router {
    routes_to_models()
        .fallback(unknown_route)
        .layer(middleware::from_fn(request_id::carry))
        .with_state(app)
}

/// All routes. If the server has keys, the routes to models, files and batches need one. Health, metrics, documents and web pages
/// do not.
pub(super) fn router(app: App) -> Router {
    let asked =
        routes_to_models()
            .merge(routes_to_batches())
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
    // Inside the layer below, so that pages of listed origins can read refusals.
    let router = router.layer(middleware::from_fn_with_state(app.clone(), pages::guard));
    let router = match access::cors(&app.config.cors_origins) {
        Some(cors) => router.layer(cors),
        None => router,
    };
    // Outermost, so that no answer lacks the id.
    let router = router.layer(middleware::from_fn(request_id::carry));
    router.with_state(app)
}

fn api(endpoint: &'static str, work: Work, write_error: WriteError) -> MethodRouter<App> {
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

/// Ready while the server serves at least one model and is not shutting down.
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

/// The response to a method that a route does not have. The router adds the methods that it has.
async fn wrong_method(method: Method, uri: Uri, headers: HeaderMap) -> Response {
    if method == Method::OPTIONS {
        return StatusCode::NO_CONTENT.into_response();
    }
    let message = format!("{method} is not allowed on {}.", uri.path());
    let error = ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message);
    messages::refusal(uri.path(), &headers, &error)
}

async fn unknown_route(method: Method, uri: Uri, headers: HeaderMap) -> Response {
    let message = format!(
        "Unknown route: {method} {}. The API is under /v1.",
        uri.path()
    );
    let error = ApiError {
        code: Some("unknown_url"),
        ..ApiError::new(StatusCode::NOT_FOUND, message)
    };
    messages::refusal(uri.path(), &headers, &error)
}
