//! Shows the progress of training: a bar on a terminal, lines elsewhere.
#![expect(
    clippy::disallowed_types,
    reason = "the real time of a real computation is shown; there is no clock to pause"
)]

use std::io::IsTerminal as _;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};

/// Shows steps and the loss on stderr.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    epochs: usize,
    start: Instant,
}

impl Progress {
    pub(crate) fn start(epochs: usize, steps: usize) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template(
                "{elapsed_precise} [{wide_bar}] step {pos} of {len}, {eta} left, {msg}",
            );
            let bar = ProgressBar::new(u64::try_from(steps).unwrap_or(u64::MAX));
            bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        Self {
            bar,
            epochs,
            start: Instant::now(),
        }
    }

    pub(crate) fn step(&self) {
        if let Some(bar) = &self.bar {
            bar.inc(1);
        }
    }

    /// Epochs are counted from one.
    pub(crate) fn epoch(&self, epoch: usize, loss: f32) {
        match &self.bar {
            Some(bar) => bar.set_message(format!("loss {loss:.3}")),
            None => eprintln!(
                "epoch {epoch} of {}: loss {loss:.4}, {} s",
                self.epochs,
                self.start.elapsed().as_secs()
            ),
        }
    }

    /// Prints a further line.
    pub(crate) fn note(&self, note: &str) {
        match &self.bar {
            Some(bar) => bar.println(note),
            None => eprintln!("  {note}"),
        }
    }

    pub(crate) fn finish(self) {
        if let Some(bar) = self.bar {
            bar.finish();
        }
        let seconds = self.start.elapsed().as_secs();
        eprintln!("trained in {} min {:02} s", seconds / 60, seconds % 60);
    }
}
