//! Plots a run with faults over time: one line per policy, and a mark at each fault.

use super::{COLOURS, LEFT, RIGHT, WIDTH, curve, grid, label};
use crate::report::Report;
use crate::timeline::Moment;

/// Height of one panel, and the space above and below its axes.
const PANEL: f64 = 220.0;
const ABOVE: f64 = 30.0;
const BELOW: f64 = 40.0;

/// The value that a panel plots for a moment.
type Value = fn(&Moment) -> Option<f64>;

const PANELS: [(&str, Value); 2] = [
    ("90 % of first tokens came within, ms", |moment| {
        moment.ttft_p90_ms
    }),
    ("longest pause in an answer, ms", |moment| {
        Some(moment.longest_pause_ms)
    }),
];

/// The total height of the panels.
pub(super) fn height() -> f64 {
    PANEL * 2.0
}

/// The panels, the first one beginning at `top`.
pub(super) fn panels(report: &Report, top: f64) -> Vec<String> {
    let panels = PANELS.iter().zip([top, top + PANEL]);
    panels
        .flat_map(|((title, value), top)| panel(report, top, title, *value))
        .collect()
}

/// Maps seconds and values to coordinates in a panel.
struct Scale {
    top: f64,
    most_s: f64,
    most: f64,
}

impl Scale {
    fn of(report: &Report, top: f64, value: Value) -> Self {
        let moments = || report.rows.iter().flat_map(|row| &row.over_time);
        let most_s = moments().map(|moment| moment.at_s).fold(1.0, f64::max);
        let most = moments().filter_map(value).fold(1.0, f64::max);
        Self { top, most_s, most }
    }

    fn x(&self, at_s: f64) -> f64 {
        LEFT + (at_s / self.most_s).min(1.0) * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, value: f64) -> f64 {
        self.bottom() - value / self.most * (PANEL - ABOVE - BELOW)
    }

    fn bottom(&self) -> f64 {
        self.top + PANEL - BELOW
    }

    fn axes(&self) -> Vec<String> {
        let (ceiling, right) = (self.top + ABOVE, WIDTH - RIGHT);
        let mut lines = Vec::new();
        for part in [0.0, 0.25, 0.5, 0.75, 1.0] {
            let (at_s, value) = (self.most_s * part, self.most * part);
            let (x, y) = (self.x(at_s), self.y(value));
            lines.push(grid([LEFT, y], [right, y]));
            lines.push(label(LEFT - 6.0, y + 4.0, "end", &format!("{value:.0}")));
            lines.push(grid([x, ceiling], [x, self.bottom()]));
            let below = self.bottom() + 16.0;
            lines.push(label(x, below, "middle", &format!("{at_s:.0} s")));
        }
        lines
    }
}

fn panel(report: &Report, top: f64, title: &str, value: Value) -> Vec<String> {
    let scale = Scale::of(report, top, value);
    let mut lines = scale.axes();
    lines.push(label(LEFT, top + 12.0, "start", title));
    for fault in &report.faults {
        let x = scale.x(fault.at.as_secs_f64());
        lines.push(format!(
            "<line x1=\"{x:.1}\" y1=\"{:.1}\" x2=\"{x:.1}\" y2=\"{:.1}\" stroke=\"#a00\" stroke-dasharray=\"4 3\"/>",
            top + ABOVE,
            scale.bottom()
        ));
        let what = fault.what.to_string();
        lines.push(label(x + 3.0, top + ABOVE - 4.0, "start", &what));
    }
    for (row, colour) in report.rows.iter().zip(COLOURS.iter().cycle()) {
        let points = row.over_time.iter().filter_map(|moment| {
            let value = value(moment)?;
            Some((scale.x(moment.at_s), scale.y(value)))
        });
        lines.push(curve(colour, 1.5, points));
    }
    lines
}
