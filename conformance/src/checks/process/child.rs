//! The checks of SP for the author's process, with the kit as its worker.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "who waits for one arrival fails on any other, whatever it is"
)]

use std::time::Duration;

use genset_backend_common::{CancelReason, EngineConfig, ErrorKind, GenerateRequest, Output, Role};
use genset_wire::{Cancel, Credit, FrameKind, GoAway, GoAwayCode, PROTOCOL_VERSION};
use serde::Serialize;

use super::supervisor::refuses_other_version;
use super::worker::{Arrival, Worker, hello};
use crate::answer::chunk_of;
use crate::check::{CheckResult, Stop, ensure, fail};
use crate::medium::Medium;
use crate::trial::Trial;

/// More credit than any answer here uses.
const MUCH_CREDIT: u32 = 10_000;
/// The number of tokens of a short answer.
const SHORT: u32 = 8;
/// More tokens than arrive during a check.
const LONG: u32 = 5_000;

fn request(config: &EngineConfig, max_tokens: u32) -> GenerateRequest {
    let mut request = GenerateRequest::from_tokens(config.model.clone(), Vec::new());
    request.input = Medium::of(&config.capabilities).input(vec![1, 0, 1]);
    let room = config.context_length_tokens.saturating_sub(3).max(1);
    request.stop.max_tokens = Some(max_tokens.min(room));
    request.stop.ignore_eos = true;
    request
}

/// What arrived on a stream, up to its end.
#[derive(Default)]
struct Read {
    outputs: Vec<Option<Output>>,
    is_error: bool,
}

/// Reads a stream to its end, and discards frames of the others.
fn read(trial: &Trial, worker: &mut Worker, stream: u32) -> Result<Read, Stop> {
    read_within(trial.limits().call, worker, stream)
}

/// As [`read`], with its own limit for each item.
fn read_within(limit: Duration, worker: &mut Worker, stream: u32) -> Result<Read, Stop> {
    let mut read = Read::default();
    loop {
        match worker.next("the next item of an answer", limit)? {
            Arrival::Item(on, output) if on == stream => read.outputs.push(output),
            Arrival::End(on) if on == stream => return Ok(read),
            Arrival::Error(on, _) if on == stream => {
                read.is_error = true;
                return Ok(read);
            }
            Arrival::Closed => fail!("the process closed its socket in the middle of an answer"),
            Arrival::Item(..)
            | Arrival::Config(_)
            | Arrival::End(_)
            | Arrival::Error(..)
            | Arrival::Pong(_)
            | Arrival::GoAway => {}
        }
    }
}

/// A short request must be answered completely.
fn serves(trial: &Trial, worker: &mut Worker, config: &EngineConfig, when: &str) -> CheckResult {
    let stream = worker.request("generate", MUCH_CREDIT, &request(config, SHORT))?;
    let read = read(trial, worker, stream)?;
    let is_whole = matches!(read.outputs.last(), Some(Some(Output::Finished(_))));
    ensure!(
        is_whole && !read.is_error,
        "{when} a short request ended with {:?}",
        read.outputs.last()
    );
    Ok(())
}

/// Begins a long request and waits for an item of it, whatever else is active.
fn begun(
    trial: &Trial,
    worker: &mut Worker,
    config: &EngineConfig,
    credit: u32,
) -> Result<u32, Stop> {
    let stream = worker.request("generate", credit, &request(config, LONG))?;
    let deadline = tokio::time::Instant::now() + trial.limits().call;
    loop {
        let left = deadline.saturating_duration_since(tokio::time::Instant::now());
        match worker.next("the first item of an answer", left)? {
            Arrival::Item(on, Some(_)) if on == stream => return Ok(stream),
            Arrival::Item(on, Some(_)) | Arrival::End(on) if on != stream => {}
            other => fail!("a long answer began with {other:?}"),
        }
    }
}

