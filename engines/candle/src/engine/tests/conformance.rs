//! The whole conformance kit on the engine with a trivial model, so that the engine alone is tested.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use genset_backend_common::controls::Adapter;
use genset_conformance::{Probe, Scenario, Subject, Verdict, find, run_check, suite};
use tokenizers::Tokenizer;

use super::fake::{Fake, Guesser, Switches, TOKENIZER};

struct Crash(Arc<Switches>);

impl Probe for Crash {
    fn crash(&self) -> bool {
        self.0.failing_steps.store(u32::MAX, Ordering::Relaxed);
        true
    }
}

fn subject(fake: Fake) -> Subject {
    let crash = Arc::new(Crash(Arc::clone(&fake.switches)));
    let tokenizer: Tokenizer = str::from_utf8(TOKENIZER).unwrap().parse().unwrap();
    let text = move |tokens: &[u32]| tokenizer.decode(tokens, true).unwrap();
    Subject::new(fake.engine())
        .with_probe(crash)
        .with_text(Arc::new(text))
        .with_adapter(Adapter {
            name: "poems".into(),
            source: "1".into(),
        })
}

suite!(|_: &Scenario| subject(Fake::default()));

/// The same with drafts that are sometimes right.
mod with_drafts {
    use super::*;

    fn guessing() -> Fake {
        Fake {
            guesses: Some((Guesser::Model { wrong: 3 }, 4)),
            ..Fake::default()
        }
    }

    suite!(|_: &Scenario| subject(guessing()));
}

/// A check that does not apply passes too, so the kit would not notice a lost declaration.
#[test]
fn what_is_declared_is_checked() {
    for id in [
        "DT02", "DT07", "GD01", "KV01", "KV08", "KV09", "MG01", "MG04", "MT02", "MT07", "ER03",
        "LR01", "LR02", "LR03", "LR04", "LR05", "LR06", "ER06", "FN15", "LC07",
    ] {
        let report = run_check(find(id).unwrap(), |_: &Scenario| subject(Fake::default()));
        assert_eq!(report.verdict, Verdict::Pass, "{id}");
    }
}
