//! [`RequestContext`]: what travels beside a request: its id, cancellation, deadline, trace and headers.
//!
//! One cancellation per request, in a tree: the frontend owns the root, every station below works on a child, so that
//! cancelling above reaches everything below and cancelling below stays there. Cloning shares.

mod explanation;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::error::{EngineError, ErrorKind};

pub use self::explanation::{Explanation, MAX_DECISIONS};

/// Why a request was cancelled. The first reason stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CancelReason {
    /// The client cancelled or left, or nobody reads the stream any more.
    Client,
    /// The request's deadline or idle limit passed.
    Deadline,
    /// The worker, or the frontend that sent the request, is shutting down; the request may go on elsewhere.
    Shutdown,
    /// The engine reported itself dead; the request may go on elsewhere.
    EngineDead,
}

impl CancelReason {
    const ALL: [Self; 4] = [
        Self::Client,
        Self::Deadline,
        Self::Shutdown,
        Self::EngineDead,
    ];

    /// The error a request cancelled for this reason ends with, where it must end with one.
    #[must_use]
    pub fn error_kind(self) -> ErrorKind {
        match self {
            Self::Client => ErrorKind::Cancelled,
            Self::Deadline => ErrorKind::DeadlineExceeded,
            Self::Shutdown => ErrorKind::EngineShutdown,
            Self::EngineDead => ErrorKind::Disconnected,
        }
    }

    /// [`Self::error_kind`] with a message.
    #[must_use]
    pub fn to_error(self) -> EngineError {
        let message = match self {
            Self::Client => "the request was cancelled",
            Self::Deadline => "the request's deadline passed before it finished",
            // A worker says so, also where it was told by the frontend that shuts down.
            Self::Shutdown => {
                "the server is shutting down and cut the request short; send it again"
            }
            Self::EngineDead => "the engine died while it served the request; send it again",
        };
        EngineError::new(self.error_kind(), message)
    }
}

/// W3C trace context: the `traceparent` and `tracestate` headers, passed on unchanged.
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
    /// Takes the headers if `traceparent` is well formed; a malformed one is dropped, as the specification says.
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

    /// The 32 hex digits of the trace id.
    #[must_use]
    pub fn trace_id(&self) -> &str {
        self.traceparent.get(3..35).unwrap_or_default()
    }
}

/// What travels beside one request. Cheap to clone; clones share the cancellation.
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

