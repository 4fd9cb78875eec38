//! Embedders keep what the contract says of embeddings. The kit's other checks ask engines that generate.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;

use genset_conformance::{Scenario, Subject, Verdict, find, run_check};
use genset_engine_candle::{CandleArgs, DeviceChoice, EmbeddingEngine};

const BERT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/encoders/bert");

fn subject() -> Subject {
    let args = CandleArgs {
        device: DeviceChoice::Cpu,
        max_num_seqs: Some(16),
        ..CandleArgs::default()
    };
    Subject::new(EmbeddingEngine::from_args(&args, Path::new(BERT)))
}

/// A check that does not apply passes too, so verdicts are compared.
#[test]
fn the_checks_of_embeddings_apply_and_pass() {
    for id in ["EM01", "EM02", "EM03"] {
        let report = run_check(find(id).unwrap(), |_: &Scenario| subject());
        assert_eq!(report.verdict, Verdict::Pass, "{id}");
    }
}
