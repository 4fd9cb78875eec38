//! [`RequestContext`]: what travels with a request: its id, cancellation, deadline, trace and headers.
//!
//! Cancellations form a tree: the frontend owns the root, and every layer below works on a child. Cancelling a context cancels
//! everything below it and nothing above. Clones share the cancellation.

mod explanation;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::error::{EngineError, ErrorKind};

pub use self::explanation::{Explanation, MAX_DECISIONS};

crate::named! {
    /// Why a request was cancelled. The first reason wins.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
    #[serde(rename_all = "snake_case")]
    pub enum CancelReason {
        /// The client cancelled or left, or the stream was dropped.
        Client = "client",
        /// The request's deadline or idle limit passed.
        Deadline = "deadline",
        /// The worker, or the frontend that sent the request, is shutting down; the request may migrate.
        Shutdown = "shutdown",
        /// The engine reported itself dead; the request may migrate.
        EngineDead = "engine_dead",
    }
}

impl CancelReason {
    /// Returns the kind of the error that ends a request cancelled for this reason, if an error must end it.
    #[must_use]
    pub fn error_kind(self) -> ErrorKind {
        match self {
            Self::Client => ErrorKind::Cancelled,
            Self::Deadline => ErrorKind::DeadlineExceeded,
            Self::Shutdown => ErrorKind::EngineShutdown,
            Self::EngineDead => ErrorKind::Disconnected,
        }
    }

    /// Returns an error of [`Self::error_kind`], with a message.
    #[must_use]
    pub fn to_error(self) -> EngineError {
        let message = match self {
            Self::Client => "the request was cancelled",
            Self::Deadline => "the request's deadline passed before it finished",
            // A worker says this even if it is the frontend that shuts down.
            Self::Shutdown => {
                "the server is shutting down and cut the request short; send it again"
            }
            Self::EngineDead => "the engine died while it served the request; send it again",
        };
        EngineError::new(self.error_kind(), message)
    }
}

/// W3C trace context: the `traceparent` and `tracestate` headers, forwarded unchanged.
///
/// # Source
/// <https://www.w3.org/TR/trace-context/>
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TraceContext {
    /// `version-traceid-parentid-flags` in lower-case hex, as received; checked by [`TraceContext::parse`].
    pub traceparent: String,
    /// Vendor data, empty when there is none.
    pub tracestate: String,
}

impl TraceContext {
    /// Parses the headers; returns `None` if `traceparent` is malformed, as the specification demands.
    #[must_use]
    pub fn parse(traceparent: &str, tracestate: &str) -> Option<Self> {
        let fields: Vec<&str> = traceparent.split('-').collect();
        let [version, trace_id, parent_id, flags, ..] = fields[..] else {
            return None;
        };
        let is_hex = |text: &str, len: usize| {
            text.len() == len && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        };
        let is_zero = |text: &str| text.bytes().all(|b| b == b'0');
        let well_formed = is_hex(version, 2)
            && version != "ff"
            && (version != "00" || fields.len() == 4)
            && is_hex(trace_id, 32)
            && !is_zero(trace_id)
            && is_hex(parent_id, 16)
            && !is_zero(parent_id)
            && is_hex(flags, 2);
        well_formed.then(|| Self {
            traceparent: traceparent.into(),
            tracestate: tracestate.into(),
        })
    }

    /// Returns the 32 hex digits of the trace id.
    #[must_use]
    pub fn trace_id(&self) -> &str {
        self.traceparent.get(3..35).unwrap_or_default()
    }
}

/// The metadata of one request. Cheap to clone; clones share the cancellation.
///
/// # Examples
/// ```
/// use genset_backend_common::{CancelReason, RequestContext};
///
/// let ctx = RequestContext::new("req-1");
/// let child = ctx.child();
/// child.cancel(CancelReason::Deadline);
/// assert!(child.is_cancelled() && !ctx.is_cancelled());
/// ```
#[derive(Clone)]
pub struct RequestContext {
    meta: Arc<Meta>,
    cancel: Arc<CancelNode>,
    deadline: Option<Instant>,
    began: Option<Instant>,
    prompt_tokens: u32,
    explanation: Option<Explanation>,
    losses: Option<Arc<Losses>>,
}

/// Counts the instances that were lost while they had a request.
struct Losses {
    limit: u32,
    count: AtomicU32,
}

#[derive(Debug, Clone, Default)]
struct Meta {
    id: String,
    trace: Option<TraceContext>,
    headers: BTreeMap<String, String>,
    affinity: Option<String>,
}

