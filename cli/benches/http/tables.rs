//! The figures for people.

use std::fmt::Write as _;

use serde_json::Value;

type Columns = &'static [(&'static str, &'static str)];

const LOADS: Columns = &[
    ("requests", "requests"),
    ("tokens/CPU s", "tokens_per_cpu_second"),
    ("tokens/s", "tokens_per_second"),
    ("events/token", "events_per_token"),
    ("CPU us/token", "cpu_us_per_token"),
    ("CPU us/request", "cpu_us_per_request"),
    ("idle MiB", "idle_rss_mib"),
    ("after MiB", "rss_mib"),
    ("peak MiB", "peak_rss_mib"),
];

const PROMPTS: Columns = &[
    ("requests", "requests"),
    ("requests/s", "requests_per_second"),
    ("CPU us/request", "cpu_us_per_request"),
    ("tokens", "prompt_tokens"),
    ("known tokens", "known_prompt_tokens"),
    ("template us", "template_us"),
    ("tokenize us", "tokenize_us"),
];

/// Every part that was measured.
pub(crate) fn all(results: &Value) -> String {
    let mut text = format!("{}\n", results["hardware"].as_str().unwrap_or_default());
    if let Some(starts) = results.get("starts") {
        let (after, count) = (&starts["ready_after_ms"], &starts["starts"]);
        let _ = writeln!(text, "\nready after {after} ms (median of {count} starts)");
    }
    table(&mut text, &results["loads"], "load", LOADS);
    table(&mut text, &results["prompts"], "prompts", PROMPTS);
    if let Some(health) = results.get("health") {
        let (load, cores) = (&health["load"], &health["server_cores"]);
        let _ = writeln!(text, "\n/health, idle: {}", times(&health["idle"]));
        let busy = times(&health["saturated"]);
        let _ = writeln!(text, "/health, {load} ({cores} cores busy): {busy}");
    }
    if let Some(memory) = results.get("memory") {
        let _ = writeln!(
            text,
            "\n{} open streams: {} KiB each ({} MiB, idle {} MiB)",
            memory["streams"],
            memory["kib_per_stream"],
            memory["open_rss_mib"],
            memory["idle_rss_mib"]
        );
    }
    text
}

fn table(text: &mut String, rows: &Value, name: &str, columns: Columns) {
    let Some(rows) = rows.as_array() else {
        return;
    };
    let _ = write!(text, "\n{name:<32}");
    for (title, _) in columns {
        let _ = write!(text, " {title:>14}");
    }
    text.push('\n');
    for row in rows {
        let _ = write!(text, "{:<32}", row[name].as_str().unwrap_or_default());
        for (_, key) in columns {
            let number = row[key].as_f64().unwrap_or(f64::NAN);
            let _ = write!(text, " {number:>14}");
        }
        text.push('\n');
    }
}

fn times(summary: &Value) -> String {
    let (p50, p99, max) = (&summary["p50_ms"], &summary["p99_ms"], &summary["max_ms"]);
    let count = &summary["questions"];
    format!("p50 {p50} ms, p99 {p99} ms, longest {max} ms of {count}")
}
