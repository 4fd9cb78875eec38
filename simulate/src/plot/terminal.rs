//! [`Curves`] for a terminal: one line each, higher where more first tokens came.

use std::fmt::Write as _;

use super::{Curves, Scale};

/// Columns of the time axis.
const COLUMNS: usize = 60;

/// Heights of a column.
const HEIGHTS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

impl Curves<'_> {
    /// The distribution of first tokens over time, one line each above a shared logarithmic axis; empty if there is nothing
    /// to show. The highest column of a line is the time at which most came.
    #[must_use]
    pub fn in_words(&self) -> String {
        if self.all.iter().all(|(_, points)| points.is_empty()) {
            return String::new();
        }
        let scale = Scale::of(self);
        let width = self.all.iter().map(|(name, _)| name.chars().count()).max();
        let width = width.unwrap_or(0).max("TTFT, ms".len());
        let mut text = format!("{:<width$}  {}\n", "TTFT, ms", scale.marks());
        for (name, points) in &self.all {
            // Writing to a string cannot fail.
            let _infallible = writeln!(text, "{name:<width$}  {}", scale.bars(points).trim_end());
        }
        text
    }
}

impl Scale {
    /// The powers of ten, each at its position.
    fn marks(&self) -> String {
        let mut line = String::new();
        for power in self.first..=self.last {
            let ms = 10_f64.powi(power);
            let column = self.column(ms);
            line.extend(std::iter::repeat_n(' ', column.saturating_sub(line.len())));
            line.push_str(&ms.to_string());
        }
        line
    }

    fn bars(&self, points: &[(f64, f64)]) -> String {
        let mut shares = [0.0_f64; COLUMNS];
        let mut before = 0.0;
        for (ms, share) in points {
            if let Some(column) = shares.get_mut(self.column(*ms)) {
                *column += share - before;
            }
            before = *share;
        }
        let most = shares.iter().copied().fold(0.0, f64::max);
        let bar = |share: f64| match height(share / most) {
            _ if share <= 0.0 => ' ',
            height => HEIGHTS.get(height).copied().unwrap_or('█'),
        };
        shares.into_iter().map(bar).collect()
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a column is small"
    )]
    fn column(&self, ms: f64) -> usize {
        let share = (ms.log10() - f64::from(self.first)) / f64::from(self.last - self.first);
        ((share * COLUMNS as f64) as usize).min(COLUMNS - 1)
    }
}

/// The index of a height, for a fraction of the maximum.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "between 0 and the number of heights"
)]
fn height(part: f64) -> usize {
    (part * (HEIGHTS.len() - 1) as f64).ceil() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_highest_where_most_came() {
        let mut curves = Curves::default();
        assert_eq!(curves.in_words(), "");
        let (fast, slow) = ([(10.0, 0.2), (20.0, 1.0)], [(90.0, 1.0)]);
        curves.add("fast", &fast);
        curves.add("http://slow&1", &slow);
        let text = curves.in_words();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        let place = |line: &str, what: char| line.chars().position(|it| it == what);
        assert_eq!(place(lines[1], '▃'), Some(15), "at 10 ms: {text}");
        assert!(place(lines[1], '█') < place(lines[2], '█'), "{text}");
        assert!(
            lines[0].contains("10") && lines[0].ends_with("100"),
            "{text}"
        );
        let svg = curves.svg();
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert!(svg.contains("http://slow&amp;1"), "{svg}");
    }
}
