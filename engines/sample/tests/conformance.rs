//! The sample engine keeps the contract: the whole conformance kit, one test per check.

use genset_conformance::{Scenario, suite};
use genset_engine_sample::{SampleArgs, SampleEngine};

suite!(|_: &Scenario| SampleEngine::from_args(&SampleArgs {
    vocab_size: 1000,
    token_delay_ms: 1
}));
