//! A request that a Python handler answers: [`CallHandler`] accepts it, Python holds the [`Call`], and [`Answer`] is the stream of
//! the items that Python writes.

use std::collections::{BTreeMap, VecDeque};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use futures_core::Stream;
use genset_backend_common::{
    CancelReason, EngineError, ErrorKind, RequestContext, async_trait, context::TraceContext,
};
use genset_runtime::plane::{Encoded, Handler, ResponseStream};
use parking_lot::Mutex;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error;
use crate::inbox::{Event, Inbox};

/// How many items Python may be ahead of an answer's reader.
const CREDIT: u32 = 32;

/// Numbers the calls of this process.
static NEXT_CALL: AtomicU64 = AtomicU64::new(1);

/// Serves an endpoint by passing its requests to Python.
#[derive(Debug)]
pub(crate) struct CallHandler {
    /// The endpoint's number in Python.
    pub(crate) serving: u64,
    pub(crate) inbox: Inbox,
    /// The most requests that Python may have at once.
    pub(crate) max_requests: usize,
    pub(crate) in_flight: Arc<AtomicUsize>,
    /// Whether new requests are refused.
    pub(crate) is_draining: Arc<AtomicBool>,
}

impl CallHandler {
    /// Passes a request to Python.
    ///
    /// # Errors
    /// `Overloaded` if Python has `max_requests` already, `EngineShutdown` while it drains.
    pub(crate) fn begin(&self, request: Bytes, ctx: RequestContext) -> Result<Answer, EngineError> {
        if self.is_draining.load(Ordering::Acquire) {
            let message = "this instance is shutting down; send the request to another";
            return Err(EngineError::engine_shutdown(message));
        }
        let place = Place::take(&self.in_flight, self.max_requests)?;
        let state = Arc::new(CallState {
            id: NEXT_CALL.fetch_add(1, Ordering::Relaxed),
            request,
            ctx,
            written: Mutex::default(),
        });
        self.inbox
            .put(Event::Called(self.serving, Arc::clone(&state)));
        Ok(Answer {
            cancelled: Box::pin(state.ctx.cancelled_owned()),
            state,
            inbox: self.inbox.clone(),
            taken: 0,
            has_told: false,
            has_ended: false,
            _place: place,
        })
    }
}

#[async_trait]
impl Handler<Encoded, Encoded> for CallHandler {
    async fn handle(
        &self,
        request: Encoded,
        ctx: RequestContext,
    ) -> Result<ResponseStream<Encoded>, EngineError> {
        Ok(Box::pin(self.begin(request.0, ctx)?))
    }
}

