//! The whole conformance kit on the engine with a trivial model, so that the engine alone is tested.

use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock};

use genset_backend_common::controls::Adapter;
use genset_conformance::{Detokenize, Probe, Scenario, Subject, catalogue, suite};
use tokenizers::Tokenizer;

use super::fake::{Fake, Guesser, Switches, TOKENIZER};

struct Crash(Arc<Switches>);

impl Probe for Crash {
    fn crash(&self) -> bool {
        self.0.failing_steps.store(u32::MAX, Ordering::Relaxed);
        true
    }
}

static TEXT: LazyLock<Detokenize> = LazyLock::new(|| {
    let tokenizer: Tokenizer = str::from_utf8(TOKENIZER).unwrap().parse().unwrap();
    Arc::new(move |tokens: &[u32]| tokenizer.decode(tokens, true).unwrap())
});

fn subject(fake: Fake) -> Subject {
    let crash = Arc::new(Crash(Arc::clone(&fake.switches)));
    Subject::new(fake.engine())
        .with_probe(crash)
        .with_text(Arc::clone(&TEXT))
        .with_adapter(Adapter {
            name: "poems".into(),
            source: "1".into(),
        })
}

/// Checks that must not be skipped, so that a lost declaration is noticed.
const DECLARED: [&str; 20] = [
    "DT02", "DT07", "GD01", "KV01", "KV08", "KV09", "MG01", "MG04", "MT02", "MT07", "ER03", "LR01",
    "LR02", "LR03", "LR04", "LR05", "LR06", "ER06", "FN15", "LC07",
];

/// All other checks.
fn may_be_skipped() -> Vec<&'static str> {
    let ids = catalogue().map(|check| check.id);
    ids.filter(|id| !DECLARED.contains(id)).collect()
}

suite!(|_: &Scenario| subject(Fake::default()), skips: may_be_skipped());

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
