//! [`StepTimes`]: where the time of a decode step goes. The products are timed alone, by kind of matrix; what a step takes
//! beyond them is attention over the KV cache, norms, sampling and delivery.

use std::fmt::Write as _;

use genset_backend_common::EngineError;
use genset_engine_candle::model::ProductTime;
use genset_engine_candle::{CandleEngine, Hardware};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::Measured;
use crate::input::note;

/// Measurements of each product; the median counts.
const REPEATS: usize = 5;

/// The name of what is no product.
const REST: &str = "everything else";

/// Where the time of a step of some decoding sequences goes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct StepTimes {
    pub(crate) sequences: u32,
    /// A whole step of the engine under load.
    pub(crate) step_s: f64,
    /// The products of all layers, by kind of matrix, in the order of a step.
    pub(crate) kinds: Vec<KindTime>,
    /// What a step takes beyond its products.
    pub(crate) rest_s: f64,
}

/// The products of one kind of matrix in a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct KindTime {
    /// What the matrices are for, and the types of their weights.
    pub(crate) kind: String,
    /// Bytes of weights that a step reads.
    pub(crate) weight_bytes: u64,
    pub(crate) time_s: f64,
}

impl KindTime {
    pub(super) fn new(product: ProductTime) -> Self {
        Self {
            kind: product.kind,
            weight_bytes: product.bytes,
            time_s: product.time.as_secs_f64(),
        }
    }
}

impl StepTimes {
    pub(super) fn new(sequences: u32, step_s: f64, kinds: Vec<KindTime>) -> Self {
        let products: f64 = kinds.iter().map(|kind| kind.time_s).sum();
        Self {
            sequences,
            step_s,
            // The two were measured at different times.
            rest_s: (step_s - products).max(0.0),
            kinds,
        }
    }

    /// Bytes of weights that a step reads.
    fn weight_bytes(&self) -> u64 {
        self.kinds.iter().map(|kind| kind.weight_bytes).sum()
    }

    /// What it consists of, the whole step last; each with its bytes of weights and its seconds.
    pub(super) fn parts(&self) -> impl Iterator<Item = (&str, u64, f64)> {
        let kinds = self.kinds.iter();
        let kinds = kinds.map(|kind| (kind.kind.as_str(), kind.weight_bytes, kind.time_s));
        kinds.chain([
            (REST, 0, self.rest_s),
            ("the whole step", self.weight_bytes(), self.step_s),
        ])
    }

    /// The seconds of the part of this name.
    fn seconds(&self, name: &str) -> Option<f64> {
        self.parts()
            .find_map(|(part, _, seconds)| (part == name).then_some(seconds))
    }
}

/// Adds to `measured` where the time of its steps goes, and the rate of memory, until `stop` is cancelled.
pub(super) async fn measure(
    engine: &CandleEngine,
    hardware: &Hardware,
    measured: &mut Measured,
    stop: &CancellationToken,
) -> Result<(), EngineError> {
    for decode in &measured.decode {
        if decode.accepted_drafts.is_some() {
            note("where a step's time goes is not measured with guesses");
            return Ok(());
        }
        // Their rate includes prefill.
        if decode.rounds_apart > 0 {
            continue;
        }
        let sequences = usize::try_from(decode.sequences).unwrap_or(usize::MAX);
        let products = tokio::select! {
            biased;
            () = stop.cancelled() => return Ok(()),
            products = engine.time_products(sequences, REPEATS) => products?,
        };
        let Some(products) = products else {
            note("where a step's time goes is measured on the CPU alone");
            return Ok(());
        };
        let kinds = products.into_iter().map(KindTime::new).collect();
        let step_s = f64::from(decode.sequences) / decode.tokens_per_s;
        let step = StepTimes::new(decode.sequences, step_s, kinds);
        measured.steps.push(step);
    }
    let reads_memory =
        first(&measured.steps).is_some_and(|step| step.weight_bytes() > hardware.caches());
    if reads_memory && !stop.is_cancelled() {
        let hardware = hardware.clone();
        let rate = tokio::task::spawn_blocking(move || hardware.memory_bytes_per_s());
        measured.memory_bytes_per_s = rate.await.unwrap_or_default();
    }
    Ok(())
}

/// The step of the fewest sequences.
fn first(steps: &[StepTimes]) -> Option<&StepTimes> {
    steps.iter().min_by_key(|step| step.sequences)
}

