//! The progress of a long command: a bar on a terminal, otherwise a line for every tenth.

use indicatif::{ProgressBar, ProgressFinish, ProgressStyle};

use crate::input::note;

/// A bar on standard error, if that is a terminal. Dropping it removes it.
pub(crate) fn bar() -> ProgressBar {
    let bar = ProgressBar::new(0).with_finish(ProgressFinish::AndClear);
    if let Ok(style) = ProgressStyle::with_template("{msg} [{bar:40}] {pos}/{len} {eta}") {
        bar.set_style(style);
    }
    bar
}

/// The progress of one command, on standard error. Dropping this removes the bar.
pub(crate) struct Progress {
    label: &'static str,
    bar: ProgressBar,
    /// The last tenth that was printed. A smaller value starts over.
    told: u64,
}

impl Progress {
    pub(crate) fn of_rounds(label: &'static str) -> Self {
        let bar = bar();
        bar.set_message(label);
        let told = 0;
        Self { label, bar, told }
    }

    /// Sets the progress to `done` of `all`.
    pub(crate) fn set(&mut self, done: u64, all: u64) {
        if !self.bar.is_hidden() {
            self.bar.set_length(all);
            self.bar.set_position(done);
            return;
        }
        let tenths = (done.saturating_mul(10)).checked_div(all).unwrap_or(10);
        if tenths != self.told {
            note(format_args!("{}: {tenths}0 %", self.label));
            self.told = tenths;
        }
    }
}
