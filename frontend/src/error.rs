//! [`ApiError`]: an error as clients see it, in OpenAI's format.

mod param;

use std::borrow::Cow;
use std::error::Error as _;
use std::fmt;
use std::time::Duration;

use axum::response::{IntoResponse, Response};
use genset_backend_common::{EngineError, ErrorKind, RequestField, request::NotResumable};
use http::{HeaderName, HeaderValue, StatusCode, header};
use serde_json::{Value, json};

pub use param::{Param, ParamName};

/// The header that keeps the official clients from sending a request again; otherwise they do so twice for every 5xx.
pub(crate) const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// The most bytes of a client's name that a message or the log shows.
const MAX_SHOWN_BYTES: usize = 200;

/// The part of `name` that a message or the log shows.
pub(crate) fn shown(name: &str) -> Cow<'_, str> {
    match name.split_at(name.floor_char_boundary(MAX_SHOWN_BYTES)) {
        (_, "") => Cow::Borrowed(name),
        (beginning, _) => Cow::Owned(format!("{beginning}...")),
    }
}

/// The longest message: what a client sent is quoted, but not at full length.
const MAX_MESSAGE_BYTES: usize = 2000;

/// Cuts a text to about `max` bytes.
fn cut(mut text: String, max: usize) -> String {
    if text.len() > max {
        text.truncate(text.floor_char_boundary(max));
        text.push_str("...");
        text.shrink_to_fit();
    }
    text
}

/// What is wrong. The sentence is built once the API that reports it is known.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Problem {
    /// A sentence that needs no field name.
    Sentence(String),
    /// The value of the field is wrong.
    Invalid(String),
    /// The field is not supported.
    Unsupported(String),
    /// The field does not exist.
    Unknown,
    /// An engine's problem with the field; the text continues after the field's name.
    Engine(String),
}

/// The `code` of a response's error, for the program itself: not every API has it in its body.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ErrorCode(pub(crate) &'static str);

/// An error in OpenAI's format: a status, and an `error` object with `message`, `type`, `param` and `code`.
///
/// # Source
/// <https://platform.openai.com/docs/guides/error-codes>
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    /// The HTTP status.
    pub status: StatusCode,
    pub(crate) problem: Problem,
    /// The invalid request field.
    pub param: Option<Param>,
    /// A stable code of the problem, if OpenAI has one.
    pub code: Option<&'static str>,
    /// When to try again.
    pub retry_after: Option<Duration>,
    /// The kind of error behind this server; `None` if the server itself refuses.
    pub cause: Option<ErrorKind>,
    /// What only the operator is told; `None` if clients are told all of it.
    pub(crate) untold: Option<Untold>,
}

/// An error for the log.
#[derive(Debug, Clone)]
pub(crate) struct Untold(EngineError);

impl PartialEq for Untold {
    fn eq(&self, other: &Self) -> bool {
        (self.0.kind(), self.0.message()) == (other.0.kind(), other.0.message())
    }
}

impl ApiError {
    /// The code for a model that no worker serves.
    pub(crate) const MODEL_NOT_FOUND: &'static str = "model_not_found";

