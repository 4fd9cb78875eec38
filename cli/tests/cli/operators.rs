//! `genset models`, `genset top` and `genset control`: what operators ask of a fleet that runs.

use serde_json::Value;

use crate::fleet::Fleet;
use crate::support::tiny_chat;

const ENDPOINT: &str = "dyn://genset.backend.generate";

#[tokio::test]
async fn models_are_listed_with_their_workers() {
    let fleet = Fleet::new();
    let none = fleet.ask(&["models"]).await;
    assert_eq!(none.code, Some(0), "{none:?}");
    assert!(none.stdout.starts_with("no model is served"), "{none:?}");

    let first = fleet.worker(&[]).await;
    let second = fleet.worker(&[]).await;
    let shown = fleet.ask(&["models"]).await;
    let lines: Vec<Vec<&str>> = shown.stdout.lines().map(words_of).collect();
    assert_eq!(
        lines[0],
        ["MODEL", "ROLE", "CONTEXT", "ENDPOINT", "WORKERS"]
    );
    assert_eq!(lines[1][..2], ["tiny-chat", "aggregated"]);
    assert_eq!(lines[1][3], ENDPOINT);
    assert_eq!(lines[1].len(), 6, "two workers: {shown:?}");

    let listed = fleet.ask(&["models", "--json"]).await;
    let listed: Value = serde_json::from_str(&listed.stdout).unwrap();
    let workers = listed[0]["pools"][0]["workers"].as_array().unwrap();
    let workers: Vec<&str> = workers.iter().filter_map(Value::as_str).collect();
    assert_eq!(workers, lines[1][4..]);
    first.stop().await;
    second.stop().await;
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
async fn where_there_is_no_worker_control_says_so() {
    let fleet = Fleet::new();
    let ended = fleet.ask(&["control", "dyn://nobody", "wake"]).await;
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains("nobody.backend.control"), "{ended:?}");
}
