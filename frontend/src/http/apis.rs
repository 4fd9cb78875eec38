//! What every route that takes a JSON body shares: reading it, answering whatever happens, and the APIs whose answers come
//! in one piece. Chat and completions have a path of their own in `handlers`, for their many choices.

use std::panic::AssertUnwindSafe;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use genset_backend_common::output::Usage;
use genset_backend_common::{EndpointType, EngineError, RequestContext};
use http::{HeaderMap, StatusCode, header};
use serde_json::json;

use super::access::Caller;
use super::handlers::{App, context, find_any_model, find_model};
use super::metrics::RequestGuard;
use super::request_body::{HeldBody, read_body};
use super::request_id::request_id;
use crate::error::ApiError;
use crate::model::ServedModel;
use crate::openai::{
    DetokenizeRequest, EmbeddingRequest, RequestLimits, TokenizeInput, TokenizeRequest,
    embeddings_json,
};
use crate::pipeline::{self, EmbedJob, Job};

/// One request on its way.
pub(super) struct Call {
    pub(super) app: App,
    pub(super) request_id: String,
    pub(super) caller: Caller,
    pub(super) headers: HeaderMap,
    /// Gone once it is read as a request.
    pub(super) body: HeldBody,
    pub(super) body_bytes: usize,
    pub(super) guard: RequestGuard,
}

impl Call {
    /// Waits for a place among the requests to `model`. What its engine is told of the request; opens its span.
    ///
    /// # Errors
    /// A 400 that names the header at fault, or what [`RequestGuard::enter`] refuses with.
    pub(super) async fn admit(&mut self, model: &ServedModel) -> Result<RequestContext, ApiError> {
        let ctx = context(&self.request_id, &self.headers)?;
        let ctx = self.guard.trace(ctx);
        self.guard.enter(model, ctx.deadline()).await?;
        Ok(ctx)
    }

    pub(super) fn limits(&self) -> RequestLimits {
        RequestLimits::from(&*self.app.config)
    }

    /// Reads the body as a request; a long one where it delays nobody else.
    ///
    /// # Errors
    /// What `parse` refuses.
    pub(super) async fn parse<T: Send + 'static>(
        &mut self,
        parse: impl FnOnce(&[u8], &RequestLimits) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (body, limits) = (std::mem::take(&mut self.body), self.limits());
        pipeline::off_async_threads(self.body_bytes, move || parse(&body, &limits)).await
    }
}

/// A good answer.
pub(super) enum Reply {
    /// JSON, whole.
    Json(String),
    /// A body that is yet to be written. It counts the request from here on.
    Streamed(Box<dyn FnOnce(RequestGuard) -> Response + Send>),
}

/// What answers a request.
pub(super) type Work = for<'a> fn(&'a mut Call) -> BoxFuture<'a, Result<Reply, ApiError>>;

/// How an API writes its errors.
pub(super) type WriteError = fn(&ApiError, &str) -> Response;

/// A request as it came.
pub(super) struct Given {
    /// The route's name in metrics.
    pub(super) endpoint: &'static str,
    pub(super) caller: Caller,
    pub(super) headers: HeaderMap,
    pub(super) body: Body,
}

/// Answers a request, whatever happens on the way.
pub(super) async fn answer(
    app: App,
    given: Given,
    work: Work,
    write_error: WriteError,
) -> Response {
    let Given {
        endpoint,
        caller,
        headers,
        body,
    } = given;
    let request_id = request_id(&headers);
    let mut call = Call {
        guard: app.metrics.request(endpoint, &request_id),
        request_id,
        caller,
        app,
        headers,
        body: HeldBody::default(),
        body_bytes: 0,
    };
    let answered = AssertUnwindSafe(read_and_work(&mut call, body, work))
        .catch_unwind()
        .await
        .unwrap_or_else(|_panic| {
            tracing::error!(request_id = call.request_id, "a handler panicked");
            Err(EngineError::internal("the server failed on this request").into())
        });
    let Call {
        request_id,
        mut guard,
        ..
    } = call;
    match answered {
        Ok(Reply::Json(json)) => {
            guard.set_status(StatusCode::OK);
            ([(header::CONTENT_TYPE, "application/json")], json).into_response()
        }
        Ok(Reply::Streamed(write)) => write(guard),
        Err(error) => {
            guard.fail(&error);
            let (status, message) = (error.status.as_u16(), &error.message);
            tracing::debug!(request_id, status, message, "refused");
            write_error(&error, &request_id)
        }
    }
}