struct CancelNode {
    token: CancellationToken,
    /// 0 for none, else 1 + the index in `CancelReason::ALL`.
    reason: AtomicU8,
    /// How often the request, or a child of it, migrated.
    moves: AtomicU32,
    /// The prompt's length, if only the engine knows it; 0 until then.
    prompt_tokens: AtomicU32,
    parent: Option<Arc<CancelNode>>,
}

impl CancelNode {
    fn new(token: CancellationToken, parent: Option<Arc<Self>>) -> Self {
        Self {
            token,
            reason: AtomicU8::new(0),
            moves: AtomicU32::new(0),
            prompt_tokens: AtomicU32::new(0),
            parent,
        }
    }

    fn reason(&self) -> Option<CancelReason> {
        match usize::from(self.reason.load(Ordering::Acquire)).checked_sub(1) {
            Some(index) => CancelReason::ALL.get(index).copied(),
            None => self.parent.as_ref().and_then(|parent| parent.reason()),
        }
    }
}

impl RequestContext {
    /// Creates a root context. `id` must be unique among the requests in flight.
    #[must_use]
    pub fn new(id: impl Into<String>) -> Self {
        let cancel = CancelNode::new(CancellationToken::new(), None);
        Self {
            meta: Arc::new(Meta {
                id: id.into(),
                ..Meta::default()
            }),
            cancel: Arc::new(cancel),
            deadline: None,
            began: None,
            prompt_tokens: 0,
            explanation: None,
            losses: None,
        }
    }

    /// Replaces the id, for example of a [`child`](Self::child) when one context cancels several requests.
    #[must_use]
    pub fn with_id(mut self, id: impl Into<String>) -> Self {
        Arc::make_mut(&mut self.meta).id = id.into();
        self
    }

    /// Sets the instant after which the answer is useless. Ignored if a deadline is already set and earlier.
    #[must_use]
    pub fn with_deadline(mut self, deadline: Instant) -> Self {
        self.deadline = Some(
            self.deadline
                .map_or(deadline, |earlier| earlier.min(deadline)),
        );
        self
    }

    /// Records that the request began earlier at another instance, and when: a worker's time limit counts from then. The first
    /// call wins.
    #[must_use]
    pub fn with_began(mut self, began: Instant) -> Self {
        self.began = self.began.or(Some(began));
        self
    }

    /// Sets the trace the request belongs to.
    #[must_use]
    pub fn with_trace(mut self, trace: TraceContext) -> Self {
        Arc::make_mut(&mut self.meta).trace = Some(trace);
        self
    }

