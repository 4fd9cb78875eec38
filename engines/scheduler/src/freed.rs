//! [`HeldSequence`]: an ended sequence whose blocks stay allocated until its holder drops it.

use std::sync::{Arc, Mutex, PoisonError};

use crate::sequence::SequenceId;

/// Reports, from any thread, the held sequences that were dropped, to the driver of the scheduler. Clones share one list.
#[derive(Clone)]
pub struct FreedSequences {
    ids: Arc<Mutex<Vec<SequenceId>>>,
    nudge: Arc<dyn Fn() + Send + Sync>,
}

impl FreedSequences {
    /// Creates an empty list. Each dropped [`HeldSequence`] calls `nudge`, which must not block.
    #[must_use]
    pub fn new(nudge: impl Fn() + Send + Sync + 'static) -> Self {
        Self {
            ids: Arc::default(),
            nudge: Arc::new(nudge),
        }
    }

    /// Returns the sequences that were dropped since the last call.
    #[must_use]
    pub fn take(&self) -> Vec<SequenceId> {
        let mut ids = self.ids.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *ids)
    }

    /// Creates the holder of a sequence that ends as [`Held`](crate::Outcome::Held).
    #[must_use]
    pub fn holding(&self, id: SequenceId) -> HeldSequence {
        HeldSequence {
            id,
            freed: self.clone(),
        }
    }
}

genset_backend_common::debug_as!(|_| FreedSequences { .. });

/// A sequence whose blocks are held. Dropping it frees them.
#[derive(Debug)]
pub struct HeldSequence {
    id: SequenceId,
    freed: FreedSequences,
}

impl HeldSequence {
    /// The sequence's id.
    #[must_use]
    pub fn id(&self) -> SequenceId {
        self.id
    }
}

impl Drop for HeldSequence {
    fn drop(&mut self) {
        let mut ids = self
            .freed
            .ids
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        ids.push(self.id);
        drop(ids);
        (self.freed.nudge)();
    }
}
