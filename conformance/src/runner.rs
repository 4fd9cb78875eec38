//! Runs checks: each on a fresh engine, a thread and an async runtime of its own, under a watch on the wall clock.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use genset_backend_common::Role;
use parking_lot::RwLock;
use tokio::runtime::{Builder, Runtime};
use tokio::time::Instant;

use crate::check::{Check, CheckResult, Level, Profile, SkipReason, Stop};
use crate::checks::catalogue;
use crate::limits::Limits;
use crate::medium::Medium;
use crate::report::{CheckReport, EngineReport, Evidence, Report, Verdict};
use crate::rules::Rule;
use crate::subject::Factory;
use crate::transcript::Transcript;
use crate::trial::{Live, Trial, Variation};

mod watch;

use watch::{Clock, watch};

/// What to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The highest level to run, [`Level::Core`] or above.
    pub level: Level,
    /// Only checks whose ids start with one of these, in capitals; empty for all.
    pub only: Vec<String>,
    /// How the run of one check begins, for the report's replay lines: a command that takes `--only ID`, `--level LEVEL` and
    /// `--seed N`. Where it is empty, a replay line is a call in Rust.
    pub replay: String,
    /// Varies the prompts of every check; a run with the same seed sends the same ones.
    pub seed: u64,
    /// Random sequences of operations that SQ01 tries; 0 leaves it out.
    pub sequences: u32,
    /// Whether the measurements (level [`Level::Info`]) are taken. They cost about a second, and are never judged.
    pub is_measuring: bool,
    /// The events that the transcript of a failed check keeps, the last ones; 0 for no transcripts.
    pub max_transcript_events: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            level: Level::Strict,
            only: Vec::new(),
            replay: String::new(),
            seed: 0,
            sequences: 36,
            is_measuring: true,
            max_transcript_events: 200,
        }
    }
}

/// What a first look at the engine said.
#[derive(Debug, Clone)]
pub(crate) struct Acquaintance {
    pub(crate) is_virtual_time: bool,
    pub(crate) limits: Limits,
    /// The limits of checks on several threads, which no paused clock drives.
    threaded_limits: Limits,
    profiles: Vec<Profile>,
    pub(crate) medium: Medium,
    pub(crate) engine: EngineReport,
}

impl Acquaintance {
    /// Whether the engine started. Of one that did not, nothing is known.
    pub(crate) fn has_started(&self) -> bool {
        self.engine.capabilities.is_some()
    }
}

/// Runs every core and strict check that applies. Blocks the calling thread.
#[must_use]
pub fn run_conformance(factory: impl Factory) -> Report {
    run_conformance_with(factory, &Options::default())
}

/// Runs what `options` say. Blocks the calling thread.
///
/// # Panics
/// When the id of no check begins with one of [`Options::only`]: a run without the check that is meant would be a good one.
#[must_use]
pub fn run_conformance_with(factory: impl Factory, options: &Options) -> Report {
    run_conformance_while(factory, options, || Ok(()))
}

/// [`run_conformance_with`] for an engine that may go away for good, such as a worker in another process. `is_there` is asked
/// after each check that failed; what it says against it ends the run, and the checks that are left are skipped as
/// [`Gone`](SkipReason::Gone).
///
/// # Panics
/// As [`run_conformance_with`].
#[must_use]
pub fn run_conformance_while(
    factory: impl Factory,
    options: &Options,
    mut is_there: impl FnMut() -> Result<(), String>,
) -> Report {
    for prefix in &options.only {
        assert!(
            catalogue().any(|check| check.id.starts_with(prefix.as_str())),
            "no check's id starts with {prefix:?}"
        );
    }
    let factory: Arc<dyn Factory> = Arc::new(factory);
    let known = acquaint(&factory);
    let mut seen = BTreeMap::new();
    let mut gone: Option<String> = None;
    let mut checks: Vec<CheckReport> = catalogue()
        .map(|check| {
            if let Some(reason) = &gone {
                let skip = reason_to_skip(check, &known, options);
                let gone = || Stop::Skip(SkipReason::Gone, reason.clone());
                return Tried::untried(skip.unwrap_or_else(gone)).report(check, Duration::ZERO);
            }
            let report = run_one(check, &factory, &known, options, &mut seen);
            if report.is_bad() {
                gone = is_there().err();
            }
            report
        })
        .collect();
    tell_breaches(&mut checks, seen);
    Report::new(known.engine, options, checks)
}

