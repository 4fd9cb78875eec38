//! [`Row`]: the figures of an attack, judged by the promises, as a line of a table or as JSON.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Value, json};

use super::Deed;
use super::bystanders::Streams;

/// The memory that one request may use, in addition to eight times its bytes.
const ROOM_BYTES: u64 = 16 << 20;
/// The memory that the clients beside an attack may use.
const BYSTANDERS_BYTES: u64 = 16 << 20;

/// The limits for figures: memory follows the bytes that were sent, no client waits, no stream ends early.
#[derive(Debug)]
pub(super) struct Promises {
    /// The longest time that `/live` may take. The promise is a few milliseconds; a loaded machine adds its own delay.
    pub(super) max_stall: Duration,
}

/// The figures of one attack.
#[derive(Debug, Default)]
pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) what: &'static str,
    pub(super) deed: Deed,
    pub(super) rss_before: u64,
    pub(super) rss_peak: u64,
    pub(super) cpu_seconds: f64,
    pub(super) seconds: f64,
    /// `None` if there was no server to ask.
    pub(super) stall: Option<Duration>,
    pub(super) streams: Option<Streams>,
    pub(super) is_dead: bool,
    /// It was killed for using more memory than this machine could spare.
    pub(super) was_stopped: bool,
    /// The promises that were broken.
    pub(super) broken: Vec<String>,
}

impl Row {
    /// A row for an attack that is judged by its deed alone.
    pub(super) fn of(deed: Deed) -> Self {
        Self {
            deed,
            ..Self::default()
        }
    }

    /// Compares the figures with the promises.
    pub(super) fn judge(&mut self, promises: &Promises) {
        let mut broken = Vec::new();
        let room = ROOM_BYTES * (1 + self.deed.further);
        let allowed = self.rss_before + 8 * self.deed.bytes + room + BYSTANDERS_BYTES;
        if self.was_stopped {
            broken.push("memory: stopped".to_owned());
        } else if self.rss_peak > allowed {
            broken.push(format!("memory: {} MB allowed", megabytes(allowed)));
        }
        if self.is_dead && !self.was_stopped {
            broken.push("the server died".to_owned());
        }
        if self.stall.is_some_and(|stall| stall > promises.max_stall) {
            broken.push("stall".to_owned());
        }
        if let Some(streams) = &self.streams
            && (streams.broken > 0 || streams.refused > 0)
        {
            broken.push("streams".to_owned());
        }
        broken.extend(self.deed.problem.clone());
        self.broken = broken;
    }

    /// The number of times each answer occurred.
    fn answers(&self) -> BTreeMap<&str, usize> {
        let mut counts = BTreeMap::new();
        for answer in &self.deed.answers {
            *counts.entry(answer.as_str()).or_default() += 1;
        }
        counts
    }

    pub(super) fn to_json(&self) -> Value {
        json!({
            "name": self.name,
            "what": self.what,
            "body_bytes": self.deed.bytes,
            "answers": self.answers(),
            "rss_before_bytes": self.rss_before,
            "rss_peak_bytes": self.rss_peak,
            "cpu_seconds": self.cpu_seconds,
            "seconds": self.seconds,
            "stall_seconds": self.stall.map(|stall| stall.as_secs_f64()),
            "streams": self.streams.as_ref().map(|streams| json!({
                "finished": streams.finished,
                "broken": streams.broken,
                "refused": streams.refused,
                "longest_gap_seconds": streams.longest_gap.as_secs_f64(),
                "first_error": streams.first_error,
            })),
            "note": self.deed.note,
            "broken_promises": self.broken,
        })
    }

    /// As a line of the table.
    pub(super) fn line(&self) -> String {
        let answers: Vec<String> = self
            .answers()
            .iter()
            .map(|(answer, count)| match count {
                1 => (*answer).to_owned(),
                count => format!("{count} x {answer}"),
            })
            .collect();
        let memory = match self.rss_peak {
            0 => String::new(),
            peak => format!("{} to {}", megabytes(self.rss_before), megabytes(peak)),
        };
        let stall = self.stall.map(|stall| stall.as_millis().to_string());
        let streams = self.streams.as_ref().map(ToString::to_string);
        let verdict = match (self.broken.is_empty(), self.deed.note.is_empty()) {
            (true, true) => "kept".to_owned(),
            (true, false) => format!("kept: {}", self.deed.note),
            (false, true) => format!("**broken**: {}", self.broken.join(", ")),
            (false, false) => format!("**broken**: {}; {}", self.broken.join(", "), self.deed.note),
        };
        let cpu = match self.stall {
            Some(_) => format!("{:.1}", self.cpu_seconds),
            None => String::new(),
        };
        format!(
            "| {} {} | {} | {} | {memory} | {cpu} | {} | {} | {verdict} |",
            self.name,
            self.what,
            size(self.deed.bytes),
            answers.join(", "),
            stall.unwrap_or_default(),
            streams.unwrap_or_default(),
        )
    }
}

/// All rows, as Markdown.
pub(super) fn table(rows: &[Row]) -> String {
    let mut text = "| attack | sent | answers | RSS, MB | CPU, s | longest `/live`, ms | other streams | promises |\n\
        |---|---|---|---|---|---|---|---|\n"
        .to_owned();
    for row in rows {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{}", row.line());
    }
    text
}

fn megabytes(bytes: u64) -> u64 {
    bytes.div_ceil(1_000_000)
}

fn size(bytes: u64) -> String {
    match bytes {
        0 => String::new(),
        1..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{} kB", bytes.div_ceil(1_000)),
        _ => format!("{} MB", megabytes(bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROMISES: Promises = Promises {
        max_stall: Duration::from_millis(500),
    };

    fn row(peak: u64) -> Row {
        let mut deed = Deed::new(1_000_000);
        deed.answers = vec!["200".into(), "503".into(), "200".into()];
        Row {
            name: "3a",
            what: "a body",
            deed,
            rss_before: 40_000_000,
            rss_peak: peak,
            stall: Some(Duration::from_millis(7)),
            streams: Some(Streams {
                finished: 3,
                ..Streams::default()
            }),
            ..Row::default()
        }
    }

    #[test]
    fn memory_follows_the_bytes_that_were_sent() {
        let mut kept = row(80_000_000);
        kept.judge(&PROMISES);
        assert_eq!(kept.broken, [] as [String; 0]);
        let mut broken = row(90_000_000);
        broken.judge(&PROMISES);
        assert_eq!(broken.broken, ["memory: 82 MB allowed"]);
        let mut of_two = row(90_000_000);
        of_two.deed.further = 1;
        of_two.judge(&PROMISES);
        assert_eq!(of_two.broken, [] as [String; 0]);
    }

    #[test]
    fn stalls_streams_and_a_dead_server_break_promises() {
        let mut row = row(50_000_000);
        row.stall = Some(Duration::from_millis(501));
        row.streams = Some(Streams {
            finished: 2,
            broken: 1,
            ..Streams::default()
        });
        row.is_dead = true;
        row.deed.problem = Some("quota".into());
        row.judge(&PROMISES);
        assert_eq!(row.broken, ["the server died", "stall", "streams", "quota"]);
    }

    #[test]
    fn the_table_has_a_line_for_each_attack() {
        let mut row = row(50_000_000);
        row.judge(&PROMISES);
        let table = table(&[row]);
        let line = table.lines().nth(2).unwrap();
        assert_eq!(
            line,
            "| 3a a body | 1 MB | 2 x 200, 503 | 40 to 50 | 0.0 | 7 | 3 of 3, longest gap 0 ms | kept |"
        );
    }
}
