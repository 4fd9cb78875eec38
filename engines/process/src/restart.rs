//! [`RestartPolicy`]: whether and when a process is restarted after its end. Pure; an engine's supervisor applies it.

use std::time::Duration;

use genset_backend_common::EngineError;

/// When a process that ended by itself is restarted.
///
/// The pause before each attempt doubles, up to the longest pause. Half of each pause is random, so that the processes of a fleet
/// do not load at the same time. The attempt count is reset after the engine has served long enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RestartPolicy {
    /// The maximum number of attempts in a row, at least 1. After them the engine is dead.
    pub max_restarts: u32,
    /// The pause before the first attempt, more than 0.
    pub first_pause: Duration,
    /// The upper limit of a pause; at least `first_pause`.
    pub longest_pause: Duration,
    /// How long the engine must serve before the attempt count is reset.
    pub settled_after: Duration,
}

impl RestartPolicy {
    /// Allows this number of attempts in a row, with pauses of 1 s, 2 s, 4 s, up to a minute. Resets after ten minutes of
    /// service.
    #[must_use]
    pub fn new(max_restarts: u32) -> Self {
        Self {
            max_restarts,
            first_pause: Duration::from_secs(1),
            longest_pause: Duration::from_secs(60),
            settled_after: Duration::from_secs(600),
        }
    }

    /// As [`Self::new`]; `None` for 0 attempts.
    #[must_use]
    pub fn of(max_restarts: u32) -> Option<Self> {
        (max_restarts > 0).then(|| Self::new(max_restarts))
    }

    /// Checks the fields against each other.
    ///
    /// # Errors
    /// `InvalidArgument` for the setting `restart`.
    pub fn validate(&self) -> Result<(), EngineError> {
        let problem = if self.max_restarts == 0 {
            "max_restarts must be at least 1; leave the policy out for none"
        } else if self.first_pause.is_zero() {
            "first_pause must be more than 0"
        } else if self.longest_pause < self.first_pause {
            "longest_pause must be at least first_pause"
        } else {
            return Ok(());
        };
        Err(EngineError::invalid_argument("restart", problem))
    }
}

/// The number of attempts used.
#[derive(Debug)]
pub(crate) struct Backoff {
    policy: RestartPolicy,
    used: u32,
}

impl Backoff {
    pub(crate) fn new(policy: RestartPolicy) -> Self {
        Self { policy, used: 0 }
    }

    /// Records how long the engine served before it ended.
    pub(crate) fn served(&mut self, how_long: Duration) {
        if how_long >= self.policy.settled_after {
            self.used = 0;
        }
    }

    /// The pause before the next attempt; `None` if no attempt is left. `chance` is in `0.0..=1.0`.
    pub(crate) fn next_pause(&mut self, chance: f64) -> Option<Duration> {
        if self.used >= self.policy.max_restarts {
            return None;
        }
        let doubled = 2u32.checked_pow(self.used).unwrap_or(u32::MAX);
        self.used += 1;
        let whole = self.policy.first_pause.saturating_mul(doubled);
        let whole = whole.min(self.policy.longest_pause);
        Some(whole.mul_f64(0.5 + 0.5 * chance.clamp(0.0, 1.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> RestartPolicy {
        RestartPolicy {
            longest_pause: Duration::from_secs(5),
            ..RestartPolicy::new(4)
        }
    }

    fn pauses(backoff: &mut Backoff, chance: f64) -> Vec<u128> {
        std::iter::from_fn(|| backoff.next_pause(chance))
            .map(|pause| pause.as_millis())
            .collect()
    }

    #[test]
    fn pauses_double_up_to_the_longest_and_end() {
        assert_eq!(
            pauses(&mut Backoff::new(policy()), 1.0),
            [1000, 2000, 4000, 5000]
        );
        assert_eq!(
            pauses(&mut Backoff::new(policy()), 0.0),
            [500, 1000, 2000, 2500]
        );
    }

    #[test]
    fn by_itself_a_pause_is_twice_the_one_before_up_to_a_minute() {
        let millis = pauses(&mut Backoff::new(RestartPolicy::new(8)), 1.0);
        let seconds: Vec<_> = millis.iter().map(|pause| pause / 1000).collect();
        assert_eq!(seconds, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert_eq!(RestartPolicy::of(0), None);
    }

    #[test]
    fn only_an_engine_that_served_long_enough_begins_anew() {
        let mut backoff = Backoff::new(policy());
        assert_eq!(pauses(&mut backoff, 1.0).len(), 4);
        backoff.served(Duration::from_secs(599));
        assert_eq!(backoff.next_pause(1.0), None);
        backoff.served(Duration::from_secs(600));
        assert_eq!(pauses(&mut backoff, 1.0), [1000, 2000, 4000, 5000]);
    }

    #[test]
    fn many_attempts_overflow_nothing() {
        let mut backoff = Backoff::new(RestartPolicy::new(100));
        assert_eq!(
            pauses(&mut backoff, 1.0).last(),
            Some(&RestartPolicy::new(1).longest_pause.as_millis())
        );
    }

    #[test]
    fn impossible_policies_are_refused() {
        policy().validate().unwrap();
        for bad in [
            RestartPolicy::new(0),
            RestartPolicy {
                first_pause: Duration::ZERO,
                ..policy()
            },
            RestartPolicy {
                longest_pause: Duration::from_millis(1),
                ..policy()
            },
        ] {
            let error = bad.validate().unwrap_err();
            assert_eq!(error.at().map(|at| at.name()), Some("restart"));
        }
    }
}
