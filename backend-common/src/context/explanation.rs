//! [`Explanation`]: how a request was routed, for clients that ask.

use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value;

/// The most decisions that are kept of one request; later ones are dropped.
pub const MAX_DECISIONS: usize = 16;

/// How a request was routed: a decision for each instance that it was sent to, oldest first, of all its sequences together. Who
/// routes adds them, and whoever made the context reads them. Clones share.
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

    /// The decisions up to now.
    #[must_use]
    pub fn decisions(&self) -> Vec<Value> {
        self.decisions.lock().clone()
    }
}
