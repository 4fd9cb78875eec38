//! The second clean engine passes everything, and every profile applies to it, with a few exceptions.

use genset_conformance::mutants::capable::{capable, with_context};
use genset_conformance::{Level, Options, Profile, Scenario, Verdict, run_conformance_with};

#[test]
fn the_capable_engine_passes_everything_and_every_profile_applies() {
    let everything = Options {
        level: Level::Soak,
        ..Options::default()
    };
    let report = run_conformance_with(capable, &everything);
    report.assert_conformant();
    for check in &report.checks {
        let is_left_out = matches!(check.verdict, Verdict::Skip { .. });
        // Checks for plain engines are covered by the kill matrix and the sample engine, processes by the engine that has one,
        // and ranks by an engine with several, among the kit's controls.
        let may_be = match check.profile {
            Profile::Tokens
            | Profile::Subprocess
            | Profile::Embeddings
            | Profile::Scores
            | Profile::Controls
            | Profile::Adapters
            | Profile::Ranks
            | Profile::Bodies => true,
            Profile::KvEvents => check.id == "RK02",
            Profile::Sampling
            | Profile::Logprobs
            | Profile::Guided
            | Profile::Disaggregated
            | Profile::Resume => false,
        };
        assert!(may_be || !is_left_out, "did not apply: {check:?}");
    }
}

/// All abilities, in a context that few of the kit's prompts would fit into with their answers.
#[test]
fn the_capable_engine_passes_everything_with_a_context_of_64() {
    for seed in 0..3 {
        let options = Options {
            level: Level::Soak,
            seed,
            ..Options::default()
        };
        run_conformance_with(|_: &Scenario| with_context(64), &options).assert_conformant();
    }
}