    /// Adds a header; names are lower-case.
    #[must_use]
    pub fn with_header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        Arc::make_mut(&mut self.meta)
            .headers
            .insert(name.into().to_ascii_lowercase(), value.into());
        self
    }

    /// Adds headers; names are lower-case.
    #[must_use]
    pub fn with_headers(mut self, headers: BTreeMap<String, String>) -> Self {
        if !headers.is_empty() {
            Arc::make_mut(&mut self.meta).headers.extend(headers);
        }
        self
    }

    /// Sets the affinity key: requests with the same key are best served by the same instance. It stays in this process.
    #[must_use]
    pub fn with_affinity(mut self, key: impl Into<String>) -> Self {
        Arc::make_mut(&mut self.meta).affinity = Some(key.into());
        self
    }

    /// Asks the router to explain its decisions. It stays in this process.
    #[must_use]
    pub fn with_explanation(mut self, explanation: Explanation) -> Self {
        self.explanation = Some(explanation);
        self
    }

    /// Limits how many instances may be lost while they have the request, so that a request that crashes its instances does not
    /// reach all of them. Clones, children and siblings made from now on share the count. The first limit wins.
    #[must_use]
    pub fn with_loss_limit(mut self, limit: u32) -> Self {
        if self.losses.is_none() {
            let count = AtomicU32::new(0);
            self.losses = Some(Arc::new(Losses { limit, count }));
        }
        self
    }

    /// Sets the number of prompt tokens, from which `output::stream` and `output::channel` fill in the usage. The Worker's
    /// adapter calls this; an engine used without a Worker must do so itself.
    #[must_use]
    pub fn with_prompt_tokens(mut self, prompt_tokens: u32) -> Self {
        self.prompt_tokens = prompt_tokens;
        self
    }

    /// Returns a context for the next layer: cancelled with this one, or on its own.
    #[must_use]
    pub fn child(&self) -> Self {
        let parent = Arc::clone(&self.cancel);
        let cancel = CancelNode::new(self.cancel.token.child_token(), Some(parent));
        Self {
            cancel: Arc::new(cancel),
            ..self.clone()
        }
    }

    /// Returns a context of the same request with an independent cancellation.
    #[must_use]
    pub fn detached(&self) -> Self {
        let alone = Self::new(String::new());
        Self {
            cancel: alone.cancel,
            ..self.clone()
        }
    }

    /// Like [`Self::child`], for one of several sequences of a request: appends `-index` to the id, since ids are unique among
    /// the requests in flight.
    #[must_use]
    pub fn sibling(&self, index: usize) -> Self {
        let mut ctx = self.child();
        Arc::make_mut(&mut ctx.meta).id = format!("{}-{index}", self.id());
        ctx
    }

    /// Returns the request's id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.meta.id
    }

    /// Cancels this context, its clones and its children. The first reason wins.
    pub fn cancel(&self, reason: CancelReason) {
        let code = CancelReason::ALL
            .iter()
            .position(|r| *r == reason)
            .unwrap_or(0);
        let code = u8::try_from(code + 1).unwrap_or(1);
        if self.cancel.reason().is_none() {
            // If two cancels race, the first store wins and the other reason is dropped.
            let _ =
                self.cancel
                    .reason
                    .compare_exchange(0, code, Ordering::AcqRel, Ordering::Acquire);
        }
        self.cancel.token.cancel();
    }

    /// Returns whether the request was cancelled. Compute loops check it once per step.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.cancel.token.is_cancelled()
    }

    /// Returns why the request was cancelled, or `None` if it was not.
    #[must_use]
    pub fn cancel_reason(&self) -> Option<CancelReason> {
        self.is_cancelled()
            .then(|| self.cancel.reason().unwrap_or(CancelReason::Client))
    }

    /// Waits until the request is cancelled.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub async fn cancelled(&self) {
        self.cancel.token.cancelled().await;
    }

    /// Waits until the request is cancelled or its deadline passes; returns the error of that.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub async fn over(&self) -> EngineError {
        let deadline = async {
            match self.deadline {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        let reason = tokio::select! {
            biased;
            () = self.cancelled() => self.cancel_reason().unwrap_or(CancelReason::Client),
            () = deadline => CancelReason::Deadline,
        };
        reason.to_error()
    }

    /// Like [`Self::cancelled`], but the future owns its state, for hand-written streams.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub fn cancelled_owned(&self) -> impl Future<Output = ()> + Send + use<> {
        self.cancel.token.clone().cancelled_owned()
    }

    /// Returns the instant after which the answer is useless.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Returns the time left until the deadline; zero when it has passed, `None` without one.
    #[must_use]
    pub fn time_left(&self) -> Option<Duration> {
        self.deadline
            .map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }

    /// Returns when the request began at another instance, if [that is set](Self::with_began).
    #[must_use]
    pub fn began(&self) -> Option<Instant> {
        self.began
    }

    /// Returns the tracing span for all work on the request: with its id, and its trace id if it has one.
    #[must_use]
    pub fn span(&self) -> tracing::Span {
        let trace_id = self.trace().map(TraceContext::trace_id);
        tracing::debug_span!("request", request_id = self.id(), trace_id)
    }

    /// Returns the trace that the request belongs to.
    #[must_use]
    pub fn trace(&self) -> Option<&TraceContext> {
        self.meta.trace.as_ref()
    }

    /// Returns a header by its lower-case name.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.meta.headers.get(name).map(String::as_str)
    }

    /// Returns all headers.
    #[must_use]
    pub fn headers(&self) -> &BTreeMap<String, String> {
        &self.meta.headers
    }

    /// Returns the affinity key.
    #[must_use]
    pub fn affinity(&self) -> Option<&str> {
        self.meta.affinity.as_deref()
    }

    /// Returns where the router records its decisions; `None` if the client did not ask.
    #[must_use]
    pub fn explanation(&self) -> Option<&Explanation> {
        self.explanation.as_ref()
    }

    /// Records a migration, visible to this context and those above.
    pub fn note_move(&self) {
        let mut node = Some(&self.cancel);
        while let Some(here) = node {
            here.moves.fetch_add(1, Ordering::Relaxed);
            node = here.parent.as_ref();
        }
    }

    /// Returns how often the request migrated, over all its choices.
    #[must_use]
    pub fn moves(&self) -> u32 {
        self.cancel.moves.load(Ordering::Relaxed)
    }

    /// Records that an instance was lost while it had the request. An unreachable instance did not have it.
    pub fn note_loss(&self) {
        if let Some(losses) = &self.losses {
            losses.count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns whether the number of lost instances exceeds the [limit](Self::with_loss_limit): no other instance may take the
    /// request.
    #[must_use]
    pub fn has_lost_too_many(&self) -> bool {
        let losses = self.losses.as_ref();
        losses.is_some_and(|losses| losses.count.load(Ordering::Relaxed) > losses.limit)
    }

    /// Returns the number of prompt tokens, from the adapter or else from the engine; 0 if neither knows.
    #[must_use]
    pub fn prompt_tokens(&self) -> u32 {
        match self.prompt_tokens {
            0 => self.cancel.prompt_tokens.load(Ordering::Relaxed),
            counted => counted,
        }
    }

    /// Reports the number of prompt tokens of an input that is not tokens. It is the usage if the engine does not finish the
    /// answer, such as after a cancellation. Clones of the context see it.
    pub fn tell_prompt_tokens(&self, prompt_tokens: u32) {
        let told = &self.cancel.prompt_tokens;
        told.store(prompt_tokens, Ordering::Relaxed);
    }
}

crate::debug_as!(|it| RequestContext {
    id: it.meta.id,
    cancelled: it.cancel_reason(),
    deadline: it.deadline,
    ..
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parents_reason_reaches_the_child_and_the_first_reason_stays() {
        let root = RequestContext::new("r");
        let child = root.child().child();
        assert_eq!(child.cancel_reason(), None);
        root.cancel(CancelReason::Shutdown);
        root.cancel(CancelReason::Client);
        child.cancel(CancelReason::Deadline);
        assert_eq!(child.cancel_reason(), Some(CancelReason::Shutdown));
    }

    #[test]
    fn what_ends_several_requests_ends_each_under_its_own_id() {
        let all = RequestContext::new("all");
        let requests = ["a", "b"].map(|id| all.child().with_id(id));
        assert_eq!(requests.each_ref().map(RequestContext::id), ["a", "b"]);
        requests[0].cancel(CancelReason::Client);
        assert!(!all.is_cancelled() && !requests[1].is_cancelled());
        all.cancel(CancelReason::Shutdown);
        assert_eq!(requests[1].cancel_reason(), Some(CancelReason::Shutdown));
    }

    #[test]
    fn a_later_deadline_changes_nothing() {
        let now = Instant::now();
        let early = now + Duration::from_secs(1);
        let ctx = RequestContext::new("r").with_deadline(early);
        assert_eq!(
            ctx.with_deadline(now + Duration::from_secs(9)).deadline(),
            Some(early)
        );
    }

    #[test]
    fn a_move_is_seen_above_and_not_beside() {
        let root = RequestContext::new("r");
        let (one, other) = (root.sibling(0), root.sibling(1));
        one.sibling(1).note_move();
        assert_eq!((root.moves(), one.moves(), other.moves()), (1, 1, 0));
    }

    #[test]
    fn losses_count_together_and_the_first_limit_stays() {
        let unlimited = RequestContext::new("r");
        unlimited.note_loss();
        assert!(!unlimited.has_lost_too_many());
        let ctx = unlimited.with_loss_limit(1).with_loss_limit(9);
        ctx.sibling(0).note_loss();
        assert!(!ctx.has_lost_too_many());
        ctx.detached().note_loss();
        assert!(ctx.has_lost_too_many() && ctx.child().has_lost_too_many());
    }

    #[test]
    fn decisions_reach_whoever_asked_up_to_a_limit() {
        let explanation = Explanation::default();
        let ctx = RequestContext::new("r").with_explanation(explanation.clone());
        let below = ctx.sibling(1).detached();
        for decision in 0..2 * MAX_DECISIONS {
            if let Some(explanation) = below.explanation() {
                explanation.add(decision.into());
            }
        }
        let decisions = explanation.decisions();
        assert_eq!(decisions.len(), MAX_DECISIONS);
        assert_eq!(decisions.first(), Some(&0.into()));
    }

    #[test]
    fn malformed_trace_parents_are_dropped() {
        let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let trace = TraceContext::parse(good, "a=b").unwrap();
        assert_eq!(trace.trace_id(), "0af7651916cd43dd8448eb211c80319c");
        for bad in [
            "",
            "00",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0AF7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-x",
        ] {
            assert_eq!(TraceContext::parse(bad, ""), None, "{bad}");
        }
    }
}
