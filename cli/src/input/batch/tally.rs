//! The progress of a batch, and its statistics.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use tokio::time::Instant;

use super::super::note;
use super::line::LineSummary;

/// The interval between progress messages.
pub(super) const INTERVAL: Duration = Duration::from_secs(2);

/// The answers of this run.
#[derive(Debug)]
pub(super) struct Tally {
    begun: Instant,
    to_answer: usize,
    answered: usize,
    failed: usize,
    tokens_in: u64,
    tokens_out: u64,
    elapsed: Duration,
}

impl Tally {
    pub(super) fn new(to_answer: usize) -> Self {
        Self {
            begun: Instant::now(),
            to_answer,
            answered: 0,
            failed: 0,
            tokens_in: 0,
            tokens_out: 0,
            elapsed: Duration::ZERO,
        }
    }

    /// Counts a line of the output, for which its prompt waited `elapsed`.
    pub(super) fn count(&mut self, line: &LineSummary<'_>, elapsed: Duration) {
        let (tokens_in, tokens_out) = line.tokens();
        self.answered += 1;
        self.failed += usize::from(line.is_failure());
        self.tokens_in += tokens_in;
        self.tokens_out += tokens_out;
        self.elapsed += elapsed;
    }

    /// Prints the progress of a run that is not over at once.
    pub(super) fn show(&self) {
        let elapsed = self.begun.elapsed();
        if elapsed >= INTERVAL {
            note(self.progress(elapsed.as_secs_f64()));
        }
    }

    /// The number of answers and, once there are some, the speed and the remaining time.
    fn progress(&self, seconds: f64) -> String {
        let (answered, all) = (self.answered, self.to_answer);
        if answered == 0 {
            return format!("0 of {all} prompts");
        }
        let left = seconds / answered as f64 * (all - answered) as f64;
        format!(
            "{answered} of {all} prompts, {:.1} tokens/s, about {left:.0} s left",
            self.tokens_out as f64 / seconds
        )
    }

    /// The statistics of the run.
    pub(super) fn summary(&self, output: &Path) -> String {
        let seconds = self.begun.elapsed().as_secs_f64().max(f64::MIN_POSITIVE);
        let mean = self.elapsed.as_secs_f64() * 1e3 / self.answered.max(1) as f64;
        let mut text = String::new();
        let mut row = |name: &str, value: String| {
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{name:<14}{value}");
        };
        row(
            "prompts",
            format!("{}, {} without an answer", self.answered, self.failed),
        );
        row(
            "tokens in",
            format!(
                "{} ({:.1}/s)",
                self.tokens_in,
                self.tokens_in as f64 / seconds
            ),
        );
        row(
            "tokens out",
            format!(
                "{} ({:.1}/s)",
                self.tokens_out,
                self.tokens_out as f64 / seconds
            ),
        );
        row(
            "time",
            format!("{seconds:.1} s, {mean:.0} ms a prompt on average"),
        );
        row("output", output.display().to_string());
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_shows_its_progress_before_the_first_answer_too() {
        let mut tally = Tally::new(3);
        assert_eq!(tally.progress(4.0), "0 of 3 prompts");
        let line = LineSummary::read(r#"{"response":"x","tokens_out":10}"#).unwrap();
        tally.count(&line, Duration::ZERO);
        let shown = "1 of 3 prompts, 2.5 tokens/s, about 8 s left";
        assert_eq!(tally.progress(4.0), shown);
    }
}
