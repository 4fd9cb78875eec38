//! [`Report`]: the figures, as a table and as JSON.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::faults::Fault;
use crate::run::Tally;
use crate::timeline::Moment;

/// The results of a plan.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    /// The kind of load: `chat`, `agent`, `single` or `trace`.
    pub load: &'static str,
    /// The number of workers.
    pub workers: usize,
    /// The number of frontends.
    pub frontends: usize,
    /// The plan's seed.
    pub seed: u64,
    /// The faults during the run.
    pub faults: Vec<Fault>,
    /// One row per policy and fleet, in the plan's order.
    pub rows: Vec<Row>,
}

/// The figures of one policy. Times are in milliseconds, within a percent; `None` if nothing was measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// The policy; for a disaggregated fleet, followed by the numbers of prefill and decode workers: `kv 2+6`.
    pub policy: String,
    /// Workers that only prefill; 0 if each does both.
    pub prefill_workers: usize,
    /// Requests that were sent.
    pub requests: u64,
    /// Requests that ended in an error, by its kind.
    pub lost: BTreeMap<&'static str, u64>,
    /// Requests that migrated to another worker. A request that migrated twice counts twice.
    pub moved: u64,
    /// Time to first token, 50th percentile.
    pub ttft_p50_ms: Option<f64>,
    /// Its 90th percentile.
    pub ttft_p90_ms: Option<f64>,
    /// Its 99th percentile.
    pub ttft_p99_ms: Option<f64>,
    /// Inter-token latency, 50th percentile.
    pub itl_p50_ms: Option<f64>,
    /// Its 99th percentile.
    pub itl_p99_ms: Option<f64>,
    /// Tokens generated per second, over the whole run.
    pub tokens_per_s: f64,
    /// The share of all prompt tokens that were in a prefix cache.
    pub hit_rate: f64,
    /// The end of the last answer, in simulated seconds.
    pub duration_s: f64,
    /// The distribution of the times to the first token: milliseconds, and the share of requests that did not exceed them.
    pub ttft: Vec<(f64, f64)>,
    /// How long clients waited, over the time of the run.
    pub over_time: Vec<Moment>,
}

impl Row {
    pub(crate) fn new(policy: String, prefill_workers: usize, tally: Tally, moved: u64) -> Self {
        let duration_s = tally.duration.as_secs_f64();
        Self {
            policy,
            prefill_workers,
            requests: tally.requests,
            moved,
            ttft_p50_ms: tally.ttft.ms(0.5).map(rounded),
            ttft_p90_ms: tally.ttft.ms(0.9).map(rounded),
            ttft_p99_ms: tally.ttft.ms(0.99).map(rounded),
            itl_p50_ms: tally.itl.ms(0.5).map(rounded),
            itl_p99_ms: tally.itl.ms(0.99).map(rounded),
            tokens_per_s: rounded(ratio(tally.completion_tokens, duration_s)),
            hit_rate: (ratio(tally.cached_tokens, float(tally.prompt_tokens)) * 1e4).round() / 1e4,
            duration_s: rounded(duration_s),
            ttft: tally.ttft.points(),
            over_time: tally.timeline.moments(),
            lost: tally.lost,
        }
    }

    /// Requests that ended in an error.
    #[must_use]
    pub fn lost_requests(&self) -> u64 {
        self.lost.values().sum()
    }
}

/// Rounded to three decimal places.
fn rounded(number: f64) -> f64 {
    (number * 1e3).round() / 1e3
}

fn ratio(part: u64, whole: f64) -> f64 {
    if whole > 0.0 {
        float(part) / whole
    } else {
        0.0
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts are far below 2^52")]
fn float(count: u64) -> f64 {
    count as f64
}

impl Report {
    /// The report as JSON.
    #[must_use]
    pub fn json(&self) -> String {
        // String keys and finite numbers always serialize to JSON.
        serde_json::to_string_pretty(self).unwrap_or_default()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let frontends = match self.frontends {
            1 => String::new(),
            several => format!("{several} frontends, "),
        };
        writeln!(
            f,
            "{} workers, {frontends}load {}, seed {}; times in ms\n",
            self.workers, self.load, self.seed
        )?;
        let names = self.rows.iter().map(|row| row.policy.len());
        let width = names.max().unwrap_or(0).max(14);
        writeln!(
            f,
            "{:<width$} {:>9} {:>6} {:>6} {:>10} {:>10} {:>10} {:>9} {:>9} {:>10} {:>7}",
            "policy",
            "requests",
            "lost",
            "moved",
            "TTFT p50",
            "p90",
            "p99",
            "ITL p50",
            "p99",
            "tokens/s",
            "hits"
        )?;
        for row in &self.rows {
            let ms = |time: Option<f64>| time.map_or("-".into(), |ms| format!("{ms:.1}"));
            writeln!(
                f,
                "{:<width$} {:>9} {:>6} {:>6} {:>10} {:>10} {:>10} {:>9} {:>9} {:>10.0} {:>6.1}%",
                row.policy,
                row.requests,
                row.lost_requests(),
                row.moved,
                ms(row.ttft_p50_ms),
                ms(row.ttft_p90_ms),
                ms(row.ttft_p99_ms),
                ms(row.itl_p50_ms),
                ms(row.itl_p99_ms),
                row.tokens_per_s,
                row.hit_rate * 100.0
            )?;
        }
        Ok(())
    }
}