pub(super) async fn only_frames(trial: Trial) -> CheckResult {
    let (mut worker, config) = Worker::start(&trial)?;
    for _ in 0..3 {
        serves(&trial, &mut worker, &config, "while it logs all it can,")?;
    }
    worker.request("cleanup", SHORT, &())?;
    match worker.next("the end of `cleanup`", trial.limits().cleanup)? {
        Arrival::End(_) | Arrival::Item(..) => Ok(()),
        other => fail!("`cleanup` was answered with {other:?}"),
    }
}

pub(super) async fn ends_with_its_worker(trial: Trial) -> CheckResult {
    let (mut worker, config) = Worker::start(&trial)?;
    begun(&trial, &mut worker, &config, MUCH_CREDIT)?;
    worker.vanish();
    let limit = trial.limits().call;
    let when = "when its worker was gone,";
    worker.exit(when, limit).await?;
    worker.tracks.end(when, limit).await
}

pub(super) async fn other_version(trial: Trial) -> CheckResult {
    refuses_other_version(&trial).await?;
    let mut worker = Worker::spawn(&trial)?;
    worker.write(&hello(PROTOCOL_VERSION + 98)?)?;
    // A process that has exited already takes no request, which is correct.
    let _ = worker.request("start", SHORT, &later_start());
    loop {
        let what = "the refusal of a worker of another version";
        match worker.next(what, trial.limits().start)? {
            Arrival::GoAway | Arrival::Closed => return Ok(()),
            Arrival::Pong(_) => {}
            other => fail!("a worker of another version was answered with {other:?}"),
        }
    }
}

pub(super) async fn exits_by_itself(trial: Trial) -> CheckResult {
    let (mut worker, config) = Worker::start(&trial)?;
    serves(&trial, &mut worker, &config, "after start")?;
    let stream = worker.request("cleanup", SHORT, &())?;
    let read = read_within(trial.limits().cleanup, &mut worker, stream)?;
    ensure!(!read.is_error, "`cleanup` failed");
    let go_away = GoAway {
        code: GoAwayCode::Shutdown,
        reason: "the check is over".into(),
    };
    worker.send(FrameKind::GoAway, 0, &go_away)?;
    worker.leave();
    let when = "after `cleanup` and GoAway";
    let status = worker.exit(when, trial.limits().call).await?;
    ensure!(status.success(), "{when} the process ended with {status}");
    worker.tracks.end(when, trial.limits().call).await
}

pub(super) async fn answers_ping(trial: Trial) -> CheckResult {
    // With credit it computes, without credit it waits; a loop may hang in either.
    for credit in [MUCH_CREDIT, 1] {
        // Each in its own process: the engine may run one request at a time.
        let (mut worker, config) = Worker::start(&trial)?;
        begun(&trial, &mut worker, &config, credit)?;
        let payload = format!("ping with credit {credit}");
        worker.send_bytes(FrameKind::Ping, 0, payload.as_bytes())?;
        let deadline = tokio::time::Instant::now() + trial.limits().call;
        loop {
            let left = deadline.saturating_duration_since(tokio::time::Instant::now());
            match worker.next("Pong, while a request is under way,", left)? {
                Arrival::Pong(echoed) if echoed == payload.as_bytes() => break,
                Arrival::Pong(echoed) => {
                    fail!("Pong has the payload {echoed:?}, Ping had {payload:?}")
                }
                Arrival::Item(..) | Arrival::End(_) => {}
                other => fail!("Ping was answered with {other:?}"),
            }
        }
    }
    Ok(())
}

fn cancel(worker: &mut Worker, stream: u32) -> CheckResult {
    let cancel = Cancel {
        reason: CancelReason::Client,
        discard: false,
    };
    worker.send(FrameKind::Cancel, stream, &cancel)
}

