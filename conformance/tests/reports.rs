//! The forms of a report: what people read, and what programs do.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use std::collections::BTreeSet;
use std::sync::Arc;

use genset_conformance::mutants::{Clean, corpus};
use genset_conformance::{
    JSON_SCHEMA, Level, Options, Report, Scenario, Verdict, Waivers, matrix, run_conformance_with,
};
use genset_engine_sample::{SampleArgs, SampleEngine};
use serde_json::Value;

fn clean() -> Clean {
    let args = SampleArgs {
        vocab_size: 1000,
        token_delay_ms: 1,
    };
    Arc::new(move |_: &Scenario| SampleEngine::from_args(&args))
}

fn options() -> Options {
    Options {
        level: Level::Core,
        only: vec!["ST".into(), "US".into()],
        replay: "genset conform run --engine broken".into(),
    }
}

/// The report of an engine that fails one check.
fn broken() -> Report {
    let mutant = corpus()
        .find(|mutant| mutant.name == "silent-on-a-whole-chunk")
        .unwrap();
    run_conformance_with(mutant.factory(clean()), &options())
}

#[test]
fn a_failure_is_told_with_what_it_breaks_and_how_to_replay_it() {
    let report = broken();
    let text = report.to_terminal(false);
    for part in [
        "FAILED ST01",
        "\n  seen    ",
        "\n  breaks  ",
        "\n  clause  ",
        "replay  genset conform run --engine broken --only ST01",
        "NOT CONFORMANT",
    ] {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
    assert!(!text.contains('\x1b') && report.to_terminal(true).contains('\x1b'));
    assert!(!report.is_conformant() && !report.is_good());
}

#[test]
fn the_json_form_is_what_its_schema_says_and_reads_back() {
    let report = broken();
    let text = report.to_json().unwrap();
    assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), report);
    let (json, schema): (Value, Value) = (
        serde_json::from_str(&text).unwrap(),
        serde_json::from_str(JSON_SCHEMA).unwrap(),
    );
    assert_eq!(keys(&json), names(&schema["required"]));
    assert_eq!(keys(&json), keys(&schema["properties"]));
    for part in ["engine", "host"] {
        assert_eq!(
            keys(&json[part]),
            names(&schema["properties"][part]["required"])
        );
    }
    let profile = &schema["properties"]["profiles"]["items"];
    for counted in json["profiles"].as_array().unwrap() {
        assert_eq!(keys(counted), names(&profile["required"]));
        assert!(allows(&profile["properties"]["result"], &counted["result"]));
    }
    let check = &schema["$defs"]["check"];
    for result in json["checks"].as_array().unwrap() {
        let kinds = check["oneOf"].as_array().unwrap();
        let kind = kinds
            .iter()
            .find(|kind| kind["properties"]["verdict"]["const"] == result["verdict"]);
        let known: BTreeSet<String> =
            &names(&check["required"]) | &names(&kind.unwrap()["required"]);
        assert_eq!(keys(result), known);
        for (field, kind) in [("level", "level"), ("profile", "profile")] {
            assert!(allows(&schema["$defs"][kind], &result[field]), "{result}");
        }
    }
}

fn keys(object: &Value) -> BTreeSet<String> {
    object.as_object().unwrap().keys().cloned().collect()
}

fn names(list: &Value) -> BTreeSet<String> {
    let list = list.as_array().map(Vec::as_slice).unwrap_or_default();
    list.iter()
        .map(|name| name.as_str().unwrap().to_owned())
        .collect()
}

fn allows(schema: &Value, value: &Value) -> bool {
    schema["enum"].as_array().unwrap().contains(value)
}

#[test]
fn the_junit_form_counts_and_escapes() {
    let mut report = broken();
    report.engine.name = "<broken> & \"odd\"".into();
    let xml = report.to_junit();
    assert!(xml.contains("&lt;broken&gt; &amp; &quot;odd&quot;"));
    assert_eq!(xml.matches("<testcase ").count(), report.checks.len());
    assert_eq!(xml.matches("<failure ").count(), report.failures().count());
    assert_eq!(
        xml.matches("<testcase ").count(),
        xml.matches("</testcase>").count()
    );
    assert!(xml.contains("genset conform run --engine broken --only ST01</system-out>"));
}

#[test]
fn the_matrix_has_a_column_a_report() {
    let mut good = run_conformance_with(
        {
            let clean = clean();
            move |scenario: &Scenario| clean.build(scenario)
        },
        &options(),
    );
    good.engine.name = "good".into();
    let table = matrix(&[good, broken()]);
    assert!(
        table.starts_with("| check | level | promise | good | sample |\n"),
        "{table}"
    );
    let row = table
        .lines()
        .find(|line| line.starts_with("| ST01 "))
        .unwrap();
    assert!(row.ends_with("| pass | **FAIL** |"), "{row}");
}

#[test]
fn a_waiver_makes_a_failure_an_expected_one_but_no_core_check_conformant() {
    let mut report = broken();
    let known = r#"
        [[check]]
        id = "ST01"
        expect = "fail"
        reason = "known"
        issue = "https://example.org/1"
        until = "2999-12-31"
    "#;
    report.apply(&Waivers::parse(known).unwrap());
    assert!(report.is_good() && !report.is_conformant());
    let waived = report
        .checks
        .iter()
        .find(|check| check.id == "ST01")
        .unwrap();
    assert!(matches!(waived.verdict, Verdict::ExpectedFail { .. }));

    let mut report = broken();
    report.apply(&Waivers::parse(&known.replace("2999", "2001")).unwrap());
    assert!(
        !report.is_good()
            && report
                .to_terminal(false)
                .contains("the waiver ended on 2001-12-31")
    );
}
