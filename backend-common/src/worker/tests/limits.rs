//! A request's limits: cancellation, deadlines, silence, admission.

use std::time::Duration;

use futures_util::{FutureExt, StreamExt};
use tokio::time::Instant;

use super::fakes::Act::{Hang, Late};
use super::fakes::Call::Generate;
use super::fakes::{PROMPT_TOKENS, World};
use super::fakes::{config, counting, request, served, serving, slowly, stalling, stop_cleanly};
use super::transcript::{Transcript, read};
use crate::config::{Capabilities, EngineConfig, InputKind};
use crate::context::{CancelReason, RequestContext};
use crate::error::ErrorKind;
use crate::handles::Load;
use crate::output::{Finish, FinishReason, stream};
use crate::request::{Input, ScorePair};
use crate::worker::WorkerConfig;

const RUNNING: &str = "genset_worker_running_requests";
const WAITING: &str = "genset_worker_waiting_requests";

/// The longest silence that [`impatient`] allows.
const IDLE: Duration = Duration::from_secs(10);

/// A worker that limits nothing but silence.
fn impatient() -> WorkerConfig {
    let mut config = config();
    (config.limits.idle_timeout, config.limits.request_timeout) = (Some(IDLE), None);
    config
}

/// A worker that runs one request and lets two wait.
fn narrow() -> WorkerConfig {
    let mut config = config();
    (config.limits.max_running, config.limits.max_waiting) = (1, 2);
    config
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_request_ends_as_cancelled_and_pays_for_what_it_got() {
    let (world, handle) = stalling(config()).await;
    let ctx = RequestContext::new("r");
    let outputs = world.generate(request(), ctx.clone()).await.unwrap();
    let cancel = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        ctx.cancel(CancelReason::Client);
    };
    let (seen, ()) = tokio::join!(read(outputs), cancel);
    let cancelled = Transcript::finished(FinishReason::Cancelled, PROMPT_TOKENS, &[0]);
    assert_eq!(seen, cancelled);
    stop_cleanly(&handle).await;
    assert_eq!(world.aborted_ids(), ["r"]);
}

#[tokio::test(start_paused = true)]
async fn a_request_cancelled_before_its_first_token_pays_for_its_prompt() {
    let (world, handle) = stalling(config()).await;
    let ctx = RequestContext::new("r");
    let outputs = world.generate(request(), ctx.clone()).await.unwrap();
    ctx.cancel(CancelReason::Client);
    let cancelled = Transcript::finished(FinishReason::Cancelled, PROMPT_TOKENS, &[]);
    assert_eq!(read(outputs).await, cancelled);
    let first_tokens = world.metric("genset_worker_time_to_first_token_seconds_count");
    assert_eq!(first_tokens, 1, "the canary's alone");
    let load = world.offer().recent.describe(Load::default());
    assert_eq!(load.recent_ttft_us, None);
    stop_cleanly(&handle).await;
}

#[tokio::test(start_paused = true)]
async fn dropping_a_stream_cancels_the_request_tells_the_engine_and_frees_its_place() {
    let (world, handle) = stalling(config()).await;
    let outputs = world.send("dropped").await.unwrap();
    assert_eq!(world.metric(RUNNING), 1);
    let seen = world.last_seen();
    assert!(!seen.is_cancelled());
    drop(outputs);
    assert_eq!(world.metric(RUNNING), 0);
    assert_eq!(seen.cancel_reason(), Some(CancelReason::Client));
    stop_cleanly(&handle).await;
    assert_eq!(world.aborted_ids(), ["dropped"]);
}

#[tokio::test(start_paused = true)]
async fn dropping_the_call_of_generate_cancels_the_request_and_frees_its_place() {
    let (world, handle) = stalling(config()).await;
    world.plan(Generate, [Hang]);
    let client = RequestContext::new("dropped");
    let call = world.generate(request(), client.clone());
    assert!(call.now_or_never().is_none());
    assert_eq!(world.metric(RUNNING), 0);
    let seen = world.last_seen();
    assert_eq!(seen.cancel_reason(), Some(CancelReason::Client));
    assert!(!client.is_cancelled(), "cancelling below stays there");
    stop_cleanly(&handle).await;
}