pub(super) async fn ends_cancelled(trial: Trial) -> CheckResult {
    let (mut worker, config) = Worker::start(&trial)?;
    // One that computes, and one that waits for credit.
    for credit in [MUCH_CREDIT, 1] {
        if config.max_num_seqs == Some(1) {
            let stream = begun(&trial, &mut worker, &config, credit)?;
            cancel(&mut worker, stream)?;
            until_ended(&trial, &mut worker, stream, None)?;
            continue;
        }
        // It waits for credit, so that it cannot end by itself meanwhile. The other is sent later: if its answer is over before
        // the Cancel, its End still comes after its first item.
        let beside = begun(&trial, &mut worker, &config, 1)?;
        let stream = begun(&trial, &mut worker, &config, credit)?;
        cancel(&mut worker, stream)?;
        until_ended(&trial, &mut worker, stream, Some(beside))?;
        worker.send(FrameKind::Credit, beside, &Credit { items: 1 })?;
        match worker.next("the next item of the answer beside", trial.limits().call)? {
            Arrival::Item(on, Some(_)) if on == beside => {}
            other => fail!("after a Cancel the stream beside went on with {other:?}"),
        }
        cancel(&mut worker, beside)?;
        read(&trial, &mut worker, beside)?;
    }
    serves(&trial, &mut worker, &config, "after cancels")
}

/// The cancelled stream must end soon; the one beside it must not.
fn until_ended(
    trial: &Trial,
    worker: &mut Worker,
    cancelled: u32,
    beside: Option<u32>,
) -> CheckResult {
    let deadline = tokio::time::Instant::now() + trial.limits().cancel;
    loop {
        let left = deadline.saturating_duration_since(tokio::time::Instant::now());
        match worker.next("the end of a cancelled stream", left)? {
            Arrival::End(on) | Arrival::Error(on, _) if on == cancelled => return Ok(()),
            Arrival::End(on) | Arrival::Error(on, _) if Some(on) == beside => {
                fail!("a Cancel ended the stream beside it")
            }
            Arrival::Closed => fail!("a Cancel ended the process"),
            Arrival::Item(..)
            | Arrival::Config(_)
            | Arrival::End(_)
            | Arrival::Error(..)
            | Arrival::Pong(_)
            | Arrival::GoAway => {}
        }
    }
}

pub(super) async fn keeps_to_credit(trial: Trial) -> CheckResult {
    let (mut worker, config) = Worker::start(&trial)?;
    let waiting = begun(&trial, &mut worker, &config, 2)?;
    let second = worker.next("the second item of an answer", trial.limits().call)?;
    ensure!(
        matches!(second, Arrival::Item(on, Some(_)) if on == waiting),
        "a second item has credit, but {second:?} came"
    );
    if let Some(arrival) = worker.poll(trial.limits().cancel / 8)? {
        fail!("without credit came {arrival:?}");
    }
    if config.max_num_seqs != Some(1) {
        answers_beside(&trial, &mut worker, &config)?;
    }
    worker.send(FrameKind::Credit, waiting, &Credit { items: 1 })?;
    match worker.next("the item for new credit", trial.limits().call)? {
        Arrival::Item(on, Some(_)) if on == waiting => Ok(()),
        other => fail!("new credit was answered with {other:?}"),
    }
}

/// A short request must be answered while another waits for credit, without any item of the waiting one.
fn answers_beside(trial: &Trial, worker: &mut Worker, config: &EngineConfig) -> CheckResult {
    let other = worker.request("generate", MUCH_CREDIT, &request(config, SHORT))?;
    loop {
        match worker.next("an answer beside one without credit", trial.limits().call)? {
            Arrival::End(on) if on == other => return Ok(()),
            Arrival::Item(on, Some(_)) if on == other => {}
            arrival => fail!("beside an answer without credit came {arrival:?}"),
        }
    }
}

/// A `start` request with a field of a later version.
#[derive(Serialize)]
struct LaterStart {
    worker_id: u64,
    role: Role,
    of_a_later_version: Vec<u32>,
}

