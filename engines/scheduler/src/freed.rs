//! [`HeldSequence`]: an ended sequence whose blocks others may want, in the hands of whoever knows when they do no more.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::sequence::SequenceId;

/// The held sequences whose blocks nobody wants any more, told from any thread to whoever drives the scheduler. Clones share.
#[derive(Clone)]
pub struct FreedSequences {
    ids: Arc<Mutex<Vec<SequenceId>>>,
    nudge: Arc<dyn Fn() + Send + Sync>,
}

impl FreedSequences {
    /// None yet. `nudge` is called after each, and must not wait.
    #[must_use]
    pub fn new(nudge: impl Fn() + Send + Sync + 'static) -> Self {
        Self {
            ids: Arc::default(),
            nudge: Arc::new(nudge),
        }
    }

    /// Those that have come since the last call.
    #[must_use]
    pub fn take(&self) -> Vec<SequenceId> {
        let mut ids = self.ids.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *ids)
    }

    /// A sequence that ends as [`Held`](crate::Outcome::Held).
    #[must_use]
    pub fn holding(&self, id: SequenceId) -> HeldSequence {
        HeldSequence {
            id,
            freed: self.clone(),
        }
    }
}

impl fmt::Debug for FreedSequences {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FreedSequences").finish_non_exhaustive()
    }
}

/// A sequence whose blocks are held. Dropping it frees them.
#[derive(Debug)]
pub struct HeldSequence {
    id: SequenceId,
    freed: FreedSequences,
}

impl HeldSequence {
    /// The sequence.
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