/// Runs one check. Blocks the calling thread.
#[must_use]
pub fn run_check(check: &Check, factory: impl Factory) -> CheckReport {
    let factory: Arc<dyn Factory> = Arc::new(factory);
    let known = acquaint(&factory);
    run_known(check, &factory, &known)
}

/// [`run_check`] on an engine that is known already.
pub(crate) fn run_known(
    check: &Check,
    factory: &Arc<dyn Factory>,
    known: &Acquaintance,
) -> CheckReport {
    let options = Options {
        level: Level::Soak,
        ..Options::default()
    };
    run_one(check, factory, known, &options, &mut BTreeMap::new())
}

/// A breach of a rule of the reader: the first check that saw it, and what it saw.
struct Breach {
    check: &'static str,
    what: String,
    transcript: Transcript,
}

/// Fails the check of each rule that another check saw broken. Such a rule holds always, so it fails also where its check was
/// left out by name.
fn tell_breaches(checks: &mut [CheckReport], seen: BTreeMap<Rule, Breach>) {
    for (rule, breach) in seen {
        let row = checks.iter_mut().find(|row| row.id == rule.check());
        let Some(row) = row.filter(|row| !row.is_bad()) else {
            continue;
        };
        let Breach {
            check,
            what,
            transcript,
        } = breach;
        row.verdict = Verdict::Fail {
            reason: format!("in {check}: {what}"),
        };
        row.is_precondition = false;
        row.seen_in = Some(check.to_owned());
        row.transcript = Some(transcript);
    }
}

fn run_one(
    check: &Check,
    factory: &Arc<dyn Factory>,
    known: &Acquaintance,
    options: &Options,
    seen: &mut BTreeMap<Rule, Breach>,
) -> CheckReport {
    let started = Instant::now();
    let mut tried = match reason_to_skip(check, known, options) {
        Some(skip) => Tried::untried(skip),
        None => on_own_thread(*check, Arc::clone(factory), known, options),
    };
    for (rule, what) in std::mem::take(&mut tried.breaches) {
        if Rule::of(check.id) == Some(rule) && tried.result.is_ok() {
            tried.result = Err(Stop::Fail(what.clone()));
        }
        seen.entry(rule).or_insert_with(|| Breach {
            check: check.id,
            what,
            transcript: tried.transcript.clone(),
        });
    }
    tried.report(check, started.elapsed())
}

/// Why a check is not run, if it is not.
fn reason_to_skip(check: &Check, known: &Acquaintance, options: &Options) -> Option<Stop> {
    let is_wanted = options.only.is_empty()
        || options
            .only
            .iter()
            .any(|prefix| check.id.starts_with(prefix.as_str()));
    let (code, reason) = if !is_wanted {
        (SkipReason::Filtered, "left out by name".to_owned())
    } else if check.level > options.level {
        let number = check.level.number();
        (
            SkipReason::Level,
            format!("level {number} was not asked for"),
        )
    } else if check.level == Level::Info && !options.is_measuring {
        let reason = "measurements were not asked for".to_owned();
        (SkipReason::NotMeasured, reason)
    } else if !known.profiles.contains(&check.profile) {
        let profile = check.profile.name();
        let reason = format!("the engine does not declare {profile}");
        (SkipReason::NotDeclared, reason)
    } else if check.needs_tokens && !known.medium.is_tokens() {
        let reason = "the check speaks in token ids, and the engine takes only text".to_owned();
        (SkipReason::NeedsTokens, reason)
    } else {
        return None;
    };
    Some(Stop::Skip(code, reason))
}

