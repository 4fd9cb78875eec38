//! `genset conform`: the kit as a command.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::Stdio;

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::fleet::Fleet;
use crate::support::{
    Ended, Server, genset, run_with, send_signal, soon, stand_in, tiny_chat, until,
};
use crate::terminal::Terminal;

async fn conform(words: &[&str]) -> Ended {
    run_with(genset(&[&["conform"], words].concat()), b"").await
}

/// The last lines of a good run with a subset of the checks.
const IN_PART: &str = " checks of level 1 left out by name\n";

#[tokio::test]
async fn the_catalogue_is_listed_and_explained() {
    let listed = conform(&["list"]).await;
    assert_eq!(listed.code, Some(0));
    assert!(
        listed
            .stdout
            .lines()
            .any(|line| line.starts_with("CN03  1  tokens")),
        "{}",
        listed.stdout
    );
    let as_json = conform(&["list", "--json"]).await;
    assert_eq!(
        as_json.stdout.lines().count(),
        listed.stdout.lines().count()
    );
    for line in as_json.stdout.lines() {
        serde_json::from_str::<Value>(line).unwrap();
    }
    let explained = conform(&["explain", "cn03"]).await;
    for part in [
        "CN03  ",
        "clause   LLMEngine::generate, Contract (backend-common/src/engine.rs:",
        "breaks   ",
        "--only CN03",
    ] {
        assert!(explained.stdout.contains(part), "{}", explained.stdout);
    }
}

#[tokio::test]
async fn a_run_reports_to_people_and_to_programs() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (json, junit) = (path("report.json"), path("report.xml"));
    let words = [
        "run",
        "--engine=sample",
        "--only=ST,US",
        "--about=accelerator=none",
        "--about",
        "features=a=1",
        "--json",
        &json,
        "--junit",
        &junit,
    ];
    let ran = conform(&words).await;
    assert_eq!(ran.code, Some(0), "{}", ran.stdout);
    assert!(ran.stdout.ends_with(IN_PART), "{}", ran.stdout);
    assert!(
        std::fs::read_to_string(&junit)
            .unwrap()
            .contains("<testsuite ")
    );
    let report: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    assert_eq!(report["schema"], "genset-conformance/4");
    let about = serde_json::json!({"accelerator": "none", "features": "a=1"});
    assert_eq!(report["about"], about);
    let nameless = conform(&["run", "--engine=sample", "--about", "=1"]).await;
    assert_eq!(nameless.code, Some(2), "{nameless:?}");

    let matrix = conform(&["matrix", &json]).await;
    assert!(matrix.stdout.contains("| ST01 | 1 |"), "{}", matrix.stdout);
    let nothing = conform(&["replay", &json, "--engine", "sample"]).await;
    assert_eq!(
        (nothing.code, nothing.stdout.as_str()),
        (Some(0), "Nothing failed in this report.\n")
    );
    let same = conform(&["diff", &json, &json]).await;
    assert_eq!(
        (same.code, same.stdout.as_str()),
        (Some(0), "No verdict changed.\n")
    );

    // The same report, edited so that ST01 failed: worse in one direction, better in the other, and rerun by replay.
    let text = std::fs::read_to_string(&json).unwrap();
    let failed = text.replacen(
        "\"verdict\": \"pass\"",
        "\"verdict\": \"fail\",\n      \"reason\": \"seen\"",
        1,
    );
    let bad = path("bad.json");
    std::fs::write(&bad, &failed).unwrap();
    let worse = conform(&["diff", &json, &bad]).await;
    assert_eq!(
        (worse.code, worse.stdout.as_str()),
        (Some(1), "ST01  pass -> FAIL\n")
    );
    assert_eq!(conform(&["diff", &bad, &json]).await.code, Some(0));
    let again = conform(&["replay", &bad, "--engine", "sample"]).await;
    assert!(
        again.code == Some(0) && again.stdout.contains("1 passed, 0 failed"),
        "{}",
        again.stdout
    );
    for (code, exit_code) in [("gone", 1), ("not_declared", 1), ("filtered", 0)] {
        let skip = format!("\"verdict\": \"skip\", \"code\": \"{code}\", \"reason\": \"why\"");
        std::fs::write(&bad, text.replacen("\"verdict\": \"pass\"", &skip, 1)).unwrap();
        let lost = conform(&["diff", &json, &bad]).await;
        assert_eq!(
            (lost.code, lost.stdout.as_str()),
            (Some(exit_code), "ST01  pass -> skip (why)\n"),
            "{code}"
        );
        let rest = conform(&["replay", &bad, "--engine", "sample"]).await;
        let expected = match code {
            "gone" => "1 passed, 0 failed",
            _ => "Nothing failed in this report.",
        };
        assert!(rest.stdout.contains(expected), "{code}: {}", rest.stdout);
        assert_eq!(rest.code, Some(0), "{code}: {rest:?}");
    }
    std::fs::write(&bad, failed.replace("\"ST01\"", "\"XX01\"")).unwrap();
    let unknown = conform(&["replay", &bad, "--engine", "sample"]).await;
    unknown.fails(2, "no check's id starts with \"XX01\"");

    // A terminal obeys nothing in a report of somebody else.
    let foreign = text.replace("\"ST01\"", "\"\\u001b[2J\"");
    let foreign = foreign.replace("\"sample\"", "\"\\u001b[2J\"");
    std::fs::write(&bad, foreign).unwrap();
    for words in [&["diff", &json, &bad][..], &["matrix", &bad]] {
        let shown = conform(words).await.stdout;
        let is_escaped = shown.contains("\\u{1b}[2J") && !shown.contains('\x1b');
        assert!(is_escaped, "{shown:?}");
    }
}