    /// An error without field or code.
    #[must_use]
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        let sentence = cut(message.into(), MAX_MESSAGE_BYTES);
        Self {
            status,
            problem: Problem::Sentence(sentence),
            param: None,
            code: None,
            retry_after: None,
            cause: None,
            untold: None,
        }
    }

    /// Logs what clients are not told. Whoever reports the error calls it, because an error of this server does not know its
    /// request.
    pub fn log(&self, request_id: Option<&str>) {
        let Some(Untold(error)) = &self.untold else {
            return;
        };
        tracing::warn!(
            request_id = error.details().request_id.as_deref().or(request_id),
            kind = %error.kind(),
            %error,
            source = error.source().map(tracing::field::display),
            "a request failed"
        );
    }

    fn of_param(param: impl Into<Param>, problem: Problem) -> Self {
        let param = match param.into() {
            Param::Path(path) => Param::Path(cut(path, MAX_SHOWN_BYTES)),
            other @ (Param::Request(_) | Param::Chat(_)) => other,
        };
        Self {
            problem,
            param: Some(param),
            ..Self::new(StatusCode::BAD_REQUEST, "")
        }
    }

    /// A 400 that names the field.
    #[must_use]
    pub fn invalid(param: impl Into<Param>, problem: impl fmt::Display) -> Self {
        let problem = cut(problem.to_string(), MAX_MESSAGE_BYTES);
        Self::of_param(param, Problem::Invalid(problem))
    }

    /// A 400 that names a field this server does not support.
    #[must_use]
    pub fn unsupported(param: impl Into<Param>, problem: impl fmt::Display) -> Self {
        let problem = cut(problem.to_string(), MAX_MESSAGE_BYTES);
        Self {
            code: Some("unsupported_parameter"),
            ..Self::of_param(param, Problem::Unsupported(problem))
        }
    }

    /// A 400 that names a field that does not exist.
    #[must_use]
    pub(crate) fn unknown(param: String) -> Self {
        Self {
            code: Some("unknown_parameter"),
            ..Self::of_param(param, Problem::Unknown)
        }
    }

    /// Marks an error as one of the chat that a request was converted to.
    #[must_use]
    pub(crate) fn in_chat(mut self) -> Self {
        if let Some(Param::Path(path)) = self.param {
            self.param = Some(Param::Chat(path));
        }
        self
    }

    /// Marks an error as one of a prompt: if there are several, an error about the prompt names its index.
    #[must_use]
    pub(crate) fn of_prompt(mut self, index: usize, count: usize) -> Self {
        let name = RequestField::Prompt.name();
        let at = self.param.as_ref().map(Param::name);
        if count > 1 && at == Some(name) {
            self.param = Some(format!("{name}[{index}]").into());
        }
        self
    }

    /// The 404 for a model that no worker serves.
    #[must_use]
    pub fn model_not_found(model: &str) -> Self {
        let model = shown(model);
        let message =
            format!("The model '{model}' does not exist. GET /v1/models lists those that do.");
        let base = Self::new(StatusCode::NOT_FOUND, message);
        Self {
            param: Some("model".into()),
            code: Some(Self::MODEL_NOT_FOUND),
            ..base
        }
    }

    /// The 503 for a model that lost its last worker a moment ago, or that is not ready yet.
    #[must_use]
    pub fn model_gone(model: &str) -> Self {
        let model = shown(model);
        let message = format!("No worker serves the model '{model}' now. Send the request again.");
        let base = Self::new(StatusCode::SERVICE_UNAVAILABLE, message);
        Self {
            param: Some("model".into()),
            retry_after: Some(Duration::from_secs(1)),
            ..base
        }
    }

    /// The 503 for a server that is shutting down.
    #[must_use]
    pub fn draining() -> Self {
        let base = Self::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "The server is shutting down. Send the request again.",
        );
        Self {
            retry_after: Some(Duration::from_secs(1)),
            ..base
        }
    }

    /// What is wrong and what to do, with the field's name from `name`.
    #[must_use]
    pub fn message(&self, name: ParamName) -> String {
        let param = self.param.as_ref().map(name).unwrap_or_default();
        match &self.problem {
            Problem::Sentence(sentence) => sentence.clone(),
            Problem::Invalid(problem) => format!("Invalid value for '{param}': {problem}."),
            Problem::Unsupported(problem) => {
                format!("Unsupported parameter: '{param}': {problem}.")
            }
            Problem::Unknown => format!("Unrecognized request argument supplied: {param}."),
            Problem::Engine(problem) => format!("{param}: {problem}"),
        }
    }

    /// Like [`Self::message`], for clients that learn the field in no other way.
    pub(crate) fn message_with_param(&self, name: ParamName) -> String {
        let message = self.message(name);
        match (&self.param, &self.problem, self.cause) {
            // This server's own sentences need no field name.
            (Some(param), Problem::Sentence(_), Some(_)) => format!("{}: {message}", name(param)),
            _ => message,
        }
    }

    /// OpenAI's `type` for the status.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_client_error() => "invalid_request_error",
            _ => "server_error",
        }
    }

    /// Its label in the metrics: the kind of the engine's error, or the reason for which this server refused.
    #[must_use]
    pub fn failure(&self) -> &'static str {
        if let Some(kind) = self.cause {
            return kind.name();
        }
        match self.status {
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => "unauthorized",
            StatusCode::NOT_FOUND => "not_found",
            StatusCode::REQUEST_TIMEOUT => "slow_body",
            StatusCode::PAYLOAD_TOO_LARGE => "body_too_large",
            StatusCode::TOO_MANY_REQUESTS => "quota",
            // A server that shuts down blames no field; a model without a worker is blamed.
            StatusCode::SERVICE_UNAVAILABLE if self.param.is_some() => {
                ErrorKind::Unavailable.name()
            }
            StatusCode::SERVICE_UNAVAILABLE => "draining",
            status if status.is_client_error() => "invalid_request",
            _ => "internal",
        }
    }

    /// The body: `{"error": {...}}`, with the field's name from `name`.
    #[must_use]
    pub fn to_json(&self, name: ParamName) -> Value {
        json!({
            "error": {
                "message": self.message(name),
                "type": self.kind(),
                "param": self.param.as_ref().map(name),
                "code": self.code,
            }
        })
    }

    /// The response with [`Self::to_json`].
    pub(crate) fn response(&self, name: ParamName) -> Response {
        self.response_with(self.to_json(name).to_string())
    }

    /// The response with this JSON body.
    pub(crate) fn response_with(&self, json: String) -> Response {
        let mut response = (self.status, axum::body::Body::from(json)).into_response();
        if let Some(code) = self.code {
            response.extensions_mut().insert(ErrorCode(code));
        }
        let headers = response.headers_mut();
        headers.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/json"),
        );
        if let Some(after) = self.retry_after {
            let seconds = after.as_secs().max(1);
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::GATEWAY_TIMEOUT {
            // The same request would take as long again.
            headers.insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        response
    }
}

