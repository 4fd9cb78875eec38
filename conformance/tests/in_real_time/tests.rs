//! Correct but unusual engines whose waits take real time.

use std::sync::Arc;

use genset_conformance::mutants::capable::capable;
use genset_conformance::mutants::fault::faulty;
use genset_conformance::mutants::{Clean, corpus};
use genset_conformance::{Factory, Scenario, Verdict, find, run_check};

use super::{Blocks, Full, in_real_time, is_sound_in_real_time, sample, seats};

#[test]
fn an_engine_that_keeps_its_pace_is_told_from_one_that_rushes() {
    let pace = find("RD06").unwrap();
    let sound = run_check(pace, |scenario: &Scenario| in_real_time(capable(scenario)));
    assert_eq!(sound.verdict, Verdict::Pass);
    let clean: Clean = Arc::new(capable);
    let rushes = corpus().find(|mutant| mutant.name == "rushes-after-a-stall");
    let rushes = rushes.unwrap().factory(clean);
    let broken = run_check(pace, move |scenario: &Scenario| {
        in_real_time(rushes.build(scenario))
    });
    let is_seen = matches!(
        &broken.verdict,
        Verdict::Fail { reason } if reason.starts_with("after a stall")
    );
    assert!(is_seen, "{:?}", broken.verdict);
}

#[test]
fn a_token_a_millisecond_of_ten() {
    is_sound_in_real_time(|| sample(10, 1));
}

#[test]
fn thirty_milliseconds_for_a_token() {
    is_sound_in_real_time(|| sample(1000, 30));
}

#[test]
fn one_seat_and_the_others_are_refused() {
    is_sound_in_real_time(|| seats(1, Full::AtOnce));
}

#[test]
fn two_seats_and_the_others_are_refused_in_their_streams() {
    is_sound_in_real_time(|| seats(2, Full::InTheStream));
}

#[test]
fn answers_in_blocks_of_32_tokens() {
    is_sound_in_real_time(|| faulty(sample(1000, 0), Blocks));
}
