//! [`Limits`]: time limits for an engine, scaled to its speed.

use std::time::Duration;

/// Time limits for each kind of operation. On a paused clock they cost nothing. In real time they are scaled by the pace of
/// warm-up requests, so that a slow engine does not fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// One call of a method (`generate`, `abort`, `drain`), and the next item of a stream.
    pub call: Duration,
    /// `cleanup`, which may take longer than any other call: a device has to be free again.
    pub cleanup: Duration,
    /// From a cancellation or a drop to its visible effect: 48 times the warm-up's time per token, if that is more than 2 s. The
    /// contract's ten times are those of a step, which takes longer in a full batch than in the warm-up.
    pub cancel: Duration,
    /// `start`.
    pub start: Duration,
    /// The limit of a whole check in wall clock time. A check that exceeds it has a blocked thread.
    pub wall: Duration,
    /// The maximum length of an answer that only needs to be long, in tokens.
    pub answer_tokens: u32,
    /// The time per token of a long answer on a paused clock; `None` if not measured. In real time it would depend on the load
    /// of the machine.
    pub token: Option<Duration>,
}

/// The total number of tokens of the warm-up requests.
const WARM_UP_TOKENS: u32 = 12;

/// The number of answers of full length that take half of a check's time.
const LONG_ANSWERS: u32 = 5;

/// The warm-up time that the base limits assume.
const BASE_WARM_UP: Duration = Duration::from_millis(500);

impl Limits {
    /// The limits for an engine that takes `warm_up` for three requests like those of the warm-up.
    #[must_use]
    pub fn scaled(warm_up: Duration) -> Self {
        let factor = (warm_up.as_secs_f64() / BASE_WARM_UP.as_secs_f64()).clamp(1.0, 100.0);
        let base = Self::default();
        let wall = base.wall.mul_f64(factor);
        let token = (warm_up / WARM_UP_TOKENS).max(Duration::from_micros(1));
        let affordable = (wall / 2 / LONG_ANSWERS).as_micros() / token.as_micros();
        Self {
            call: base.call.mul_f64(factor),
            cleanup: base.cleanup.mul_f64(factor),
            cancel: base.cancel.mul_f64(factor),
            start: base.start.mul_f64(factor),
            wall,
            answer_tokens: u32::try_from(affordable).unwrap_or(u32::MAX),
            token: None,
        }
    }

    /// Adds the time by which an engine's first request took longer than later ones, such as for kernels that it compiles. The
    /// engine of each check is a new one, and may need that time again.
    #[must_use]
    pub(crate) fn with_longer_first(self, longer: Duration) -> Self {
        Self {
            call: self.call + longer * 2,
            cancel: self.cancel + longer,
            wall: self.wall + longer * 2,
            ..self
        }
    }

    /// The limits on a paused clock, where waiting is free: only the wall clock limit is real. The warm-up time on that clock
    /// still scales the limits for effects that must come soon.
    #[must_use]
    pub fn virtual_time(warm_up: Duration) -> Self {
        let least = Duration::from_secs(5);
        Self {
            call: Duration::from_secs(3600),
            cleanup: Duration::from_secs(3600),
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
            cleanup: Duration::from_secs(5),
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
        let token = Duration::from_millis(200);
        assert_eq!(slow.cancel, token * 48);
    }

    #[test]
    fn a_longer_first_request_is_added_and_scales_nothing() {
        let seconds = Duration::from_secs;
        let usual = Limits::default();
        let compiles = usual.with_longer_first(seconds(10));
        assert_eq!(compiles.cancel, seconds(12));
        assert_eq!((compiles.call, compiles.wall), (seconds(25), seconds(40)));
        assert_eq!(
            (compiles.start, compiles.answer_tokens),
            (usual.start, usual.answer_tokens)
        );
    }

    #[test]
    fn soon_follows_the_pace_on_a_paused_clock_too() {
        let cancel = |ms| Limits::virtual_time(Duration::from_millis(ms)).cancel;
        assert_eq!(cancel(0), Duration::from_secs(5));
        assert_eq!(cancel(30_000), Duration::from_secs(120));
    }
}