#[tokio::test]
async fn a_report_may_have_a_name_that_is_no_text() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join(OsStr::from_bytes(b"\xff.xml"));
    let mut command = genset(&["conform", "run", "--engine=sample", "--only=ST01"]);
    command.arg("--junit").arg(&file);
    let ran = run_with(command, b"").await;
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(file.exists(), "{ran:?}");
}

#[tokio::test]
async fn a_file_that_cannot_be_written_is_named_before_any_check() {
    for (command, flag) in [
        ("run", "--json"),
        ("run", "--junit"),
        ("sequences", "--regressions"),
    ] {
        let words = [command, "--engine=sample", flag, "/no/such/folder/report"];
        let ran = conform(&words).await;
        assert_eq!((ran.code, ran.stdout.as_str()), (Some(2), ""), "{ran:?}");
        let expected = format!("error: {flag}: /no/such/folder/report cannot be written");
        assert!(ran.stderr.contains(&expected), "{ran:?}");
    }
}

#[tokio::test]
async fn measurements_are_compared_and_a_seed_is_replayed() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (json, slow) = (path("report.json"), path("slow.json"));
    let words = [
        "run",
        "--engine",
        "sample",
        "--only",
        "PF01,ST01",
        "--seed",
        "9",
        "--json",
        &json,
    ];
    let ran = conform(&words).await;
    assert!(
        ran.stdout.contains("measured  PF01 between_tokens_us "),
        "{}",
        ran.stdout
    );
    let text = std::fs::read_to_string(&json).unwrap();
    let mut report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["seed"], 9);
    let rows = report["checks"].as_array_mut().unwrap();
    let row = rows.iter_mut().find(|row| row["id"] == "PF01").unwrap();
    let was = row["measurements"]["first_token_us"].as_u64().unwrap();
    row["measurements"]["first_token_us"] = (was * 2 + 1).into();
    let first = rows.iter_mut().find(|row| row["id"] == "ST01").unwrap();
    first["verdict"] = "fail".into();
    first["reason"] = "seen".into();
    std::fs::write(&slow, report.to_string()).unwrap();
    let compared = conform(&["diff", &json, &slow]).await;
    let expected = format!(
        "ST01  pass -> FAIL\nPF01  first_token_us {was} -> {}\n",
        was * 2 + 1
    );
    assert_eq!((compared.code, compared.stdout), (Some(1), expected));
    let replayed = conform(&["replay", &slow, "--engine", "sample"]).await;
    assert!(replayed.stdout.contains("1 passed, 0 failed"));
}

