//! [`clean`]: the engine without faults, which mutants wrap.

use std::sync::Arc;

use genset_conformance::Scenario;
use genset_conformance::mutants::Clean;
use genset_engine_sample::{SampleArgs, SampleEngine};

pub(crate) fn clean() -> Clean {
    let args = SampleArgs {
        vocab_size: 1000,
        token_delay_ms: 1,
    };
    Arc::new(move |_: &Scenario| SampleEngine::from_args(&args))
}
