//! [`RecentRequests`]: statistics of a Worker's recent requests, for observers of a fleet. Nothing is decided by them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::handles::Load;

/// The number of requests that count as recent.
const KEPT: usize = 64;

/// The recent requests of a Worker, without canaries. Clones share state.
#[derive(Debug, Clone, Default)]
pub struct RecentRequests(Arc<Mutex<Kept>>);

/// A number or a pair for each request, oldest first.
#[derive(Debug, Default)]
struct Kept {
    first_items: VecDeque<Duration>,
    prompts: VecDeque<(u32, u32)>,
}

fn keep<T>(kept: &mut VecDeque<T>, new: T) {
    if kept.len() == KEPT {
        kept.pop_front();
    }
    kept.push_back(new);
}

impl RecentRequests {
    /// Records the time from the call of `generate` to a request's first item.
    pub(crate) fn first_item(&self, after: Duration) {
        keep(&mut self.0.lock().first_items, after);
    }

    /// Records the prompt length of a finished request, and how many of its tokens were reused.
    pub(crate) fn prompt(&self, tokens: u32, cached: u32) {
        keep(&mut self.0.lock().prompts, (tokens, cached));
    }

    /// Returns `load` with the statistics filled in.
    #[must_use]
    pub fn describe(&self, load: Load) -> Load {
        let kept = self.0.lock();
        let mut first_items: Vec<Duration> = kept.first_items.iter().copied().collect();
        first_items.sort_unstable();
        let median = first_items.get(first_items.len() / 2);
        let sum = |of: fn(&(u32, u32)) -> u32| kept.prompts.iter().map(of).map(u64::from).sum();
        Load {
            recent_ttft_us: median
                .map(|after| u64::try_from(after.as_micros()).unwrap_or(u64::MAX)),
            recent_prompt_tokens: sum(|(tokens, _)| *tokens),
            recent_cached_tokens: sum(|(_, cached)| *cached),
            ..load
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_requests_count_and_older_ones_do_not() {
        let recent = RecentRequests::default();
        assert_eq!(recent.describe(Load::default()), Load::default());
        // From a time when everything was slow and nothing was cached.
        for _ in 0..3 {
            recent.first_item(Duration::from_secs(60));
            recent.prompt(1_000_000, 0);
        }
        for after_us in 0..u64::try_from(KEPT).unwrap() {
            recent.first_item(Duration::from_micros(after_us));
            recent.prompt(100, 25);
        }
        let engines = Load {
            running_requests: 3,
            ..Load::default()
        };
        let expected = Load {
            recent_ttft_us: Some(32),
            recent_prompt_tokens: 6400,
            recent_cached_tokens: 1600,
            ..engines
        };
        assert_eq!(recent.describe(engines), expected);
    }
}
