//! [`Report`]: the results as a table and as JSON. Columns and names that a simulation also has are those of its report.

use std::collections::BTreeMap;
use std::fmt;

use genset_simulate::{Curves, Quantiles};
use serde::Serialize;

use super::drive::Measured;
use super::tally::{Slo, Tally};
use super::target::Target;

/// The results for some servers under one load.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// `chat`, `agent`, `single` or `trace`.
    pub(super) load: &'static str,
    /// When sessions began, in words.
    pub(super) arrivals: String,
    pub(super) api: &'static str,
    pub(super) seed: u64,
    pub(super) slo_ttft_ms: Option<f64>,
    pub(super) slo_itl_ms: Option<f64>,
    /// One row per server.
    pub(super) rows: Vec<Row>,
}

/// The figures of one server. Times are in milliseconds, exact to a percent; `None` if nothing was measured.
#[derive(Debug, Default, Serialize)]
pub(super) struct Row {
    pub(super) server: String,
    model: String,
    /// Requests that were sent and have ended.
    requests: u64,
    /// Requests that failed, by HTTP status, or `connect`, `broken`, `event`.
    lost: BTreeMap<String, u64>,
    /// The first error message of each kind.
    problems: BTreeMap<String, String>,
    #[serde(flatten)]
    times: Times,
    /// Answers per second of the whole time.
    requests_per_s: f64,
    tokens_per_s: f64,
    /// Answers per second that met the SLO; `None` without an SLO.
    goodput_per_s: Option<f64>,
    /// Share of prompt tokens that were in a prefix cache; `None` if the server does not report it.
    hit_rate: Option<f64>,
    duration_s: f64,
    #[serde(flatten)]
    lengths: Lengths,
    /// The distribution of TTFT: milliseconds, and the share of answers with at most that time.
    ttft: Vec<(f64, f64)>,
    /// Whether Ctrl-C ended the run early.
    pub(super) is_cut: bool,
    remarks: Vec<String>,
}

/// Times in milliseconds, by quantile.
#[derive(Debug, Default, Serialize)]
struct Times {
    ttft_p50_ms: Option<f64>,
    ttft_p90_ms: Option<f64>,
    ttft_p99_ms: Option<f64>,
    /// Time between two tokens.
    itl_p50_ms: Option<f64>,
    itl_p99_ms: Option<f64>,
    /// The mean time between the tokens of one answer.
    answer_itl_p50_ms: Option<f64>,
    answer_itl_p99_ms: Option<f64>,
    /// From the request to the end of its answer.
    latency_p50_ms: Option<f64>,
    latency_p99_ms: Option<f64>,
    /// How late requests were sent, if they had a fixed time.
    lag_p99_ms: Option<f64>,
}

impl Times {
    fn of(tally: &Tally) -> Self {
        let ms = |times: &Quantiles, quantile: f64| times.ms(quantile).map(rounded);
        Self {
            ttft_p50_ms: ms(&tally.ttft, 0.5),
            ttft_p90_ms: ms(&tally.ttft, 0.9),
            ttft_p99_ms: ms(&tally.ttft, 0.99),
            itl_p50_ms: ms(&tally.itl, 0.5),
            itl_p99_ms: ms(&tally.itl, 0.99),
            answer_itl_p50_ms: ms(&tally.answer_itl, 0.5),
            answer_itl_p99_ms: ms(&tally.answer_itl, 0.99),
            latency_p50_ms: ms(&tally.latency, 0.5),
            latency_p99_ms: ms(&tally.latency, 0.99),
            lag_p99_ms: ms(&tally.lag, 0.99),
        }
    }
}

/// Mean token counts of the answered requests: as requested, and as the server counted.
#[derive(Debug, Default, Serialize)]
struct Lengths {
    asked_prompt_tokens: f64,
    prompt_tokens: f64,
    asked_tokens: f64,
    completion_tokens: f64,
}

impl Lengths {
    fn of(tally: &Tally) -> Self {
        let mean = |tokens: u64| ratio(float(tokens), float(tally.answered));
        Self {
            asked_prompt_tokens: mean(tally.asked_prompt_tokens),
            prompt_tokens: mean(tally.prompt_tokens),
            asked_tokens: mean(tally.asked_tokens),
            completion_tokens: mean(tally.completion_tokens),
        }
    }
}

impl Row {
    pub(super) fn new(target: &Target, measured: Measured, slo: Slo) -> Self {
        let Measured {
            tally,
            took,
            is_cut,
        } = measured;
        let duration_s = took.as_secs_f64();
        let answered = float(tally.answered);
        let goodput = slo.is_some().then(|| ratio(float(tally.good), duration_s));
        let cached = tally.cached_tokens.map(float);
        let lost: BTreeMap<String, u64> = { tally.lost.iter() }
            .map(|(kind, lost)| (kind.to_string(), lost.count))
            .collect();
        let (times, lengths) = (Times::of(&tally), Lengths::of(&tally));
        let problems = tally.lost.into_iter();
        Self {
            server: target.client.shown().to_owned(),
            model: target.model.clone(),
            requests: tally.answered + lost.values().sum::<u64>(),
            lost,
            problems: problems
                .map(|(kind, lost)| (kind.to_string(), lost.problem))
                .collect(),
            times,
            requests_per_s: ratio(answered, duration_s),
            tokens_per_s: ratio(float(tally.completion_tokens), duration_s),
            goodput_per_s: goodput,
            hit_rate: cached.map(|cached| ratio(cached, float(tally.prompt_tokens))),
            duration_s: rounded(duration_s),
            lengths,
            ttft: tally.ttft.points(),
            is_cut,
            remarks: target.remarks.clone(),
        }
    }

