//! A request's place in a distributed trace: its W3C context travels with it from process to process. A process that exports
//! spans inserts its own span; any other passes the context on unchanged.

#[cfg(feature = "otlp")]
pub(crate) mod otlp;

use futures_util::TryStreamExt;
use genset_backend_common::{EngineError, Output, RequestContext};
use tracing::Span;

use crate::plane::ResponseStream;

/// Makes `span` a child of the request's trace, or the root of a new one, and returns the context for the next
/// process, with `span` as its parent. Without span export, both stay unchanged.
///
/// Call it before the span is entered.
#[must_use = "the next process needs the context"]
pub fn continue_trace(span: &Span, ctx: RequestContext) -> RequestContext {
    if span.is_disabled() {
        return ctx;
    }
    #[cfg(feature = "otlp")]
    let ctx = otlp::continue_trace(span, ctx);
    ctx
}

/// The span of a request at a worker, until the end of its response.
pub(crate) fn worker_span(ctx: &RequestContext) -> Span {
    tracing::debug_span!(
        "worker_request",
        otel.kind = "server",
        otel.status_code = tracing::field::Empty,
        error.r#type = tracing::field::Empty,
        request_id = ctx.id(),
    )
}

/// Marks a span's request as failed.
pub(crate) fn record_error(span: &Span, error: &EngineError) {
    span.record("otel.status_code", "ERROR");
    span.record("error.type", error.kind().name());
}

/// Keeps a span open until the stream is dropped, and marks it as failed if the stream yields an error. Returns the stream itself
/// if the span is disabled.
pub(crate) fn traced(outputs: ResponseStream<Output>, span: Span) -> ResponseStream<Output> {
    if span.is_disabled() {
        return outputs;
    }
    Box::pin(outputs.inspect_err(move |error| record_error(&span, error)))
}
