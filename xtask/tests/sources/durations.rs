//! A public time is a `Duration`. Only figures whose JSON has seconds may have a number of seconds.

use super::each_source;

/// Files whose public numbers are figures.
const FIGURES: [&str; 2] = ["simulate/src/report.rs", "simulate/src/timeline.rs"];

/// Public items of a file that are a number of seconds: fields, parameters and return values. Rates do not count.
fn seconds(source: &str) -> Vec<&str> {
    let is_seconds = |line: &&str| {
        let words: Vec<_> = line
            .split(|letter: char| !letter.is_alphanumeric() && letter != '_')
            .filter(|word| !word.is_empty() && *word != "Option")
            .collect();
        words.windows(2).any(|pair| {
            let (name, kind) = (pair[0], pair[1]);
            let is_time =
                name.ends_with("_s") || name.ends_with("seconds") || name.ends_with("secs");
            is_time && !name.contains("per_") && (kind == "f64" || kind == "f32")
        })
    };
    let public = source.lines().map(str::trim_start);
    let public = public.filter(|line| line.starts_with("pub ") && !line.starts_with("pub const"));
    public.filter(is_seconds).collect()
}

#[test]
fn no_public_time_is_a_number_of_seconds() {
    let (mut found, mut files) = (Vec::new(), 0);
    each_source(|_, path, source| {
        if FIGURES.iter().any(|figures| path.ends_with(figures)) {
            return;
        }
        files += 1;
        let lines = seconds(source).into_iter();
        found.extend(lines.map(|line| format!("{}: {line}", path.display())));
    });
    assert!(files > 500, "only {files} files were found");
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn public_seconds_are_seen() {
    let source = "    pub grace_s: f64,\n    pub at_s: Option<f64>,\npub fn wait(timeout_s: f64) {}\n    pub rate_per_s: f64,\n    left_s: f64,\n    pub(crate) cpu_seconds: f64,\n    pub grace: Duration,\n";
    assert_eq!(seconds(source).len(), 3);
}