/// One of an endpoint's concurrent requests; released on drop.
#[derive(Debug)]
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(in_flight: &Arc<AtomicUsize>, limit: usize) -> Result<Self, EngineError> {
        let place = Self(Arc::clone(in_flight));
        if in_flight.fetch_add(1, Ordering::Relaxed) < limit {
            return Ok(place);
        }
        let message = format!("this endpoint has {limit} requests under way; try again later");
        Err(EngineError::new(ErrorKind::Overloaded, message))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The shared state of a request in progress.
#[derive(Debug)]
pub(crate) struct CallState {
    id: u64,
    request: Bytes,
    ctx: RequestContext,
    written: Mutex<Written>,
}

/// Written by Python, and not read yet.
#[derive(Debug, Default)]
struct Written {
    items: VecDeque<Bytes>,
    end: Option<Result<(), EngineError>>,
    reader: Option<Waker>,
    is_dropped: bool,
}

impl CallState {
    /// The parent context of the requests that this one makes.
    pub(crate) fn context(&self) -> &RequestContext {
        &self.ctx
    }

    fn write(&self, change: impl FnOnce(&mut Written)) {
        let reader = {
            let mut written = self.written.lock();
            if written.is_dropped || written.end.is_some() {
                return;
            }
            change(&mut written);
            written.reader.take()
        };
        if let Some(reader) = reader {
            reader.wake();
        }
    }
}

/// A request for a Python handler.
#[pyclass(frozen, module = "genset._native")]
#[derive(Debug)]
pub(crate) struct Call(pub(crate) Arc<CallState>);

#[pymethods]
impl Call {
    /// Its number in this process, used in events.
    #[getter]
    fn id(&self) -> u64 {
        self.0.id
    }

    /// How many items may be written before the reader grants more.
    #[getter]
    #[expect(clippy::unused_self, reason = "a getter of Python")]
    fn credit(&self) -> u32 {
        CREDIT
    }

    /// The request, MessagePack.
    #[getter]
    fn request<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.request)
    }

    #[getter]
    fn request_id(&self) -> &str {
        self.0.ctx.id()
    }

    #[getter]
    fn headers(&self) -> BTreeMap<String, String> {
        self.0.ctx.headers().clone()
    }

    /// `traceparent` and `tracestate`; empty without a trace.
    #[getter]
    fn trace(&self) -> (String, String) {
        let trace = self.0.ctx.trace().cloned().unwrap_or_default();
        let TraceContext {
            traceparent,
            tracestate,
        } = trace;
        (traceparent, tracestate)
    }

    /// Milliseconds until the deadline; `None` without one.
    #[getter]
    fn deadline_ms(&self) -> Option<u64> {
        let left = self.0.ctx.time_left()?;
        Some(u64::try_from(left.as_millis()).unwrap_or(u64::MAX))
    }

    /// Ends the answer.
    fn end(&self) {
        self.0.write(|written| written.end = Some(Ok(())));
    }

    /// Ends the answer with an error, the payload of an `Error` frame.
    fn fail(&self, error: &[u8]) {
        let error = error::from_bytes(error);
        self.0.write(|written| written.end = Some(Err(error)));
    }
}

impl Call {
    /// Writes an item. Writing beyond the credit is the caller's error.
    pub(crate) fn send(&self, item: &[u8]) -> PyResult<()> {
        if self.0.written.lock().items.len() > CREDIT as usize {
            return Err(PyRuntimeError::new_err(
                "an item without credit: wait for room first",
            ));
        }
        let item = Bytes::copy_from_slice(item);
        self.0.write(|written| written.items.push_back(item));
        Ok(())
    }
}

/// Python's answer as a stream. Dropping it tells Python that the reader is gone.
pub(crate) struct Answer {
    state: Arc<CallState>,
    inbox: Inbox,
    cancelled: Pin<Box<dyn Future<Output = ()> + Send>>,
    taken: u32,
    has_told: bool,
    has_ended: bool,
    _place: Place,
}

impl Answer {
    fn tell_stopped(&mut self) {
        if !std::mem::replace(&mut self.has_told, true) {
            let reason = self.state.ctx.cancel_reason();
            let reason = reason.unwrap_or(CancelReason::Client);
            self.inbox.put(Event::Stopped(self.state.id, reason.name()));
        }
    }

    /// Counts a taken item, and grants credit for many at once.
    fn count(&mut self) {
        self.taken += 1;
        if self.taken >= CREDIT / 2 {
            let taken = std::mem::take(&mut self.taken);
            self.inbox.put(Event::Credit(self.state.id, taken));
        }
    }
}

impl Stream for Answer {
    type Item = Result<Encoded, EngineError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        if this.has_ended {
            return Poll::Ready(None);
        }
        let mut written = this.state.written.lock();
        if let Some(item) = written.items.pop_front() {
            drop(written);
            this.count();
            return Poll::Ready(Some(Ok(Encoded(item))));
        }
        if let Some(end) = written.end.clone() {
            drop(written);
            this.has_ended = true;
            return Poll::Ready(end.err().map(Err));
        }
        written.reader = Some(cx.waker().clone());
        drop(written);
        if !this.has_told && this.cancelled.as_mut().poll(cx).is_ready() {
            this.tell_stopped();
        }
        Poll::Pending
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        {
            let mut written = self.state.written.lock();
            written.is_dropped = true;
            written.items.clear();
        }
        if !self.has_ended {
            self.tell_stopped();
        }
    }
}