/// For the log.
impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message(Param::plain))
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        let policy = error.policy();
        let status =
            StatusCode::from_u16(policy.http_status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let code = match error.kind() {
            ErrorKind::ContextLengthExceeded => Some("context_length_exceeded"),
            ErrorKind::Unsupported => Some("unsupported_parameter"),
            ErrorKind::InvalidArgument
            | ErrorKind::NotFound
            | ErrorKind::Overloaded
            | ErrorKind::Unavailable
            | ErrorKind::EngineShutdown
            | ErrorKind::CannotConnect
            | ErrorKind::Disconnected
            | ErrorKind::StreamIncomplete
            | ErrorKind::DeadlineExceeded
            | ErrorKind::Cancelled
            | ErrorKind::Internal => None,
        };
        let needs_retry_after = policy.is_retryable && matches!(policy.http_status, 429 | 503);
        let default_retry = needs_retry_after.then_some(Duration::from_secs(1));
        Self {
            status,
            problem: for_clients(&error),
            param: error.at().map(Param::from),
            code,
            retry_after: error.details().retry_after.or(default_retry),
            cause: Some(error.kind()),
            untold: told_instead(error.kind()).map(|_told| Untold(error)),
        }
    }
}

/// What clients are told of an error that the request did not cause, and what to do about it; `None` if they are told its own
/// message.
fn told_instead(kind: ErrorKind) -> Option<(&'static str, &'static str)> {
    match kind {
        ErrorKind::Disconnected => Some((
            "The connection to the worker was lost",
            "Send the request again.",
        )),
        ErrorKind::CannotConnect => Some((
            "No worker can be reached now",
            "Send the request again later.",
        )),
        ErrorKind::StreamIncomplete => Some((
            "The answer broke off before its end",
            "Send the request again.",
        )),
        ErrorKind::Internal => Some(("The server failed on this request", "Its log says why.")),
        ErrorKind::InvalidArgument
        | ErrorKind::ContextLengthExceeded
        | ErrorKind::Unsupported
        | ErrorKind::NotFound
        | ErrorKind::Overloaded
        | ErrorKind::Unavailable
        | ErrorKind::EngineShutdown
        | ErrorKind::DeadlineExceeded
        | ErrorKind::Cancelled => None,
    }
}

