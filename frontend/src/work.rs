//! [`WorkThreads`] runs the long work of requests: parsing bodies, rendering templates, tokenizing prompts, writing answers
//! as JSON.
//!
//! An async thread serves all connections and the links to workers: work that occupies one for more than a few milliseconds
//! delays everybody. So work is measured in bytes before it starts, and long work runs on threads of its own, as many as
//! there are slots. It is not for work that waits: no work here does I/O.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::{CancelReason, EngineError, MetricsRegistry};
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::error::ApiError;

/// Work on fewer bytes of text runs inline: the worst text takes a tokenizer less than 3 ms then.
pub(crate) const SHORT_WORK_BYTES: usize = 4 << 10;

/// Inline work that took longer than this yields before the request continues.
const LONG_TURN: Duration = Duration::from_millis(1);

/// Limits how much long work runs at once; more waits. Clones share the limit.
#[derive(Debug, Clone)]
pub struct WorkThreads {
    places: Arc<Semaphore>,
    running: Gauge,
    waiting: Gauge,
}

impl WorkThreads {
    /// A limit of `places`.
    #[must_use]
    pub fn new(places: NonZeroUsize) -> Self {
        Self {
            places: Arc::new(Semaphore::new(places.get().min(Semaphore::MAX_PERMITS))),
            running: Gauge::default(),
            waiting: Gauge::default(),
        }
    }

    /// Registers the metrics.
    pub(crate) fn register(&self, registry: &MetricsRegistry) {
        registry.register(
            "genset_frontend_long_work_running",
            "Long bodies, templates and prompts that are being processed",
            self.running.clone(),
        );
        registry.register(
            "genset_frontend_long_work_waiting",
            "Long bodies, templates and prompts that wait for a thread",
            self.waiting.clone(),
        );
    }

    /// Runs `work` inline if it has few bytes; otherwise on a thread for blocking work, once a slot is free.
    ///
    /// # Errors
    /// The error of `work`; a 504 if the deadline passes while it waits.
    ///
    /// # Cancel safety
    /// If the future is dropped, work that has not started never starts; running work finds that its
    /// [`Owner`] has left, and stops soon.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        deadline: Option<Instant>,
        work: impl FnOnce(&Owner) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if bytes < SHORT_WORK_BYTES {
            return brief(|| work(&Owner::default())).await;
        }
        let place = self.place(deadline).await?;
        let owner = Owner::default();
        let _leaving = owner.leaves.clone().drop_guard();
        let done = tokio::task::spawn_blocking(move || {
            let _place = place;
            owner.check()?;
            work(&owner)
        });
        done.await.unwrap_or_else(|error| {
            let failed = EngineError::internal("processing the request failed");
            Err(failed.with_source(error).into())
        })
    }

    async fn place(&self, deadline: Option<Instant>) -> Result<Place, EngineError> {
        let permit = match Arc::clone(&self.places).try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) => {
                let _waiting = Counted::new(self.waiting.clone());
                acquire(&self.places, deadline).await?
            }
        };
        Ok(Place::new(permit, self.running.clone()))
    }
}

/// Waits for a permit of a semaphore that nobody closes.
///
/// # Errors
/// `DeadlineExceeded` if the deadline passes first.
pub(crate) async fn acquire(
    permits: &Arc<Semaphore>,
    deadline: Option<Instant>,
) -> Result<OwnedSemaphorePermit, EngineError> {
    let acquired = Arc::clone(permits).acquire_owned();
    let permit = match deadline {
        None => acquired.await,
        Some(deadline) => tokio::time::timeout_at(deadline, acquired)
            .await
            .map_err(|_elapsed| CancelReason::Deadline.to_error())?,
    };
    permit.map_err(|_closed| CancelReason::Shutdown.to_error())
}

/// Runs `work` inline, and yields if it took long.
pub(crate) async fn brief<T>(work: impl FnOnce() -> T) -> T {
    let started = Instant::now();
    let done = work();
    if started.elapsed() > LONG_TURN {
        tokio::task::yield_now().await;
    }
    done
}