#[tokio::test]
async fn sequences_are_tried_and_replayed() {
    let tried = conform(&[
        "sequences",
        "--engine",
        "sample",
        "--cases",
        "8",
        "--seed",
        "7",
    ])
    .await;
    assert_eq!(
        tried.stdout, "8 sequences kept the contract (seed 7).\n",
        "{}",
        tried.stderr
    );
    let operations = "start; generate#0 len=3 max=5; poll#0 2; drop#0; cleanup";
    let replayed = conform(&["replay", "--sequence", operations, "--engine", "sample"]).await;
    assert_eq!(
        replayed.stdout, "The sequence kept the contract.\n",
        "{}",
        replayed.stderr
    );
    let odd = conform(&["replay", "--sequence", "start; jump", "--engine", "sample"]).await;
    odd.fails(2, "jump");
}

#[tokio::test]
async fn an_engine_of_text_is_tested_in_text() {
    let ran = conform(&["run", "--engine", "echo_full"]).await;
    assert_eq!(ran.code, Some(0), "{}", ran.stdout);
    assert!(ran.stdout.contains(" about tokens"), "{}", ran.stdout);
    assert!(ran.stdout.ends_with("CONFORMANT\n"), "{}", ran.stdout);
    let explained = conform(&["explain", "ST06"]).await;
    assert!(
        explained.stdout.contains("every engine that takes tokens"),
        "{}",
        explained.stdout
    );
}

/// A wrapper holds the files of the built-in engine. A call that it does not forward, such as a drain, shows here.
#[tokio::test]
async fn the_built_in_engine_moves_its_kv_blocks() {
    let ran = conform(&["run", "--engine", "candle", "--only", "DG"]).await;
    assert_eq!(ran.code, Some(0), "{}", ran.stdout);
}

/// Expects ST01 to fail. With the sample engine it passes, so the run fails.
const WRONG_WAIVER: &str = r#"
[[check]]
id = "ST01"
expect = "fail"
reason = "known"
issue = "https://example.org/1"
until = "2999-12-31"
"#;

/// Runs a printed line in a shell.
async fn pasted(line: &str) -> Ended {
    let mut command = tokio::process::Command::new("/bin/sh");
    let binary = std::path::Path::new(env!("CARGO_BIN_EXE_genset"));
    command
        .args(["-c", line])
        .env("PATH", binary.parent().unwrap())
        .kill_on_drop(true);
    run_with(command, b"").await
}

#[tokio::test]
async fn a_replay_line_works_when_it_is_pasted() {
    let dir = TempDir::new().unwrap();
    let waivers = dir.path().join("conformance.toml");
    std::fs::write(&waivers, WRONG_WAIVER).unwrap();
    let waivers = waivers.to_str().unwrap();
    let words = [
        "run",
        "--engine",
        "sample",
        "--only",
        "ST",
        "--seed",
        "7",
        "--waivers",
        waivers,
    ];
    let ran = conform(&words).await;
    assert_eq!(ran.code, Some(1), "{}", ran.stdout);
    let line = ran
        .stdout
        .lines()
        .find_map(|line| line.trim().strip_prefix("replay  "));
    let line = line.unwrap();
    assert_eq!(
        line,
        "genset conform run --engine sample --only ST01 --level strict --seed 7"
    );
    let again = pasted(line).await;
    assert!(
        again.code == Some(0) && again.stdout.contains("1 passed, 0 failed"),
        "{again:?}"
    );
}

#[tokio::test]
async fn a_server_of_the_api_is_tested_by_its_url() {
    let server = Server::start(&["out=sample"]).await;
    let url = format!("http://{}/v1", server.address);
    let ran = conform(&["run", "--url", &url, "--only", "ST,FN,US,ER01"]).await;
    assert_eq!(ran.code, Some(0), "{}", ran.stdout);
    assert!(ran.stdout.ends_with(IN_PART), "{}", ran.stdout);
    let words = ["run", "--url", &url, "--max-num-seqs", "1", "--only"];
    let of_one_seat = conform(&[&words[..], &["ST07"]].concat()).await;
    assert_eq!(of_one_seat.code, Some(0), "{}", of_one_seat.stdout);
    let unseen = conform(&["run", "--url", &url, "--only", "KV"]).await;
    unseen.fails(2, "--only");
    let missing = conform(&["run", "--url", &url, "--url-model", "other"]).await;
    missing.fails(2, "--url-model");
    server.stop().await;
    let gone = conform(&["run", "--url", &url]).await;
    gone.fails(2, "--url");
}