/// The problem as clients see it. Errors that the request did not cause are for the operator: their messages contain
/// addresses, instances, devices and rules of the engine contract, so they go only to the log.
fn for_clients(error: &EngineError) -> Problem {
    let Some((what, then)) = told_instead(error.kind()) else {
        let message = error.message().to_owned();
        let is_about_value = matches!(
            error.kind(),
            ErrorKind::InvalidArgument | ErrorKind::Unsupported
        );
        return if is_about_value && error.at().is_some() {
            Problem::Engine(message)
        } else {
            Problem::Sentence(message)
        };
    };
    // If something in the request prevented the migration of its answer, the client can change that.
    let source = error.source();
    Problem::Sentence(
        match source.and_then(|source| source.downcast_ref::<NotResumable>()) {
            Some(why) => format!("{what}, and {why}. {then}"),
            None => format!("{what}. {then}"),
        },
    )
}

/// For routes without a body, whose params have the same name in every API.
impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.log(None);
        self.response(Param::plain)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{anthropic, openai, responses};

    #[test]
    fn clients_are_told_what_kept_their_answer_from_going_on_elsewhere() {
        let lost = |kind| {
            let error = EngineError::new(kind, "the connection to 192.0.2.7:21151 ended");
            ApiError::from(error.with_source(NotResumable::Seed)).to_string()
        };
        assert_eq!(
            lost(ErrorKind::Disconnected),
            "The connection to the worker was lost, and this request has a seed, so its answer cannot continue on another worker of \
             this engine. Send the request again."
        );
        let told = lost(ErrorKind::StreamIncomplete);
        assert!(told.contains("has a seed"), "{told}");
    }

    #[test]
    fn a_field_has_the_name_of_the_api_that_tells_of_it() {
        let error = EngineError::invalid_argument(RequestField::Prompt, "is too odd");
        let error = ApiError::from(error);
        for (name, expected) in [
            (openai::chat_name as ParamName, "messages"),
            (openai::completion_name, "prompt"),
            (openai::embedding_name, "input"),
            (openai::rerank_name, "documents"),
            (openai::score_name, "text_2"),
            (responses::param_name, "input"),
            (anthropic::param_name, "messages"),
        ] {
            let json = error.to_json(name);
            assert_eq!(json["error"]["param"], expected);
            assert_eq!(json["error"]["message"], format!("{expected}: is too odd"));
        }
        let of_chat =
            ApiError::invalid("tools[1].function.parameters", "expected an object").in_chat();
        let message = of_chat.message(anthropic::param_name);
        assert_eq!(
            message,
            "Invalid value for 'tools[1].input_schema': expected an object."
        );
    }

    #[test]
    fn clients_are_told_nothing_of_what_an_operator_must_mend() {
        for (kind, says) in [
            (ErrorKind::Disconnected, "worker"),
            (ErrorKind::CannotConnect, "worker"),
            (ErrorKind::Internal, "log"),
            (ErrorKind::StreamIncomplete, "broke off"),
        ] {
            let error =
                EngineError::new(kind, "rule panic: /dev/nvidia0 of instance 17, 192.0.2.7");
            let told = ApiError::from(error.with_request_id("r"));
            for part in ["panic", "nvidia", "17", "192.0.2.7"] {
                assert!(!told.to_string().contains(part), "{told}");
            }
            assert!(told.to_string().contains(says), "{told}");
            assert_eq!(told.cause, Some(kind));
        }
        let engines = EngineError::new(ErrorKind::Unavailable, "the engine starts again");
        let told = ApiError::from(engines);
        assert_eq!(told.to_string(), "the engine starts again");
    }

    #[test]
    fn a_model_without_a_worker_is_not_counted_as_a_shutdown() {
        for (error, label) in [
            (ApiError::draining(), "draining"),
            (ApiError::model_gone("m"), "unavailable"),
            (ApiError::model_not_found("m"), "not_found"),
        ] {
            assert_eq!(error.failure(), label, "{error}");
        }
    }

    #[test]
    fn names_are_shown_up_to_a_length() {
        assert_eq!(shown("tiny"), "tiny");
        let long = "\u{e9}".repeat(10_000);
        assert!(shown(&long).len() <= MAX_SHOWN_BYTES + 3);
    }
}
