//! [`Readers`]: wakes the readers of a step's outputs with one message from the engine thread.
//!
//! Waking a task from outside its runtime costs a lock and often a system call. With dozens of sequences per step this would
//! slow the step down. So the engine thread leaves the wakers here, and a task of the runtime calls them.

use std::sync::Arc;
use std::task::Waker;

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Readers to wake.
#[derive(Debug, Default)]
pub(crate) struct Readers {
    waiting: Mutex<Waiting>,
    is_some: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
    wakers: Vec<Waker>,
    /// Whether [`Readers::serve`] is running.
    is_served: bool,
}

impl Readers {
    /// Hands over readers to wake; never blocks.
    pub(crate) fn wake(&self, wakers: impl IntoIterator<Item = Waker>) {
        let wakers: Vec<Waker> = wakers.into_iter().collect();
        if wakers.is_empty() {
            return;
        }
        let mut waiting = self.waiting.lock();
        if !waiting.is_served {
            drop(waiting);
            wakers.into_iter().for_each(Waker::wake);
            return;
        }
        waiting.wakers.extend(wakers);
        drop(waiting);
        self.is_some.notify_one();
    }

    /// Wakes readers until the future is dropped. Then it wakes the rest, and the engine thread itself wakes later ones.
    pub(crate) async fn serve(self: Arc<Self>) {
        self.waiting.lock().is_served = true;
        let end = EndOfService(&self);
        loop {
            end.0.is_some.notified().await;
            end.0.wake_all();
        }
    }

    fn wake_all(&self) {
        let wakers = std::mem::take(&mut self.waiting.lock().wakers);
        wakers.into_iter().for_each(Waker::wake);
    }
}

struct EndOfService<'a>(&'a Readers);

impl Drop for EndOfService<'_> {
    fn drop(&mut self) {
        self.0.waiting.lock().is_served = false;
        self.0.wake_all();
    }
}
