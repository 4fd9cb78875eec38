//! The first look at an engine: its declaration and its speed.

use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::{
    GenerateRequest, Input, Role, config::InputKind, request::ScorePair, worker::WorkerConfig,
};
use tokio::time::Instant;

use super::watch::Clock;
use super::{BESIDE, Interruption, no_interruption, try_out};
use crate::check::{CheckResult, Profile, Stop};
use crate::limits::Limits;
use crate::medium::{Api, Medium};
use crate::report::EngineReport;
use crate::subject::Factory;
use crate::trial::{Live, Trial, Variation};

/// The results of a first look at the engine.
#[derive(Debug, Clone)]
pub(crate) struct Acquaintance {
    pub(crate) is_virtual_time: bool,
    pub(crate) limits: Limits,
    /// The limits of checks on several threads, which cannot use a paused clock.
    pub(super) threaded_limits: Limits,
    pub(super) profiles: Vec<Profile>,
    pub(crate) medium: Medium,
    pub(crate) engine: EngineReport,
}

impl Acquaintance {
    /// Whether the engine started. Otherwise nothing is known of it.
    pub(crate) fn has_started(&self) -> bool {
        self.engine.capabilities.is_some()
    }

    /// Whether the engine takes prompts, as far as is known.
    pub(crate) fn takes_prompts(&self) -> bool {
        let can = self.engine.capabilities.as_ref();
        can.is_none_or(Medium::takes_prompts)
    }

    /// The clock of a check on one thread.
    pub(super) fn clock(&self) -> Clock {
        match self.is_virtual_time {
            true => Clock::Paused,
            false => Clock::Real,
        }
    }
}

/// The limits before the engine's speed is known. An engine that answers a Worker's canary in time, and is clean in time for
/// it, must pass.
fn warm_up_limits() -> Limits {
    let worker = WorkerConfig::default();
    Limits {
        call: worker.canary.timeout,
        cleanup: worker.cleanup_timeout,
        ..Limits::default()
    }
}

/// The durations of the three warm-up requests.
#[derive(Debug, Clone, Copy, Default)]
struct WarmUp {
    /// Of three requests, at the pace of the last two: an engine may compile kernels for its first.
    pace: Duration,
    /// By how much the first took longer.
    longer_first: Duration,
}

impl WarmUp {
    /// The limits in real time.
    fn limits(self) -> Limits {
        Limits::scaled(self.pace).with_longer_first(self.longer_first)
    }
}

/// Measures three requests, which determine the limits. An engine that fails them is not slow: the default limits then make
/// failing checks end soon.
///
/// # Errors
/// The error of the request that fails or is not answered in time.
async fn warm_up(live: &Live) -> Result<WarmUp, Stop> {
    let mut request = live.request(4, 4);
    if Medium::declared(&live.config.capabilities).next().is_none() {
        request.input = input_of_its_own(live);
    }
    let taken = time_of_three(live, &request).await;
    if taken.is_ok() || live.medium() != Medium::Body {
        return taken;
    }
    // The engine may be offered for completions and not for chats.
    request.input = live.body(Api::Completion, &live.prompt(4, 0), false);
    time_of_three(live, &request).await
}

/// A sequence for an engine that only embeds, or a pair for one that only scores.
fn input_of_its_own(live: &Live) -> Input {
    let token_ids = live.prompt(4, 0);
    if live.config.capabilities.inputs.contains(&InputKind::Embed) {
        return Input::Embed(vec![token_ids].into());
    }
    let pair = ScorePair {
        token_ids,
        first_tokens: 2,
    };
    Input::Score([pair].into())
}

async fn time_of_three(live: &Live, request: &GenerateRequest) -> Result<WarmUp, Stop> {
    let mut times = [Duration::ZERO; 3];
    for time in &mut times {
        let started = Instant::now();
        let answer = live.answer(request.clone()).await?;
        if answer.finished().is_none() {
            let error = answer.error();
            return Err(Stop::Fail(format!("a plain request failed: {error:?}")));
        }
        *time = started.elapsed();
    }
    let [first, second, third] = times;
    let later = (second + third) / 2;
    Ok(WarmUp {
        pace: later * 3,
        longer_first: first.saturating_sub(later),
    })
}

/// The maximum number of looks at an engine that does not start.
const LOOKS: u32 = 3;

/// Learns what an engine declares, and its speed. Looks again if the engine does not start: otherwise one failed start would
/// skip the checks of all that it declares.
pub(crate) fn acquaint(factory: &Arc<dyn Factory>) -> Acquaintance {
    acquaint_until(factory, &no_interruption)
}

/// As [`acquaint`]. If the run is interrupted, little may be known.
pub(super) fn acquaint_until(
    factory: &Arc<dyn Factory>,
    interruption: Interruption<'_>,
) -> Acquaintance {
    let mut known = acquaint_once(factory, interruption);
    for _ in 1..LOOKS {
        if known.has_started() || interruption().is_some() {
            break;
        }
        known = acquaint_once(factory, interruption);
    }
    known
}