/// What came out of a check.
struct Tried {
    result: CheckResult,
    evidence: Evidence,
    measurements: BTreeMap<String, u64>,
    transcript: Transcript,
    /// The rules of the reader that were broken meanwhile.
    breaches: BTreeMap<Rule, String>,
}

impl Tried {
    fn untried(skip: Stop) -> Self {
        Self {
            result: Err(skip),
            evidence: Evidence::Direct,
            measurements: BTreeMap::new(),
            transcript: Transcript::default(),
            breaches: BTreeMap::new(),
        }
    }

    fn report(self, check: &Check, duration: Duration) -> CheckReport {
        let verdict = self.verdict(check.level);
        let is_failed = matches!(verdict, Verdict::Fail { .. });
        let is_precondition = is_failed && matches!(self.result, Err(Stop::Precondition(_)));
        CheckReport {
            id: check.id.to_owned(),
            level: check.level,
            profile: check.profile,
            verdict,
            evidence: self.evidence,
            duration_us: u64::try_from(duration.as_micros()).unwrap_or(u64::MAX),
            is_precondition,
            seen_in: None,
            transcript: is_failed.then_some(self.transcript),
        }
    }

    /// A measurement is never judged: one that the engine spoils is not taken.
    fn verdict(&self, level: Level) -> Verdict {
        match (self.result.clone(), level) {
            (Ok(()), Level::Info) => Verdict::Measured {
                measurements: self.measurements.clone(),
            },
            (Ok(()), Level::Core | Level::Strict | Level::Soak) => Verdict::Pass,
            (Err(Stop::Fail(reason) | Stop::Precondition(reason)), Level::Info) => Verdict::Skip {
                code: SkipReason::NotMeasured,
                reason,
            },
            (
                Err(Stop::Fail(reason) | Stop::Precondition(reason)),
                Level::Core | Level::Strict | Level::Soak,
            ) => Verdict::Fail { reason },
            (Err(Stop::Skip(code, reason)), _) => Verdict::Skip { code, reason },
        }
    }
}

/// Checks read-lock it while they run, those that count what belongs to the whole process write-lock it.
static BESIDE: RwLock<()> = RwLock::new(());

/// How many times the wall clock's limit a soak check may take: minutes, for an engine in real time.
const SOAK_WALL: u32 = 30;

/// The check that runs random sequences.
pub(crate) const SEQUENCES: &str = "SQ01";

/// A check that outlives the wall clock's limit is given up with its thread: nothing else can end a thread.
fn on_own_thread(
    check: Check,
    factory: Arc<dyn Factory>,
    known: &Acquaintance,
    options: &Options,
) -> Tried {
    let limits = if check.is_multi_thread {
        known.threaded_limits
    } else {
        known.limits
    };
    let is_paused = known.is_virtual_time && !check.is_multi_thread;
    let variation = Variation {
        seed: options.seed,
        sequences: options.sequences,
        // A measurement is never judged, and notes would be measured with it.
        transcript_events: match check.level {
            Level::Info => 0,
            Level::Core | Level::Strict | Level::Soak => options.max_transcript_events,
        },
        medium: known.medium,
        keeps_virtual_time: known.is_virtual_time,
    };
    let trial = Trial::new(factory, check.id, limits, variation);
    let watched = trial.clone();
    let _alone = check.is_alone.then(|| BESIDE.write());
    // Sequences run beside others one by one; whoever waits for them holds nothing that they wait for.
    let is_of_sequences = check.id == SEQUENCES;
    let _beside = (!check.is_alone && !is_of_sequences).then(|| BESIDE.read());
    let wall = match check.level {
        Level::Info | Level::Core | Level::Strict if !is_of_sequences => limits.wall,
        Level::Info | Level::Core | Level::Strict | Level::Soak => limits.wall * SOAK_WALL,
    };
    let result = watch(wall, Clock::paused(is_paused), &watched, move || {
        let runtime = runtime(check.is_multi_thread, is_paused)?;
        try_out(runtime, &trial, (check.run)(trial.clone()))
    });
    Tried {
        result,
        evidence: watched.evidence(),
        measurements: watched.measurements(),
        transcript: watched.transcript(),
        breaches: watched.broken_rules(),
    }
}

