//! Embedders and cross-encoders pass the conformance checks of embeddings and scores. The kit's other checks need engines that
//! generate.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;

use genset_conformance::{Scenario, Subject, Verdict, find, run_check};
use genset_engine_candle::{CandleArgs, DeviceChoice, EmbeddingEngine};

const ENCODERS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/encoders");

fn subject(checkout: &str) -> Subject {
    let args = CandleArgs {
        device: DeviceChoice::Cpu,
        max_num_seqs: Some(16),
        ..CandleArgs::default()
    };
    Subject::new(EmbeddingEngine::from_args(
        &args,
        &Path::new(ENCODERS).join(checkout),
    ))
}

/// A check that does not apply passes too, so the test compares verdicts.
fn check(checkout: &'static str, ids: &[&str]) {
    for id in ids {
        let report = run_check(find(id).unwrap(), |_: &Scenario| subject(checkout));
        assert_eq!(report.verdict, Verdict::Pass, "{id} {checkout}");
    }
}

#[test]
fn the_checks_of_embeddings_apply_and_pass() {
    check("bert", &["EM01", "EM02", "EM03"]);
}

#[test]
fn the_checks_of_scores_apply_and_pass() {
    for checkout in ["bert-scores", "xlm-roberta-scores", "modernbert-scores"] {
        check(checkout, &["SC01", "SC02"]);
    }
}