#[tokio::test]
async fn what_cannot_be_run_is_refused_by_name() {
    let folder = TempDir::new().unwrap();
    let odd = folder.path().join("odd");
    std::fs::write(&odd, "odd").unwrap();
    let odd = odd.to_str().unwrap();
    for (words, expected) in [
        (&["explain", "XX99"][..], "genset conform list"),
        (&["explain", "CN3"], "those of CN are CN01, CN02, CN03"),
        (&["explain", "é"], "genset conform list"),
        (
            &["run", "--engine", "sampel"],
            "'--engine <ENGINE>': \"sampel\" is none of candle, ",
        ),
        (&["run"], "--engine"),
        (&["run", "--engine", "sample", "--only", "XX"], "--only"),
        (&["run", "--engine", "cmd"], "--engine-cmd"),
        (
            &["run", "--engine", "vllm"],
            "error: --engine: a server is tested where it runs",
        ),
        (
            &["run", "--engine", "sample", "--about", "commit"],
            "must be NAME=VALUE, such as commit=4f2c",
        ),
        (&["run", "--endpoint", "dyn://a.b.c.d"], "--endpoint"),
        (&["run", "--engine-cmd", "python 'open"], "--engine-cmd"),
        (
            &["run", "--endpoint", "dyn://a.b.c", "--tokenizer", "nowhere"],
            "--tokenizer",
        ),
        (
            &["run", "--endpoint", "dyn://a.b.c", "--tokenizer", odd],
            "error: --tokenizer: ",
        ),
        (
            &["run", "--engine", "sample", "--waivers", "nowhere.toml"],
            "nowhere.toml",
        ),
        (
            &["run", "--engine", "sample", "--waivers", odd],
            "error: --waivers: ",
        ),
        (
            &["sequences", "--engine", "sample", "--regressions", odd],
            "line 1: operation 1: `odd`",
        ),
        (
            &["run", "--engine", "sample", "--waivers", "/dev/zero"],
            "/dev/zero: it is larger than 1048576 bytes",
        ),
        (
            &["run", "--engine", "scripted", "--script", "/dev/zero"],
            "/dev/zero: it is larger than",
        ),
        (
            &[
                "sequences",
                "--engine",
                "sample",
                "--regressions",
                "/dev/zero",
            ],
            "/dev/zero: it is larger than",
        ),
        (&["diff", "/dev/zero", odd], "it is larger than"),
        (&["diff", "nowhere.json", "nowhere.json"], "nowhere.json"),
        (&["diff", odd, odd], "odd: is no report: "),
    ] {
        let ended = conform(words).await;
        ended.fails(2, expected);
    }
}

/// Without the tokenizer, the kit could not check what a live worker's grammars allow.
#[tokio::test]
async fn grammars_of_a_live_worker_are_read_with_its_tokenizer() {
    let fleet = Fleet::new();
    let model = tiny_chat().display().to_string();
    let _worker = fleet
        .worker_of(&["in=dyn://guided", "out=candle", &model], &[])
        .await;
    let endpoint = "dyn://guided.backend.generate";
    let words = ["conform", "run", "--endpoint", endpoint, "--only", "GD02"];
    let unread = fleet.ask(&words).await;
    assert!(unread.stdout.contains("1 skipped"), "{}", unread.stdout);
    let read = fleet
        .ask(&[&words[..], &["--tokenizer", &model]].concat())
        .await;
    assert_eq!(read.code, Some(0), "{}{}", read.stdout, read.stderr);
    assert!(read.stdout.contains("1 passed"), "{}", read.stdout);
}

