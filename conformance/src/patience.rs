//! [`Patience`]: how long a check may take, on the machine's clock.

use std::time::Duration;

use crate::trial::Progress;

/// A check whose answers continue may take this many times the limit, on a busy machine.
const BUSY: u32 = 8;

/// At least one part in this many of the time counts, however long threads waited for a CPU. So every check ends.
pub(crate) const LEAST_SHARE: u32 = 16;

/// Why a check was given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GivenUp {
    /// No item was read during the limit.
    Blocked,
    /// Items were read, but the check exceeded [`BUSY`] limits.
    Slow,
}

/// Counts a check's time. Time in which the process waited for a CPU does not count, since the engine did not run. Nor does a
/// wait with a longer limit of its own, such as a start's, unless it blocks the check's thread.
#[derive(Debug)]
pub(crate) struct Patience {
    limit: Duration,
    seen: Progress,
    /// The time since an item was read or a wait made progress.
    idle: Duration,
    all: Duration,
}

impl Patience {
    pub(crate) fn new(limit: Duration) -> Self {
        Self {
            limit,
            seen: Progress::default(),
            idle: Duration::ZERO,
            all: Duration::ZERO,
        }
    }

    /// How long a check may take whose answers continue.
    pub(crate) fn most(&self) -> Duration {
        self.limit * BUSY
    }

    /// `passed` is the time since the last look. During it, a thread waited `starved` for a CPU.
    pub(crate) fn look(
        &mut self,
        progress: Progress,
        passed: Duration,
        starved: Duration,
    ) -> Option<GivenUp> {
        let had = passed.saturating_sub(starved).max(passed / LEAST_SHARE);
        self.all += had;
        self.idle += had;
        let before = std::mem::replace(&mut self.seen, progress);
        if progress.waits != before.waits {
            // The idle time up to now belongs to the wait.
            self.all = self.all.saturating_sub(self.idle);
        }
        if progress != before {
            self.idle = Duration::ZERO;
        }
        if self.idle >= self.limit {
            Some(GivenUp::Blocked)
        } else if self.all >= self.most() {
            Some(GivenUp::Slow)
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn items(items: u64) -> Progress {
        Progress { items, waits: 0 }
    }

    /// The seconds until a check is given up, if it starves for `starved` of each second and reads this many items per second.
    fn seconds(limit: u64, starved: Duration, items_a_second: u64) -> (u64, GivenUp) {
        let mut patience = Patience::new(Duration::from_secs(limit));
        for second in 1.. {
            if let Some(why) = patience.look(items(second * items_a_second), SECOND, starved) {
                return (second, why);
            }
        }
        unreachable!("the loop has no end of its own")
    }

    #[test]
    fn an_engine_that_gives_nothing_is_blocked_after_the_limit() {
        assert_eq!(seconds(20, Duration::ZERO, 0), (20, GivenUp::Blocked));
    }

    #[test]
    fn an_engine_whose_answers_go_on_has_eight_times_the_limit() {
        assert_eq!(seconds(20, Duration::ZERO, 1), (160, GivenUp::Slow));
    }

    #[test]
    fn a_process_that_the_machine_keeps_waiting_has_the_same_time_to_run() {
        // It runs a tenth of the time, like one of thirty threads on two CPUs.
        let starved = SECOND * 9 / 10;
        assert_eq!(seconds(20, starved, 0), (200, GivenUp::Blocked));
        assert_eq!(seconds(20, starved, 1), (1600, GivenUp::Slow));
    }

    #[test]
    fn every_check_ends_however_little_it_runs() {
        assert_eq!(seconds(20, SECOND * 2, 0), (320, GivenUp::Blocked));
    }

    #[test]
    fn a_wait_with_a_limit_of_its_own_counts_for_nothing() {
        let mut patience = Patience::new(SECOND * 20);
        // The wait makes progress every fifth second.
        for second in 0..1000 {
            let progress = Progress {
                items: 0,
                waits: second / 5,
            };
            assert_eq!(patience.look(progress, SECOND, Duration::ZERO), None);
        }
    }

    #[test]
    fn an_item_begins_the_time_anew() {
        let mut patience = Patience::new(SECOND * 20);
        assert_eq!(patience.look(items(0), SECOND * 19, Duration::ZERO), None);
        assert_eq!(patience.look(items(1), SECOND * 19, Duration::ZERO), None);
        assert_eq!(patience.look(items(1), SECOND * 19, Duration::ZERO), None);
        assert_eq!(
            patience.look(items(1), SECOND, Duration::ZERO),
            Some(GivenUp::Blocked)
        );
    }
}
