//! The duration of a step ([`TimeModel`], [`StepTimes`]), and the clock that waits for it ([`StepClock`]).

use std::time::Duration;

use genset_backend_common::spelling::none_of;
use genset_scheduler::{Scheduled, Scheduler, SequenceId};
use serde::Deserialize;
use serde_json::Value;
use tokio::time::Instant;

use crate::args::MockerArgs;

/// A time in milliseconds: a polynomial of degree two with a lower bound. Its variable is the number of tokens that a step
/// prefills, or the share of the KV cache in use.
///
/// In a file it is an object with any of these names, where missing ones are 0, or a number for a constant time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct TimeModel {
    /// The factor of the square.
    pub quadratic: f64,
    /// The factor of the variable.
    pub linear: f64,
    /// The constant term.
    pub constant: f64,
    /// The lower bound in milliseconds, at least 0.
    pub min: f64,
}

/// The names of a model's numbers.
const NAMES: [&str; 4] = ["quadratic", "linear", "constant", "min"];

/// The longest step in milliseconds: an hour. A larger value is a mistake in the model.
const LONGEST_MS: f64 = 3_600_000.0;

impl TimeModel {
    /// A constant time, in milliseconds.
    #[must_use]
    pub const fn constant(ms: f64) -> Self {
        Self {
            quadratic: 0.0,
            linear: 0.0,
            constant: ms,
            min: 0.0,
        }
    }

    /// The time at `x`, in milliseconds: between 0 and an hour.
    #[must_use]
    pub fn ms(&self, x: f64) -> f64 {
        let ms = (self.quadratic * x + self.linear) * x + self.constant;
        ms.max(self.min).clamp(0.0, LONGEST_MS)
    }

    /// Reads a number, or an object of numbers.
    pub(crate) fn read(value: Value) -> Result<Self, String> {
        if let Some(ms) = value.as_f64() {
            return Ok(Self::constant(ms));
        }
        let Value::Object(entries) = &value else {
            return Err(format!(
                "must be a number of milliseconds, or an object of {}",
                NAMES.join(", ")
            ));
        };
        if let Some(unknown) = entries.keys().find(|key| !NAMES.contains(&key.as_str())) {
            return Err(none_of(unknown, NAMES));
        }
        serde_json::from_value(value).map_err(|error| error.to_string())
    }

    pub(crate) fn check(&self) -> Result<(), &'static str> {
        let numbers = [self.quadratic, self.linear, self.constant, self.min];
        if !numbers.iter().all(|number| number.is_finite()) {
            return Err("must be made of finite numbers");
        }
        if self.min < 0.0 {
            return Err("its min must not be below 0");
        }
        Ok(())
    }
}

/// The durations of steps.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepTimes {
    prefill: TimeModel,
    decode: TimeModel,
    speedup_ratio: f64,
}

impl StepTimes {
    pub(crate) fn new(args: &MockerArgs) -> Self {
        Self {
            prefill: args.prefill_ms,
            decode: args.decode_ms,
            speedup_ratio: args.speedup_ratio,
        }
    }

    /// The time of a step that was just planned: its prompt tokens, then its decode rows. `is_received`: whether a sequence's KV
    /// blocks came from a prefill instance. Of such a prompt only the last token is computed, in a row like those of decode.
    pub(crate) fn of(
        &self,
        scheduler: &Scheduler,
        rows: &[Scheduled],
        is_received: impl Fn(SequenceId) -> bool,
    ) -> Duration {
        let (mut prefilled, mut has_decode) = (0, false);
        for row in rows {
            let prompt_tokens = scheduler
                .sequence(row.id)
                .map_or(0, |sequence| sequence.prompt_tokens());
            let decodes_from = prompt_tokens.saturating_sub(usize::from(is_received(row.id)));
            if row.tokens.len() == 1 && row.tokens.start >= decodes_from {
                has_decode = true;
            } else {
                prefilled += row.tokens.len();
            }
        }
        let mut ms = 0.0;
        if prefilled > 0 {
            ms += self.prefill.ms(float(prefilled));
        }
        if has_decode {
            let pool = scheduler.pool();
            ms += self.decode.ms(float(pool.used()) / float(pool.total()));
        }
        Duration::try_from_secs_f64(ms / 1000.0 / self.speedup_ratio).unwrap_or(Duration::MAX / 4)
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "counts of tokens and blocks are far below 2^52"
)]
pub(crate) fn float(count: usize) -> f64 {
    count as f64
}

/// When the last step ended by the model. On a busy machine waits end late. A step begins at the modelled end of the previous
/// one, so that delays do not add up.
#[derive(Debug)]
pub(crate) struct StepClock {
    /// `None` after an idle time: the next step begins now.
    last_end: Option<Instant>,
}

