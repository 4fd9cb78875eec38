//! tiny-chat's golden questions, asked of a `genset` that was built for something else than this machine's processor.

use std::fs;
use std::io::Write as _;
use std::process::{Command, Stdio};

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::repo::Repo;

/// Asks the questions of one message, each of a process of its own. `genset` is its command, without arguments.
///
/// # Errors
/// When one is not answered as `golden.json` says.
pub(crate) fn ask(
    repo: &Repo,
    genset: impl Fn() -> Command,
    options: &[&str],
) -> anyhow::Result<()> {
    let folder = repo.root().join("models/tiny-chat");
    let golden: Value = serde_json::from_str(&fs::read_to_string(folder.join("golden.json"))?)?;
    let cases = golden["cases"]
        .as_array()
        .context("golden.json has no cases")?;
    let mut asked = 0;
    for case in cases {
        let [message] = case["messages"].as_array().map_or(&[][..], Vec::as_slice) else {
            continue;
        };
        let question = message["content"]
            .as_str()
            .context("a message without content")?;
        let mut ask = genset();
        ask.args(["run", "in=stdin", "out=candle"])
            .arg(&folder)
            .args(options);
        let answer = answer(&mut ask, question)?;
        let expected = case["answer"]
            .as_str()
            .context("a case without an answer")?;
        ensure!(
            answer.trim_end() == expected,
            "{question:?} is answered {:?} and not {expected:?}",
            answer.trim_end()
        );
        asked += 1;
    }
    ensure!(
        asked > 10,
        "golden.json has {asked} questions of one message"
    );
    eprintln!("{asked} golden questions answered");
    Ok(())
}

fn answer(ask: &mut Command, question: &str) -> anyhow::Result<String> {
    let mut child = ask.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut input = child.stdin.take().context("the program has no input")?;
    input.write_all(question.as_bytes())?;
    drop(input);
    let output = child.wait_with_output()?;
    ensure!(
        output.status.success(),
        "`genset run` failed on {question:?} ({})",
        output.status
    );
    Ok(String::from_utf8(output.stdout)?)
}
