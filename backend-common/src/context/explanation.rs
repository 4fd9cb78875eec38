//! [`Explanation`]: how a request was routed, for clients that ask.

use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value;

/// The maximum number of decisions kept for one request; later ones are dropped.
pub const MAX_DECISIONS: usize = 16;

/// How a request was routed: one decision for each instance it was sent to, oldest first, over all its sequences. Routers add
/// decisions, and the context's creator reads them. Clones share state.
#[derive(Debug, Clone, Default)]
pub struct Explanation {
    decisions: Arc<Mutex<Vec<Value>>>,
}

impl Explanation {
    /// Adds a decision, unless there are [`MAX_DECISIONS`] already.
    pub fn add(&self, decision: Value) {
        let mut decisions = self.decisions.lock();
        if decisions.len() < MAX_DECISIONS {
            decisions.push(decision);
        }
    }

    /// Returns the decisions so far.
    #[must_use]
    pub fn decisions(&self) -> Vec<Value> {
        self.decisions.lock().clone()
    }
}
