//! The checks of SP for the subject's own supervisor, with the author's process or a shell script.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use genset_backend_common::{EngineError, ErrorKind, LLMEngine, StartContext};
use genset_wire::{FrameKind, PROTOCOL_VERSION};

use super::supervise;
use super::tracks::{Tracks, exists, kill};
use super::worker::{encoded, framed, hello};
use crate::check::{CheckResult, Stop, ensure, fail, skip};
use crate::subject::{ChildCommand, Subject};
use crate::trial::{Live, Trial};

/// The subject's engine, started, with its process marked.
async fn started(trial: &Trial) -> Result<(Live, Tracks), Stop> {
    let process = supervise(trial)?;
    let mut command = process.command();
    let tracks = Tracks::on(&mut command)?;
    let engine = process.supervise(command, trial.limits().start);
    trial.adopt(&engine);
    let start = StartContext::detached(1);
    let config = trial.starting("start", engine.start(start.clone())).await?;
    let config = match config {
        Ok(config) => config,
        Err(error) => fail!("start failed: {error} ({})", error.kind()),
    };
    let subject = Subject {
        engine,
        ..trial.build()
    };
    let live = Live {
        trial: trial.clone(),
        subject,
        config,
        start,
    };
    Ok((live, tracks))
}

/// More tokens than are computed before the process is killed, unless the context holds fewer.
const LONG: u32 = 5000;

pub(super) async fn killed_process(trial: Trial) -> CheckResult {
    let (live, tracks) = started(&trial).await?;
    let room = live.config.context_length_tokens.saturating_sub(4);
    let wanted = LONG.min(room).max(1);
    let (mut all, mut read) = (Vec::new(), Vec::new());
    for _ in 0..live.at_once(3) {
        let mut running = live.generate(live.request(4, wanted)).await?;
        read.push(running.read_tokens(1).await?.len());
        all.push(running);
    }
    let children = tracks.children();
    ensure!(
        !children.is_empty(),
        "the engine's process is no child of its supervisor's"
    );
    for child in children {
        kill(child);
    }
    let mut was_cut = false;
    let answers = join_all(all.into_iter().map(|running| running.finish())).await;
    for (answer, read) in answers.into_iter().zip(read) {
        let answer = answer?;
        if u32::try_from(read + answer.generated().len()) == Ok(wanted) {
            // It was over before the kill.
            continue;
        }
        was_cut = true;
        let Some(error) = answer.error() else {
            fail!(
                "a killed process ended a stream as if it were complete: {:?}",
                answer.reason()
            );
        };
        ensure!(
            error.policy().is_migratable,
            "a request of a killed process ends with {}, which goes on nowhere else: {error}",
            error.kind()
        );
    }
    let died = live.start.health.died();
    let what = "the report that the engine is dead";
    trial.within(what, trial.limits().call, died).await?;
    if !was_cut {
        skip!(
            NotMeasured,
            "the context is so small that every answer was over before the process could be killed"
        );
    }
    Ok(())
}

pub(super) async fn nothing_stays(trial: Trial) -> CheckResult {
    let (live, tracks) = started(&trial).await?;
    drop(live.answer(live.request(4, 4)).await?);
    let children = tracks.children();
    // A good request keeps the engine busy, which must not keep its process alive either.
    let mut busy = live.generate(live.request(4, 5000)).await?;
    busy.read_tokens(1).await?;
    live.put_away().await?;
    let zombies: Vec<u32> = children.into_iter().filter(|pid| exists(*pid)).collect();
    ensure!(
        zombies.is_empty(),
        "when cleanup returned, these processes were not reaped: {zombies:?}"
    );
    tracks.end("after cleanup", trial.limits().cancel).await
}

/// The error of starting a process that a shell script plays; the start must fail.
async fn start_error(trial: &Trial, script: &str, patience: Duration) -> Result<EngineError, Stop> {
    let process = supervise(trial)?;
    let mut command = ChildCommand {
        program: "/bin/sh".into(),
        args: vec!["-c".into(), script.into()],
        ..ChildCommand::default()
    };
    let tracks = Tracks::on(&mut command)?;
    let engine: Arc<dyn LLMEngine> = process.supervise(command, patience);
    trial.adopt(&engine);
    let start = engine.start(StartContext::detached(1));
    let what = "the start of a process that does not";
    let limit = patience + trial.limits().call;
    let error = match trial.within(what, limit, start).await? {
        Err(error) => error,
        Ok(config) => fail!(
            "a process that is no engine was started as {:?}",
            config.model
        ),
    };
    tracks
        .end("after a failed start", trial.limits().call)
        .await?;
    Ok(error)
}

/// A shell command that writes `bytes` to the socket.
fn writes(bytes: &[u8]) -> String {
    let octal: String = bytes.iter().map(|byte| format!("\\{byte:03o}")).collect();
    format!("printf '{octal}' >&\"$GENSET_ENGINE_FD\"")
}

fn greets(version: u16) -> Result<String, Stop> {
    Ok(writes(&hello(version)?))
}

pub(super) async fn late_start(trial: Trial) -> CheckResult {
    let never_ends_start = format!("{}; exec sleep 1000", greets(PROTOCOL_VERSION)?);
    for (what, script) in [
        ("does not greet", "exec sleep 1000"),
        ("does not end `start`", never_ends_start.as_str()),
    ] {
        let error = start_error(&trial, script, trial.limits().cancel / 2).await?;
        ensure!(
            error.kind() == ErrorKind::DeadlineExceeded,
            "a process that {what} fails with {}, not deadline_exceeded: {error}",
            error.kind()
        );
    }
    Ok(())
}

/// The last line that a shell script prints before it dies, after many others.
const LAST_WORDS: &str = "genset-conformance: the last words";

pub(super) async fn last_lines(trial: Trial) -> CheckResult {
    let script = format!(
        "i=0; while [ $i -lt 500 ]; do echo line $i >&2; i=$((i+1)); done; echo '{LAST_WORDS}' >&2; exit 3"
    );
    let error = start_error(&trial, &script, trial.limits().start).await?;
    ensure!(
        error.message().contains(LAST_WORDS),
        "the error does not hold the last line on standard error: {error}"
    );
    Ok(())
}

/// The supervisor's half of SP07.
pub(super) async fn refuses_other_version(trial: &Trial) -> CheckResult {
    let script = format!("{}; exec sleep 1000", greets(PROTOCOL_VERSION + 98)?);
    let error = start_error(trial, &script, trial.limits().start).await?;
    ensure!(
        error.kind() == ErrorKind::CannotConnect,
        "a process of another version fails with {}, not cannot_connect: {error}",
        error.kind()
    );
    Ok(())
}

pub(super) async fn broken_frames(trial: Trial) -> CheckResult {
    let greeted = greets(PROTOCOL_VERSION)?;
    // On a stream that no worker has open this early.
    let whole = framed(
        FrameKind::Item,
        1_000_000,
        &encoded(&b"an item".as_slice())?,
    )?;
    let half = whole.get(..whole.len() / 2).unwrap_or_default();
    let cases = [
        ("breaks off in a frame", writes(half)),
        (
            "writes text to the socket",
            writes(b"Loading weights... done\n"),
        ),
        ("sends an item that nobody asked for", writes(&whole)),
    ];
    for (what, writes) in cases {
        let script = format!("{greeted}; {writes}; exit 0");
        let error = start_error(&trial, &script, trial.limits().start).await?;
        ensure!(
            error.kind() == ErrorKind::Disconnected,
            "a process that {what} fails with {}, not disconnected: {error}",
            error.kind()
        );
    }
    Ok(())
}
