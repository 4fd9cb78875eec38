//! [`Sample`]: a line of a server's metrics text. Pure; nothing that a server sends is trusted.
//!
//! # Source
//! <https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format>

use genset_backend_common::series::{is_label_name, is_metric_name};

/// The maximum number of labels of a sample.
const MAX_LABELS: usize = 256;
/// Above this, an `f64` cannot distinguish whole numbers.
const MAX_COUNT: f64 = 9_007_199_254_740_991.0;

/// One value of one series.
#[derive(Debug, PartialEq)]
pub(crate) struct Sample<'a> {
    pub(crate) name: &'a str,
    pub(crate) labels: Vec<(&'a str, String)>,
    pub(crate) value: f64,
}

impl<'a> Sample<'a> {
    /// Parses a line; `None` if it is not a sample. A timestamp after the value is ignored.
    pub(crate) fn read(line: &'a str) -> Option<Self> {
        let end = line.find(|c: char| c == '{' || c.is_ascii_whitespace())?;
        let (name, rest) = line.split_at(end);
        let (labels, rest) = match rest.strip_prefix('{') {
            Some(inside) => read_labels(inside)?,
            None => (Vec::new(), rest),
        };
        let value = rest.split_ascii_whitespace().next()?.parse().ok()?;
        is_metric_name(name).then_some(Self {
            name,
            labels,
            value,
        })
    }

    /// The value of a label.
    pub(crate) fn label(&self, name: &str) -> Option<&str> {
        let mut labels = self.labels.iter();
        let found = labels.find(|(label, _)| *label == name);
        found.map(|(_, value)| value.as_str())
    }
}

/// The samples with one name.
pub(crate) fn samples<'a>(metrics: &'a str, name: &'a str) -> impl Iterator<Item = Sample<'a>> {
    metrics
        .lines()
        .filter(move |line| line.starts_with(name))
        .filter_map(Sample::read)
        .filter(move |sample| sample.name == name)
}

/// Rounds to a whole number; `None` if the value is not a count.
pub(crate) fn count(value: f64) -> Option<u64> {
    let is_count = (0.0..=MAX_COUNT).contains(&value);
    is_count.then(|| format!("{value:.0}"))?.parse().ok()
}

/// Parses labels up to the closing brace; returns them and the rest.
fn read_labels(mut rest: &str) -> Option<(Vec<(&str, String)>, &str)> {
    let mut labels = Vec::new();
    loop {
        rest = rest.trim_start_matches([' ', ',']);
        if let Some(behind) = rest.strip_prefix('}') {
            return Some((labels, behind));
        }
        let (name, behind) = rest.split_once('=')?;
        let name = name.trim();
        let (value, behind) = quoted(behind.trim_start().strip_prefix('"')?)?;
        if labels.len() == MAX_LABELS || !is_label_name(name) {
            return None;
        }
        labels.push((name, value));
        rest = behind;
    }
}

/// Parses a text up to its closing quotation mark; returns it and the rest.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut is_escaped = false;
    let end = text.find(|c| {
        let is_end = c == '"' && !is_escaped;
        is_escaped = c == '\\' && !is_escaped;
        is_end
    })?;
    let (value, behind) = text.split_at(end);
    Some((unescaped(value), behind.strip_prefix('"')?))
}

/// Removes the backslashes that escape line breaks, quotation marks and backslashes.
pub(crate) fn unescaped(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => match letters.next() {
                Some('n') => plain.push('\n'),
                Some(other) => plain.push(other),
                None => plain.push('\\'),
            },
            letter => plain.push(letter),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_has_a_name_labels_and_a_value() {
        let read =
            Sample::read(r#"vllm:x_bucket{le="+Inf", path="C:\\n\"a\"\nb",} 3.5 1712345678"#);
        let read = read.unwrap();
        assert_eq!((read.name, read.value), ("vllm:x_bucket", 3.5));
        assert_eq!(read.label("le"), Some("+Inf"));
        assert_eq!(read.label("path"), Some("C:\\n\"a\"\nb"));
        assert_eq!(read.label("pat"), None);
        let bare = Sample::read("process_open_fds 7").unwrap();
        assert_eq!((bare.labels.len(), bare.value), (0, 7.0));
        assert!(Sample::read("a NaN").unwrap().value.is_nan());
        assert_eq!(Sample::read("a{} +Inf").unwrap().value, f64::INFINITY);
    }

    #[test]
    fn what_is_no_sample_is_none() {
        let many: String = (0..=MAX_LABELS).map(|n| format!("l{n}=\"\",")).collect();
        for line in [
            "",
            "# HELP a b",
            "a",
            "a ",
            "a b",
            "1a 2",
            "{} 1",
            "a{ 1",
            "a{b} 1",
            "a{b=\"} 1",
            "a{b=\"c\\\"} 1",
            "a{1b=\"c\"} 1",
            "a{b=\"c\"}",
            "é 1",
            &format!("a{{{many}}} 1"),
        ] {
            assert_eq!(Sample::read(line), None, "{line}");
        }
    }

    #[test]
    fn counts_are_whole_and_not_below_nothing() {
        for (value, counted) in [(0.0, 0), (1.4, 1), (8.128_902e6, 8_128_902)] {
            assert_eq!(count(value), Some(counted));
        }
        for none in [-1.0, f64::NAN, f64::INFINITY, 1e300] {
            assert_eq!(count(none), None, "{none}");
        }
    }

    #[test]
    fn only_the_samples_of_a_name_are_found() {
        let metrics = "a_b 1\na 2\n# a 3\na{x=\"y\"} 4\n a 5\n";
        let values: Vec<f64> = samples(metrics, "a").map(|sample| sample.value).collect();
        assert_eq!(values, [2.0, 4.0]);
    }
}
