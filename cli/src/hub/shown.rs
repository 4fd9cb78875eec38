//! The progress of a download: a bar for each file on a terminal, otherwise a line for every tenth.

use std::sync::Mutex;
use std::time::Duration;

use genset_hub::{Event, ModelRef, PlannedFile, Progress, Wait};
use indicatif::{HumanBytes, MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::input::note;

/// Shorter pauses are not reported.
const SHORT: Duration = Duration::from_secs(2);

/// The progress of one model's files, on standard error. Shows nothing if nothing is downloaded.
pub(super) struct Shown {
    model: String,
    bars: MultiProgress,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// One for each planned file; `None` for files that were already present.
    files: Vec<Option<ProgressBar>>,
    received: Vec<u64>,
    all: u64,
    total: Option<ProgressBar>,
    /// The last tenth that was printed.
    told: u64,
    waits_for_other: bool,
}

impl Shown {
    pub(super) fn new(model: &ModelRef) -> Self {
        Self {
            model: model.to_string(),
            bars: MultiProgress::with_draw_target(ProgressDrawTarget::stderr()),
            state: Mutex::default(),
        }
    }

    /// Removes the bars.
    pub(super) fn finish(&self) {
        // Bars that cannot be drawn do not exist.
        let _gone = self.bars.clear();
    }

    fn plan(&self, state: &mut State, files: &[PlannedFile]) {
        let is_missing = |file: &PlannedFile| file.present_bytes < file.bytes;
        let missing = files.iter().filter(|file| is_missing(file)).count();
        let (all, present) = files.iter().fold((0, 0), |(all, present), file| {
            (all + file.bytes, present + file.present_bytes)
        });
        if missing > 0 {
            let here = match present {
                0 => String::new(),
                present => format!("; {} are here", HumanBytes(present)),
            };
            let left = HumanBytes(all - present);
            note(format_args!(
                "fetching {}: {missing} files, {left}{here}",
                self.model
            ));
        }
        state.all = all;
        state.received = files.iter().map(|file| file.present_bytes).collect();
        let bars = files.iter();
        let bars = bars.map(|file| is_missing(file).then(|| self.bar(&file.name, file.bytes)));
        state.files = bars.collect();
        state.total = (missing > 1).then(|| self.bar("in all", all));
    }

    fn bar(&self, name: &str, bytes: u64) -> ProgressBar {
        let bar = self.bars.add(ProgressBar::new(bytes));
        let style = "{msg:32!} [{bar:30}] {bytes:>10}/{total_bytes} {bytes_per_sec} {eta}";
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style);
        }
        bar.set_message(name.to_owned());
        bar
    }

    fn received(&self, state: &mut State, file: usize, bytes: u64) {
        let Some(received) = state.received.get_mut(file) else {
            return;
        };
        *received = bytes;
        if let Some(bar) = state.files.get(file).and_then(Option::as_ref) {
            bar.set_position(bytes);
        }
        let sum: u64 = state.received.iter().sum();
        if let Some(total) = &state.total {
            total.set_position(sum);
        }
        let tenths = sum.saturating_mul(10).checked_div(state.all).unwrap_or(10);
        if self.bars.is_hidden() && state.files.iter().any(Option::is_some) && tenths > state.told {
            note(format_args!("{}: {tenths}0 %", self.model));
            state.told = tenths;
        }
    }

    fn waits(&self, state: &mut State, wait: Wait) {
        let words = match wait {
            Wait::OtherProcess if state.waits_for_other => return,
            Wait::OtherProcess => {
                state.waits_for_other = true;
                "another process fetches it too; this one waits for it".to_owned()
            }
            Wait::Retry(pause) if pause < SHORT => return,
            Wait::Retry(pause) => format!("trying the hub again in {} s", pause.as_secs()),
        };
        let line = format!("{}: {words}", self.model);
        // Print above the bars, not through them. Without visible bars the line would be lost.
        let is_drawn = !self.bars.is_hidden() && self.bars.println(&line).is_ok();
        if !is_drawn {
            note(line);
        }
    }
}

impl Progress for Shown {
    fn tell(&self, event: Event<'_>) {
        let Ok(mut state) = self.state.lock() else {
            return;
        };
        match event {
            Event::Planned(files) => self.plan(&mut state, files),
            Event::Received { file, bytes } => self.received(&mut state, file, bytes),
            Event::Waits { wait, .. } => self.waits(&mut state, wait),
            Event::Done { file } => {
                if let Some(bar) = state.files.get(file).and_then(Option::as_ref) {
                    bar.finish();
                }
            }
            _ => {}
        }
    }
}