    pub(super) fn lost_requests(&self) -> u64 {
        self.lost.values().sum()
    }

    /// Remarks that the figures alone do not show.
    fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.is_cut {
            notes.push("stopped before the end".into());
        }
        for (kind, count) in &self.lost {
            let problem = self.problems.get(kind).map_or("", String::as_str);
            notes.push(format!("{count} lost, {kind}: {problem}"));
        }
        let (counted, meant) = (self.lengths.prompt_tokens, self.lengths.asked_prompt_tokens);
        // Without an answer, or a server that counts, there is nothing to compare.
        if counted > 0.0 && (counted / meant.max(1.0) - 1.0).abs() > 0.05 {
            notes.push(format!(
                "prompts had {counted:.1} tokens on average by the server's count, {meant:.1} were meant"
            ));
        }
        if (self.lengths.completion_tokens - self.lengths.asked_tokens).abs() > 0.05 {
            notes.push(format!(
                "answers had {:.1} tokens on average, {:.1} were asked for",
                self.lengths.completion_tokens, self.lengths.asked_tokens
            ));
        }
        if let Some(lag) = self.times.lag_p99_ms.filter(|lag| *lag > 1.0) {
            notes.push(format!(
                "1 % of the requests went out {lag:.1} ms late or more: new connections to the server take long, or this machine is too slow for the load"
            ));
        }
        notes.extend(self.remarks.iter().cloned());
        notes
    }
}

/// Rounds to three decimal places.
fn rounded(number: f64) -> f64 {
    (number * 1e3).round() / 1e3
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 {
        rounded(part / whole)
    } else {
        0.0
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
fn float(count: u64) -> f64 {
    count as f64
}

impl Report {
    /// The distributions of TTFT.
    pub(super) fn curves(&self) -> Curves<'_> {
        let mut curves = Curves::default();
        for row in &self.rows {
            curves.add(&row.server, &row.ttft);
        }
        curves
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "load {}, {}, {}, seed {}; times in ms\n",
            self.load, self.arrivals, self.api, self.seed
        )?;
        let names = self.rows.iter().map(|row| row.server.len());
        let width = names.max().unwrap_or(0).max(14);
        write!(
            f,
            "{:<width$} {:>9} {:>6} {:>10} {:>10} {:>10} {:>9} {:>9} {:>10} {:>10} {:>7}",
            "server",
            "requests",
            "lost",
            "TTFT p50",
            "p90",
            "p99",
            "ITL p50",
            "p99",
            "requests/s",
            "tokens/s",
            "hits"
        )?;
        let has_goodput = self.rows.iter().any(|row| row.goodput_per_s.is_some());
        writeln!(f, "{}", if has_goodput { "    good/s" } else { "" })?;
        for row in &self.rows {
            let ms = |time: Option<f64>| time.map_or("-".into(), |ms| format!("{ms:.1}"));
            let hits = row.hit_rate.map(|rate| format!("{:.1}%", rate * 100.0));
            let good = row.goodput_per_s.map(|good| format!(" {good:>9.2}"));
            writeln!(
                f,
                "{:<width$} {:>9} {:>6} {:>10} {:>10} {:>10} {:>9} {:>9} {:>10.2} {:>10.0} {:>7}{}",
                row.server,
                row.requests,
                row.lost_requests(),
                ms(row.times.ttft_p50_ms),
                ms(row.times.ttft_p90_ms),
                ms(row.times.ttft_p99_ms),
                ms(row.times.itl_p50_ms),
                ms(row.times.itl_p99_ms),
                row.requests_per_s,
                row.tokens_per_s,
                hits.as_deref().unwrap_or("-"),
                good.as_deref().unwrap_or("")
            )?;
        }
        let plot = self.curves().in_words();
        if !plot.is_empty() {
            write!(f, "\n{plot}")?;
        }
        for row in &self.rows {
            for note in row.notes() {
                writeln!(f, "\n{}: {note}", row.server)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn row(tally: &Tally) -> Row {
        Row {
            times: Times::of(tally),
            lengths: Lengths::of(tally),
            ..Row::default()
        }
    }

    #[test]
    fn lengths_are_compared_where_the_server_counted_some() {
        let mut tally = Tally::default();
        assert_eq!(row(&tally).notes(), [""; 0]);
        tally.answered = 1;
        tally.asked_prompt_tokens = 100;
        assert_eq!(row(&tally).notes(), [""; 0]);
        tally.prompt_tokens = 120;
        let expected =
            "prompts had 120.0 tokens on average by the server's count, 100.0 were meant";
        assert_eq!(row(&tally).notes(), [expected]);
    }

    #[test]
    fn late_requests_are_told_with_both_of_their_causes() {
        let mut tally = Tally::default();
        tally.lag.add(Duration::from_micros(900));
        assert_eq!(row(&tally).notes(), [""; 0]);
        tally.lag.add(Duration::from_millis(50));
        let notes = row(&tally).notes();
        let [note] = notes.as_slice() else {
            panic!("{notes:?}")
        };
        // A request that waits for its connection is late, and the machine may be idle.
        assert!(note.contains("new connections to the server"), "{note}");
        assert!(note.contains("this machine"), "{note}");
    }
}
