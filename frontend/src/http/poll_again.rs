//! [`PollAgain`]: polls a future again in place if it wakes itself.
//!
//! hyper wakes a connection's own task while it runs, about once a request. The async runtime takes that for yielding: it queues
//! the task again and wakes another thread to help, which finds nothing to do. That costs two system calls and two context
//! switches a request.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;

/// Polls in place before the task yields anyway, so that one connection cannot occupy a thread.
const MAX_TURNS: usize = 8;

/// Nobody polls: a wake goes to the task.
const IDLE: u8 = 0;
/// The future is being polled.
const POLLING: u8 = 1;
/// The future is being polled, and was woken during the poll.
const WOKEN: u8 = 2;

/// Polls one future; see the module.
#[derive(Debug)]
pub(super) struct PollAgain {
    wakes: Arc<Wakes>,
    waker: Waker,
}

#[derive(Debug)]
struct Wakes {
    task: AtomicWaker,
    state: AtomicU8,
}

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let noted =
            self.state
                .compare_exchange(POLLING, WOKEN, Ordering::AcqRel, Ordering::Acquire);
        if noted == Err(IDLE) {
            self.task.wake();
        }
    }
}

impl PollAgain {
    pub(super) fn new() -> Self {
        let wakes = Arc::new(Wakes {
            task: AtomicWaker::new(),
            state: AtomicU8::new(IDLE),
        });
        let waker = Waker::from(Arc::clone(&wakes));
        Self { wakes, waker }
    }

    /// Polls `future`, and again as long as it was woken during the poll.
    pub(super) fn poll<F: Future>(
        &self,
        mut future: Pin<&mut F>,
        cx: &mut Context<'_>,
    ) -> Poll<F::Output> {
        self.wakes.task.register(cx.waker());
        for _ in 0..MAX_TURNS {
            self.wakes.state.store(POLLING, Ordering::Release);
            let polled = future.as_mut().poll(&mut Context::from_waker(&self.waker));
            let state = self.wakes.state.swap(IDLE, Ordering::AcqRel);
            if polled.is_ready() || state != WOKEN {
                return polled;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Polls once a future that wakes itself in its first `wakes` turns. Returns how often it ran and how often its task was
    /// woken.
    fn run(wakes: usize) -> (usize, usize) {
        let task = Arc::new(Count::default());
        let waker = Waker::from(Arc::clone(&task));
        let turns = AtomicUsize::new(0);
        let future = std::future::poll_fn(|cx: &mut Context<'_>| {
            if turns.fetch_add(1, Ordering::SeqCst) < wakes {
                cx.waker().wake_by_ref();
            }
            Poll::<()>::Pending
        });
        let polled = PollAgain::new().poll(pin!(future), &mut Context::from_waker(&waker));
        assert!(polled.is_pending());
        (turns.into_inner(), task.0.load(Ordering::SeqCst))
    }

    #[test]
    fn a_future_that_wakes_itself_runs_again_and_its_task_is_not_woken() {
        assert_eq!(run(0), (1, 0));
        assert_eq!(run(3), (4, 0));
    }

    #[test]
    fn one_that_never_stops_yields_after_all() {
        assert_eq!(run(usize::MAX), (MAX_TURNS, 1));
    }

    #[test]
    fn a_wake_from_elsewhere_wakes_the_task() {
        let task = Arc::new(Count::default());
        let waker = Waker::from(Arc::clone(&task));
        let mut inner = None;
        let future = std::future::poll_fn(|cx: &mut Context<'_>| {
            inner = Some(cx.waker().clone());
            Poll::<()>::Pending
        });
        let again = PollAgain::new();
        assert!(
            again
                .poll(pin!(future), &mut Context::from_waker(&waker))
                .is_pending()
        );
        inner.unwrap().wake();
        assert_eq!(task.0.load(Ordering::SeqCst), 1);
    }
}
