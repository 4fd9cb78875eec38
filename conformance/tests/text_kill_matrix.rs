//! Proves that the checks detect faults without tokens: exactly the checks listed here catch the corpus's mutants, converted to
//! engines of text. Faults that only engines of text have are in the corpus itself.

mod clean;
#[macro_use]
mod matrix;

use std::collections::BTreeSet;

use genset_conformance::mutants::text::spelled;
use genset_conformance::mutants::{Mutant, groups};
use genset_conformance::{
    Check, Level, Medium, Options, Scenario, find, run_conformance, run_conformance_with,
};

use self::clean::clean;

#[test]
fn the_clean_engine_of_text_passes_everything() {
    let clean = clean();
    let report = run_conformance(move |scenario: &Scenario| spelled(clean.build(scenario)));
    report.assert_conformant();
    let can = report.engine.capabilities.as_ref();
    assert_eq!(can.map(Medium::of), Some(Medium::Text));
}

/// Mutants whose fault looks different in text than in tokens: the checks that still catch it, and why.
const UNSEEN: &[(&str, &[&str], &str)] = &[
    ("stop-and-length", &[], "it takes a stop token"),
    ("no-usage-on-stop", &[], "it takes a stop token"),
    (
        "stop-token-counted",
        &["RD02"],
        "it takes a stop token, which some other check sends",
    ),
    ("min-tokens-ignored", &[], "it takes a stop token"),
    (
        "own-end-before-min-tokens",
        &[],
        "what the engine of text is built on is never asked to end by itself",
    ),
    (
        "token-after-terminal",
        &[],
        "what the engine of text is built on mends the stream",
    ),
    (
        "long-answers-lose-their-end",
        &["US08"],
        "what the engine of text is built on mends the stream, and knows no usage",
    ),
    (
        "tokens-after-error",
        &[],
        "what the engine of text is built on mends the stream",
    ),
    (
        "prompt-counted-in-blocks",
        &[],
        "only the engine knows how many tokens a text is",
    ),
    (
        "prompt-counted-by-chunk",
        &[],
        "only the engine knows how many tokens a text is",
    ),
    (
        "resume-counts-twice",
        &[],
        "an engine of text does not resume",
    ),
    (
        "seed-constant",
        &[],
        "without log probabilities nobody knows that there was a choice",
    ),
    ("poisoned-by-a-failure", &[], "the failure is a text"),
    (
        "variance-hides-other-rows",
        &["CC04", "DT15", "DT16"],
        "without log probabilities only the beginnings of many answers tell",
    ),
];

/// The checks that must catch a mutant as an engine of text: those for tokens, without those that use token ids. The reader's
/// rule for KV events does not depend on tokens.
fn expected(mutant: &Mutant) -> BTreeSet<&'static str> {
    if let Some((_, left, _)) = UNSEEN.iter().find(|(name, _, _)| *name == mutant.name) {
        return left.iter().copied().collect();
    }
    let applies = |id: &&str| {
        let is_of_text = |check: &Check| !check.needs_tokens && check.level != Level::Soak;
        *id == "RD05" || find(id).is_some_and(is_of_text)
    };
    mutant.killed_by.iter().copied().filter(applies).collect()
}

/// Mutants with their own refusal instead of the Worker's know only tokens. Those of text are text already.
fn can_be_spelled(mutant: &Mutant) -> bool {
    let refuses_itself = (mutant.build)(&clean(), &Scenario::default()).checks_itself;
    !refuses_itself && !mutant.name.starts_with("text-")
}

/// Mutants that no check should catch in text are not run. False alarms are excluded by the clean engine, which passes all
/// checks, and by the other mutants, which only the expected checks catch.
fn caught_as_expected(group: &str) {
    let mut wrong = Vec::new();
    let mutants = groups().filter(|(name, _)| *name == group);
    let mutants = mutants.flat_map(|(_, mutants)| mutants);
    for mutant in mutants.filter(|mutant| can_be_spelled(mutant)) {
        let expected = expected(mutant);
        if expected.is_empty() {
            continue;
        }
        let clean = clean();
        let options = Options {
            sequences: match mutant.killed_by.contains(&"SQ01") {
                true => Options::default().sequences,
                false => 0,
            },
            is_measuring: false,
            ..Options::default()
        };
        let report = run_conformance_with(
            move |scenario: &Scenario| spelled((mutant.build)(&clean, scenario)),
            &options,
        );
        let caught: BTreeSet<&str> = report.failures().map(|check| check.id.as_str()).collect();
        if caught != expected {
            wrong.push(format!(
                "{}: expected {expected:?}, caught by {caught:?}",
                mutant.name
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

each_group!(
    mutants_are_caught_in_text_as_they_are_in_tokens,
    caught_as_expected
);