/// The caller that waits for work. Clones are the same one.
#[derive(Debug, Clone, Default)]
pub(crate) struct Owner {
    leaves: CancellationToken,
}

impl Owner {
    /// Whether the caller has left; long work checks now and then.
    pub(crate) fn has_left(&self) -> bool {
        self.leaves.is_cancelled()
    }

    /// Ends work whose caller has left.
    ///
    /// # Errors
    /// An error that nobody sees.
    pub(crate) fn check(&self) -> Result<(), ApiError> {
        match self.has_left() {
            true => Err(CancelReason::Client.to_error().into()),
            false => Ok(()),
        }
    }
}

/// The place of something that runs or waits; dropping it admits the next.
#[derive(Debug)]
pub(crate) struct Place {
    /// Declared first: the next one is counted only when this one is no more.
    _counted: Counted,
    _permit: OwnedSemaphorePermit,
}

impl Place {
    /// A place that `gauge` counts.
    pub(crate) fn new(permit: OwnedSemaphorePermit, gauge: Gauge) -> Self {
        Self {
            _counted: Counted::new(gauge),
            _permit: permit,
        }
    }
}

/// Counted in a gauge until it is dropped.
#[derive(Debug)]
struct Counted(Gauge);

impl Counted {
    fn new(gauge: Gauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::mpsc;

    use futures_util::FutureExt;
    use futures_util::future::BoxFuture;

    use super::*;

    const LONG: usize = SHORT_WORK_BYTES;

    /// Takes the only slot until the sender is dropped.
    pub(crate) async fn keep_busy(
        threads: &WorkThreads,
    ) -> (BoxFuture<'_, Result<(), ApiError>>, mpsc::SyncSender<()>) {
        let (begin, begun) = tokio::sync::oneshot::channel();
        let (end, ended) = mpsc::sync_channel::<()>(1);
        let work = move |_: &Owner| {
            begin.send(()).unwrap();
            // Until the sender is dropped.
            assert!(ended.recv().is_err());
            Ok(())
        };
        let mut working = threads.run(LONG, None, work).boxed();
        assert!((&mut working).now_or_never().is_none());
        begun.await.unwrap();
        (working, end)
    }

    #[tokio::test]
    async fn work_that_waits_when_its_owner_leaves_does_not_begin() {
        let threads = WorkThreads::new(NonZeroUsize::MIN);
        let (working, end) = keep_busy(&threads).await;
        let held = Arc::new(());
        let of_work = Arc::clone(&held);
        let work = move |_: &Owner| -> Result<(), ApiError> { panic!("it began: {of_work:?}") };
        assert!(threads.run(LONG, None, work).now_or_never().is_none());
        assert_eq!(Arc::strong_count(&held), 1, "something of it is kept");
        assert_eq!((threads.running.get(), threads.waiting.get()), (1, 0));
        drop(end);
        working.await.unwrap();
        assert!(threads.run(LONG, None, |_| Ok(())).await.is_ok());
    }

    #[tokio::test]
    async fn work_is_told_that_its_owner_left() {
        let threads = WorkThreads::new(NonZeroUsize::MIN);
        let (begin, begun) = tokio::sync::oneshot::channel();
        let (end, ended) = tokio::sync::oneshot::channel();
        let work = move |owner: &Owner| -> Result<(), ApiError> {
            begin.send(()).unwrap();
            while !owner.has_left() {
                std::thread::yield_now();
            }
            end.send(owner.check().is_err()).unwrap();
            Ok(())
        };
        let mut working = threads.run(LONG, None, work).boxed();
        assert!((&mut working).now_or_never().is_none());
        begun.await.unwrap();
        drop(working);
        assert!(ended.await.unwrap(), "its owner is there");
    }

    #[tokio::test]
    async fn work_waits_no_longer_than_its_deadline() {
        let threads = WorkThreads::new(NonZeroUsize::MIN);
        let (working, end) = keep_busy(&threads).await;
        let deadline = Some(Instant::now());
        let refused = threads.run(LONG, deadline, |_| Ok(())).await.unwrap_err();
        assert_eq!(refused.status, 504);
        drop(end);
        working.await.unwrap();
    }
}
