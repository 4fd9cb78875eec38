//! The forms of a report, for people and for programs.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod clean;

use std::collections::{BTreeMap, BTreeSet};

use genset_backend_common::{
    EngineConfig, EngineError, GenerateRequest, LLMEngine, OutputStream, RequestContext,
    StartContext, async_trait,
};
use genset_conformance::mutants::capable::capable;
use genset_conformance::{
    CheckReport, JSON_SCHEMA, Level, Options, Profile, Report, Scenario, SkipReason, Verdict,
    Waivers, find, matrix, run_conformance_with,
};
use serde_json::Value;

use self::clean::{clean, mutant, sample};

fn options() -> Options {
    Options {
        level: Level::Core,
        only: vec!["ST".into(), "US".into(), "PF01".into()],
        replay: "genset conform run --engine broken".into(),
        about: [("commit".to_owned(), "4f2c\x1b[2J".to_owned())].into(),
        seed: 3,
        ..Options::default()
    }
}

/// An engine that fails one check.
const BROKEN: &str = "silent-on-a-whole-chunk";

/// The report of a mutant.
fn of(name: &str, options: &Options) -> Report {
    run_conformance_with(mutant(name).factory(clean()), options)
}

fn broken() -> Report {
    of(BROKEN, &options())
}

#[test]
fn a_failure_is_told_with_what_it_breaks_and_how_to_replay_it() {
    let report = broken();
    let text = report.to_terminal(false);
    for part in [
        " of sample, level 1, seed 3\n",
        "\nabout     commit 4f2c\\u{1b}[2J\n",
        "FAILED ST01",
        "\n  seen    ",
        "\n  breaks  ",
        "\n  clause  ",
        "replay  genset conform run --engine broken --only ST01 --level core --seed 3\n",
        "measured  PF01 between_tokens_us ",
        ", first_token_us ",
        "NOT CONFORMANT",
    ] {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
    assert!(!text.contains('\x1b') && report.to_terminal(true).contains('\x1b'));
    assert!(!report.is_conformant() && !report.is_good());
}

#[test]
fn a_terminal_obeys_nothing_that_an_engine_or_a_waiver_says() {
    let mut report = broken();
    report.engine.name = "m\x1b[2J".into();
    for check in &mut report.checks {
        if let Verdict::Fail { reason } = &mut check.verdict {
            reason.push('\u{9b}');
        }
    }
    let text = report.to_terminal(false);
    assert!(text.contains(" of m\\u{1b}[2J, level 1"), "{text}");
    assert!(text.contains("\\u{9b}\n"), "{text}");
    assert!(!text.contains(['\x1b', '\u{9b}']), "{text}");
    let waiver = |id: &str| {
        format!("[[check]]\nid = \"{id}\"\nexpect = \"fail\"\nreason = \"\\u001b[2J\"\n")
    };
    let waivers = waiver("ST01") + &waiver("\\u001b");
    report.apply(&Waivers::parse(&waivers).unwrap());
    let text = report.to_terminal(false);
    for part in [
        "\nexpected to fail: ST01 (\\u{1b}[2J, ",
        "\nWAIVER \\u{1b}: no check has this id\n",
    ] {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
    assert!(!text.contains('\x1b'), "{text}");
}

#[test]
fn the_json_form_is_what_its_schema_says_and_reads_back() {
    let report = broken();
    let text = report.to_json().unwrap();
    assert_eq!(Report::from_json(&text).unwrap(), report);
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
        let mut known: BTreeSet<String> =
            &names(&check["required"]) | &names(&kind.unwrap()["required"]);
        if result["verdict"] == "fail" {
            known.insert("transcript".into());
        }
        assert_eq!(keys(result), known);
        if let Some(code) = result.get("code") {
            assert!(allows(&kind.unwrap()["properties"]["code"], code));
        }
        if let Some(transcript) = result.get("transcript") {
            ensure_transcript(&schema["$defs"]["transcript"], transcript);
        }
        for (field, kind) in [("level", "level"), ("profile", "profile")] {
            assert!(allows(&schema["$defs"][kind], &result[field]), "{result}");
        }
    }
}

fn ensure_transcript(schema: &Value, transcript: &Value) {
    assert_eq!(keys(transcript), names(&schema["required"]));
    let event = &schema["properties"]["events"]["items"];
    let told = transcript["events"].as_array().unwrap();
    assert!(!told.is_empty());
    for told in told {
        assert!(
            names(&event["required"]).is_subset(&keys(told))
                && keys(told).is_subset(&keys(&event["properties"])),
            "{told}"
        );
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
    report.engine.name = "<broken> & \"odd\"\u{ffff}".into();
    let xml = report.to_junit();
    assert!(xml.contains("&lt;broken&gt; &amp; &quot;odd&quot; \" tests="));
    assert_eq!(xml.matches("<testcase ").count(), report.checks.len());
    assert_eq!(xml.matches("<failure ").count(), report.failures().count());
    assert_eq!(
        xml.matches("<testcase ").count(),
        xml.matches("</testcase>").count()
    );
    let clause = find("ST01").unwrap().located_clause();
    assert!(
        xml.contains(&format!("\nclause: {clause}</failure>")),
        "{xml}"
    );
    assert!(xml.contains(
        "genset conform run --engine broken --only ST01 --level core --seed 3</system-out>"
    ));
}

#[test]
fn the_matrix_has_a_column_a_report() {
    let mut good = run_conformance_with(sample(), &options());
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

    // A core check that its authors waived counts as failed.
    let mut report = broken();
    let skipped = known.replace("\"fail\"", "\"skip\"");
    report.apply(&Waivers::parse(&skipped).unwrap());
    assert!(report.is_good() && !report.is_conformant());
    let waived = |check: &&CheckReport| check.is_waived();
    assert_eq!(report.checks.iter().filter(waived).count(), 1);

    let mut report = broken();
    report.apply(&Waivers::parse(&known.replace("2999", "2001")).unwrap());
    assert!(
        !report.is_good()
            && report
                .to_terminal(false)
                .contains("the waiver ended on 2001-12-31")
    );
}

#[test]
fn a_failure_has_a_transcript_as_long_as_the_options_allow() {
    let transcript = |events: usize| {
        let options = Options {
            max_transcript_events: events,
            only: vec!["ST01".into()],
            ..options()
        };
        let report = of(BROKEN, &options);
        let failed = report.failures().next().unwrap().clone();
        failed.transcript.unwrap()
    };
    let whole = transcript(200);
    let told: Vec<&str> = whole.events.iter().map(|e| e.event.as_str()).collect();
    assert_eq!(&told[..2], ["start as aggregated", "start returned"]);
    assert!(told[2].starts_with("generate: prompt of "), "{told:?}");
    let last = transcript(1);
    assert_eq!(last.events.len(), 1);
    assert_eq!(
        last.left_out,
        whole.left_out + u64::try_from(whole.events.len()).unwrap() - 1
    );
    assert!(transcript(0).events.is_empty());
}

/// The events in a broken engine's failure of a check.
fn events(name: &str, check: &str) -> String {
    let options = Options {
        only: vec![check.into()],
        level: Level::Soak,
        ..Options::default()
    };
    let report = of(name, &options);
    let failed = report.failures().next().unwrap();
    let events = failed.transcript.as_ref().unwrap().events.iter();
    let events: Vec<&str> = events.map(|event| event.event.as_str()).collect();
    events.join("; ")
}

#[test]
fn a_transcript_has_what_was_dropped_aborted_drained_and_cleaned_up() {
    for (name, check, part) in [
        ("drop-reported-as-death", "RD04", "; the stream was dropped"),
        ("abort-reported-as-death", "RD04", "; abort; abort returned"),
        (
            "second-drain-waits",
            "SH07",
            "; drain; drain returned; drain; the call of drain was dropped",
        ),
        (
            "cleanup-not-idempotent",
            "SH02",
            "; cleanup; cleanup returned; cleanup; cleanup failed: ",
        ),
    ] {
        let told = events(name, check);
        assert!(told.contains(part), "{name}: {told}");
    }
}

#[test]
fn a_false_virtual_time_is_named_as_the_cause_and_breaks_nothing_else() {
    let report = of("false-virtual-time", &Options::default());
    let failed: Vec<&CheckReport> = report.failures().collect();
    assert_eq!(failed.len(), 1, "{failed:?}");
    let Verdict::Fail { reason } = &failed[0].verdict else {
        panic!("{failed:?}");
    };
    assert!(
        failed[0].id == "LC09"
            && reason.starts_with("the engine declares virtual_time, but waits for something"),
        "{reason}"
    );
}

/// The measurements of the clean engine.
fn measured(is_measuring: bool) -> BTreeMap<String, Verdict> {
    let options = Options {
        only: vec!["PF".into()],
        is_measuring,
        ..Options::default()
    };
    let report = run_conformance_with(sample(), &options);
    assert!(report.is_good());
    let checks = report.checks.into_iter();
    checks
        .filter(|check| check.level == Level::Info && check.id.starts_with("PF"))
        .map(|check| (check.id, check.verdict))
        .collect()
}

#[test]
fn measurements_have_numbers_and_no_verdict() {
    let all = measured(true);
    let names = |id: &str| {
        let Verdict::Measured { measurements } = &all[id] else {
            panic!("{id}: {:?}", all[id]);
        };
        measurements.keys().cloned().collect::<Vec<_>>()
    };
    assert_eq!(names("PF01"), ["between_tokens_us", "first_token_us"]);
    let at = |count| format!("at_{count}_tokens_per_s");
    assert_eq!(names("PF02"), ["01", "04", "16", "32"].map(at));
    assert_eq!(names("PF03"), ["first_token_ns", "per_token_ns"]);
    for verdict in measured(false).values() {
        assert!(matches!(
            verdict,
            Verdict::Skip {
                code: SkipReason::NotMeasured,
                ..
            }
        ));
    }
}

/// An engine without a device: it starts, and refuses every request.
struct Refuses;

#[async_trait]
impl LLMEngine for Refuses {
    async fn start(&self, _ctx: StartContext) -> Result<EngineConfig, EngineError> {
        Ok(EngineConfig::new("refuses", 4096))
    }

    async fn generate(
        &self,
        _request: GenerateRequest,
        _ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        Err(EngineError::internal("the device is gone"))
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        Ok(())
    }
}

#[test]
fn checks_that_could_not_be_tried_are_told_together_and_not_under_their_promises() {
    let options = Options {
        only: vec!["ST01".into(), "US02".into(), "CN03".into()],
        replay: "genset conform run --engine broken".into(),
        ..Options::default()
    };
    let report = run_conformance_with(|_: &Scenario| Refuses, &options);
    assert!(!report.is_good());
    assert!(
        report.failures().all(|check| check.is_precondition),
        "{report:?}"
    );
    let text = report.to_terminal(false);
    let told = "FAILED before it could be tried: ST01, US02, CN03\n  seen    generate refused a good request: the device is gone (internal)\n";
    assert!(text.contains(told), "{text}");
    assert_eq!(text.matches("\nFAILED").count(), 1, "{text}");
    let json: Value = serde_json::from_str(&report.to_json().unwrap()).unwrap();
    let rows = json["checks"].as_array().unwrap();
    let marked = rows.iter().filter(|row| row["is_precondition"] == true);
    assert_eq!(marked.count(), 3);
    let untried = "<failure message=\"could not be tried: generate refused a good request: the device is gone (internal)\"></failure>";
    assert_eq!(report.to_junit().matches(untried).count(), 3);
}

#[test]
fn a_skipped_check_says_why() {
    let rows = [
        ("CN11", SkipReason::Level, "level 3 was not asked for"),
        (
            "ER03",
            SkipReason::NoProbe,
            "only a probe can make the engine crash",
        ),
        (
            "KV01",
            SkipReason::NotDeclared,
            "the engine does not declare kv-events",
        ),
        (
            "PF01",
            SkipReason::NotMeasured,
            "measurements were not asked for",
        ),
        ("SQ01", SkipReason::Filtered, "no sequences were asked for"),
    ];
    let options = Options {
        only: rows.iter().map(|(id, ..)| (*id).to_owned()).collect(),
        sequences: 0,
        is_measuring: false,
        ..Options::default()
    };
    let report = run_conformance_with(sample(), &options);
    let others = ("LC01", SkipReason::Filtered, "left out by name");
    for (id, code, why) in rows.into_iter().chain([others]) {
        let row = report.checks.iter().find(|row| row.id == id).unwrap();
        let reason = why.to_owned();
        assert_eq!(row.verdict, Verdict::Skip { code, reason }, "{id}");
    }
}

#[test]
fn without_a_command_a_replay_line_is_a_call() {
    let options = Options {
        replay: String::new(),
        ..options()
    };
    let report = of(BROKEN, &options);
    let line = "replay  run_conformance_with(factory, &Options { only: vec![\"ST01\".into()], level: Level::Core, seed: 3, ..Options::default() })\n";
    let text = report.to_terminal(false);
    assert!(text.contains(line), "{text}");
}

#[test]
fn a_part_of_the_core_checks_makes_nobody_conformant() {
    let report = run_conformance_with(sample(), &options());
    assert!(report.is_good() && !report.is_conformant());
    let text = report.to_terminal(false);
    let last = text.lines().last().unwrap();
    let is_told =
        last.starts_with("PASSED, with ") && last.ends_with(" checks of level 1 left out by name");
    assert!(is_told, "{last}");
}

#[test]
fn what_few_engines_can_has_a_profile_of_its_own() {
    for (able, group, profile) in [
        ("embeds", "EM", Profile::Embeddings),
        ("scores", "SC", Profile::Scores),
        ("is-operated", "CT", Profile::Controls),
        ("is-operated", "LR", Profile::Adapters),
        ("two-ranks", "RK01", Profile::Ranks),
        ("text-bodies", "WB", Profile::Bodies),
    ] {
        let options = Options {
            only: vec![group.into()],
            ..Options::default()
        };
        let result = |report: &Report| {
            let row = report.profiles.iter().find(|row| row.profile == profile);
            row.unwrap().result.clone()
        };
        let able = of(able, &options);
        assert_eq!(result(&able), "success", "{group}");
        assert_eq!(
            result(&run_conformance_with(sample(), &options)),
            "absent",
            "{group}"
        );
    }
}

#[test]
#[should_panic(expected = "no check's id starts with \"cn03\"")]
fn a_check_that_is_not_there_is_refused() {
    let options = Options {
        only: vec!["CN04".into(), "cn03".into()],
        ..Options::default()
    };
    drop(run_conformance_with(sample(), &options));
}

#[test]
#[should_panic(expected = "the lowest level of a run is Core")]
fn a_run_without_any_core_check_is_refused() {
    let options = Options {
        level: Level::Info,
        ..Options::default()
    };
    drop(run_conformance_with(sample(), &options));
}

#[test]
fn a_replay_of_the_sequences_tries_as_many() {
    let options = Options {
        only: vec!["SQ01".into(), "ST01".into()],
        sequences: 2,
        ..options()
    };
    let mut report = run_conformance_with(sample(), &options);
    let line = |report: &Report, id: &str| {
        let row = report.checks.iter().find(|row| row.id == id).unwrap();
        report.replay_of(row)
    };
    assert!(line(&report, "SQ01").ends_with(" --seed 3 --sequences 2"));
    assert!(line(&report, "ST01").ends_with(" --seed 3"));
    report.replay.clear();
    assert!(line(&report, "SQ01").contains("seed: 3, sequences: 2, ..Options::default()"));
}

#[test]
fn a_measurement_that_the_engine_spoils_is_not_taken_and_fails_nothing() {
    let options = Options {
        only: vec!["PF01".into()],
        ..Options::default()
    };
    let report = run_conformance_with(|_: &Scenario| Refuses, &options);
    let row = report.checks.iter().find(|row| row.id == "PF01").unwrap();
    let code = SkipReason::NotMeasured;
    assert!(
        matches!(&row.verdict, Verdict::Skip { code: is, .. } if *is == code),
        "{row:?}"
    );
    assert!(report.is_good());
}

/// The seed varies the requests, not what an engine must do.
#[test]
fn the_clean_engines_pass_with_any_seed() {
    for seed in [1, 42, u64::MAX] {
        let options = Options {
            seed,
            is_measuring: false,
            ..Options::default()
        };
        run_conformance_with(sample(), &options).assert_conformant();
        run_conformance_with(capable, &options).assert_conformant();
    }
}