/// An engine that declares virtual time but does not keep it is tested in real time, so that only the check for that fails.
fn acquaint_once(factory: &Arc<dyn Factory>, interruption: Interruption<'_>) -> Acquaintance {
    let known = look_at(factory, true, interruption);
    if !known.is_virtual_time {
        return known;
    }
    match warm_up_on_a_paused_clock(factory, interruption) {
        Ok(Pace { warm_up, token }) => {
            let mut limits = Limits::virtual_time(warm_up.pace);
            limits.token = token;
            limits.cancel += warm_up.longer_first;
            Acquaintance {
                limits,
                threaded_limits: warm_up.limits(),
                ..known
            }
        }
        Err(_) => look_at(factory, false, interruption),
    }
}

/// Starts one engine. An engine that fails here is treated as a plain one; the checks will report the failure.
fn look_at(
    factory: &Arc<dyn Factory>,
    may_be_virtual: bool,
    interruption: Interruption<'_>,
) -> Acquaintance {
    let plain = Acquaintance {
        is_virtual_time: false,
        limits: Limits::default(),
        threaded_limits: Limits::default(),
        profiles: vec![Profile::Tokens],
        medium: Medium::default(),
        engine: EngineReport::default(),
    };
    let _beside = BESIDE.read();
    let limits = warm_up_limits();
    let variation = Variation::default();
    let trial = Trial::new(Arc::clone(factory), "warm-up", limits, variation);
    // An engine that did not start is cleaned up too: the next look may need the resources that it holds.
    let meet = move |trial| meet(trial, may_be_virtual);
    try_out(&trial, limits.start, Clock::Real, interruption, meet).unwrap_or(plain)
}

/// Tests on a paused clock whether an engine's waits follow tokio's clock.
pub(crate) fn ensure_virtual_time(factory: &Arc<dyn Factory>) -> CheckResult {
    warm_up_on_a_paused_clock(factory, &no_interruption).map(drop)
}

/// The duration of the warm-up requests on a paused clock. The clock advances as soon as all tasks wait. If an engine waits for
/// something else, hours pass meanwhile.
fn warm_up_on_a_paused_clock(
    factory: &Arc<dyn Factory>,
    interruption: Interruption<'_>,
) -> Result<Pace, Stop> {
    let limits = Limits::virtual_time(Duration::ZERO);
    let variation = Variation::default();
    let trial = Trial::new(Arc::clone(factory), "virtual-time", limits, variation);
    try_out(
        &trial,
        limits.wall,
        Clock::Paused,
        interruption,
        answers_on_a_paused_clock,
    )
}

/// Other failures of the engine are left to other checks.
async fn answers_on_a_paused_clock(trial: Trial) -> Result<Pace, Stop> {
    let begun = Instant::now();
    let answered = async {
        let live = trial.start().await?;
        Ok(Pace {
            warm_up: warm_up(&live).await?,
            token: time_of_a_token(&live).await?,
        })
    };
    match answered.await {
        Err(Stop::Fail(late) | Stop::Precondition(late))
            if begun.elapsed() >= trial.limits().call =>
        {
            Err(Stop::Fail(format!(
                "the engine declares virtual_time, but waits for something that does not follow tokio::time: on a paused \
                 clock {late}"
            )))
        }
        Ok(pace) => Ok(pace),
        Err(_) => Ok(Pace::default()),
    }
}

/// The engine's speed on a paused clock.
#[derive(Debug, Clone, Copy, Default)]
struct Pace {
    /// The durations of the warm-up requests.
    warm_up: WarmUp,
    /// The time per token after the first item; `None` if all came at once.
    token: Option<Duration>,
}

/// The length of the answer whose tokens are timed.
const TIMED_TOKENS: u32 = 96;

async fn time_of_a_token(live: &Live) -> Result<Option<Duration>, Stop> {
    if !Medium::takes_prompts(&live.config.capabilities) {
        // Its answer comes at once.
        return Ok(None);
    }
    let wanted = live.affordable_answer(4, TIMED_TOKENS);
    let mut running = live.generate(live.request(4, wanted)).await?;
    let mut tokens = 0;
    let mut first = None;
    let mut last = Instant::now();
    while let Some(Ok(output)) = running.next().await? {
        if output.token_count() > 0 {
            last = Instant::now();
            tokens += output.token_count();
            first.get_or_insert((last, tokens));
        }
    }
    let Some((begun, at_first)) = first.filter(|(_, at_first)| *at_first < tokens) else {
        return Ok(None);
    };
    let token = last.saturating_duration_since(begun) / (tokens - at_first);
    Ok(Some(token).filter(|token| !token.is_zero()))
}

/// How many times the first cleanup's time a later one has: it may have more to free.
const CLEANUPS: u32 = 2;