/// The instances that were lost while they had a request.
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
    /// How often it, or what became of it below, moved to another instance.
    moves: AtomicU32,
    /// The prompt's length, where the engine alone knows it; 0 until it does.
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
    /// A context that nothing else cancels. `id` must be unique among the requests in flight.
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

    /// Gives it another id, such as to a [`child`](Self::child) of what ends several requests together.
    #[must_use]
    pub fn with_id(mut self, id: impl Into<String>) -> Self {
        Arc::make_mut(&mut self.meta).id = id.into();
        self
    }

    /// Sets the instant after which the answer is of no use. A later deadline than the present one changes nothing.
    #[must_use]
    pub fn with_deadline(mut self, deadline: Instant) -> Self {
        self.deadline = Some(
            self.deadline
                .map_or(deadline, |earlier| earlier.min(deadline)),
        );
        self
    }

    /// Says that another instance had the request before, and when that began: the time that a worker gives its requests counts
    /// from there. An instant that was set before stays.
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

    /// Sets what the request has in common with others that are best served by the same instance. It stays in this process.
    #[must_use]
    pub fn with_affinity(mut self, key: impl Into<String>) -> Self {
        Arc::make_mut(&mut self.meta).affinity = Some(key.into());
        self
    }

    /// Asks those who route the request to say how. It stays in this process.
    #[must_use]
    pub fn with_explanation(mut self, explanation: Explanation) -> Self {
        self.explanation = Some(explanation);
        self
    }

    /// Sets how many instances may be lost while they have the request: one that brings down whoever takes it is so kept from the
    /// others. Clones, children and siblings made from now on count together. A limit that was set before stays.
    #[must_use]
    pub fn with_loss_limit(mut self, limit: u32) -> Self {
        if self.losses.is_none() {
            let count = AtomicU32::new(0);
            self.losses = Some(Arc::new(Losses { limit, count }));
        }
        self
    }

    /// Sets the number of prompt tokens, from which `output::stream` and `output::channel` fill in the usage.
    /// The Worker's adapter does this; engines called without a Worker do it themselves.
    #[must_use]
    pub fn with_prompt_tokens(mut self, prompt_tokens: u32) -> Self {
        self.prompt_tokens = prompt_tokens;
        self
    }

    /// The same request seen by the next station: cancelled with this one, or alone.
    #[must_use]
    pub fn child(&self) -> Self {
        let parent = Arc::clone(&self.cancel);
        let cancel = CancelNode::new(self.cancel.token.child_token(), Some(parent));
        Self {
            cancel: Arc::new(cancel),
            ..self.clone()
        }
    }

    /// The same request with a cancellation of its own: nothing above cancels it.
    #[must_use]
    pub fn detached(&self) -> Self {
        let alone = Self::new(String::new());
        Self {
            cancel: alone.cancel,
            ..self.clone()
        }
    }

    /// As [`Self::child`], for one of several sequences of a request: the id gets `-index` at its end, since ids are
    /// unique among the requests in flight.
    #[must_use]
    pub fn sibling(&self, index: usize) -> Self {
        let mut ctx = self.child();
        Arc::make_mut(&mut ctx.meta).id = format!("{}-{index}", self.id());
        ctx
    }

    /// The request's id.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.meta.id
    }

    /// Cancels the request for every holder of this context and its children. The first reason stays.
    pub fn cancel(&self, reason: CancelReason) {
        let code = CancelReason::ALL
            .iter()
            .position(|r| *r == reason)
            .unwrap_or(0);
        let code = u8::try_from(code + 1).unwrap_or(1);
        if self.cancel.reason().is_none() {
            // Two racing cancels: the first to store wins, the other's reason is dropped.
            let _ =
                self.cancel
                    .reason
                    .compare_exchange(0, code, Ordering::AcqRel, Ordering::Acquire);
        }
        self.cancel.token.cancel();
    }

    /// Whether the request was cancelled. Compute loops ask once a step.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        self.cancel.token.is_cancelled()
    }

    /// Why the request was cancelled, or `None` while it was not.
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

    /// As [`Self::cancelled`], as a future that owns what it needs, for hand-written streams.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub fn cancelled_owned(&self) -> impl Future<Output = ()> + Send + use<> {
        self.cancel.token.clone().cancelled_owned()
    }

    /// The instant after which the answer is of no use.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Time left until the deadline; zero when it has passed, `None` when there is none.
    #[must_use]
    pub fn time_left(&self) -> Option<Duration> {
        self.deadline
            .map(|deadline| deadline.saturating_duration_since(Instant::now()))
    }

    /// When the request began at another instance, where one [had it before](Self::with_began).
    #[must_use]
    pub fn began(&self) -> Option<Instant> {
        self.began
    }

    /// The span that everything done for the request is logged in: with its id, and its trace's where it has one.
    #[must_use]
    pub fn span(&self) -> tracing::Span {
        let trace_id = self.trace().map(TraceContext::trace_id);
        tracing::debug_span!("request", request_id = self.id(), trace_id)
    }

    /// The trace the request belongs to.
    #[must_use]
    pub fn trace(&self) -> Option<&TraceContext> {
        self.meta.trace.as_ref()
    }

    /// A header by its lower-case name.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.meta.headers.get(name).map(String::as_str)
    }

    /// All headers.
    #[must_use]
    pub fn headers(&self) -> &BTreeMap<String, String> {
        &self.meta.headers
    }

    /// What the request has in common with others that are best served by the same instance.
    #[must_use]
    pub fn affinity(&self) -> Option<&str> {
        self.meta.affinity.as_deref()
    }

    /// Where those who route the request say how; `None` when nobody asks.
    #[must_use]
    pub fn explanation(&self) -> Option<&Explanation> {
        self.explanation.as_ref()
    }

    /// Notes that the request moved to another instance, for whoever holds this context or one above.
    pub fn note_move(&self) {
        let mut node = Some(&self.cancel);
        while let Some(here) = node {
            here.moves.fetch_add(1, Ordering::Relaxed);
            node = here.parent.as_ref();
        }
    }

    /// How often the request moved to another instance, its choices together.
    #[must_use]
    pub fn moves(&self) -> u32 {
        self.cancel.moves.load(Ordering::Relaxed)
    }

    /// Notes that an instance was lost that had the request. One that could not be reached had not.
    pub fn note_loss(&self) {
        if let Some(losses) = &self.losses {
            losses.count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether more instances were lost than the [limit](Self::with_loss_limit) says: no other one is to take the request.
    #[must_use]
    pub fn has_lost_too_many(&self) -> bool {
        let losses = self.losses.as_ref();
        losses.is_some_and(|losses| losses.count.load(Ordering::Relaxed) > losses.limit)
    }

    /// The number of prompt tokens, as the adapter counted them, or else as the engine told; 0 when neither knows.
    #[must_use]
    pub fn prompt_tokens(&self) -> u32 {
        match self.prompt_tokens {
            0 => self.cancel.prompt_tokens.load(Ordering::Relaxed),
            counted => counted,
        }
    }

    /// Tells the number of prompt tokens of an input that is no tokens, for the usage of an answer that the engine does not finish:
    /// one that is cancelled. Clones of the context hear of it.
    pub fn tell_prompt_tokens(&self, prompt_tokens: u32) {
        let told = &self.cancel.prompt_tokens;
        told.store(prompt_tokens, Ordering::Relaxed);
    }
}

impl fmt::Debug for RequestContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestContext")
            .field("id", &self.meta.id)
            .field("cancelled", &self.cancel_reason())
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

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
