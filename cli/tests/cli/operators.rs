//! `genset models`, `genset top` and `genset control`: commands for operators of a running fleet.

use std::os::unix::fs::PermissionsExt;

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::fleet::Fleet;
use crate::support::{genset, run, run_with, send_signal, tiny_chat};
use crate::terminal::Terminal;

const ENDPOINT: &str = "dyn://genset.backend.generate";

#[tokio::test]
async fn models_are_listed_with_their_workers() {
    let fleet = Fleet::new();
    let none = fleet.ask(&["models"]).await;
    assert_eq!(none.code, Some(0), "{none:?}");
    assert!(none.stdout.starts_with("no model is served"), "{none:?}");

    let first = fleet.worker(&[]).await;
    let words = ["in=dyn", "out=sample", "--user-data={\"team\": \"a\"}"];
    let second = fleet.worker_of(&words, &[]).await;
    let shown = fleet.ask(&["models"]).await;
    let lines: Vec<Vec<&str>> = shown.stdout.lines().map(words_of).collect();
    assert_eq!(
        lines[0],
        ["MODEL", "ROLE", "CONTEXT", "ENDPOINT", "WORKERS"]
    );
    assert_eq!(lines[1][..2], ["tiny-chat", "aggregated"]);
    assert_eq!(lines[1][3], ENDPOINT);
    assert_eq!(lines[1].len(), 6, "two workers: {shown:?}");
    assert_eq!(lines[2], ["tiny-chat:", "tool", "parser", "hermes"]);

    let listed = fleet.ask(&["models", "--json"]).await;
    let listed: Value = serde_json::from_str(&listed.stdout).unwrap();
    assert_eq!(listed[0]["tool_parser"], "hermes");
    let workers = listed[0]["pools"][0]["workers"].as_array().unwrap();
    let workers: Vec<&str> = workers.iter().filter_map(Value::as_str).collect();
    assert_eq!(workers, lines[1][4..]);
    let data = listed[0]["pools"][0]["user_data"].as_object().unwrap();
    let data: Vec<&Value> = data.values().collect();
    assert_eq!(data, [&json!({"team": "a"})], "{listed}");
    first.stop().await;
    second.stop().await;
}

#[tokio::test]
async fn a_model_that_has_prefill_workers_alone_is_listed_as_not_served() {
    let fleet = Fleet::new();
    let words = ["in=dyn", "out=sample", "--role=prefill"];
    let prefill = fleet.worker_of(&words, &[]).await;
    let shown = fleet.ask(&["models"]).await;
    let line = shown.stdout.lines().last();
    let expected = "tiny-chat: not served: no decode worker";
    assert_eq!(line, Some(expected), "{shown:?}");
    let words = ["in=dyn", "out=sample", "--role=decode"];
    let decode = fleet.worker_of(&words, &[]).await;
    let listed = fleet.ask(&["models", "--json"]).await;
    let listed: Value = serde_json::from_str(&listed.stdout).unwrap();
    assert_eq!(listed[0]["served"], true, "{listed}");
    prefill.stop().await;
    decode.stop().await;
}

fn words_of(line: &str) -> Vec<&str> {
    line.split_whitespace().collect()
}

#[tokio::test]
async fn what_is_asked_of_an_endpoint_reaches_its_workers() {
    let fleet = Fleet::new();
    let model = tiny_chat();
    let words = ["in=dyn", "out=mocker", model.to_str().unwrap()];
    let first = fleet.worker_of(&words, &[]).await;
    let second = fleet.worker_of(&words, &[]).await;

    let cleared = fleet
        .ask(&["control", ENDPOINT, "clear_prefix_cache"])
        .await;
    assert_eq!(cleared.code, Some(0), "{cleared:?}");
    let lines: Vec<Vec<&str>> = cleared.stdout.lines().map(words_of).collect();
    assert!(lines.len() == 2 && lines.iter().all(|line| line[1] == "done"));

    let shown = fleet.ask(&["top"]).await;
    let idle = "2 workers, 0 requests running, 0 waiting\n";
    assert!(shown.stdout.starts_with(idle), "{shown:?}");
    assert_eq!(
        shown
            .stdout
            .matches("..........   0 %  0 of 16384 blocks")
            .count(),
        2
    );
    let seen = fleet.ask(&["top", "--json"]).await;
    let seen: Value = serde_json::from_str(&seen.stdout).unwrap();
    assert_eq!(seen[1]["load"]["kv_total_blocks"], 16_384);

    let of_one = [
        "control",
        ENDPOINT,
        "wake",
        "--json",
        "--instance",
        lines[0][0],
    ];
    let refused = fleet.ask(&of_one).await;
    assert_eq!(refused.code, Some(1), "mockers do not sleep: {refused:?}");
    let refused: Value = serde_json::from_str(&refused.stdout).unwrap();
    assert_eq!(refused.as_array().unwrap().len(), 1);
    assert_eq!(refused[0]["worker"], lines[0][0]);
    assert_eq!(refused[0]["error"]["kind"], "unsupported");
    first.stop().await;
    second.stop().await;
}

