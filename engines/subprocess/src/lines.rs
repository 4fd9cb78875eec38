//! Logs the output of the process, each line at the level it names.

use genset_process::level_named;
use tracing::Level;

/// Logs a line at the level it begins with, or else at `otherwise`.
pub(crate) fn log(text: &str, otherwise: Level, pid: u32) {
    let (level, text) = split_level(text).unwrap_or((otherwise, text));
    genset_process::log(level, Some(pid), None, text);
}

/// The level that a line begins with, and the rest.
fn split_level(line: &str) -> Option<(Level, &str)> {
    // Loggers align levels of different lengths.
    let (word, rest) = line.trim_start().split_once([' ', ':'])?;
    let level = level_named(word.trim_matches(['[', ']']))?;
    Some((level, rest.trim_start_matches([':', ' '])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_the_level_it_begins_with() {
        let cases = [
            (
                "WARNING my_engine: low memory",
                Some((Level::WARN, "my_engine: low memory")),
            ),
            ("[ERROR] x", Some((Level::ERROR, "x"))),
            (
                " INFO my_engine: ready",
                Some((Level::INFO, "my_engine: ready")),
            ),
            ("INFO: ready", Some((Level::INFO, "ready"))),
            ("Traceback (most recent call last):", None),
            ("INFO", None),
        ];
        for (line, expected) in cases {
            assert_eq!(split_level(line), expected, "{line}");
        }
    }
}
