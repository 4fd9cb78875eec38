//! Whether a lease is alive, as a pure function of observations of its file.
//!
//! A reader compares the file with its last observation, and counts the time in which it scanned and nothing changed. It never
//! compares a file's time with its own clock, with one exception: a file first seen with a time near the clock's was
//! just written and counts as alive without a beat.

use std::time::{Duration, SystemTime};

/// The properties that change when a lease beats or is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileMark {
    pub(super) modified: SystemTime,
    pub(super) inode: u64,
    pub(super) length: u64,
}

/// A reader's verdict on a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// First seen with a time far from the clock's: it is alive once the reader sees it change.
    Undecided,
    Alive,
    Dead,
}

/// A reader's observations of a lease.
#[derive(Debug)]
pub(super) struct Liveness {
    mark: FileMark,
    silent: Duration,
    verdict: Verdict,
}

impl Liveness {
    pub(super) fn first_seen(mark: FileMark, clock: SystemTime, time_to_live: Duration) -> Self {
        let (age, is_near) = match clock.duration_since(mark.modified) {
            Ok(age) => (age, age < time_to_live),
            Err(ahead) => (Duration::ZERO, ahead.duration() < time_to_live),
        };
        if is_near {
            // The silence before this reader started counts, so that a dead lease expires no later for late readers.
            Self {
                mark,
                silent: age,
                verdict: Verdict::Alive,
            }
        } else {
            Self::unjudged(mark)
        }
    }

    /// Like [`Self::first_seen`], without the shortcut.
    pub(super) fn unjudged(mark: FileMark) -> Self {
        Self {
            mark,
            silent: Duration::ZERO,
            verdict: Verdict::Undecided,
        }
    }

    /// Takes in a scan of the file, `watched` after the previous one. Returns whether the file has changed.
    pub(super) fn observe(
        &mut self,
        mark: FileMark,
        watched: Duration,
        time_to_live: Duration,
    ) -> bool {
        let is_changed = mark != self.mark;
        if is_changed {
            self.mark = mark;
            self.silent = Duration::ZERO;
            self.verdict = Verdict::Alive;
        } else {
            self.silent = self.silent.saturating_add(watched);
            if self.silent >= time_to_live {
                self.verdict = Verdict::Dead;
            }
        }
        is_changed
    }

    /// Restarts its time to live: an outage caused the silence so far.
    pub(super) fn pardon(&mut self) {
        self.silent = Duration::ZERO;
    }

    pub(super) fn verdict(&self) -> Verdict {
        self.verdict
    }

    pub(super) fn silent(&self) -> Duration {
        self.silent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIVE: Duration = Duration::from_secs(2);
    const TICK: Duration = Duration::from_millis(200);

    fn at(seconds: u64) -> FileMark {
        FileMark {
            modified: SystemTime::UNIX_EPOCH + Duration::from_secs(seconds),
            inode: 1,
            length: 1,
        }
    }

    fn clock(seconds: u64) -> SystemTime {
        at(seconds).modified
    }

    #[test]
    fn a_file_with_a_time_near_the_clock_is_alive_at_once() {
        for seconds in [999, 1000, 1001] {
            let lease = Liveness::first_seen(at(seconds), clock(1000), LIVE);
            assert_eq!(lease.verdict(), Verdict::Alive, "{seconds}");
        }
    }

    #[test]
    fn a_file_with_any_other_time_is_alive_once_it_changes() {
        for seconds in [0, 998, 1002, 9999] {
            let mut lease = Liveness::first_seen(at(seconds), clock(1000), LIVE);
            lease.observe(at(seconds), TICK, LIVE);
            assert_eq!(lease.verdict(), Verdict::Undecided, "{seconds}");
            // Even if its time goes back.
            lease.observe(at(seconds / 2 + 1), TICK, LIVE);
            assert_eq!(lease.verdict(), Verdict::Alive, "{seconds}");
        }
    }

    #[test]
    fn silence_kills_and_a_change_revives() {
        let mut lease = Liveness::first_seen(at(1000), clock(1000), LIVE);
        for _ in 0..9 {
            lease.observe(at(1000), TICK, LIVE);
            assert_eq!(lease.verdict(), Verdict::Alive);
        }
        lease.observe(at(1000), TICK, LIVE);
        assert_eq!(lease.verdict(), Verdict::Dead);
        lease.observe(at(1001), TICK, LIVE);
        assert_eq!(lease.verdict(), Verdict::Alive);
    }

    #[test]
    fn the_silence_before_the_reader_came_counts() {
        let mut lease = Liveness::first_seen(at(999), clock(1000), LIVE);
        for _ in 0..5 {
            lease.observe(at(999), TICK, LIVE);
        }
        assert_eq!(lease.verdict(), Verdict::Dead);
    }

    #[test]
    fn a_pardoned_lease_has_its_whole_time_again() {
        let mut lease = Liveness::first_seen(at(1000), clock(1000), LIVE);
        lease.observe(at(1000), LIVE - TICK, LIVE);
        lease.pardon();
        lease.observe(at(1000), LIVE - TICK, LIVE);
        assert_eq!(lease.verdict(), Verdict::Alive);
    }
}
