//! Asks tiny-chat's golden questions of a `genset` built for something other than this machine's processor.

use std::fs;
use std::process::Command;

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use crate::process::run as run_command;
use crate::repo::Repo;

/// Asks the questions of one process, many at a time. `genset` is its command, without arguments.
///
/// # Errors
/// When an answer differs from `golden.json`.
pub(crate) fn ask(repo: &Repo, mut genset: Command, options: &[&str]) -> anyhow::Result<()> {
    let model = repo.root().join("models/tiny-chat");
    let golden: Value = serde_json::from_str(&fs::read_to_string(model.join("golden.json"))?)?;
    let cases = golden["cases"]
        .as_array()
        .context("golden.json has no cases")?;
    ensure!(cases.len() > 10, "golden.json has {} cases", cases.len());
    let folder = repo.target().join("golden-questions");
    // Otherwise the run would resume from the answers of an earlier one.
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder)?;
    let questions = folder.join("questions.jsonl");
    let lines = cases.iter().enumerate().map(|(index, case)| {
        let body = json!({"model": "tiny-chat", "messages": case["messages"]});
        let question = json!({
            "custom_id": index.to_string(), "method": "POST", "url": "/v1/chat/completions", "body": body,
        });
        format!("{question}\n")
    });
    fs::write(&questions, lines.collect::<String>())?;
    genset
        .arg("run")
        .arg(format!("in=batch:{}", questions.display()))
        .arg("out=candle")
        .arg(&model)
        .args(options);
    run_command(&mut genset)?;
    let answers = fs::read_to_string(folder.join("output.jsonl"))?;
    ensure!(
        answers.lines().count() == cases.len(),
        "{} of {} questions have an answer",
        answers.lines().count(),
        cases.len()
    );
    for (case, line) in cases.iter().zip(answers.lines()) {
        let answer: Value = serde_json::from_str(line)?;
        let answer = &answer["response"]["body"]["choices"][0]["message"]["content"];
        ensure!(
            *answer == case["answer"],
            "{} is answered {answer} and not {}",
            case["messages"],
            case["answer"]
        );
    }
    eprintln!("{} golden questions answered", cases.len());
    Ok(())
}
