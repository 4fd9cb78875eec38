//! Proves that random sequences detect faults: the clean engines pass them, broken ones are caught, and a printed failure fails
//! in the same way when replayed.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests may; clippy knows only the functions marked as tests"
)]

mod clean;
mod in_real_time;

use std::fs;
use std::path::Path;

use genset_conformance::mutants::{controls, slotted::slotted};
use genset_conformance::{
    Factory, Scenario, SequenceFailure, SequenceOptions, Violated, replay_sequence, run_sequences,
};

use self::clean::{clean, sample};
use self::in_real_time::in_real_time;

fn mutant(name: &str) -> impl Factory {
    clean::mutant(name).factory(clean())
}

fn options() -> SequenceOptions {
    SequenceOptions {
        cases: 256,
        seed: Some(1),
        ..SequenceOptions::default()
    }
}

fn violated(failure: SequenceFailure) -> Violated {
    match failure.violated() {
        Some(violated) => violated.clone(),
        None => panic!("{failure}"),
    }
}

fn caught(name: &str) -> Violated {
    violated(run_sequences(mutant(name), &options()).expect_err(name))
}

#[test]
fn the_sample_engine_passes() {
    let report = run_sequences(sample(), &options()).unwrap_or_else(|failure| panic!("{failure}"));
    assert_eq!((report.cases, report.seed), (256, 1));
}

