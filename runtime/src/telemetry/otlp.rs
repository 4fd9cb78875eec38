//! The export of spans over OTLP (HTTP, protobuf), configured by the standard `OTEL_*` variables.
//!
//! Spans wait in a bounded queue for a dedicated thread, which sends them in batches: a request never waits for the
//! collector. If the queue is full, spans are dropped.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use genset_backend_common::{RequestContext, context::TraceContext};
use opentelemetry::trace::{
    SpanContext, SpanId, TraceContextExt, TraceFlags, TraceId, TraceState, TracerProvider,
};
use opentelemetry_otlp::{ExporterBuildError, Protocol, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{SdkTracerProvider, SpanData, SpanExporter};
use tracing::{Span, Subscriber};
use tracing_opentelemetry::OpenTelemetrySpanExt;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::registry::LookupSpan;

/// How long the process waits for the collector at exit.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(3);

/// The default name of the service.
const SERVICE_NAME: &str = "genset";

/// Any of these enables the export.
const ENDPOINT_VARIABLES: [&str; 2] = [
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
];

/// A running export. Dropping it sends pending spans and ends the export.
#[derive(Debug)]
pub(crate) struct Export {
    provider: SdkTracerProvider,
}

impl Export {
    /// Starts an export if the environment asks for it, otherwise returns `None`.
    ///
    /// # Errors
    /// If a variable is invalid.
    pub(crate) fn from_environment() -> Result<Option<Self>, ExporterBuildError> {
        let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let is_disabled = std::env::var("OTEL_SDK_DISABLED")
            .is_ok_and(|value| value.eq_ignore_ascii_case("true"));
        if is_disabled || !ENDPOINT_VARIABLES.into_iter().any(is_set) {
            return Ok(None);
        }
        // Another crate may enable TLS in the exporter's HTTP client, which then needs a crypto provider.
        #[cfg(feature = "tls")]
        let _ = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_http()
            .with_protocol(Protocol::HttpBinary)
            .build()?;
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(Reporting::new(exporter))
            .with_resource(resource())
            .build();
        Ok(Some(Self { provider }))
    }

    /// The layer that passes our spans to the export, whatever the log shows.
    pub(crate) fn layer<S>(&self) -> impl Layer<S> + Send + Sync + use<S>
    where
        S: Subscriber + for<'a> LookupSpan<'a> + Send + Sync,
    {
        tracing_opentelemetry::layer()
            .with_tracer(self.provider.tracer("genset"))
            .with_location(false)
            .with_threads(false)
            .with_target(false)
            .with_tracked_inactivity(false)
            .with_filter(Targets::new().with_target("genset", LevelFilter::DEBUG))
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        // The exporter has reported failures.
        drop(self.provider.shutdown_with_timeout(FLUSH_TIMEOUT));
    }
}

fn resource() -> Resource {
    let resource = Resource::builder().build();
    let name = resource.get(&"service.name".into());
    let is_named = name.is_some_and(|name| !name.as_str().starts_with("unknown_service"));
    if is_named {
        return resource;
    }
    Resource::builder().with_service_name(SERVICE_NAME).build()
}

/// An exporter that logs when it starts to fail and when it recovers, and nothing in between.
#[derive(Debug)]
struct Reporting<E> {
    exporter: E,
    is_failing: AtomicBool,
}

impl<E> Reporting<E> {
    fn new(exporter: E) -> Self {
        Self {
            exporter,
            is_failing: AtomicBool::new(false),
        }
    }

    fn report(&self, result: &OTelSdkResult) {
        let was_failing = self.is_failing.swap(result.is_err(), Ordering::Relaxed);
        match result {
            Err(error) if !was_failing => {
                tracing::warn!(%error, "spans cannot be exported; they are dropped until the collector answers");
            }
            Ok(()) if was_failing => tracing::info!("spans are exported again"),
            Ok(()) | Err(_) => {}
        }
    }
}

impl<E: SpanExporter> SpanExporter for Reporting<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let result = self.exporter.export(batch).await;
        self.report(&result);
        result
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

/// See [`continue_trace`](super::continue_trace).
pub(super) fn continue_trace(span: &Span, ctx: RequestContext) -> RequestContext {
    if let Some(parent) = ctx.trace().and_then(remote_parent) {
        let parent = opentelemetry::Context::new().with_remote_span_context(parent);
        if span.set_parent(parent).is_err() {
            tracing::debug!("the span is not exported, or was entered already");
        }
    }
    let context = span.context();
    let own = context.span().span_context().clone();
    // A span that is not recorded would be a parent that no collector ever sees.
    if !own.is_valid() || !own.is_sampled() {
        return ctx;
    }
    let traceparent = format!(
        "00-{}-{}-{:02x}",
        own.trace_id(),
        own.span_id(),
        own.trace_flags().to_u8()
    );
    match TraceContext::parse(&traceparent, &own.trace_state().header()) {
        Some(trace) => ctx.with_trace(trace),
        None => ctx,
    }
}

/// The previous process's span, from its `traceparent`.
fn remote_parent(trace: &TraceContext) -> Option<SpanContext> {
    let mut fields = trace.traceparent.split('-').skip(1);
    let trace_id = TraceId::from_hex(fields.next()?).ok()?;
    let span_id = SpanId::from_hex(fields.next()?).ok()?;
    let flags = u8::from_str_radix(fields.next()?, 16).ok()?;
    let state = trace.tracestate.parse::<TraceState>().unwrap_or_default();
    // Only the flag "sampled" is passed on.
    let flags = TraceFlags::new(flags) & TraceFlags::SAMPLED;
    Some(SpanContext::new(trace_id, span_id, flags, true, state))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parent_is_read_from_the_header() {
        let header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-03";
        let trace = TraceContext::parse(header, "a=b").unwrap();
        let parent = remote_parent(&trace).unwrap();
        assert_eq!(
            parent.trace_id().to_string(),
            "0af7651916cd43dd8448eb211c80319c"
        );
        assert_eq!(parent.span_id().to_string(), "b7ad6b7169203331");
        assert!(parent.is_sampled() && parent.is_remote());
        assert_eq!(parent.trace_state().header(), "a=b");
    }
}