async fn meet(trial: Trial, may_be_virtual: bool) -> Result<Acquaintance, Stop> {
    let live = trial.start().await?;
    let can = &live.config.capabilities;
    let is_split = can.roles.contains(&Role::Prefill) && can.roles.contains(&Role::Decode);
    let takes = |kind: InputKind| can.inputs.contains(&kind);
    let declared = [
        (true, Profile::Tokens),
        (!can.sampling.is_empty(), Profile::Sampling),
        (can.max_logprobs.is_some(), Profile::Logprobs),
        (!can.guided.is_empty(), Profile::Guided),
        (can.kv_events, Profile::KvEvents),
        (is_split, Profile::Disaggregated),
        (can.resume || can.resume_as_prompt, Profile::Resume),
        (live.subject.process.is_some(), Profile::Subprocess),
        (takes(InputKind::Embed), Profile::Embeddings),
        (takes(InputKind::Score), Profile::Scores),
        (live.subject.engine.controls().is_some(), Profile::Controls),
        (can.adapters, Profile::Adapters),
        (live.config.data_parallel_size > 1, Profile::Ranks),
        (can.whole_bodies, Profile::Bodies),
    ];
    let profiles = declared.into_iter().filter(|(is_declared, _)| *is_declared);
    let profiles = profiles.map(|(_, profile)| profile).collect();
    let engine = EngineReport {
        name: live.config.model.clone(),
        capabilities: Some(can.clone()),
    };
    let is_virtual_time = can.virtual_time && may_be_virtual;
    // The pace of an engine with virtual time is measured on a paused clock.
    let mut limits = match is_virtual_time {
        true => Limits::default(),
        false => warm_up(&live)
            .await
            .map_or_else(|_| Limits::default(), WarmUp::limits),
    };
    // The warm-up may have taken half of the silence that the wall clock allows.
    trial.note_wait();
    let begun = Instant::now();
    if live.put_away().await.is_ok() {
        limits.cleanup = limits.cleanup.max(begun.elapsed() * CLEANUPS);
    }
    // A cleanup that hangs is not tried again.
    trial.release(&live.subject);
    Ok(Acquaintance {
        is_virtual_time,
        limits,
        threaded_limits: limits,
        profiles,
        medium: live.medium(),
        engine,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use genset_backend_common::{EngineError, OutputStream, async_trait};

    use super::*;
    use crate::mutants::capable::capable;
    use crate::mutants::fault::{Call, Fault, Inner, faulty};
    use crate::subject::Scenario;

    /// Compiles for its first request.
    struct Compiles {
        time: Duration,
        is_done: AtomicBool,
    }

    #[async_trait]
    impl Fault for Compiles {
        async fn generate(&self, inner: &Inner, call: Call) -> Result<OutputStream, EngineError> {
            if !self.is_done.swap(true, Ordering::Relaxed) {
                tokio::time::sleep(self.time).await;
            }
            inner.generate(call.request, call.ctx).await
        }
    }

    async fn warmed_up(time: Duration) -> Result<WarmUp, Stop> {
        let factory = move |scenario: &Scenario| {
            let is_done = AtomicBool::new(false);
            faulty(capable(scenario), Compiles { time, is_done })
        };
        let (limits, variation) = (warm_up_limits(), Variation::default());
        let trial = Trial::new(Arc::new(factory), "warm-up", limits, variation);
        warm_up(&trial.start().await?).await
    }

    #[tokio::test(start_paused = true)]
    async fn a_first_request_has_the_time_of_a_workers_canary() {
        let canary = WorkerConfig::default().canary.timeout;
        let second = Duration::from_secs(1);
        assert!(warmed_up(canary - second).await.is_ok());
        assert!(warmed_up(canary + second).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_first_request_that_takes_long_does_not_scale_the_limits() {
        let slow = Duration::from_secs(20);
        let warm_up = warmed_up(slow).await.unwrap();
        let (limits, usual) = (warm_up.limits(), Limits::default());
        let cancel = usual.cancel + slow;
        assert!(
            limits.cancel.abs_diff(cancel) < Duration::from_millis(100),
            "{limits:?}"
        );
        assert_eq!((limits.start, limits.cleanup), (usual.start, usual.cleanup));
        assert!(limits.call > slow + usual.call, "{limits:?}");
    }

    /// Needs some time until its device is free.
    struct Frees(Duration);

    #[async_trait]
    impl Fault for Frees {
        async fn cleanup(&self, inner: &Inner) -> Result<(), EngineError> {
            tokio::time::sleep(self.0).await;
            inner.cleanup().await
        }
    }

    /// The limit of a cleanup for an engine whose first one took this long.
    async fn limit_after(time: Duration) -> Duration {
        let factory = move |scenario: &Scenario| faulty(capable(scenario), Frees(time));
        let (limits, variation) = (warm_up_limits(), Variation::default());
        let trial = Trial::new(Arc::new(factory), "warm-up", limits, variation);
        meet(trial, false).await.unwrap().limits.cleanup
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_cleanup_has_its_time() {
        let seconds = Duration::from_secs;
        assert_eq!(limit_after(seconds(1)).await, seconds(5));
        let slow = limit_after(seconds(20)).await;
        assert!((seconds(40)..seconds(41)).contains(&slow), "{slow:?}");
        // It hangs for a Worker, too.
        assert_eq!(limit_after(seconds(31)).await, seconds(5));
    }
}
