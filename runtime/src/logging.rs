//! The process's log on standard error and, with the feature `otlp`, its spans to a collector. Binaries initialize both once,
//! before anything else.

mod console;
mod line;

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::sync::OnceLock;

use genset_backend_common::{EngineError, error::At};
use tracing::Dispatch;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt, registry, reload};

#[cfg(feature = "otlp")]
use crate::telemetry::otlp;
pub use console::tokio_console_support;
use line::OneLine;

/// The environment variables with the log filter, in `RUST_LOG` syntax; the first that is set and not empty wins. The second is
/// the name that NVIDIA Dynamo's scripts use.
const LOG_VARIABLES: [&str; 2] = ["GENSET_LOG", "DYN_LOG"];

/// The process's log filter, once initialized.
static FILTER: OnceLock<reload::Handle<EnvFilter, Registry>> = OnceLock::new();

/// A guard that must outlive everything that logs: dropping it sends the pending spans, which takes at most three
/// seconds. Drop it outside of an async runtime.
#[must_use = "dropped at once, it ends the export of spans"]
#[derive(Debug, Default)]
pub struct Logging {
    #[cfg(feature = "otlp")]
    _export: Option<otlp::Export>,
}

/// Writes the log to stderr. The default level is `warn` for `quiet` programs, otherwise `info`; `verbose` raises it.
/// `GENSET_LOG`, or else `DYN_LOG` (`RUST_LOG` syntax), overrides both. With the feature `otlp` and
/// `OTEL_EXPORTER_OTLP_ENDPOINT`, spans go to that collector. With the feature `tokio-console`, tasks are shown on its usual
/// port, on loopback.
///
/// # Examples
/// ```no_run
/// let logging = genset_runtime::init_logging(0, false);
/// // Run, to the end of every async runtime.
/// drop(logging);
/// ```
pub fn init_logging(verbose: u8, quiet: bool) -> Logging {
    init_logging_with_console(verbose, quiet, None)
}

/// Like [`init_logging`]; with the feature `tokio-console`, tasks are shown at `console`.
pub fn init_logging_with_console(verbose: u8, quiet: bool, console: Option<SocketAddr>) -> Logging {
    let level = match verbose {
        0 if quiet => "warn",
        0 => "info",
        1 => "debug",
        _ => "trace",
    };
    let usual = usual_filter(level);
    // An empty filter would log nothing, not even why the process ends.
    let said = LOG_VARIABLES.iter().find_map(|name| {
        let filter = std::env::var(name).ok()?;
        (!filter.is_empty()).then_some((name, filter))
    });
    let (filter, problem) = match said {
        None => (EnvFilter::new(usual), None),
        Some((name, text)) => match EnvFilter::try_new(&text) {
            Ok(filter) => (filter, None),
            Err(error) => (EnvFilter::new(usual), Some((name, error))),
        },
    };
    let (filter, handle) = reload::Layer::new(filter);
    let has_colours = shows_colours(&std::io::stderr());
    let log = fmt::layer()
        .with_writer(std::io::stderr)
        .with_ansi(has_colours)
        .event_format(format(has_colours))
        // It would report a write failure of standard error on standard error itself, and panic.
        .log_internal_errors(false)
        .with_filter(filter);
    let subscriber = registry().with(log);
    #[cfg(feature = "tokio-console")]
    let (shown, subscriber) = match console::layer(console) {
        Ok((layer, address)) => (Ok(address), subscriber.with(Some(layer))),
        Err(problem) => (Err(problem), subscriber.with(None)),
    };
    let (logging, is_first) = install(subscriber);
    #[cfg(feature = "tokio-console")]
    match shown {
        Ok(address) => tracing::info!(%address, "tokio-console may look"),
        Err(problem) => tracing::warn!("{problem}"),
    }
    #[cfg(not(feature = "tokio-console"))]
    console::warn(console);
    if is_first {
        // Only the first subscriber takes effect, and its filter with it.
        let _ = FILTER.set(handle);
    }
    if let (true, Some((name, error))) = (is_first, problem) {
        tracing::warn!(%error, "{name} cannot be read; the level is {level}");
    }
    logging
}

/// The filter of a level. The client of NATS logs each attempt to reach a server, several in a few seconds; our own lines say once a
/// minute why it is away.
fn usual_filter(level: &str) -> String {
    match level {
        "warn" | "info" => format!("{level},async_nats=off"),
        _ => level.to_owned(),
    }
}

/// Whether to colour a stream: a terminal that is not dumb (`TERM`), unless `NO_COLOR` is set.
pub fn shows_colours(stream: &impl IsTerminal) -> bool {
    stream.is_terminal()
        && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
        && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Changes the log filter from now on.
///
/// # Errors
/// `InvalidArgument` for an invalid filter, `Unsupported` if another program owns the log.
pub(crate) fn set_log_filter(text: &str) -> Result<(), EngineError> {
    let filter = EnvFilter::try_new(text)
        .map_err(|error| EngineError::invalid_argument(At::other("filter"), error.to_string()))?;
    let at = || At::other("log_level");
    let Some(handle) = FILTER.get() else {
        let problem = "this process's log was not set up by Genset";
        return Err(EngineError::unsupported(at(), problem));
    };
    tracing::info!(filter = text, "changing the log filter");
    let changed = handle.reload(filter);
    changed.map_err(|error| EngineError::unsupported(at(), error.to_string()))
}

/// The event format: one line per event.
fn format(has_colours: bool) -> OneLine<fmt::format::Format> {
    OneLine {
        inner: fmt::format().with_ansi(has_colours),
        has_colours,
    }
}

/// Ignores records of the `log` crate, whatever features other crates enable.
fn is_set_as_first(subscriber: impl Into<Dispatch>) -> bool {
    tracing::dispatcher::set_global_default(subscriber.into()).is_ok()
}

/// Installs the process's subscriber; returns whether it is the first, the only one to take effect.
#[cfg(not(feature = "otlp"))]
fn install(subscriber: impl Into<Dispatch>) -> (Logging, bool) {
    let is_first = is_set_as_first(subscriber);
    let endpoint = std::env::var_os("OTEL_EXPORTER_OTLP_ENDPOINT");
    if is_first && endpoint.is_some_and(|endpoint| !endpoint.is_empty()) {
        tracing::warn!(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, but this build exports no spans; build with the feature otlp"
        );
    }
    (Logging::default(), is_first)
}

/// As above, and exports spans if the environment asks for it.
#[cfg(feature = "otlp")]
fn install<S>(subscriber: S) -> (Logging, bool)
where
    S: tracing::Subscriber
        + for<'a> tracing_subscriber::registry::LookupSpan<'a>
        + Send
        + Sync
        + 'static,
{
    let (export, problem) = match otlp::Export::from_environment() {
        Ok(export) => (export, None),
        Err(error) => (None, Some(error)),
    };
    let spans = export.as_ref().map(otlp::Export::layer);
    let is_first = is_set_as_first(subscriber.with(spans));
    if let Some(error) = problem {
        tracing::warn!(%error, "spans are not exported");
    }
    (Logging { _export: export }, is_first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nats_client_is_silent_at_the_usual_levels() {
        for (level, expected) in [
            ("warn", "warn,async_nats=off"),
            ("info", "info,async_nats=off"),
            ("debug", "debug"),
        ] {
            let filter = usual_filter(level);
            assert_eq!(filter, expected);
            EnvFilter::try_new(filter).unwrap();
        }
    }
}
