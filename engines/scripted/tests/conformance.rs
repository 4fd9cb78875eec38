//! The scripted engine meets the contract in both modes: the whole conformance kit, one test per check.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod common;

use std::sync::Arc;

use common::{Bytes, script};
use genset_conformance::Subject;
use genset_engine_scripted::ScriptedEngine;

/// An engine that answers everything with a pangram, at a given pace.
fn engine(pace: &str) -> ScriptedEngine {
    let text = "The quick brown fox jumps over the lazy dog.";
    ScriptedEngine::from_script(script(&format!("[[reply]]\n{pace}\ntext = '{text}'")))
}

fn engine_of_tokens(pace: &str) -> Subject {
    Subject::new(engine(pace).with_vocabulary(Arc::new(Bytes), 2048))
}

/// With a vocabulary, the engine takes the kit's tokens directly.
mod tokens {
    use genset_conformance::{Scenario, Subject, Verdict, find, run_check, suite};

    fn engine() -> Subject {
        super::engine_of_tokens("token_ms = 1")
    }

    suite!(|_: &Scenario| engine());

    /// A check that does not apply passes too, so a lost declaration would go unnoticed.
    #[test]
    fn log_probabilities_are_declared_and_checked() {
        let report = run_check(find("DT07").unwrap(), |_: &Scenario| engine());
        assert_eq!(report.verdict, Verdict::Pass);
    }
}

/// The engine takes tokens and sends several in a chunk.
mod chunks_of_tokens {
    use genset_conformance::{Scenario, suite};

    suite!(|_: &Scenario| super::engine_of_tokens(
        "first_token_ms = 20\ntoken_ms = 1\nchunk_chars = 3"
    ));
}

/// Without a vocabulary, the engine takes text, and so the kit sends text.
mod text {
    use genset_conformance::{Scenario, SkipReason, Verdict, run_conformance, suite};
    use genset_engine_scripted::ScriptedEngine;

    fn engine() -> ScriptedEngine {
        super::engine("first_token_ms = 20\ntoken_ms = 1")
    }

    suite!(|_: &Scenario| engine());

    /// A check that does not apply passes too.
    #[test]
    fn only_what_is_about_tokens_is_left_out() {
        let report = run_conformance(|_: &Scenario| engine());
        report.assert_conformant();
        let is_about_tokens = |verdict: &Verdict| {
            matches!(
                verdict,
                Verdict::Skip {
                    code: SkipReason::NeedsTokens,
                    ..
                }
            )
        };
        let checks = report
            .checks
            .iter()
            .filter(|check| is_about_tokens(&check.verdict));
        let ids: Vec<&str> = checks.map(|check| check.id.as_str()).collect();
        assert_eq!(
            ids,
            [
                "ST06", "FN06", "FN07", "FN11", "FN12", "FN13", "FN14", "FN15", "FN16", "US04",
                "US09", "CC16", "CC17", "DT06", "DT08", "DT10", "DT14", "DT18", "ER02", "RD01",
                "RD03"
            ]
        );
    }
}