/// As a check is run: beside others, on a thread and a current-thread runtime of its own, for at most `wall`.
pub(crate) fn run_beside<F>(
    known: &Acquaintance,
    trial: Trial,
    wall: Duration,
    run: impl FnOnce(Trial) -> F + Send + 'static,
) -> CheckResult
where
    F: Future<Output = CheckResult>,
{
    let is_paused = known.is_virtual_time;
    let _beside = BESIDE.read();
    let watched = trial.clone();
    watch(wall, Clock::paused(is_paused), &watched, move || {
        let runtime = runtime(false, is_paused)?;
        try_out(runtime, &trial, run(trial.clone()))
    })
}

/// Runs to the end and cleans up after it.
fn try_out(runtime: Runtime, trial: &Trial, run: impl Future<Output = CheckResult>) -> CheckResult {
    let result = runtime.block_on(async {
        let result = run.await;
        trial.tidy().await;
        result
    });
    runtime.shutdown_timeout(Duration::from_millis(100));
    result
}

fn runtime(is_multi_thread: bool, is_paused: bool) -> Result<Runtime, Stop> {
    let mut builder = if is_multi_thread {
        Builder::new_multi_thread()
    } else {
        Builder::new_current_thread()
    };
    builder.enable_all().thread_name("conformance-pool");
    // Idle threads of the pool would look like the engine's.
    builder.thread_keep_alive(Duration::from_millis(50));
    if is_multi_thread {
        builder.worker_threads(2);
    } else {
        builder.start_paused(is_paused);
    }
    builder
        .build()
        .map_err(|error| Stop::Fail(format!("the kit cannot start an async runtime: {error}")))
}

/// What a call may take before anything is known of the engine: a slow one must get through.
const WARM_UP_CALL: Duration = Duration::from_secs(15);

/// The time of three requests, from which limits follow. An engine that fails them is not slow: the usual limits hold, so that
/// every check that fails does so soon.
///
/// # Errors
/// As of the request that fails, or is not answered in time.
async fn warm_up(live: &Live) -> Result<Duration, Stop> {
    let started = Instant::now();
    for _ in 0..3 {
        let answer = live.answer(live.request(4, 4)).await?;
        if answer.finished().is_none() {
            let error = answer.error();
            return Err(Stop::Fail(format!("a plain request failed: {error:?}")));
        }
    }
    Ok(started.elapsed())
}

/// Learns what an engine declares, and how fast it is. One that declares virtual time and does not keep it is tested in real
/// time, so that it fails for that and not for everything.
pub(crate) fn acquaint(factory: &Arc<dyn Factory>) -> Acquaintance {
    let known = look_at(factory, true);
    if !known.is_virtual_time {
        return known;
    }
    match warm_up_on_a_paused_clock(factory) {
        Ok(Pace { warm_up, token }) => Acquaintance {
            limits: Limits {
                token,
                ..Limits::virtual_time(warm_up)
            },
            threaded_limits: Limits::scaled(warm_up),
            ..known
        },
        Err(_) => look_at(factory, false),
    }
}

/// Starts one engine. One that fails here is taken for a plain one; the checks will say what is wrong with it.
fn look_at(factory: &Arc<dyn Factory>, may_be_virtual: bool) -> Acquaintance {
    let plain = Acquaintance {
        is_virtual_time: false,
        limits: Limits::default(),
        threaded_limits: Limits::default(),
        profiles: vec![Profile::Tokens],
        medium: Medium::default(),
        engine: EngineReport::default(),
    };
    let (sender, receiver) = sync_channel(1);
    let factory = Arc::clone(factory);
    let _beside = BESIDE.read();
    let limits = Limits {
        call: WARM_UP_CALL,
        ..Limits::default()
    };
    let trial = Trial::new(factory, "warm-up", limits, Variation::default());
    let watched = trial.clone();
    let _ = watch(limits.start, Clock::Real, &watched, move || {
        let runtime = runtime(false, false)?;
        let known = runtime.block_on(meet(&trial, may_be_virtual));
        if let Ok(known) = known {
            let _ = sender.send(known);
        }
        runtime.shutdown_timeout(Duration::from_millis(100));
        Ok(())
    });
    receiver.try_recv().unwrap_or(plain)
}