fn later_start() -> LaterStart {
    LaterStart {
        worker_id: 1,
        role: Role::Aggregated,
        of_a_later_version: vec![1],
    }
}

/// As `Hello`, with a field of a later version, and an older version that it still supports.
#[derive(Serialize)]
struct LaterHello {
    version: u16,
    min_version: u16,
    max_frame_bytes: u32,
    has_secret: bool,
    of_a_later_version: &'static str,
}

#[derive(Serialize)]
struct LaterHead {
    endpoint: &'static str,
    instance: u64,
    id: &'static str,
    credit: u32,
    of_a_later_version: [&'static str; 2],
}

pub(super) async fn takes_later_versions(trial: Trial) -> CheckResult {
    let mut worker = Worker::spawn(&trial)?;
    let later = LaterHello {
        version: PROTOCOL_VERSION + 1,
        min_version: PROTOCOL_VERSION,
        max_frame_bytes: 1 << 20,
        has_secret: false,
        of_a_later_version: "x",
    };
    worker.send(FrameKind::Hello, 0, &later)?;
    worker.send_bytes(FrameKind::Unknown(200), 0, b"of a later version")?;
    let config = worker.ask_to_start()?;
    worker.send_bytes(FrameKind::Unknown(201), 0, b"")?;
    let unknown = worker.request("of_a_later_version", SHORT, &later_start())?;
    match worker.next(
        "the refusal of an endpoint of a later version",
        trial.limits().call,
    )? {
        Arrival::Error(on, error) if on == unknown => ensure!(
            matches!(error.kind, ErrorKind::NotFound | ErrorKind::Unsupported),
            "an endpoint of a later version is refused with {}",
            error.kind
        ),
        other => fail!("an endpoint of a later version was answered with {other:?}"),
    }
    let head = LaterHead {
        endpoint: "generate",
        instance: 0,
        id: "later",
        credit: MUCH_CREDIT,
        of_a_later_version: ["x", "y"],
    };
    let stream = worker.request_with(&head, &request(&config, SHORT))?;
    let read = read(&trial, &mut worker, stream)?;
    ensure!(
        !read.is_error && matches!(read.outputs.last(), Some(Some(Output::Finished(_)))),
        "a request with a field of a later version ended with {:?}",
        read.outputs.last()
    );
    Ok(())
}

pub(super) async fn whole_answers(trial: Trial) -> CheckResult {
    let (mut worker, config) = Worker::start(&trial)?;
    for max_tokens in [1, SHORT, 100] {
        let stream = worker.request("generate", MUCH_CREDIT, &request(&config, max_tokens))?;
        let read = read(&trial, &mut worker, stream)?;
        ensure!(!read.is_error, "a plain request ended with an error");
        let Some((last, before)) = read.outputs.split_last() else {
            fail!("a plain request was ended without an item");
        };
        for output in before {
            let Some(output) = output else {
                fail!("an item is no output");
            };
            ensure!(
                !output.is_terminal(),
                "an item came after the terminal one: {last:?}"
            );
            ensure!(
                output.token_count() > 0,
                "an item brings no token: {output:?}"
            );
            ensure_in_vocabulary(&config, output)?;
        }
        let Some(last @ Output::Finished(_)) = last else {
            fail!("the last item before End is {last:?}, which is no terminal");
        };
        ensure_in_vocabulary(&config, last)?;
    }
    Ok(())
}

fn ensure_in_vocabulary(config: &EngineConfig, output: &Output) -> CheckResult {
    let (Some(vocab_size), Some(chunk)) = (config.vocab_size, chunk_of(output)) else {
        return Ok(());
    };
    let vocab_size = vocab_size.get();
    if let Some(token) = chunk.token_ids.iter().find(|token| **token >= vocab_size) {
        fail!("token {token} is not in the vocabulary of {vocab_size}");
    }
    Ok(())
}
