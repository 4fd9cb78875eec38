//! [`Replies`]: chooses the reply for a request and counts how often each was used.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use genset_backend_common::{EngineError, RequestField};

use crate::conversation::Conversation;
use crate::script::{Reply, Script};

/// A script in play. Each start resets the counts.
#[derive(Debug)]
pub(crate) struct Replies {
    script: Arc<Script>,
    /// How often each reply was used, up to its `times`.
    uses: Vec<AtomicU32>,
}

impl Replies {
    pub(crate) fn new(script: Arc<Script>) -> Self {
        let uses = script.replies.iter().map(|_| AtomicU32::new(0)).collect();
        Self { script, uses }
    }

    pub(crate) fn script(&self) -> &Script {
        &self.script
    }

    /// Returns the first matching reply that is not used up, and uses it once.
    ///
    /// # Errors
    /// `InvalidArgument` if no reply matches. The error does not show the message: errors contain no prompt text.
    pub(crate) fn choose(&self, conversation: &Conversation) -> Result<&Reply, EngineError> {
        let mut matching = self
            .script
            .replies
            .iter()
            .zip(&self.uses)
            .filter(|(reply, _)| reply.matcher.matches(conversation));
        let chosen = matching.find(|(reply, uses)| take(uses, reply.times));
        chosen.map(|(reply, _)| reply).ok_or_else(|| {
            EngineError::invalid_argument(
                RequestField::Prompt,
                "no reply of the script matches the last user message, or those that do are used up; \
                 add one, or a last reply without `match` for all others",
            )
        })
    }
}

/// Takes one of `times` uses, if any is left.
fn take(uses: &AtomicU32, times: Option<u32>) -> bool {
    let Some(times) = times else { return true };
    let one_more = |used: u32| (used < times).then_some(used.saturating_add(1));
    uses.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more)
        .is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn concurrent_requests_take_no_more_uses_than_there_are() {
        let script = "[[reply]]\ntimes = 7\ntext = 'limited'\n[[reply]]\ntext = 'else'";
        let replies = Replies::new(Arc::new(script.parse().unwrap()));
        let limited = || {
            let chosen = replies.choose(&Conversation::default()).unwrap();
            usize::from(chosen.times.is_some())
        };
        let taken: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| (0..10).map(|_| limited()).sum::<usize>()))
                .collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .sum()
        });
        assert_eq!(taken, 7);
    }
}
