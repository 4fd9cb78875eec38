//! `genset tune`: finds the flags that are fastest for a model on this machine.

use serde_json::Value;

use crate::support::{ended_after, run, tiny_chat};

#[tokio::test]
async fn flags_are_found_and_are_flags() {
    let model = tiny_chat()
        .join("tiny-chat-q8_0.gguf")
        .display()
        .to_string();
    let ended = run(&["tune", &model, "--json", "--seconds=4"]).await;
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let tuned: Value =
        serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {ended:?}"));
    let trials = tuned["trials"].as_array().expect("trials");
    assert!(!trials.is_empty(), "{tuned}");
    for trial in trials {
        assert!(
            trial["prefill_tokens_per_s"]
                .as_f64()
                .is_some_and(|rate| rate > 0.0),
            "{trial}"
        );
    }
    let flags = tuned["flags"].as_array().expect("flags");
    let flags: Vec<&str> = flags.iter().filter_map(Value::as_str).collect();
    assert!(
        flags
            .iter()
            .any(|flag| flag.starts_with("--kv-cache-memory=")),
        "{flags:?}"
    );
    let ended = run(&[&["run", "in=stdin", &model, "--print-config"], &flags[..]].concat()).await;
    assert_eq!(ended.code, Some(0), "{ended:?}");
}

#[tokio::test]
async fn a_model_that_is_none_and_a_request_that_is_too_long_are_told() {
    let ended = run(&["tune", "/no/such.gguf"]).await;
    ended.fails(2, "error: MODEL: cannot read /no/such.gguf");
    assert!(!ended.stderr.contains("cannot be measured"), "{ended:?}");
    // A request cannot have more tokens than the model's context, so the KV cache is not sized for them.
    let model = tiny_chat().join("tiny-chat-q8_0.gguf");
    let model = model.display().to_string();
    let ended = run(&["tune", &model, "--context-tokens=2049"]).await;
    ended.fails(
        2,
        "error: --context-tokens: the model's context holds 2048 tokens",
    );
}

/// Whoever stops `genset tune`, in whatever way, also stops its trial.
#[tokio::test]
async fn a_trial_ends_with_its_standard_input() {
    let model = tiny_chat().join("tiny-chat-q8_0.gguf");
    let model = model.display().to_string();
    let words = ["bench", "engine", &model, "--repeats=1000"];
    let ended = run(&[&words[..], &["--ends-with-input"]].concat()).await;
    assert_eq!(ended.code, Some(129), "{ended:?}");
}

#[tokio::test]
async fn ctrl_c_shows_the_trials_so_far() {
    let model = tiny_chat().join("tiny-chat-q8_0.gguf");
    let model = model.display().to_string();
    let words = ["tune", &model, "--json", "--seconds=3600"];
    let ended = ended_after(&words, "defaults: prefill").await;
    assert_eq!(ended.code, Some(3), "{ended:?}");
    let tuned: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(tuned["is_cut"], true);
    assert!(!tuned["trials"].as_array().unwrap().is_empty(), "{tuned}");
}
