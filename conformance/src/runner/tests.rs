//! Which checks count as silent on the wall clock.

use std::cell::Cell;
use std::future::pending;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::sync_channel;

use genset_engine_sample::{SampleArgs, SampleEngine};

use super::*;
use crate::limits::Limits;
use crate::medium::Medium;
use crate::mutants::{Clean, controls};
use crate::subject::{Scenario, Subject};

/// The silence after which these watches give up.
const SILENCE: Duration = Duration::from_secs(2);

fn trial() -> Trial {
    let factory = |_: &Scenario| {
        Subject::new(SampleEngine::from_args(&SampleArgs {
            vocab_size: 100,
            token_delay_ms: 0,
        }))
    };
    let limits = Limits {
        call: SILENCE / 4,
        wall: SILENCE,
        start: SILENCE * 3 / 2,
        ..Limits::default()
    };
    Trial::new(Arc::new(factory), "LC01", limits, Variation::default())
}

/// The failure text of the watch over a check that does `work`.
fn watched<F>(work: impl FnOnce(Trial) -> F + Send + 'static) -> String
where
    F: Future<Output = CheckResult>,
{
    watched_for(SILENCE, work)
}

/// As [`watched`], with another limit.
fn watched_for<F>(limit: Duration, work: impl FnOnce(Trial) -> F + Send + 'static) -> String
where
    F: Future<Output = CheckResult>,
{
    let ended = try_out(&trial(), limit, Clock::Real, &no_interruption, work);
    let Err(Stop::Fail(reason)) = ended else {
        panic!("{ended:?}");
    };
    reason
}

#[test]
fn a_start_that_takes_long_is_judged_by_its_own_limit() {
    let reason = watched(|trial| async move { trial.starting("start", pending()).await });
    assert!(reason.starts_with("start was not done within"), "{reason}");
}

#[test]
fn a_wait_with_a_limit_longer_than_silence_is_judged_by_that_limit() {
    let limit = SILENCE * 3 / 2;
    let reason = watched(move |trial| async move { trial.within("wake", limit, pending()).await });
    assert!(reason.starts_with("wake was not done within"), "{reason}");
}

#[test]
fn a_start_that_blocks_the_thread_is_silence() {
    let (release, blocked) = sync_channel::<()>(0);
    let reason = watched(move |trial| async move {
        let blocks = async move {
            let _ = blocked.recv();
        };
        trial.starting("start", blocks).await
    });
    drop(release);
    let says = "the engine blocks its thread";
    assert!(reason.starts_with(says), "{reason}");
}

#[test]
fn a_check_whose_answers_never_end_is_given_up() {
    let over = Arc::new(AtomicBool::new(false));
    let is_over = Arc::clone(&over);
    let reason = watched_for(SILENCE / 4, move |trial| async move {
        let live = trial.start().await?;
        while !is_over.load(Ordering::Relaxed) {
            drop(live.answer(live.request(4, 4)).await?);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok::<(), Stop>(())
    });
    over.store(true, Ordering::Relaxed);
    let says = "the check was not over within 4 s of real time, though answers went on";
    assert_eq!(reason, says);
}

#[tokio::test]
async fn a_cleanup_is_no_silence() {
    let trial = trial();
    let before = trial.progress();
    assert_eq!(trial.cleaning("cleanup", async {}).await, Ok(()));
    assert_ne!(trial.progress(), before);
}

#[test]
fn a_check_is_given_up_when_the_run_is_interrupted() {
    let asked = Cell::new(0);
    let interruption = || {
        asked.set(asked.get() + 1);
        (asked.get() > 1).then(|| "enough".to_owned())
    };
    let work = |_: Trial| pending::<CheckResult>();
    let ended = try_out(&trial(), SILENCE * 100, Clock::Real, &interruption, work);
    let gone = Stop::Skip(SkipReason::Gone, "enough".into());
    assert_eq!((ended, asked.get()), (Err(gone), 2));
}

#[test]
fn a_panic_is_told_with_its_message() {
    let panics: [(fn(), &str); 3] = [
        (|| panic!("it fell"), "it fell"),
        (|| panic!("{:?}", Some(3)), "Some(3)"),
        (|| std::panic::panic_any(3_u8), "no message"),
    ];
    for (panics, message) in panics {
        let reason = watched(move |_| async move {
            panics();
            Ok::<(), Stop>(())
        });
        assert_eq!(reason, format!("the engine panicked: {message}"));
    }
}

#[test]
fn a_slow_engine_of_bodies_has_the_limits_of_a_slow_one() {
    let args = SampleArgs {
        vocab_size: 1000,
        token_delay_ms: 400,
    };
    let clean: Clean = Arc::new(move |_: &Scenario| SampleEngine::from_args(&args));
    for name in ["text-bodies-alone", "text-bodies-of-completions"] {
        let control = controls().find(|control| control.name == name).unwrap();
        let factory: Arc<dyn Factory> = Arc::new(control.factory(Arc::clone(&clean)));
        let known = acquaint(&factory);
        assert_eq!(known.medium, Medium::Body, "{name}");
        let limits = known.threaded_limits;
        assert!(limits.call > Limits::default().call, "{name}: {limits:?}");
    }
}