#[tokio::test]
async fn without_the_secret_of_the_fleet_top_and_the_doctor_say_why_workers_give_no_answer() {
    let fleet = Fleet::new();
    let folder = tempfile::tempdir().unwrap();
    let secret = folder.path().join("secret");
    std::fs::write(&secret, "the secret of the fleet").unwrap();
    let variable = [("GENSET_WIRE_SECRET_FILE", secret.to_str().unwrap())];
    let worker = fleet.worker(&variable).await;

    let shown = fleet.ask(&["top", "--once"]).await;
    assert_eq!(shown.code, Some(1), "{shown:?}");
    let reason = shown.stdout.lines().last().unwrap_or_default();
    assert!(reason.contains(" gave no answer: "), "{shown:?}");
    assert!(reason.contains("--wire-secret-file"), "{shown:?}");
    let seen = fleet.ask(&["top", "--json"]).await;
    assert_eq!(seen.code, Some(1), "{seen:?}");
    let seen: Value = serde_json::from_str(&seen.stdout).unwrap();
    assert_eq!(seen[0]["load"], Value::Null);
    assert_eq!(seen[0]["error"]["kind"], "cannot_connect");

    let words = ["doctor", "--http-port=0"];
    // Without other programs for the doctor to run, and with its own cache.
    let alone = [
        ("PATH", "/nowhere"),
        ("HF_HOME", folder.path().to_str().unwrap()),
    ];
    let looked = run_with(fleet.command(&words, &alone), b"").await;
    assert_eq!(looked.code, Some(1), "{looked:?}");
    let silent = "problem  workers that give no answer: 1 of 1; ";
    assert!(looked.stdout.contains(silent), "{looked:?}");
    let dead =
        "-> a worker whose connection is refused has died, and is listed until its lease ends";
    assert!(looked.stdout.contains(dead), "{looked:?}");
    let with_secret = [&alone[..], &variable].concat();
    let looked = run_with(fleet.command(&words, &with_secret), b"").await;
    let answering = "ok       workers that answer: 1 of 1";
    assert!(looked.stdout.contains(answering), "{looked:?}");
    worker.stop().await;
}

#[tokio::test]
async fn sigterm_gives_back_the_terminal_that_top_draws_on() {
    let folder = tempfile::tempdir().unwrap();
    let words = ["top", "--discovery-path", folder.path().to_str().unwrap()];
    let mut terminal = Terminal::spawn(&words, &[]);
    terminal
        .until(|screen| screen.alternate_screen() && screen.hide_cursor())
        .await;
    send_signal(&terminal.child, Signal::TERM);
    terminal
        .until(|screen| !screen.alternate_screen() && !screen.hide_cursor())
        .await;
    assert_eq!(terminal.exit_code().await, Some(0));
}

#[tokio::test]
async fn a_dumb_terminal_is_not_drawn_on() {
    let folder = tempfile::tempdir().unwrap();
    let words = ["top", "--discovery-path", folder.path().to_str().unwrap()];
    let mut terminal = Terminal::spawn(&words, &[("TERM", "dumb")]);
    terminal.expect("no model is served").await;
    assert_eq!(terminal.exit_code().await, Some(0));
}

#[tokio::test]
async fn where_there_is_no_worker_control_says_so() {
    let fleet = Fleet::new();
    let ended = fleet.ask(&["control", "dyn://nobody", "wake"]).await;
    ended.fails(1, "nobody.backend.control");
    let misspelt = fleet.ask(&["control", "dyn://a.b.c.d", "wake"]).await;
    assert_eq!(misspelt.code, Some(2), "{misspelt:?}");
}

#[tokio::test]
async fn who_looks_at_a_fleet_makes_no_discovery_directory() {
    let folder = tempfile::tempdir().unwrap();
    let misspelt = folder.path().join("misspelt");
    let flag = ["--discovery-path", misspelt.to_str().unwrap()];
    for words in [&["models"][..], &["top"], &["control", ENDPOINT, "wake"]] {
        let ended = run(&[words, &flag].concat()).await;
        assert_eq!(ended.code, Some(1), "{ended:?}");
        let expected = format!(
            "error: --discovery-path: {} is not there",
            misspelt.display()
        );
        assert!(ended.stderr.starts_with(&expected), "{ended:?}");
        assert!(!misspelt.exists());
    }
}