#[test]
fn the_other_clean_engines_pass() {
    for control in controls() {
        run_sequences(control.factory(clean()), &options())
            .unwrap_or_else(|failure| panic!("{}: {failure}", control.name));
    }
    let clean = clean();
    run_sequences(
        move |scenario: &Scenario| slotted(&clean, scenario),
        &options(),
    )
    .unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn an_engine_in_real_time_passes() {
    let clean = clean();
    let factory = move |scenario: &Scenario| in_real_time(clean.build(scenario));
    let options = SequenceOptions {
        cases: 8,
        ..options()
    };
    run_sequences(factory, &options).unwrap_or_else(|failure| panic!("{failure}"));
}

/// Each mutant with its shrunk sequence, and a part of its message.
const CAUGHT: &[(&str, &str, &str)] = &[
    (
        "cancel-ignored",
        "start; generate#0 len=1 max=257",
        "cancelled after 0 tokens and gave more than 256 after that",
    ),
    (
        "cancelled-as-stop",
        "start; generate#0 len=1 max=1; cancel#0",
        "was cancelled and ended as Stop",
    ),
    (
        "cancelled-work-billed",
        "start; generate#0 len=1 max=1; cancel#0",
        "delivered 0 tokens, its usage says 2",
    ),
    (
        "cancel-swallows-the-terminal",
        "start; generate#0 len=1 max=3; poll#0 3; cancel#0",
        "ended_without_terminal",
    ),
    (
        "late-cancel-hits-next-tenant",
        "start; generate#0 len=1 max=1; poll#0 2; generate#1 len=1 max=1; cancel#0",
        "request #1 ended as cancelled, and nobody cancelled it",
    ),
    (
        "unknown-abort-hits-the-newest",
        "start; generate#0 len=1 max=1; abort",
        "nobody cancelled it",
    ),
    (
        "second-abort-undoes-the-first",
        "start; generate#0 len=1 max=257; abort#0; abort#0",
        "gave more than 256",
    ),
    (
        "two-tokens-for-one",
        "start; generate#0 len=1 max=1",
        "gave 2 tokens, max_tokens is 1",
    ),
    (
        "prompt-counted-in-blocks",
        "start; generate#0 len=33 max=1",
        "has 33 prompt tokens, its usage says 48",
    ),
    (
        "one-counter-for-all",
        "start; generate#0 len=1 max=1; generate#1 len=1 max=1",
        "request #1 delivered 1 tokens, its usage says 2",
    ),
    (
        "lossy-buffer",
        "start; generate#0 len=1 max=9; poll#0 1; advance 1001ms",
        "ended as Length after 8 of 9 tokens",
    ),
    (
        "token-after-terminal",
        "start; generate#0 len=1 max=1",
        "item_after_terminal",
    ),
    (
        "early-request-panics",
        "",
        "the engine panicked: the scheduler is not there yet",
    ),
    (
        "cleanup-not-idempotent",
        "start",
        "a cleanup after the cleanup failed",
    ),
    (
        "cleanup-forgets-streams",
        "start; generate#0 len=1 max=1; cleanup",
        "the next item of request #0 was not done within",
    ),
    (
        "second-drain-waits",
        "start; drain; drain",
        "drain was not done within",
    ),
    (
        "late-request-is-internal",
        "",
        "generate after cleanup should be refused with engine_shutdown",
    ),
];

#[test]
fn broken_engines_are_caught_by_short_sequences_that_replay() {
    for (name, text, what) in CAUGHT {
        let found = caught(name);
        assert_eq!(found.sequence.to_string(), *text, "{name}");
        assert!(found.violation.contains(what), "{name}: {found}");
        assert!(found.sequence.len() <= 6, "{name}: {found}");
        let replayed = violated(replay_sequence(text, mutant(name)).expect_err(name));
        assert_eq!(
            (&replayed.violation, replayed.operation),
            (&found.violation, found.operation),
            "{name}"
        );
        replay_sequence(text, sample()).unwrap_or_else(|failure| panic!("{name}: {failure}"));
    }
}

#[test]
fn a_failure_says_what_where_and_how_to_replay_it() {
    let options = SequenceOptions {
        replay: "genset conform replay --engine broken".into(),
        ..options()
    };
    let failure = run_sequences(mutant("second-drain-waits"), &options).unwrap_err();
    assert_eq!(
        failure.to_string(),
        r#"at `drain` (3 of 3): drain was not done within 3600 s
  sequence: start; drain; drain
  seed:     1
  replay:   genset conform replay --engine broken --sequence 'start; drain; drain'
  in Rust:  replay_sequence("start; drain; drain", factory)"#
    );
}

/// More requests than the slotted engines run at once, and none is read: waiting ones are served once there is room.
#[test]
fn requests_over_capacity_hang_only_where_they_are_forgotten() {
    let requests: String = (0..25)
        .map(|request| format!("generate#{request} len=4 max=2000; "))
        .collect();
    let text = format!("start; {requests}poll#24 1");
    let clean = clean();
    replay_sequence(&text, move |scenario: &Scenario| slotted(&clean, scenario))
        .unwrap_or_else(|failure| panic!("{failure}"));
    let found = violated(replay_sequence(&text, mutant("hangs-over-capacity")).unwrap_err());
    assert!(found.violation.contains("request #24"), "{found}");
}

#[test]
fn a_bad_text_is_refused_by_its_token() {
    let failure = replay_sequence("start; pol#0 2", sample()).unwrap_err();
    assert!(failure.violated().is_none());
    assert_eq!(
        failure.to_string(),
        "this is no sequence of operations: operation 2: `pol#0`: the operations are start, generate, poll, cancel, drop, \
         abort, drain, cleanup and advance"
    );
}

fn lines_of(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines.map(str::to_owned).collect()
}

#[test]
fn regressions_are_kept_and_tried_first() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sequences.txt");
    let mut options = SequenceOptions {
        regressions: Some(path.clone()),
        ..options()
    };
    let found = violated(run_sequences(mutant("second-drain-waits"), &options).unwrap_err());
    assert_eq!(lines_of(&path), [found.sequence.to_string()]);

    // Without random sequences only the file can find it; a sequence from the file is not added again.
    options.cases = 0;
    let again = violated(run_sequences(mutant("second-drain-waits"), &options).unwrap_err());
    assert_eq!((again.violation, again.seed), (found.violation, None));
    assert_eq!(lines_of(&path).len(), 1);
    let report = run_sequences(sample(), &options).unwrap();
    assert_eq!((report.regressions, report.cases), (1, 0));

    fs::write(&path, "# why\nstart\nstop\n").unwrap();
    let failure = run_sequences(sample(), &options).unwrap_err().to_string();
    assert!(failure.contains("line 3: operation 1: `stop`"), "{failure}");

    options.regressions = Some(folder.path().to_owned());
    let failure = run_sequences(sample(), &options).unwrap_err();
    let is_unreadable = matches!(failure, SequenceFailure::Regressions { .. });
    assert!(is_unreadable, "{failure}");
}

#[test]
fn a_violation_is_told_where_it_cannot_be_kept() {
    let folder = tempfile::tempdir().unwrap();
    let options = SequenceOptions {
        regressions: Some(folder.path().join("none/sequences.txt")),
        ..options()
    };
    let found = violated(run_sequences(mutant("second-drain-waits"), &options).unwrap_err());
    let problem = found.unkept.as_deref().unwrap();
    assert!(problem.contains("none/sequences.txt: "), "{problem}");
    assert!(found.to_string().contains("\n  not kept: "), "{found}");
}
