//! [`Limits`]: how long an engine may take, scaled to how fast it is.

use std::time::Duration;

/// How long an engine may take for each kind of thing. On a paused clock they cost nothing; in real time they are scaled
/// by how long three warm-up requests took, so that a slow engine is not a failing one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// One call of a method (`generate`, `abort`, `drain`, `cleanup`), and the next item of a stream.
    pub call: Duration,
    /// From a cancellation or a drop to its visible effect.
    pub cancel: Duration,
    /// `start`.
    pub start: Duration,
    /// The whole check, on the wall clock: past it the engine blocks its thread.
    pub wall: Duration,
    /// The longest answer that a check asks for only to have a long one, in tokens.
    pub answer_tokens: u32,
    /// What a token of a long answer takes on a paused clock; `None` where that was not measured. Real time would say how busy
    /// the machine was.
    pub token: Option<Duration>,
}

/// Tokens that the warm-up requests ask for together.
const WARM_UP_TOKENS: u32 = 12;

/// Answers of full length that take a check half its time.
const LONG_ANSWERS: u32 = 5;

/// The warm-up time for which the base limits are made.
const BASE_WARM_UP: Duration = Duration::from_millis(500);

impl Limits {
    /// The limits of an engine whose three warm-up requests took `warm_up`.
    #[must_use]
    pub fn scaled(warm_up: Duration) -> Self {
        let factor = (warm_up.as_secs_f64() / BASE_WARM_UP.as_secs_f64()).clamp(1.0, 100.0);
        let base = Self::default();
        let wall = base.wall.mul_f64(factor);
        let token = (warm_up / WARM_UP_TOKENS).max(Duration::from_micros(1));
        let affordable = (wall / 2 / LONG_ANSWERS).as_micros() / token.as_micros();
        Self {
            call: base.call.mul_f64(factor),
            cancel: base.cancel.mul_f64(factor),
            start: base.start.mul_f64(factor),
            wall,
            answer_tokens: u32::try_from(affordable).unwrap_or(u32::MAX),
            token: None,
        }
    }

    /// The limits on a paused clock, where waiting is free: only the wall clock is real. What the three warm-up requests took
    /// on that clock still says how soon is soon.
    #[must_use]
    pub fn virtual_time(warm_up: Duration) -> Self {
        let least = Duration::from_secs(5);
        Self {
            call: Duration::from_secs(3600),
            cancel: Self::scaled(warm_up).cancel.max(least),
            start: Duration::from_secs(3600),
            answer_tokens: u32::MAX,
            ..Self::default()
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            call: Duration::from_secs(5),
            cancel: Duration::from_secs(2),
            start: Duration::from_secs(60),
            wall: Duration::from_secs(20),
            answer_tokens: 1000,
            token: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_engine_gets_more_time_and_is_asked_for_less() {
        let swift = Limits::scaled(Duration::from_millis(12));
        let slow = Limits::scaled(Duration::from_millis(2400));
        assert_eq!(
            (swift.wall, swift.answer_tokens),
            (Duration::from_secs(20), 2000)
        );
        assert_eq!(
            (slow.wall, slow.answer_tokens),
            (Duration::from_secs(96), 48)
        );
    }

    #[test]
    fn soon_follows_the_pace_on_a_paused_clock_too() {
        let cancel = |ms| Limits::virtual_time(Duration::from_millis(ms)).cancel;
        assert_eq!(cancel(0), Duration::from_secs(5));
        assert_eq!(cancel(30_000), Duration::from_secs(120));
    }
}
