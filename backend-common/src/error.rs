//! [`EngineError`]: the one error that crosses crate boundaries, and the table that defines its meaning.
//!
//! Nothing in Genset matches on the text of an error. The [`ErrorKind`] alone decides the HTTP status and whether a client may
//! retry; [`ErrorKind::policy`] is that table. It also decides whether a request may move to another instance, except that
//! [`EngineError::may_go_elsewhere`] also considers what the error is about and whose resource is exhausted. Engines create
//! errors, the frontend renders them, routers read their policy.

mod at;

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use at::{At, RequestField};

crate::named! {
    /// The category of an error, a closed set.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum ErrorKind {
        /// A value in the request is malformed or out of range.
        InvalidArgument = "invalid_argument",
        /// Prompt and output together do not fit the model's context.
        ContextLengthExceeded = "context_length_exceeded",
        /// The request needs an ability that the engine does not declare.
        Unsupported = "unsupported",
        /// The model, adapter or endpoint does not exist.
        NotFound = "not_found",
        /// A limit on running or queued requests is reached.
        Overloaded = "overloaded",
        /// No instance can serve the request now.
        Unavailable = "unavailable",
        /// The engine is not started, is draining, or has stopped.
        EngineShutdown = "engine_shutdown",
        /// The instance could not be reached at all; it has not seen the request.
        CannotConnect = "cannot_connect",
        /// The connection to the instance, or the instance itself, was lost while it had the request.
        Disconnected = "disconnected",
        /// A stream ended without its terminal item.
        StreamIncomplete = "stream_incomplete",
        /// The request's deadline or its idle limit passed.
        DeadlineExceeded = "deadline_exceeded",
        /// The client cancelled or left.
        Cancelled = "cancelled",
        /// A bug in Genset or in the engine.
        Internal = "internal",
    }
}

/// The meaning of an [`ErrorKind`] for a client and for a router.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ErrorPolicy {
    /// The HTTP status code the frontend answers with.
    pub http_status: u16,
    /// Whether the same request may succeed when it is sent again.
    pub is_retryable: bool,
    /// Whether another instance may continue the request.
    pub is_migratable: bool,
}

impl ErrorKind {
    /// Returns HTTP status, retry and migration for each kind: the only such table.
    #[must_use]
    pub const fn policy(self) -> ErrorPolicy {
        let (http_status, is_retryable, is_migratable) = match self {
            Self::InvalidArgument | Self::ContextLengthExceeded | Self::Unsupported => {
                (400, false, false)
            }
            Self::NotFound => (404, false, false),
            Self::Overloaded => (429, true, true),
            Self::Unavailable | Self::EngineShutdown | Self::CannotConnect => (503, true, true),
            Self::Disconnected | Self::StreamIncomplete => (502, true, true),
            Self::DeadlineExceeded => (504, false, false),
            Self::Cancelled => (499, false, false),
            Self::Internal => (500, false, false),
        };
        ErrorPolicy {
            http_status,
            is_retryable,
            is_migratable,
        }
    }

    /// Returns whether the instance itself is gone or shutting down, as opposed to full.
    #[must_use]
    pub const fn is_instance_gone(self) -> bool {
        matches!(
            self,
            Self::CannotConnect | Self::Disconnected | Self::EngineShutdown
        )
    }
}

/// Details of an error for programs.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ErrorDetails {
    /// What is at fault, if it is a single thing.
    #[serde(flatten, with = "at::wire")]
    pub at: Option<At>,
    /// How long a client should wait before a retry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_after: Option<Duration>,
    /// The request the error belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
}

/// The message for a request that was running when its engine stopped.
pub(crate) const STOPPED_EARLY: &str = "the engine stopped before the request ended; send it again";

/// The error of every call that crosses a crate boundary.
///
/// Cheap to clone. The message is for the client: it says what is wrong and what to do, and never contains prompt text. [`At`]
/// names what it is about; `Display` joins the two. The source, if any, is for the operator's log.
///
/// # Examples
/// ```
/// use genset_backend_common::{EngineError, ErrorKind, RequestField, error::At};
///
/// let error = EngineError::invalid_argument(RequestField::Temperature, "must be between 0 and 2, got -3");
/// assert_eq!(error.kind(), ErrorKind::InvalidArgument);
/// assert_eq!(error.policy().http_status, 400);
/// assert_eq!(error.at(), Some(&At::Request(RequestField::Temperature)));
/// assert_eq!(error.message(), "must be between 0 and 2, got -3");
/// assert_eq!(error.to_string(), "temperature: must be between 0 and 2, got -3");
/// ```
#[derive(Clone)]
pub struct EngineError {
    inner: Box<Inner>,
}

