//! [`sample`] and [`clean`]: the engine without faults, which mutants wrap.

use std::sync::Arc;

use genset_conformance::mutants::Clean;
use genset_conformance::{Factory, Scenario};
use genset_engine_sample::{SampleArgs, SampleEngine};

pub(crate) fn sample() -> impl Factory {
    let args = SampleArgs {
        vocab_size: 1000,
        token_delay_ms: 1,
    };
    move |_: &Scenario| SampleEngine::from_args(&args)
}

pub(crate) fn clean() -> Clean {
    Arc::new(sample())
}
