//! Engines that take no prompts: they receive bodies, or inputs to embed, and the checks that send no prompt.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod clean;

use genset_backend_common::config::InputKind;
use genset_conformance::mutants::fault::{Declares, faulty};
use genset_conformance::{
    Medium, Scenario, SequenceOptions, SkipReason, Verdict, run_conformance, run_sequences,
};

use self::clean::{clean, mutant};

#[test]
fn an_engine_of_bodies_alone_is_asked_what_sends_no_prompt() {
    for name in ["text-bodies-alone", "text-bodies-of-completions"] {
        let control = mutant(name);
        let report = run_conformance(control.factory(clean()));
        report.assert_conformant();
        let can = report.engine.capabilities.as_ref().unwrap();
        assert_eq!(Medium::of(can), Medium::Body, "{name}");
        let of = |id: &str| {
            let row = report.checks.iter().find(|row| row.id == id);
            &row.unwrap().verdict
        };
        for id in [
            "LC01", "LC04", "LC05", "LC08", "SH01", "SH03", "SH04", "WB01",
        ] {
            assert_eq!(*of(id), Verdict::Pass, "{name}: {id}");
        }
        let code = SkipReason::NeedsTokens;
        for id in ["LC03", "ST01", "FN01", "US02", "CN01", "ER08", "SH02"] {
            let is_left_out = matches!(of(id), Verdict::Skip { code: is, .. } if *is == code);
            assert!(is_left_out, "{name}: {id}: {:?}", of(id));
        }
        let sequences = run_sequences(control.factory(clean()), &SequenceOptions::default());
        assert_eq!(sequences.unwrap().cases, 0, "{name}");
    }
}

#[test]
fn an_engine_that_only_embeds_is_asked_to_embed_and_what_sends_no_prompt() {
    let factory = || {
        let (control, clean) = (mutant("embeds"), clean());
        move |scenario: &Scenario| {
            let only = Declares(|config| config.capabilities.inputs = [InputKind::Embed].into());
            faulty((control.build)(&clean, scenario), only)
        }
    };
    let report = run_conformance(factory());
    report.assert_conformant();
    assert!(report.is_conformant());
    let of = |id: &str| {
        let row = report.checks.iter().find(|row| row.id == id);
        &row.unwrap().verdict
    };
    for id in [
        "EM01", "EM02", "EM03", "LC01", "LC09", "MT04", "SH01", "SH07", "SH08",
    ] {
        assert_eq!(*of(id), Verdict::Pass, "{id}");
    }
    let code = SkipReason::NeedsTokens;
    for id in ["LC03", "ST01", "CN01", "DT09", "SH02"] {
        let is_left_out = matches!(of(id), Verdict::Skip { code: is, .. } if *is == code);
        assert!(is_left_out, "{id}: {:?}", of(id));
    }
    let sequences = run_sequences(factory(), &SequenceOptions::default());
    assert_eq!(sequences.unwrap().cases, 0);
}