#[derive(Debug, Clone)]
struct Inner {
    kind: ErrorKind,
    message: String,
    details: ErrorDetails,
    is_own_shortage: bool,
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

impl EngineError {
    /// An error of `kind`; `message` says what happened and what to do.
    #[must_use]
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        let inner = Inner {
            kind,
            message: message.into(),
            details: ErrorDetails::default(),
            is_own_shortage: false,
            source: None,
        };
        Self {
            inner: Box::new(inner),
        }
    }

    /// Creates [`ErrorKind::InvalidArgument`] for `at`. `problem` continues the name of what is at fault: "must be at least 1".
    #[must_use]
    pub fn invalid_argument(at: impl Into<At>, problem: impl fmt::Display) -> Self {
        Self::new(ErrorKind::InvalidArgument, problem.to_string()).with_at(at)
    }

    /// Creates [`ErrorKind::Unsupported`] for `at`, which needs the missing ability. `problem` continues its name.
    #[must_use]
    pub fn unsupported(at: impl Into<At>, problem: impl fmt::Display) -> Self {
        Self::new(ErrorKind::Unsupported, problem.to_string()).with_at(at)
    }

    /// Creates [`ErrorKind::NotFound`].
    #[must_use]
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::NotFound, message)
    }

    /// Creates [`ErrorKind::EngineShutdown`].
    #[must_use]
    pub fn engine_shutdown(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::EngineShutdown, message)
    }

    /// Creates [`ErrorKind::EngineShutdown`] for a request that arrives after the engine has stopped.
    #[must_use]
    pub fn engine_has_stopped() -> Self {
        Self::engine_shutdown("the engine has stopped; send the request again")
    }

    /// Creates [`ErrorKind::Disconnected`] for a request that the engine left unfinished. If the engine ends the request itself,
    /// see [`HealthReporter::stopped`](crate::HealthReporter::stopped).
    #[must_use]
    pub fn lost_with_engine() -> Self {
        Self::new(ErrorKind::Disconnected, STOPPED_EARLY)
    }

    /// Creates [`ErrorKind::Internal`].
    #[must_use]
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, message)
    }

    /// Sets what is at fault.
    #[must_use]
    pub fn with_at(mut self, at: impl Into<At>) -> Self {
        self.inner.details.at = Some(at.into());
        self
    }

    /// Sets how long to wait before a retry.
    #[must_use]
    pub fn with_retry_after(mut self, after: Duration) -> Self {
        self.inner.details.retry_after = Some(after);
        self
    }

    /// Sets the request's id.
    #[must_use]
    pub fn with_request_id(mut self, id: impl Into<String>) -> Self {
        self.inner.details.request_id = Some(id.into());
        self
    }

    /// Sets the request's id, unless the error has one.
    #[must_use]
    pub fn or_request_id(mut self, id: &str) -> Self {
        let request_id = &mut self.inner.details.request_id;
        request_id.get_or_insert_with(|| id.to_owned());
        self
    }

    /// Sets the cause, for the log.
    #[must_use]
    pub fn with_source(mut self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.inner.source = Some(Arc::new(source));
        self
    }

    /// Marks that this process, not the instance, is out of a resource: another instance would not help. Not sent over the wire,
    /// because for another process this one is the instance.
    #[must_use]
    pub fn with_own_shortage(mut self) -> Self {
        self.inner.is_own_shortage = true;
        self
    }

    /// Replaces the details, for the wire codec.
    #[must_use]
    pub fn with_details(mut self, details: ErrorDetails) -> Self {
        self.inner.details = details;
        self
    }

    /// Returns the kind, which decides everything.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.inner.kind
    }

    /// Returns the kind's policy: status, retry, migration.
    #[must_use]
    pub fn policy(&self) -> ErrorPolicy {
        self.inner.kind.policy()
    }

    /// Returns whether this process, not the instance, [is out of a resource](Self::with_own_shortage).
    #[must_use]
    pub fn is_own_shortage(&self) -> bool {
        self.inner.is_own_shortage
    }

    /// Returns whether another instance may take the request that this one refused: the kind's policy allows it, or this instance
    /// lacks the adapter that the request names. False if this process is out of a resource.
    #[must_use]
    pub fn may_go_elsewhere(&self) -> bool {
        let lacks_adapter = self.kind() == ErrorKind::NotFound
            && self.at() == Some(&At::Request(RequestField::Adapter));
        (self.policy().is_migratable || lacks_adapter) && !self.is_own_shortage()
    }

    /// Returns what is at fault, if it is a single thing.
    #[must_use]
    pub fn at(&self) -> Option<&At> {
        self.inner.details.at.as_ref()
    }

    /// Returns the problem alone, for the client, without [`Self::at`].
    #[must_use]
    pub fn message(&self) -> &str {
        &self.inner.message
    }

    /// Returns the details for programs.
    #[must_use]
    pub fn details(&self) -> &ErrorDetails {
        &self.inner.details
    }
}