/// A longer lag is not a late timer: the process was stopped, or the machine is too slow. The clock does not make up for it.
const MAX_LAG: Duration = Duration::from_millis(100);

impl StepClock {
    pub(crate) fn new() -> Self {
        Self { last_end: None }
    }

    /// Tells the clock that there is no work.
    pub(crate) fn idle(&mut self) {
        self.last_end = None;
    }

    /// Waits for the time of one step.
    ///
    /// # Cancel safety
    /// A step whose wait is dropped counts as over.
    pub(crate) async fn pass(&mut self, step: Duration) {
        let now = Instant::now();
        let begin = match self.last_end {
            Some(end) if now.saturating_duration_since(end) <= MAX_LAG => end,
            Some(_) | None => now,
        };
        let end = begin + step;
        self.last_end = Some(end);
        if end > now {
            sleep_until(end).await;
        } else {
            // Steps that take no time must still yield to the readers.
            tokio::task::yield_now().await;
        }
    }
}

/// How late tokio's timers may be: they round up to whole milliseconds, and so does the system's wait behind them.
const TIMERS_LATE: Duration = Duration::from_millis(2);

/// A running clock has advanced after this time.
const CLOCK_GRAIN: Duration = Duration::from_micros(1);

/// Waits until `end`, to a tenth of a millisecond. A thread waits for the part below the resolution of tokio's timers.
async fn sleep_until(end: Instant) {
    if !is_virtual() {
        if let Some(almost) = end.checked_sub(TIMERS_LATE) {
            tokio::time::sleep_until(almost).await;
        }
        let left = end.saturating_duration_since(Instant::now());
        if !left.is_zero() {
            // Without a thread, the timer below waits.
            let _ = tokio::task::spawn_blocking(move || thread_sleep(left)).await;
        }
        // A timer for a past instant would round up.
        if Instant::now() >= end {
            return;
        }
    }
    tokio::time::sleep_until(end).await;
}

/// Whether tokio's clock stands still although there is work, for example because a test paused it.
#[expect(
    clippy::disallowed_types,
    reason = "the machine's clock tells whether the other one goes"
)]
fn is_virtual() -> bool {
    let (now, really) = (Instant::now(), std::time::Instant::now());
    while really.elapsed() < CLOCK_GRAIN {
        std::hint::spin_loop();
    }
    Instant::now() == now
}

#[expect(
    clippy::disallowed_methods,
    reason = "only a thread waits for less than a millisecond; on a virtual clock nobody comes here"
)]
fn thread_sleep(time: Duration) {
    std::thread::sleep(time);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(duration: Duration) -> f64 {
        duration.as_secs_f64() * 1000.0
    }

    #[test]
    fn the_default_models_are_those_of_the_guide() {
        let args = MockerArgs::default();
        let prefill = args.prefill_ms.ms(1000.0);
        assert!((prefill - (0.421 + 15.2 + 16.5)).abs() < 1e-9, "{prefill}");
        let decode = args.decode_ms.ms(0.5);
        assert!((decode - (5.74 + 27.0 - 6.425)).abs() < 1e-9, "{decode}");
        assert!((TimeModel::constant(-3.0).ms(7.0)).abs() < 1e-9);
        assert!((TimeModel::constant(f64::MAX).ms(1.0) - LONGEST_MS).abs() < 1e-9);
    }

    #[tokio::test(start_paused = true)]
    async fn late_timers_do_not_add_up_and_a_stop_is_not_caught_up_with() {
        let mut clock = StepClock::new();
        let began = Instant::now();
        for _ in 0..1000 {
            clock.pass(Duration::from_micros(5740)).await;
        }
        let passed = ms(began.elapsed());
        assert!((5740.0..5742.0).contains(&passed), "{passed}");

        tokio::time::advance(Duration::from_secs(3)).await;
        let began = Instant::now();
        clock.pass(Duration::from_millis(10)).await;
        assert!(ms(began.elapsed()) >= 10.0);
    }

    #[test]
    fn a_model_is_a_number_or_an_object_of_known_names() {
        let read = |text: &str| TimeModel::read(serde_json::from_str(text).unwrap());
        assert_eq!(read("7"), Ok(TimeModel::constant(7.0)));
        let line = TimeModel {
            linear: 2.0,
            min: 1.0,
            ..TimeModel::default()
        };
        assert_eq!(read(r#"{"linear": 2, "min": 1}"#), Ok(line));
        let error = read(r#"{"lineal": 2}"#).unwrap_err();
        assert!(error.contains("did you mean \"linear\"?"), "{error}");
        assert!(read("[1, 2]").unwrap_err().contains("milliseconds"));
        assert!(TimeModel::constant(f64::NAN).check().is_err());
    }
}
