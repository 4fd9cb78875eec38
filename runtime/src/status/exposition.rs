//! [`Exposition`]: the metrics as text. Encoding many metrics takes milliseconds, so it runs off the liveness
//! thread, one at a time, and once for all waiting callers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::body::Bytes;
use genset_backend_common::MetricsRegistry;
use tokio::runtime::Handle;
use tokio::sync::Mutex;

/// Clones share.
#[derive(Clone)]
pub(super) struct Exposition {
    metrics: MetricsRegistry,
    /// The runtime that encodes them.
    tasks: Handle,
    /// The number of requests so far.
    asked: Arc<AtomicU64>,
    last: Arc<Mutex<Written>>,
}

#[derive(Default)]
struct Written {
    /// The last request made before the encoding began: for it and all earlier ones, the text is fresh.
    up_to: u64,
    text: Bytes,
}

impl Exposition {
    /// Encodes on the blocking threads of the current runtime.
    pub(super) fn new(metrics: MetricsRegistry) -> Self {
        Self {
            metrics,
            tasks: Handle::current(),
            asked: Arc::default(),
            last: Arc::default(),
        }
    }

    /// The metrics, never older than this call; `None` if the process is ending.
    pub(super) async fn text(&self) -> Option<Bytes> {
        let ticket = self.asked.fetch_add(1, Ordering::SeqCst) + 1;
        let mut last = Arc::clone(&self.last).lock_owned().await;
        if last.up_to >= ticket {
            return Some(last.text.clone());
        }
        let (metrics, asked) = (self.metrics.clone(), Arc::clone(&self.asked));
        // It holds the lock to its end, so that a cancelled caller does not cause a second encoding.
        let writing = self.tasks.spawn_blocking(move || {
            let up_to = asked.load(Ordering::SeqCst);
            let text = Bytes::from(metrics.encode());
            last.up_to = up_to;
            last.text = text.clone();
            text
        });
        writing.await.ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn no_text_is_older_than_the_request() {
        let metrics = MetricsRegistry::default();
        let exposition = Exposition::new(metrics);
        let first = exposition.text().await.unwrap();
        assert_eq!(exposition.last.lock().await.up_to, 1);
        let held = exposition.last.lock().await;
        // Both wait for the same encoding, which begins after both requests.
        let mut waiting = [1, 2].map(|_| Box::pin(exposition.text()));
        for asking in &mut waiting {
            tokio::select! {
                biased;
                _ = asking => panic!("somebody else is writing"),
                () = std::future::ready(()) => {}
            }
        }
        drop(held);
        for asking in waiting {
            assert_eq!(asking.await.unwrap(), first);
        }
        assert_eq!(exposition.last.lock().await.up_to, 3);
    }
}
