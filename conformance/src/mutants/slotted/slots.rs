//! A limited number of slots and the queue for them.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::SlotFault;

pub(super) struct Slots {
    state: Mutex<State>,
    fault: SlotFault,
}

struct State {
    free: u32,
    /// The waiting requests with their priorities, in order of arrival.
    waiting: VecDeque<(i32, oneshot::Sender<Slot>)>,
}

/// A place to run. Dropping it passes it to the next in the queue.
pub(super) struct Slot(Option<Arc<Slots>>);

impl Slots {
    pub(super) fn new(free: u32, fault: SlotFault) -> Arc<Self> {
        let waiting = VecDeque::new();
        Arc::new(Self {
            state: Mutex::new(State { free, waiting }),
            fault,
        })
    }

    /// Whether a new request must wait.
    pub(super) fn is_full(&self) -> bool {
        self.state.lock().free == 0
    }

    /// A slot, now or in its turn. Dropping the receiver gives up the place.
    pub(super) fn take(slots: &Arc<Self>, priority: i32) -> oneshot::Receiver<Slot> {
        let (give, slot) = oneshot::channel();
        let mut state = slots.state.lock();
        if state.free > 0 {
            state.free -= 1;
            drop(state);
            // The receiver still exists.
            drop(give.send(Slot(Some(Arc::clone(slots)))));
        } else {
            state.waiting.push_back((priority, give));
        }
        slot
    }

    /// The highest priority; of several, the first to arrive.
    fn next<T>(&self, waiting: &mut VecDeque<(i32, T)>) -> Option<(i32, T)> {
        if self.fault == SlotFault::ForgetsTheQueue {
            return None;
        }
        if self.fault == SlotFault::NewestFirst {
            return waiting.pop_back();
        }
        let sign = if self.fault == SlotFault::PriorityIgnored {
            0
        } else if self.fault == SlotFault::LowestFirst {
            -1
        } else {
            1
        };
        let ranks = waiting
            .iter()
            .map(|(priority, _)| i64::from(*priority) * sign);
        let next = ranks
            .zip(0..)
            .min_by_key(|(rank, place)| (Reverse(*rank), *place));
        waiting.remove(next?.1)
    }

    fn give_back(slots: &Arc<Self>) {
        loop {
            let mut state = slots.state.lock();
            let Some((_, next)) = slots.next(&mut state.waiting) else {
                state.free += 1;
                return;
            };
            drop(state);
            match next.send(Slot(Some(Arc::clone(slots)))) {
                Ok(()) => return,
                // This request has left the queue: disarm its slot, and give the slot to the next.
                Err(mut slot) => drop(slot.0.take()),
            }
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(slots) = self.0.take() {
            Slots::give_back(&slots);
        }
    }
}

/// Holds a slot across an await without a guard: dropping the call there loses it.
pub(super) async fn reserve_carelessly(slot: oneshot::Receiver<Slot>) -> oneshot::Receiver<Slot> {
    let unguarded = ManuallyDrop::new(slot.await);
    tokio::task::yield_now().await;
    let (give, slot) = oneshot::channel();
    if let Ok(reserved) = ManuallyDrop::into_inner(unguarded) {
        // The receiver still exists.
        drop(give.send(reserved));
    }
    slot
}
