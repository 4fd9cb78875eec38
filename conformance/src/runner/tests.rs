//! What counts as silence on the wall clock.

use std::future::pending;

use genset_engine_sample::{SampleArgs, SampleEngine};

use super::*;
use crate::subject::{Scenario, Subject};

/// What a watch gives up, in these tests.
const SILENCE: Duration = Duration::from_secs(2);

fn trial() -> Trial {
    let factory = |_: &Scenario| {
        Subject::new(SampleEngine::from_args(&SampleArgs {
            vocab_size: 100,
            token_delay_ms: 0,
        }))
    };
    let limits = Limits {
        wall: SILENCE,
        start: SILENCE * 3 / 2,
        ..Limits::default()
    };
    Trial::new(Arc::new(factory), "LC01", limits, Variation::default())
}

/// How the watch on a check ends that waits for `start`, in the words of the failure.
fn watched<F>(start: impl FnOnce() -> F + Send + 'static) -> String
where
    F: Future<Output = ()>,
{
    let trial = trial();
    let watched = trial.clone();
    let ended = watch(SILENCE, Clock::Real, &watched, move || {
        let runtime = runtime(false, false)?;
        runtime.block_on(trial.starting("start", start()))
    });
    let Err(Stop::Fail(reason)) = ended else {
        panic!("{ended:?}");
    };
    reason
}

#[test]
fn a_start_that_takes_long_is_judged_by_its_own_limit() {
    let reason = watched(pending);
    assert!(reason.starts_with("start was not done within"), "{reason}");
}

#[test]
fn a_start_that_blocks_the_thread_is_silence() {
    let (release, blocked) = sync_channel::<()>(0);
    let reason = watched(move || async move {
        let _ = blocked.recv();
    });
    drop(release);
    let says = "the engine blocks its thread";
    assert!(reason.starts_with(says), "{reason}");
}