async fn read_and_work(call: &mut Call, body: Body, work: Work) -> Result<Reply, ApiError> {
    call.guard.admit(call.caller.clone())?;
    call.body = read_body(&call.app.config, &call.app.bodies, &call.headers, body).await?;
    call.body_bytes = call.body.len();
    call.guard.body_read();
    if call.app.draining.is_cancelled() {
        return Err(ApiError::draining());
    }
    work(call).await
}

/// Errors as OpenAI's API has them.
pub(super) fn openai_error(error: &ApiError, _request_id: &str) -> Response {
    error.clone().into_response()
}

pub(super) fn embeddings(call: &mut Call) -> BoxFuture<'_, Result<Reply, ApiError>> {
    async move {
        let max_inputs = call.app.config.max_embedding_inputs;
        let parse = move |body: &[u8], _: &_| EmbeddingRequest::parse(body, max_inputs);
        let request = call.parse(parse).await?;
        call.guard.model(&request.model);
        let model = find_model(&call.app, &request.model, EndpointType::Embeddings)?;
        let (name, encoding) = (request.model.clone(), request.encoding);
        let ctx = call.admit(&model).await?;
        let job = EmbedJob::prepare(model, request).await?;
        let embedded = job.run(&ctx).await?;
        call.guard.usage(&Usage {
            prompt_tokens: embedded.prompt_tokens,
            ..Usage::default()
        });
        let numbers = embedded.embeddings.iter().map(Vec::len).sum::<usize>();
        // A number takes about ten bytes.
        let json = pipeline::off_async_threads(numbers.saturating_mul(10), move || {
            let (embeddings, tokens) = (&embedded.embeddings, embedded.prompt_tokens);
            Ok(embeddings_json(&name, embeddings, encoding, tokens))
        });
        Ok(Reply::Json(json.await?))
    }
    .boxed()
}

pub(super) fn tokenize(call: &mut Call) -> BoxFuture<'_, Result<Reply, ApiError>> {
    async move {
        let request = call.parse(TokenizeRequest::parse).await?;
        let model = find_any_model(&call.app, &request.model)?;
        let tokens = match request.input {
            TokenizeInput::Prompt {
                text,
                add_special_tokens,
            } => pipeline::tokenize_prompt(model.clone(), text, add_special_tokens).await?,
            TokenizeInput::Chat(chat) => {
                let job = Job::chat(model.clone(), *chat).await?;
                let prompt = job.prompt().map(<[_]>::to_vec);
                prompt.ok_or_else(|| pipeline::no_tokenizer(&model))?
            }
        };
        let shows_strings = request.return_token_strs;
        // A token takes about ten bytes.
        let reply = pipeline::off_async_threads(tokens.len().saturating_mul(10), move || {
            let strings = shows_strings.then(|| pipeline::token_strings(&model, &tokens));
            let reply = json!({
                "count": tokens.len(),
                "max_model_len": model.card.context_length_tokens,
                "tokens": tokens,
                "token_strs": strings.transpose()?,
            });
            Ok(reply.to_string())
        });
        Ok(Reply::Json(reply.await?))
    }
    .boxed()
}

pub(super) fn detokenize(call: &mut Call) -> BoxFuture<'_, Result<Reply, ApiError>> {
    async move {
        let request = call.parse(|body, _| DetokenizeRequest::parse(body)).await?;
        let model = find_any_model(&call.app, &request.model)?;
        let prompt = pipeline::detokenize(model, request.tokens).await?;
        Ok(Reply::Json(json!({"prompt": prompt}).to_string()))
    }
    .boxed()
}
