//! [`Served`]: what is served under one of Python's numbers, from the moment Python asks for it.
//!
//! Starting to serve takes time, and Python may stop or close it meanwhile. The number is therefore reserved at once, and the
//! operation learns from its [`Reservation`] what happened to it. `node` is the only caller.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use genset_runtime::Serving;
use parking_lot::Mutex;
use tokio_util::task::AbortOnDropHandle;

use crate::inbox::{Event, Inbox};
use crate::model::ServedModel;

/// Everything that is served, by Python's numbers.
pub(crate) type ServedByNumber = Arc<Mutex<HashMap<u64, Served>>>;

/// What is served under one of Python's numbers.
pub(crate) enum Served {
    /// Nothing yet: the operation that begins it is in progress.
    Beginning(EarlyStops),
    Endpoint {
        serving: Arc<Serving>,
        /// Lists it again when discovery loses it; `None` once it is unlisted.
        relist: Option<AbortOnDropHandle<()>>,
        is_draining: Arc<AtomicBool>,
    },
    Model(Arc<ServedModel>),
}

impl Served {
    /// Whether it accepts requests: it was listed, and is not being unlisted. As with any worker, an outage of discovery does not
    /// matter.
    pub(crate) fn is_ready(&self) -> bool {
        match self {
            Self::Beginning(_) => false,
            Self::Endpoint { relist, .. } => relist.is_some(),
            Self::Model(model) => model.worker.status().borrow().is_ready(),
        }
    }

    /// The served model, if it is one.
    pub(crate) fn model(&self) -> Option<&Arc<ServedModel>> {
        match self {
            Self::Model(model) => Some(model),
            Self::Beginning(_) | Self::Endpoint { .. } => None,
        }
    }
}

/// Operations that stop what has not begun to be served. They are done when this is dropped.
pub(crate) struct EarlyStops {
    ops: Vec<u64>,
    inbox: Inbox,
}

impl EarlyStops {
    /// Adds an operation.
    pub(crate) fn push(&mut self, op: u64) {
        self.ops.push(op);
    }

    /// How many operations there are.
    pub(crate) fn count(&self) -> usize {
        self.ops.len()
    }
}

impl Drop for EarlyStops {
    fn drop(&mut self) {
        for op in self.ops.drain(..) {
            self.inbox.put(Event::Done(op, Ok(None)));
        }
    }
}

/// A number reserved for what an operation begins to serve. If it is dropped unused, nothing is served under the number.
pub(crate) struct Reservation {
    number: u64,
    served: ServedByNumber,
}

impl Reservation {
    /// Reserves `number`.
    pub(crate) fn new(number: u64, served: &ServedByNumber, inbox: Inbox) -> Self {
        let stops = EarlyStops {
            ops: Vec::new(),
            inbox,
        };
        served.lock().insert(number, Served::Beginning(stops));
        Self {
            number,
            served: Arc::clone(served),
        }
    }

    /// Serves `begun` under the number, and returns the operations that already stop it. `None` if the number was closed meanwhile:
    /// then `begun` is dropped.
    pub(crate) fn fill(self, begun: Served) -> Option<EarlyStops> {
        let mut served = self.served.lock();
        let place = served.get_mut(&self.number)?;
        match std::mem::replace(place, begun) {
            Served::Beginning(stops) => Some(stops),
            // Only this value fills the place, and only once.
            Served::Endpoint { .. } | Served::Model(_) => None,
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut served = self.served.lock();
        if matches!(served.get(&self.number), Some(Served::Beginning(_))) {
            served.remove(&self.number);
        }
    }
}
