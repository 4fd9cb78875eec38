//! The plot of a report: the distribution of TTFT, one line per policy; for runs with faults, also its course over time.
//! [`Curves`] plots such distributions for other crates, as SVG and for a terminal.

mod over_time;
mod terminal;

use crate::report::Report;

/// The picture's size, and the margins of its axes.
const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 60.0;
const RIGHT: f64 = 150.0;
const TOP: f64 = 20.0;
const BOTTOM: f64 = 50.0;

/// Colours that are distinguishable, also for colour-blind readers.
const COLOURS: [&str; 7] = [
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#000000",
];

/// Distributions of the time to the first token, each with a name.
#[derive(Debug, Clone, Default)]
pub struct Curves<'a> {
    all: Vec<(&'a str, &'a [(f64, f64)])>,
}

impl<'a> Curves<'a> {
    /// Adds a distribution: milliseconds, and the share of requests that did not exceed them, both ascending.
    pub fn add(&mut self, name: &'a str, points: &'a [(f64, f64)]) {
        self.all.push((name, points));
    }

    /// Plots the share of requests whose first token came within a time, as SVG, with a logarithmic time axis.
    #[must_use]
    pub fn svg(&self) -> String {
        picture(HEIGHT, self.draw())
    }

    fn draw(&self) -> Vec<String> {
        let scale = Scale::of(self);
        let mut lines = scale.axes();
        for (number, (name, points)) in self.all.iter().enumerate() {
            let colour = COLOURS[number % COLOURS.len()];
            let points = points.iter();
            let points = points.map(|(ms, share)| (scale.x(*ms), scale.y(*share)));
            lines.push(curve(colour, 2.0, points));
            let y = TOP + 16.0 * f64::from(u32::try_from(number).unwrap_or(0) + 1);
            let x = WIDTH - RIGHT + 15.0;
            let name = escaped(name);
            lines.push(format!(
                "<text x=\"{x}\" y=\"{y}\" fill=\"{colour}\">{name}</text>"
            ));
        }
        lines
    }
}

impl Report {
    /// Plots the share of requests whose first token came within a time, as SVG, with a logarithmic time axis. For a run with
    /// faults, it also plots how long clients waited over time, with a mark at each fault.
    #[must_use]
    pub fn svg(&self) -> String {
        let mut curves = Curves::default();
        for row in &self.rows {
            curves.add(&row.policy, &row.ttft);
        }
        let mut lines = curves.draw();
        if self.faults.is_empty() {
            return picture(HEIGHT, lines);
        }
        lines.extend(over_time::panels(self, HEIGHT));
        picture(HEIGHT + over_time::height(), lines)
    }
}

/// The drawn elements on a white background.
fn picture(height: f64, drawn: Vec<String>) -> String {
    let mut lines = vec![
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
             font-family=\"sans-serif\" font-size=\"12\">"
        ),
        format!("<rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>"),
    ];
    lines.extend(drawn);
    lines.push("</svg>\n".into());
    lines.join("\n")
}

/// Escapes text for XML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

/// A text.
fn label(x: f64, y: f64, anchor: &str, text: &str) -> String {
    format!("<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>")
}

/// A line of the grid.
fn grid([x1, y1]: [f64; 2], [x2, y2]: [f64; 2]) -> String {
    format!("<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"#ddd\"/>")
}

/// A line through these points.
fn curve(colour: &str, width: f64, points: impl Iterator<Item = (f64, f64)>) -> String {
    let points: Vec<String> = points.map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let points = points.join(" ");
    format!(
        "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\" points=\"{points}\"/>"
    )
}

/// Maps times and shares to coordinates: the axis begins and ends at whole powers of ten.
struct Scale {
    first: i32,
    last: i32,
}

impl Scale {
    fn of(curves: &Curves<'_>) -> Self {
        let times = curves.all.iter().flat_map(|(_, points)| points.iter());
        let (mut least, mut most) = (f64::MAX, 1.0_f64);
        for (ms, _) in times {
            least = least.min(*ms);
            most = most.max(*ms);
        }
        let first = power_below(least.min(most));
        Self {
            first,
            last: (power_below(most) + 1).max(first + 1),
        }
    }

    fn x(&self, ms: f64) -> f64 {
        let share = (ms.log10() - f64::from(self.first)) / f64::from(self.last - self.first);
        LEFT + share * (WIDTH - LEFT - RIGHT)
    }

    fn y(&self, share: f64) -> f64 {
        TOP + (1.0 - share) * (HEIGHT - TOP - BOTTOM)
    }

    fn axes(&self) -> Vec<String> {
        let mut lines = Vec::new();
        let (bottom, right) = (HEIGHT - BOTTOM, WIDTH - RIGHT);
        for power in self.first..=self.last {
            let (ms, x) = (10_f64.powi(power), self.x(10_f64.powi(power)));
            lines.push(grid([x, TOP], [x, bottom]));
            lines.push(label(x, bottom + 18.0, "middle", &ms.to_string()));
        }
        for percent in [0, 25, 50, 75, 100] {
            let y = self.y(f64::from(percent) / 100.0);
            lines.push(grid([LEFT, y], [right, y]));
            lines.push(label(LEFT - 6.0, y + 4.0, "end", &format!("{percent} %")));
        }
        let middle = f64::midpoint(LEFT, right);
        let below = HEIGHT - 12.0;
        lines.push(label(middle, below, "middle", "time to first token, ms"));
        lines
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "the logarithm of a time is small"
)]
fn power_below(ms: f64) -> i32 {
    ms.log10().floor() as i32
}