#[tokio::test]
async fn a_run_ends_when_its_worker_is_gone_for_good() {
    let fleet = Fleet::new();
    let model = tiny_chat().display().to_string();
    // Its server exits at the fourth event of an answer, and the worker with it.
    let server = stand_in("vllm --context 2048 --fault exit");
    let path = std::env::var("PATH").unwrap();
    let doomed = ["in=dyn://doomed", "out=vllm", &model, &server];
    let worker = fleet.worker_of(&doomed, &[("PATH", &path)]).await;
    let folder = TempDir::new().unwrap();
    let report = folder.path().join("report.json");
    let report_path = report.to_str().unwrap();
    let words = [
        "conform",
        "run",
        "--endpoint",
        "dyn://doomed.backend.generate",
        "--worker-wait",
        "1",
        "--only",
        "ST,US,LC",
        "--json",
        report_path,
    ];
    let ran = fleet.ask(&words).await;
    assert_eq!(ran.code, Some(3), "{}{}", ran.stdout, ran.stderr);
    assert!(
        ran.stdout
            .contains("\nENDED EARLY: the worker is gone for 1 s ("),
        "{}",
        ran.stdout
    );
    assert!(ran.stdout.ends_with("NOT CONFORMANT\n"), "{}", ran.stdout);
    let report: Value = serde_json::from_str(&std::fs::read_to_string(&report).unwrap()).unwrap();
    let of = |verdict: &str, code: Option<&str>| {
        let checks = report["checks"].as_array().unwrap().iter();
        checks
            .filter(|check| check["verdict"] == verdict && check["code"].as_str() == code)
            .count()
    };
    assert!(
        of("fail", None) > 0 && of("skip", Some("gone")) > 0,
        "{report}"
    );
    drop(worker);

    let worker = fleet.worker_of(&doomed, &[("PATH", &path)]).await;
    let words = ["conform", "replay", report_path, "--worker-wait", "1"];
    let endpoint = ["--endpoint", "dyn://doomed.backend.generate"];
    let again = fleet.ask(&[&words[..], &endpoint].concat()).await;
    assert_eq!(again.code, Some(3), "{}{}", again.stdout, again.stderr);
    drop(worker);

    // After the last check, no check is left to be skipped for it.
    let _worker = fleet.worker_of(&doomed, &[("PATH", &path)]).await;
    let words = ["conform", "run", "--only", "ST08", "--worker-wait", "1"];
    let last = fleet.ask(&[&words[..], &endpoint].concat()).await;
    last.fails(3, "error: the worker is gone for 1 s (");
}

#[tokio::test]
async fn ctrl_c_ends_a_run_with_the_results_so_far() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (begun, json, junit) = (path("begun"), path("report.json"), path("report.xml"));
    // It never says that it has started.
    let engine = format!("/bin/sh -c ': > {begun}; exec /bin/sleep 60'");
    let words = ["conform", "run", "--json", &json, "--junit", &junit];
    let mut command = genset(&[&words[..], &["--engine-cmd", &engine]].concat());
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let run = command.spawn().unwrap();
    until(async || Path::new(&begun).exists()).await;
    send_signal(&run, Signal::INT);
    let ended = Ended::of(&soon(run.wait_with_output()).await.unwrap());
    assert_eq!(ended.code, Some(130), "{ended:?}");
    let told = "\nENDED EARLY: the run was interrupted\nNOT CONFORMANT\n";
    assert!(ended.stdout.ends_with(told), "{ended:?}");
    assert_eq!(ended.stderr, "", "no progress but on a terminal");
    let report: Value = serde_json::from_str(&std::fs::read_to_string(&json).unwrap()).unwrap();
    let mut checks = report["checks"].as_array().unwrap().iter();
    assert!(checks.any(|check| check["code"] == "gone"), "{report}");
    let xml = std::fs::read_to_string(&junit).unwrap();
    let told = "<failure message=\"ended early: the run was interrupted\"/>";
    assert!(xml.contains(told), "{xml}");
}

#[tokio::test]
async fn a_terminal_shows_the_progress_of_a_run() {
    let words = ["conform", "run", "--engine=sample", "--only=ST01"];
    let mut terminal = Terminal::spawn(&words, &[]);
    terminal.expect("start [").await;
    let bar = terminal.expect("]").await;
    assert!(!bar.contains('█'), "nothing is done yet: {bar}");
    terminal.expect("1 passed, 0 failed").await;
    assert_eq!(terminal.exit_code().await, Some(0));

    let words = ["conform", "sequences", "--engine=sample", "--cases=8"];
    let mut terminal = Terminal::spawn(&words, &[]);
    terminal.expect("sequences [").await;
    terminal.expect("8 sequences kept the contract").await;
    assert_eq!(terminal.exit_code().await, Some(0));
}