#[tokio::test(start_paused = true)]
async fn a_finished_request_is_not_aborted() {
    let (world, handle) = served(config()).await;
    read(world.send("r").await.unwrap()).await;
    assert_eq!(world.metric(RUNNING), 0);
    assert!(!world.last_seen().is_cancelled());
    stop_cleanly(&handle).await;
    assert_eq!(world.aborted_ids(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn the_earlier_of_the_clients_and_the_workers_deadline_counts() {
    let seconds = |seconds| Some(Duration::from_secs(seconds));
    for (client, worker, expected) in [
        (seconds(3), None, 3),
        (None, seconds(5), 5),
        (seconds(3), seconds(5), 3),
        // A client with its own deadline may wait longer than clients without one.
        (seconds(7), seconds(5), 7),
    ] {
        let mut config = config();
        config.limits.request_timeout = worker;
        let (world, handle) = stalling(config).await;
        let start = Instant::now();
        let mut ctx = RequestContext::new("r");
        if let Some(limit) = client {
            ctx = ctx.with_deadline(start + limit);
        }
        let outputs = world.generate(request(), ctx).await.unwrap();
        let failed = Transcript::failed(ErrorKind::DeadlineExceeded, &[0]);
        assert_eq!(read(outputs).await, failed);
        assert_eq!(start.elapsed().as_secs(), expected);
        let reason = world.last_seen().cancel_reason();
        assert_eq!(reason, Some(CancelReason::Deadline));
        stop_cleanly(&handle).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_another_instance_had_has_what_is_left_of_its_time() {
    let mut config = config();
    config.limits.request_timeout = Some(Duration::from_secs(5));
    let (world, handle) = stalling(config).await;
    let began = Instant::now();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let ctx = RequestContext::new("r").with_began(began);
    let outputs = world.generate(request(), ctx).await.unwrap();
    let failed = Transcript::failed(ErrorKind::DeadlineExceeded, &[0]);
    assert_eq!(read(outputs).await, failed);
    assert_eq!(began.elapsed().as_secs(), 5);
    stop_cleanly(&handle).await;
}

#[tokio::test(start_paused = true)]
async fn a_deadline_covers_the_call_of_generate_and_the_wait_before_it() {
    let (world, handle) = stalling(narrow()).await;
    let in_3_s = || RequestContext::new("r").with_deadline(Instant::now() + Duration::from_secs(3));

    world.plan(Generate, [Hang]);
    let refused = world.generate(request(), in_3_s()).await;
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    let reason = world.last_seen().cancel_reason();
    assert_eq!(reason, Some(CancelReason::Deadline));

    let running = world.send("running").await.unwrap();
    let refused = world.generate(request(), in_3_s()).await;
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    assert_eq!(world.metric(WAITING), 0);
    drop(running);
    stop_cleanly(&handle).await;
}

#[tokio::test(start_paused = true)]
async fn a_client_may_cancel_a_call_of_generate_that_hangs() {
    let (world, handle) = stalling(config()).await;
    world.plan(Generate, [Hang]);
    let ctx = RequestContext::new("r");
    let seen = world.count(Generate);
    let call = world.generate(request(), ctx.clone());
    let cancel = async {
        while world.count(Generate) == seen {
            tokio::task::yield_now().await;
        }
        ctx.cancel(CancelReason::Client);
    };
    let (refused, ()) = tokio::join!(call, cancel);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Cancelled);
    assert_eq!(world.metric(RUNNING), 0);
    stop_cleanly(&handle).await;
}

#[tokio::test(start_paused = true)]
async fn a_silent_engine_meets_the_idle_limit_and_a_slow_one_does_not() {
    let (world, handle) = stalling(impatient()).await;
    let start = Instant::now();
    let outputs = world.send("silent").await.unwrap();
    let failed = Transcript::failed(ErrorKind::DeadlineExceeded, &[0]);
    assert_eq!(read(outputs).await, failed);
    assert!(start.elapsed() >= IDLE && start.elapsed() <= IDLE * 2);

    world.answer_with(move |request, ctx| Ok(slowly(request, ctx, IDLE - Duration::from_secs(1))));
    let answer = read(world.send("slow").await.unwrap()).await;
    assert_eq!(answer.tokens, [0, 1, 2, 3]);
    stop_cleanly(&handle).await;
}

#[tokio::test(start_paused = true)]
async fn vectors_and_scores_have_no_idle_limit() {
    let idle = Duration::from_secs(4);
    let pair = ScorePair {
        token_ids: vec![1, 2],
        first_tokens: 1,
    };
    for (kind, input) in [
        (InputKind::Embed, Input::Embed(vec![vec![1, 2]].into())),
        (InputKind::Score, Input::Score([pair].into())),
    ] {
        let world = World::new();
        let can = Capabilities {
            inputs: [kind].into(),
            ..Capabilities::default()
        };
        world.declare(EngineConfig::new("m", 16).with_capabilities(can));
        world.answer_with(move |_, ctx| {
            Ok(stream(ctx, move |_out| async move {
                tokio::time::sleep(idle * 5).await;
                Ok(Finish::stop())
            }))
        });
        let mut config = config();
        config.limits.idle_timeout = Some(idle);
        let handle = serving(&world, config).await;
        let mut asked = request();
        asked.input = input;
        let answer = world.generate(asked, RequestContext::new("r"));
        let answer = read(answer.await.unwrap()).await;
        let whole = Transcript::finished(FinishReason::Stop, PROMPT_TOKENS, &[]);
        assert_eq!(answer, whole);
        stop_cleanly(&handle).await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_wait_for_a_place_inside_generate_is_no_silence_of_the_stream() {
    let (world, handle) = served(impatient()).await;
    world.answer_with(move |request, ctx| Ok(slowly(request, ctx, IDLE / 2)));
    world.plan(Generate, [Late(IDLE * 3)]);
    let answer = read(world.send("waited").await.unwrap()).await;
    assert_eq!(answer.tokens, [0, 1, 2, 3]);
    stop_cleanly(&handle).await;
}

/// The request may be in the engine's own queue, before its first token or preempted, or have a long prompt.
#[tokio::test(start_paused = true)]
async fn an_engine_that_computes_steps_is_not_silent() {
    let (world, handle) = served(impatient()).await;
    world.answer_with(move |request, ctx| Ok(slowly(request, ctx, IDLE * 5)));
    let waiting = world.send("waiting").await.unwrap();
    let steps = async {
        for _ in 0..60 {
            tokio::time::sleep(IDLE / 2).await;
            world.compute_step();
        }
    };
    let (answer, ()) = tokio::join!(read(waiting), steps);
    assert_eq!(answer.tokens, [0, 1, 2, 3]);

    let failed = Transcript::failed(ErrorKind::DeadlineExceeded, &[]);
    assert_eq!(read(world.send("silent").await.unwrap()).await, failed);
    stop_cleanly(&handle).await;
}

/// The request may be in a queue of an engine that reports no steps. Canaries' items do not count.
#[tokio::test(start_paused = true)]
async fn an_engine_that_answers_others_is_not_silent_before_the_first_item() {
    let (world, handle) = served(impatient()).await;
    world.answer_with(move |request, ctx| {
        let is_busy = request.stop.max_tokens == Some(20);
        let pause = if is_busy { IDLE / 2 } else { IDLE * 5 };
        Ok(slowly(request, ctx, pause))
    });
    let (waiting, busy) = tokio::join!(world.ask(Some(1)), world.ask(Some(20)));
    assert_eq!((waiting.tokens.len(), busy.tokens.len()), (1, 20));

    let failed = Transcript::failed(ErrorKind::DeadlineExceeded, &[]);
    assert_eq!(read(world.send("alone").await.unwrap()).await, failed);
    stop_cleanly(&handle).await;
}

#[tokio::test(start_paused = true)]
async fn requests_run_wait_or_are_refused_in_this_order() {
    let (world, handle) = stalling(narrow()).await;
    let running = world.send("running").await.unwrap();
    let mut first = Box::pin(world.send("first"));
    let mut second = Box::pin(world.send("second"));
    assert!(first.as_mut().now_or_never().is_none());
    assert!(second.as_mut().now_or_never().is_none());
    assert_eq!((world.metric(RUNNING), world.metric(WAITING)), (1, 2));

    let error = world.send("refused").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Overloaded);
    assert!(error.details().retry_after.is_some());

    drop(running);
    assert!(
        second.as_mut().now_or_never().is_none(),
        "first come, first served"
    );
    let first = first.await.unwrap();
    assert_eq!((world.metric(RUNNING), world.metric(WAITING)), (1, 1));
    drop(first);
    drop(second.await.unwrap());
    assert_eq!((world.metric(RUNNING), world.metric(WAITING)), (0, 0));
    stop_cleanly(&handle).await;
}

#[tokio::test(start_paused = true)]
async fn a_late_request_does_not_overtake_those_that_wait() {
    let (world, handle) = stalling(narrow()).await;
    let running = world.send("running").await.unwrap();
    let mut waiting = Box::pin(world.send("waiting"));
    assert!(waiting.as_mut().now_or_never().is_none());
    drop(running);
    let mut late = Box::pin(world.send("late"));
    assert!(late.as_mut().now_or_never().is_none());
    drop(waiting.await.unwrap());
    drop(late.await.unwrap());
    stop_cleanly(&handle).await;
}

#[tokio::test(start_paused = true)]
async fn a_waiting_request_can_be_cancelled_or_dropped_and_leaves_no_trace() {
    let (world, handle) = stalling(narrow()).await;
    let running = world.send("running").await.unwrap();
    let seen = world.count(Generate);

    let ctx = RequestContext::new("cancelled");
    let mut cancelled = Box::pin(world.generate(request(), ctx.clone()));
    assert!(cancelled.as_mut().now_or_never().is_none());
    ctx.cancel(CancelReason::Client);
    assert_eq!(cancelled.await.unwrap_err().kind(), ErrorKind::Cancelled);

    assert!(world.send("dropped").now_or_never().is_none());
    assert_eq!((world.metric(RUNNING), world.metric(WAITING)), (1, 0));
    drop(running);
    drop(world.send("next").await.unwrap());
    assert_eq!(
        world.count(Generate),
        seen + 1,
        "neither reached the engine"
    );
    stop_cleanly(&handle).await;
}

/// The stream is never pending, which is when limits are otherwise checked.
#[tokio::test(start_paused = true)]
async fn an_engine_that_is_always_ready_meets_its_deadline_too() {
    let world = World::new();
    world.declare(EngineConfig::new("wide", u32::MAX));
    let handle = serving(&world, config()).await;
    world.answer_with(|request, ctx| Ok(counting(request, ctx)));
    let mut endless = request();
    endless.stop.max_tokens = Some(100_000);
    let ctx = RequestContext::new("r").with_deadline(Instant::now() + Duration::from_secs(1));
    let mut outputs = world.generate(endless, ctx).await.unwrap();
    outputs.next().await.unwrap().unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let mut items_late = 0;
    let error = loop {
        match outputs.next().await {
            Some(Ok(_)) => items_late += 1,
            Some(Err(error)) => break error,
            None => panic!("a stream ends with a terminal"),
        }
    };
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded);
    assert!(items_late < 64, "{items_late}");
    stop_cleanly(&handle).await;
}

/// The operator may lower the context; prompt and answer together respect it, whatever the request says.
#[tokio::test(start_paused = true)]
async fn an_answer_ends_where_the_context_does() {
    let narrow = WorkerConfig {
        context_length_tokens: Some(8),
        ..config()
    };
    let (world, handle) = served(narrow).await;
    for max_tokens in [None, Some(4), Some(50)] {
        world.answer_with(|request, ctx| Ok(counting(request, ctx)));
        let tokens = max_tokens.unwrap_or(50).min(8 - PROMPT_TOKENS);
        let ids: Vec<u32> = (0..tokens).collect();
        let ended = Transcript::finished(FinishReason::Length, PROMPT_TOKENS, &ids);
        assert_eq!(world.ask(max_tokens).await, ended);
    }
    stop_cleanly(&handle).await;
}