#[tokio::test]
async fn a_file_of_settings_says_where_the_fleet_is() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("genset.toml");
    std::fs::write(&file, "in = \"dyn\"\ndiscovery-path = \"/no/such\"\n").unwrap();
    for words in [&["models"][..], &["top"], &["control", ENDPOINT, "wake"]] {
        for (flag, expected) in [
            (&["--json"][..], "/no/such is not there"),
            (&["--discovery-path=/no/other"], "/no/other is not there"),
        ] {
            let mut command = genset(&[words, flag].concat());
            command.env("GENSET_CONFIG", &file);
            run_with(command, b"").await.fails(1, expected);
        }
    }
    // The variable may name the file of a worker's own binary.
    std::fs::write(&file, "weights = [\"a\"]\ndiscovery-path = \"/no/such\"\n").unwrap();
    let mut command = genset(&["models"]);
    command.env("GENSET_CONFIG", &file);
    let ended = run_with(command, b"").await;
    ended.fails(1, "/no/such is not there");
    let ended = run(&["models", "--config", file.to_str().unwrap()]).await;
    ended.fails(2, "\"weights\" is no setting");
    // The file has what the flag requires; without it nothing has.
    std::fs::write(&file, "etcd-password-file = \"/no/such\"\n").unwrap();
    let words = ["models", "--etcd-username=a", "--etcd-endpoints=http://a"];
    let config = ["--config", file.to_str().unwrap()];
    let ended = run(&[&words[..], &config].concat()).await;
    ended.fails(2, "--etcd-password-file: ");
    run(&words).await.fails(2, "--etcd-password-file <FILE>");
}

#[tokio::test]
async fn a_discovery_directory_that_cannot_be_trusted_is_told_by_its_flag() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o777)).unwrap();
    let flag = ["--discovery-path", folder.path().to_str().unwrap()];
    let ended = run(&[&["models"], &flag[..]].concat()).await;
    assert_eq!(ended.code, Some(2), "{ended:?}");
    let expected = "error: --discovery-path: the discovery directory ";
    assert!(ended.stderr.starts_with(expected), "{ended:?}");
}

#[tokio::test]
async fn a_discovery_that_is_away_is_a_failure_and_no_usage_error() {
    // A port of this test on which nothing answers as etcd does.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = silent.local_addr().unwrap();
    drop(silent);
    let etcd = format!("--etcd-endpoints=http://{address}");
    let etcd = etcd.as_str();
    for words in [
        &["models", "--discovery-backend=etcd", etcd][..],
        &["top", "--discovery-backend=etcd", etcd],
        // Naming servers selects their backend.
        &["models", etcd],
    ] {
        let ended = run(words).await;
        assert_eq!(ended.code, Some(1), "{words:?}: {ended:?}");
    }
}

#[tokio::test]
async fn a_workers_log_changes_while_it_runs() {
    let fleet = Fleet::new();
    let worker = fleet.worker(&[]).await;
    let quiet = ["control", ENDPOINT, "wake"];
    let asked = fleet.ask(&quiet).await;
    assert!(asked.stdout.contains("does not support wake"), "{asked:?}");
    let told = |log: String| log.matches("administrative request").count();
    let before = told(worker.log());
    assert!(before > 0, "{}", worker.log());

    let misspelt = fleet.ask(&["control", ENDPOINT, "log-level", "wran"]).await;
    assert_eq!(misspelt.code, Some(1), "{misspelt:?}");
    assert!(
        misspelt.stdout.contains("did you mean warn?"),
        "{misspelt:?}"
    );
    let set = fleet.ask(&["control", ENDPOINT, "log_level", "warn"]).await;
    assert_eq!(set.code, Some(0), "{set:?}");
    fleet.ask(&quiet).await;
    assert_eq!(told(worker.log()), before, "{}", worker.log());
    let set = fleet.ask(&["control", ENDPOINT, "log-level", "info"]).await;
    assert_eq!(set.code, Some(0), "{set:?}");
    fleet.ask(&quiet).await;
    assert!(told(worker.log()) > before, "{}", worker.log());

    let listed = worker.get("/control").await;
    assert_eq!(listed.status, 200, "{listed:?}");
    worker.stop().await;
}

#[tokio::test]
async fn a_worker_says_its_load_by_either_name() {
    let fleet = Fleet::new();
    let worker = fleet.worker(&[]).await;
    for name in ["load", "load_metrics"] {
        let said = fleet.ask(&["control", ENDPOINT, name]).await;
        assert_eq!(said.code, Some(0), "{said:?}");
        assert!(said.stdout.contains("0 running, 0 waiting"), "{said:?}");
    }
    worker.stop().await;
}
