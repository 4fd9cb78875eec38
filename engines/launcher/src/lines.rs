//! What the server prints goes to the log with the server's name, each line at the level it names.

use tracing::Level;

/// Logs a line of the server's.
pub(crate) fn log(server: &str, text: &str) {
    match level(text) {
        Level::ERROR => tracing::error!(target: "genset::engine", server, "{text}"),
        Level::WARN => tracing::warn!(target: "genset::engine", server, "{text}"),
        Level::DEBUG => tracing::debug!(target: "genset::engine", server, "{text}"),
        _ => tracing::info!(target: "genset::engine", server, "{text}"),
    }
}

/// The level that is among a line's first words, as these servers write it; they print everything to standard error, so
/// that says nothing.
fn level(line: &str) -> Level {
    // vLLM names each of its 35 routes at every start.
    if line.contains("] Route: ") {
        return Level::DEBUG;
    }
    for word in line.split_whitespace().take(6) {
        let word = word.trim_matches(|c: char| !c.is_ascii_alphabetic());
        match word {
            "ERROR" | "CRITICAL" | "FATAL" => return Level::ERROR,
            "WARNING" | "WARN" => return Level::WARN,
            "INFO" => return Level::INFO,
            "DEBUG" | "TRACE" => return Level::DEBUG,
            _ => {}
        }
    }
    Level::INFO
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
