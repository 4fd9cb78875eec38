//! tmp
use genset_conformance::mutants::{Clean, controls, corpus, slotted};
use genset_conformance::{Scenario, SequenceOptions, run_sequences};
use genset_engine_sample::{SampleArgs, SampleEngine};
use std::sync::Arc;

fn clean() -> Clean {
    let args = SampleArgs {
        vocab_size: 1000,
        token_delay_ms: 1,
    };
    Arc::new(move |_: &Scenario| SampleEngine::from_args(&args))
}
#[test]
fn survey() {
    let t = std::time::Instant::now();
    let r = run_sequences(
        SampleF(clean()),
        &SequenceOptions {
            cases: 256,
            seed: Some(1),
            ..Default::default()
        },
    );
    match r {
        Ok(r) => eprintln!("CLEAN {r:?} {:?}", t.elapsed()),
        Err(e) => eprintln!("CLEAN FAIL {e}"),
    }
    for c in controls() {
        let r = run_sequences(
            c.factory(clean()),
            &SequenceOptions {
                cases: 256,
                seed: Some(1),
                ..Default::default()
            },
        );
        match r {
            Ok(r) => eprintln!("CONTROL {} {r:?}", c.name),
            Err(e) => eprintln!("CONTROL FAIL {} {e}", c.name),
        }
    }
    let r = run_sequences(
        move |s: &Scenario| slotted::slotted(&clean(), s),
        &SequenceOptions {
            cases: 256,
            seed: Some(1),
            ..Default::default()
        },
    );
    match r {
        Ok(r) => eprintln!("SLOTTED {r:?} {:?}", t.elapsed()),
        Err(e) => eprintln!("SLOTTED FAIL {e}"),
    }
    for m in corpus() {
        let t = std::time::Instant::now();
        let r = run_sequences(
            m.factory(clean()),
            &SequenceOptions {
                cases: 256,
                seed: Some(1),
                ..Default::default()
            },
        );
        match r {
            Ok(_) => eprintln!("SURVIVED {} {:?} {:?}", m.name, m.killed_by, t.elapsed()),
            Err(e) => eprintln!(
                "KILLED {} {:?} {:?}\n   {e}",
                m.name,
                m.killed_by,
                t.elapsed()
            ),
        }
    }
}
struct SampleF(Clean);
impl genset_conformance::Factory for SampleF {
    fn build(&self, s: &Scenario) -> genset_conformance::Subject {
        self.0.build(s)
    }
}
