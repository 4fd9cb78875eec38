//! The scripted engine meets the contract in both modes: the whole conformance kit, one test per check.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod common;

/// With a vocabulary, the engine takes the kit's tokens directly.
mod tokens {
    use std::sync::Arc;

    use genset_conformance::{Scenario, Subject, Verdict, find, run_check, suite};
    use genset_engine_scripted::ScriptedEngine;

    use crate::common::{Bytes, script};

    const PANGRAM: &str =
        "[[reply]]\ntoken_ms = 1\ntext = 'The quick brown fox jumps over the lazy dog.'";

    fn engine() -> Subject {
        let engine = ScriptedEngine::from_script(script(PANGRAM));
        Subject::new(engine.with_vocabulary(Arc::new(Bytes), 2048))
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
    use std::sync::Arc;

    use genset_conformance::{Scenario, Subject, suite};
    use genset_engine_scripted::ScriptedEngine;

    use crate::common::{Bytes, script};

    const PANGRAM: &str = "[[reply]]\nfirst_token_ms = 20\ntoken_ms = 1\nchunk_chars = 3\n\
        text = 'The quick brown fox jumps over the lazy dog.'";

    fn engine() -> Subject {
        let engine = ScriptedEngine::from_script(script(PANGRAM));
        Subject::new(engine.with_vocabulary(Arc::new(Bytes), 2048))
    }

    suite!(|_: &Scenario| engine());
}

/// Without a vocabulary, the engine takes text, and so the kit sends text.
mod text {
    use genset_conformance::{Scenario, SkipReason, Verdict, run_conformance, suite};
    use genset_engine_scripted::ScriptedEngine;

    use crate::common::script;

    const PANGRAM: &str = "[[reply]]\nfirst_token_ms = 20\ntoken_ms = 1\n\
        text = 'The quick brown fox jumps over the lazy dog.'";

    fn engine() -> ScriptedEngine {
        ScriptedEngine::from_script(script(PANGRAM))
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