/// A table of the parts of steps, a column for each number of sequences; empty if none were measured.
pub(super) fn table(measured: &Measured) -> String {
    let Some(first) = first(&measured.steps) else {
        return String::new();
    };
    let names = first.parts().map(|(name, ..)| name.chars().count());
    let width = names.max().unwrap_or(0).max(28);
    let mut text = format!(
        "\n  {:<width$} {:>9} {:>6}",
        "a decode step, in ms", "weights", "GB/s"
    );
    for step in &measured.steps {
        let _ = write!(text, " {:>16}", sequences(step.sequences));
    }
    for (name, bytes, seconds) in first.parts() {
        let (weights, rate) = match bytes {
            0 => (String::new(), String::new()),
            bytes => (megabytes(bytes), gigabytes_per_s(bytes, seconds)),
        };
        let _ = write!(text, "\n  {name:<width$} {weights:>9} {rate:>6}");
        for step in &measured.steps {
            let cell = step.seconds(name).map_or_else(String::new, |seconds| {
                format!(
                    "{:.2} {:>4.0} %",
                    seconds * 1e3,
                    100.0 * seconds / step.step_s
                )
            });
            let _ = write!(text, " {cell:>16}");
        }
    }
    format!("{text}\n  {}\n", verdict(measured, first))
}

/// How fast a step reads weights, and how fast it could.
fn verdict(measured: &Measured, step: &StepTimes) -> String {
    let bytes = step.weight_bytes();
    let rate = gigabytes_per_s(bytes, step.step_s);
    let of = sequences(step.sequences);
    let threads = measured.setup.threads;
    let plural = if threads == 1 { " reads" } else { "s read" };
    let beside = match measured.memory_bytes_per_s {
        Some(memory) => format!(
            "{:.0} % of the {:.1} GB/s that {threads} thread{plural} from memory",
            100.0 * float(bytes) / step.step_s / memory,
            memory / 1e9
        ),
        None if bytes <= measured.setup.cache_bytes => "they fit in the caches".to_owned(),
        None => "the rate of memory was not measured".to_owned(),
    };
    format!("a step of {of} reads weights at {rate} GB/s: {beside}")
}

pub(super) fn sequences(count: u32) -> String {
    match count {
        1 => "1 sequence".to_owned(),
        count => format!("{count} sequences"),
    }
}

fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", float(bytes) / 1e6)
}

fn gigabytes_per_s(bytes: u64, seconds: f64) -> String {
    format!("{:.1}", float(bytes) / seconds / 1e9)
}

#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
fn float(bytes: u64) -> f64 {
    bytes as f64
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::Setup;
    use super::*;

    /// A run with steps of one and of four sequences.
    pub(in super::super) fn example() -> Measured {
        let kind = |kind: &str, weight_bytes, ms: f64| KindTime {
            kind: kind.to_owned(),
            weight_bytes,
            time_s: ms / 1e3,
        };
        let kinds = vec![
            kind("gate, up (Q4_K)", 60_000_000, 6.0),
            kind("down (Q6_K)", 40_000_000, 2.0),
        ];
        let more = vec![kind("gate, up (Q4_K)", 60_000_000, 12.0)];
        Measured {
            model: "m".to_owned(),
            setup: Setup {
                version: "0.1.0".to_owned(),
                model_path: "m.gguf".to_owned(),
                threads: 2,
                ..Setup::default()
            },
            steps: vec![
                StepTimes::new(4, 0.02, more),
                StepTimes::new(1, 0.01, kinds),
            ],
            memory_bytes_per_s: Some(2e10),
            ..Measured::default()
        }
    }

    #[test]
    fn what_is_no_product_is_the_rest_of_the_step() {
        let [four, one] = <[StepTimes; 2]>::try_from(example().steps).unwrap();
        assert!((one.rest_s - 0.002).abs() < 1e-9, "{one:?}");
        assert!((four.rest_s - 0.008).abs() < 1e-9, "{four:?}");
        let kinds = one.kinds;
        // Products alone were slower than the step.
        assert_eq!(StepTimes::new(1, 0.001, kinds).rest_s, 0.0);
    }

    #[test]
    fn the_table_shows_times_shares_and_how_fast_weights_are_read() {
        let table = table(&example());
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let lines: Vec<String> = table.lines().map(words).collect();
        assert_eq!(
            lines,
            [
                "",
                "a decode step, in ms weights GB/s 4 sequences 1 sequence",
                "gate, up (Q4_K) 60.0 MB 10.0 12.00 60 % 6.00 60 %",
                "down (Q6_K) 40.0 MB 20.0 2.00 20 %",
                "everything else 8.00 40 % 2.00 20 %",
                "the whole step 100.0 MB 10.0 20.00 100 % 10.00 100 %",
                "a step of 1 sequence reads weights at 10.0 GB/s: 50 % of the 20.0 GB/s that 2 threads read from memory",
            ]
        );
        let without = Measured::default();
        assert_eq!(super::table(&without), "");
    }
}
