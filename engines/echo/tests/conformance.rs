//! Both engines keep the contract, with tokens and with text: the whole conformance kit, one test per check.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use genset_conformance::{Report, Scenario, SkipReason, Verdict};
use genset_engine_echo::{EchoArgs, EchoCore, EchoFull};

/// Tokens take a while, so that an answer can be cancelled before its end.
const ARGS: EchoArgs = EchoArgs {
    token_echo_delay_ms: 1,
};

fn core() -> EchoCore {
    EchoCore::from_args(&ARGS, 1000, 4096)
}

fn full() -> EchoFull {
    EchoFull::from_args(&ARGS)
}

mod tokens {
    genset_conformance::suite!(|_: &genset_conformance::Scenario| super::core());
}

mod text {
    genset_conformance::suite!(|_: &genset_conformance::Scenario| super::full());
}

/// The ids of the checks that were skipped for `code`.
fn skipped(report: &Report, wanted: SkipReason) -> Vec<&str> {
    let is_wanted =
        |verdict: &Verdict| matches!(verdict, Verdict::Skip { code, .. } if *code == wanted);
    let checks = report
        .checks
        .iter()
        .filter(|check| is_wanted(&check.verdict));
    checks.map(|check| check.id.as_str()).collect()
}

/// A check that does not apply passes in the suite, so a check that no longer applies would go unnoticed.
#[test]
fn an_engine_of_text_is_excused_only_from_what_is_about_tokens() {
    let report = genset_conformance::run_conformance(|_: &Scenario| full());
    report.assert_conformant();
    assert_eq!(
        skipped(&report, SkipReason::NeedsTokens),
        [
            "ST06", "FN06", "FN07", "FN11", "FN12", "FN13", "FN14", "FN15", "FN16", "US04", "US09",
            "CC16", "CC17", "DT06", "DT08", "DT10", "DT14", "DT18", "ER02", "RD01", "RD03"
        ]
    );
}
