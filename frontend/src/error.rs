//! [`ApiError`]: what a client is told when something is wrong, in the OpenAI shape.

use std::time::Duration;

use axum::response::{IntoResponse, Response};
use genset_backend_common::{EngineError, ErrorKind};
use http::{HeaderValue, StatusCode, header};
use serde_json::{Value, json};

use crate::openai::Api;

/// An error as OpenAI clients know it: a status, and an `error` object with `message`, `type`, `param` and `code`.
///
/// # Source
/// <https://platform.openai.com/docs/guides/error-codes>
#[derive(Debug, Clone, PartialEq)]
pub struct ApiError {
    /// The HTTP status.
    pub status: StatusCode,
    /// What is wrong and what to do.
    pub message: String,
    /// The request field at fault.
    pub param: Option<String>,
    /// A stable name of the problem, where OpenAI has one.
    pub code: Option<&'static str>,
    /// When to try again.
    pub retry_after: Option<Duration>,
    /// What went wrong behind this server; `None` where the server itself refuses.
    pub cause: Option<ErrorKind>,
}

impl ApiError {
    /// An error with neither field nor code.
    #[must_use]
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            param: None,
            code: None,
            retry_after: None,
            cause: None,
        }
    }

    /// A 400 that names the field.
    #[must_use]
    pub fn invalid(param: impl Into<String>, problem: impl std::fmt::Display) -> Self {
        let param = param.into();
        let message = format!("Invalid value for '{param}': {problem}.");
        Self {
            param: Some(param),
            ..Self::new(StatusCode::BAD_REQUEST, message)
        }
    }

    /// A 400 that names a field this server does not support.
    #[must_use]
    pub fn unsupported(param: impl Into<String>, problem: impl std::fmt::Display) -> Self {
        let param = param.into();
        let message = format!("Unsupported parameter: '{param}': {problem}.");
        let base = Self::new(StatusCode::BAD_REQUEST, message);
        Self {
            param: Some(param),
            code: Some("unsupported_parameter"),
            ..base
        }
    }

    /// The 404 of a model that nobody serves.
    #[must_use]
    pub fn model_not_found(model: &str) -> Self {
        let message =
            format!("The model '{model}' does not exist. GET /v1/models lists those that do.");
        let base = Self::new(StatusCode::NOT_FOUND, message);
        Self {
            param: Some("model".into()),
            code: Some("model_not_found"),
            ..base
        }
    }

    /// The 503 of a server that is shutting down.
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

    /// The error as a client of `api` finds it: an engine's "prompt" is a chat's "messages".
    #[must_use]
    pub fn in_the_words_of(mut self, api: Api) -> Self {
        if api == Api::Chat && self.param.as_deref() == Some("prompt") {
            self.param = Some("messages".into());
        }
        self
    }

    /// The error with another name of its field, in `param` and in the message: an API's own for what another calls
    /// otherwise.
    #[must_use]
    pub(crate) fn renamed(mut self, name: impl FnOnce(&str) -> String) -> Self {
        let Some(field) = &self.param else {
            return self;
        };
        let renamed = name(field);
        if renamed != *field {
            let (before, after) = (format!("'{field}'"), format!("'{renamed}'"));
            self.message = self.message.replace(&before, &after);
            self.param = Some(renamed);
        }
        self
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

    /// What operators count it as: the kind of the engine's error, or what this server refused it for.
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
            StatusCode::SERVICE_UNAVAILABLE => "draining",
            status if status.is_client_error() => "invalid_request",
            _ => "internal",
        }
    }

    /// The body: `{"error": {...}}`.
    #[must_use]
    pub fn to_json(&self) -> Value {
        json!({
            "error": {
                "message": self.message,
                "type": self.kind(),
                "param": self.param,
                "code": self.code,
            }
        })
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
            message: error.message().to_owned(),
            param: error.details().field.clone(),
            code,
            retry_after: error.details().retry_after.or(default_retry),
            cause: Some(error.kind()),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (
            self.status,
            axum::body::Body::from(self.to_json().to_string()),
        )
            .into_response();
        let headers = response.headers_mut();
        headers.insert(
            header::CONTENT_TYPE,
            HeaderValue::from_static("application/json"),
        );
        if let Some(after) = self.retry_after {
            let seconds = after.as_secs().max(1);
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}
