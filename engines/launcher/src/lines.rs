//! Logs the server's output with the server's name, each line at the level it names.

use genset_process::level_named;
use tracing::Level;

/// Logs a line of the server.
pub(crate) fn log(server: &str, text: &str) {
    genset_process::log(level(text), None, Some(server), text);
}

/// The level among a line's first words, in the form that these servers use. They print everything to standard error, so the
/// stream does not tell the level.
fn level(line: &str) -> Level {
    // vLLM logs each of its 35 routes at every start.
    if line.contains("] Route: ") {
        return Level::DEBUG;
    }
    let mut words = line.split_whitespace().take(6);
    let named =
        words.find_map(|word| level_named(word.trim_matches(|c: char| !c.is_ascii_alphabetic())));
    named.unwrap_or(Level::INFO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_the_level_among_its_first_words() {
        let cases = [
            (
                "(APIServer pid=7) WARNING 11-22 01:02:03 [config.py:7] slow",
                Level::WARN,
            ),
            ("[2026-11-22 01:02:03] ERROR: no GPU", Level::ERROR),
            ("INFO:     Application startup complete.", Level::INFO),
            ("llama_model_loader: loaded", Level::INFO),
            ("a b c d e f ERROR", Level::INFO),
            (
                "(APIServer pid=7) INFO 11-22 01:02:03 [launcher.py:46] Route: /health, Methods: GET",
                Level::DEBUG,
            ),
        ];
        for (line, expected) in cases {
            assert_eq!(level(line), expected, "{line}");
        }
    }
}