impl fmt::Debug for EngineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("EngineError");
        shown
            .field("kind", &self.inner.kind)
            .field("message", &self.inner.message);
        if self.inner.details != ErrorDetails::default() {
            shown.field("details", &self.inner.details);
        }
        if let Some(source) = &self.inner.source {
            shown.field("source", source);
        }
        shown.finish()
    }
}

impl fmt::Display for EngineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(at) = self.at() {
            write!(f, "{at}: ")?;
        }
        f.write_str(&self.inner.message)
    }
}

impl StdError for EngineError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.inner
            .source
            .as_deref()
            .map(|source| source as &(dyn StdError + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::context::CancelReason;
    use crate::output::FinishReason;

    /// Repeats the documented table line by line, so that a policy change must change this test.
    #[test]
    fn the_policy_table_is_the_documented_one() {
        let table: Vec<_> = ErrorKind::ALL
            .iter()
            .map(|kind| {
                let policy = kind.policy();
                (
                    kind.name(),
                    policy.http_status,
                    policy.is_retryable,
                    policy.is_migratable,
                )
            })
            .collect();
        assert_eq!(
            table,
            [
                ("invalid_argument", 400, false, false),
                ("context_length_exceeded", 400, false, false),
                ("unsupported", 400, false, false),
                ("not_found", 404, false, false),
                ("overloaded", 429, true, true),
                ("unavailable", 503, true, true),
                ("engine_shutdown", 503, true, true),
                ("cannot_connect", 503, true, true),
                ("disconnected", 502, true, true),
                ("stream_incomplete", 502, true, true),
                ("deadline_exceeded", 504, false, false),
                ("cancelled", 499, false, false),
                ("internal", 500, false, false),
            ]
        );
    }

    #[test]
    fn a_refusal_may_go_elsewhere_by_its_policy_or_for_want_of_the_adapter() {
        for kind in ErrorKind::ALL {
            let refusal = EngineError::new(kind, "refused");
            let may_go = kind.policy().is_migratable;
            assert_eq!(refusal.may_go_elsewhere(), may_go, "{kind}");
            let lacks = refusal.with_at(RequestField::Adapter);
            let may_go = may_go || kind == ErrorKind::NotFound;
            assert_eq!(lacks.may_go_elsewhere(), may_go, "{kind}");
            let ours = lacks.with_own_shortage();
            assert!(!ours.may_go_elsewhere(), "{kind}");
            assert_eq!(ours.policy(), kind.policy());
        }
    }

    #[test]
    fn names_on_the_wire_equal_names_in_metrics() {
        for kind in ErrorKind::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
        }
        for reason in CancelReason::ALL {
            assert_eq!(serde_json::to_value(reason).unwrap(), reason.name());
        }
        for reason in FinishReason::ALL {
            assert_eq!(serde_json::to_value(reason).unwrap(), reason.name());
        }
    }

    #[test]
    fn an_error_is_one_pointer_wide() {
        assert_eq!(size_of::<EngineError>(), size_of::<usize>());
    }
}
