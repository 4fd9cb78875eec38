//! [`Log`]: counts the log lines that an operator would see.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::DefaultGuard;
use tracing::{Dispatch, Event, Level, Metadata, Subscriber};

/// Counts the lines of level `INFO` and above that this thread logs.
pub(crate) struct Log {
    lines: Arc<AtomicUsize>,
    _until: DefaultGuard,
    /// The first thread that reaches a log statement determines whether it is enabled. With one subscriber in the process, that
    /// thread asks its own, which another test's thread does not have. With two, all are asked.
    _second: Dispatch,
}

impl Log {
    /// Counts until it is dropped.
    pub(crate) fn watched() -> Self {
        let second = Dispatch::new(Counter(Arc::default()));
        let lines = Arc::new(AtomicUsize::new(0));
        let counter = Counter(Arc::clone(&lines));
        Self {
            lines,
            _until: tracing::subscriber::set_default(counter),
            _second: second,
        }
    }

    pub(crate) fn lines(&self) -> usize {
        self.lines.load(Ordering::Relaxed)
    }
}

struct Counter(Arc<AtomicUsize>);

impl Subscriber for Counter {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }

    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, _values: &Record<'_>) {}

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn event(&self, _event: &Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}