/// Whether an engine's waits follow tokio's clock, tried on a paused one.
pub(crate) fn ensure_virtual_time(factory: &Arc<dyn Factory>) -> CheckResult {
    warm_up_on_a_paused_clock(factory).map(drop)
}

/// What the warm-up requests take on a paused clock. That clock goes on as soon as everybody waits for it: an engine that waits
/// for something else is overtaken by hours.
fn warm_up_on_a_paused_clock(factory: &Arc<dyn Factory>) -> Result<Pace, Stop> {
    let limits = Limits::virtual_time(Duration::ZERO);
    let trial = Trial::new(
        Arc::clone(factory),
        "virtual-time",
        limits,
        Variation::default(),
    );
    let (sender, receiver) = sync_channel(1);
    let watched = trial.clone();
    watch(limits.wall, Clock::Paused, &watched, move || {
        let runtime = runtime(false, true)?;
        let tried = async {
            let took = answers_on_a_paused_clock(&trial).await?;
            let _ = sender.send(took);
            Ok(())
        };
        try_out(runtime, &trial, tried)
    })?;
    Ok(receiver.try_recv().unwrap_or_default())
}

/// An engine that fails otherwise than by its waits is for other checks to judge.
async fn answers_on_a_paused_clock(trial: &Trial) -> Result<Pace, Stop> {
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

/// How fast an engine is on a paused clock.
#[derive(Debug, Clone, Copy, Default)]
struct Pace {
    /// What the three warm-up requests took.
    warm_up: Duration,
    /// What a token takes behind the first item; `None` where all came at once.
    token: Option<Duration>,
}

/// Tokens of the answer whose tokens are timed.
const TIMED_TOKENS: u32 = 96;

async fn time_of_a_token(live: &Live) -> Result<Option<Duration>, Stop> {
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

async fn meet(trial: &Trial, may_be_virtual: bool) -> Result<Acquaintance, Stop> {
    let live = trial.start().await?;
    let can = &live.config.capabilities;
    let mut profiles = vec![Profile::Tokens];
    profiles.extend((!can.sampling.is_empty()).then_some(Profile::Sampling));
    profiles.extend(can.max_logprobs.map(|_| Profile::Logprobs));
    profiles.extend((!can.guided.is_empty()).then_some(Profile::Guided));
    profiles.extend(can.kv_events.then_some(Profile::KvEvents));
    let is_split = can.roles.contains(&Role::Prefill) && can.roles.contains(&Role::Decode);
    profiles.extend(is_split.then_some(Profile::Disaggregated));
    profiles.extend((can.resume || can.resume_as_prompt).then_some(Profile::Resume));
    profiles.extend(
        live.subject
            .process
            .is_some()
            .then_some(Profile::Subprocess),
    );
    let engine = EngineReport {
        name: live.config.model.clone(),
        capabilities: Some(can.clone()),
    };
    let is_virtual_time = can.virtual_time && may_be_virtual;
    let medium = live.medium();
    if is_virtual_time {
        trial.tidy().await;
        return Ok(Acquaintance {
            is_virtual_time,
            limits: Limits::virtual_time(Duration::ZERO),
            threaded_limits: Limits::default(),
            profiles,
            medium,
            engine,
        });
    }
    let limits = warm_up(&live)
        .await
        .map_or_else(|_| Limits::default(), Limits::scaled);
    trial.tidy().await;
    Ok(Acquaintance {
        is_virtual_time,
        limits,
        threaded_limits: limits,
        profiles,
        medium,
        engine,
    })
}

#[cfg(test)]
mod tests;
