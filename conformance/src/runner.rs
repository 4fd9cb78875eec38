//! Runs checks: each on a fresh engine, with its own thread and async runtime, under a watch on the wall clock.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use tokio::runtime::Builder;
use tokio::time::Instant;

use crate::check::{Check, CheckResult, Level, Profile, SkipReason, Stop};
use crate::checks::catalogue;
use crate::report::{CheckReport, Evidence, Report, Verdict};
use crate::rules::Rule;
use crate::subject::Factory;
use crate::transcript::Transcript;
use crate::trial::{Trial, Variation};

mod acquaintance;
mod watch;

use acquaintance::acquaint_until;
pub(crate) use acquaintance::{Acquaintance, acquaint, ensure_virtual_time};
use watch::{Clock, watch};

/// What to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The highest level to run, [`Level::Core`] or above.
    pub level: Level,
    /// Runs only checks whose ids start with one of these, in capitals; empty for all.
    pub only: Vec<String>,
    /// The beginning of the report's replay lines: a command that takes `--only ID`, `--level LEVEL` and `--seed N`. If empty,
    /// a replay line is a call in Rust.
    pub replay: String,
    /// Information for the report that the kit cannot see, about the engine and its machine: `engine_version`, `commit`,
    /// `features`, `accelerator` and so on.
    pub about: BTreeMap<String, String>,
    /// The seed of all prompts. Runs with the same seed send the same prompts.
    pub seed: u64,
    /// The number of random sequences for SQ01; 0 skips it.
    pub sequences: u32,
    /// Whether to take measurements (level [`Level::Info`]). They take about a second and are never judged.
    pub is_measuring: bool,
    /// The maximum number of events in the transcript of a failed check; the last ones are kept. 0 disables transcripts.
    pub max_transcript_events: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            level: Level::Strict,
            only: Vec::new(),
            replay: String::new(),
            about: BTreeMap::new(),
            seed: 0,
            sequences: 36,
            is_measuring: true,
            max_transcript_events: 200,
        }
    }
}

/// Runs all applicable core and strict checks. Blocks the calling thread.
#[must_use]
pub fn run_conformance(factory: impl Factory) -> Report {
    run_conformance_with(factory, &Options::default())
}

/// Runs the kit with `options`. Blocks the calling thread.
///
/// # Panics
/// Panics if an entry of [`Options::only`] matches no check, or [`Options::level`] is below [`Level::Core`]: otherwise a run
/// without the intended check would pass.
#[must_use]
pub fn run_conformance_with(factory: impl Factory, options: &Options) -> Report {
    run_conformance_observed(factory, options, &mut Nobody)
}

/// Follows a run, which takes minutes, and may end it. The checks that remain are then skipped as [`Gone`](SkipReason::Gone).
pub trait Observer {
    /// A check begins, after `done` of the `all` checks that apply.
    fn begins(&mut self, _check: &Check, _done: usize, _all: usize) {}

    /// A check has its result, also one that does not apply.
    ///
    /// # Errors
    /// Ends the run, with the reason: the engine is gone for good, such as a worker in another process.
    fn ended(&mut self, _report: &CheckReport) -> Result<(), String> {
        Ok(())
    }

    /// Why the run ends now, if it does. It is asked several times a second, on the thread that called the kit. The result of
    /// the running check is not kept. Its thread and its engine are left as they are, so the process should end soon.
    fn interruption(&self) -> Option<String> {
        None
    }
}

/// Lets a run go on to its end.
struct Nobody;

impl Observer for Nobody {}

/// Asks for the reason to end a run.
pub(crate) type Interruption<'a> = &'a dyn Fn() -> Option<String>;

/// No reason to end a run.
pub(crate) fn no_interruption() -> Option<String> {
    None
}

/// [`run_conformance_with`], followed by `observer`.
///
/// # Panics
/// As [`run_conformance_with`].
#[must_use]
pub fn run_conformance_observed(
    factory: impl Factory,
    options: &Options,
    observer: &mut dyn Observer,
) -> Report {
    assert!(
        options.level >= Level::Core,
        "the lowest level of a run is {:?}",
        Level::Core
    );
    for prefix in &options.only {
        assert!(
            catalogue().any(|check| check.id.starts_with(prefix.as_str())),
            "no check's id starts with {prefix:?}"
        );
    }
    let factory: Arc<dyn Factory> = Arc::new(factory);
    let known = acquaint_until(&factory, &|| observer.interruption());
    let applies = |check: &Check| reason_to_skip(check, &known, options).is_none();
    let all = catalogue().filter(|check| applies(check)).count();
    let (mut done, mut seen) = (0, Vec::new());
    let mut end: Option<String> = None;
    let mut checks = Vec::new();
    for check in catalogue() {
        end = end.or_else(|| observer.interruption());
        if let Some(reason) = &end {
            let skip = reason_to_skip(check, &known, options)
                .filter(|stop| matches!(stop, Stop::Skip(..)));
            let gone = || Stop::Skip(SkipReason::Gone, reason.clone());
            let skipped = Tried::untried(skip.unwrap_or_else(gone));
            checks.push(skipped.report(check, Duration::ZERO));
            continue;
        }
        if applies(check) {
            observer.begins(check, done, all);
            done += 1;
        }
        let run = Run {
            factory: &factory,
            known: &known,
            options,
            interruption: &|| observer.interruption(),
        };
        let report = run_one(check, &run, &mut seen);
        end = observer.ended(&report).err();
        checks.push(report);
    }
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

/// [`run_check`] on an engine that is already known.
pub(crate) fn run_known(
    check: &Check,
    factory: &Arc<dyn Factory>,
    known: &Acquaintance,
) -> CheckReport {
    let options = Options {
        level: Level::Soak,
        ..Options::default()
    };
    let run = Run {
        factory,
        known,
        options: &options,
        interruption: &no_interruption,
    };
    run_one(check, &run, &mut Vec::new())
}

/// What the checks of a run share.
struct Run<'a> {
    factory: &'a Arc<dyn Factory>,
    known: &'a Acquaintance,
    options: &'a Options,
    interruption: Interruption<'a>,
}

/// A breach of a rule of the reader: the first check that saw it, and the details.
struct Breach {
    check: &'static str,
    what: String,
    transcript: Transcript,
}

/// Fails the check of each rule that another check saw broken. Such a rule always holds, so its check fails even if it was
/// excluded by name.
fn tell_breaches(checks: &mut [CheckReport], seen: Vec<(Rule, Breach)>) {
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

fn run_one(check: &Check, run: &Run<'_>, seen: &mut Vec<(Rule, Breach)>) -> CheckReport {
    let started = Instant::now();
    let mut tried = match reason_to_skip(check, run.known, run.options) {
        Some(skip) => Tried::untried(skip),
        None => {
            let tried = on_own_thread(*check, run);
            // What was seen may come from what interrupted the run.
            match (run.interruption)() {
                Some(reason) => Tried::untried(Stop::Skip(SkipReason::Gone, reason)),
                None => tried,
            }
        }
    };
    for (rule, what) in std::mem::take(&mut tried.breaches) {
        if Rule::of(check.id) == Some(rule) && tried.result.is_ok() {
            tried.result = Err(Stop::Fail(what.clone()));
        }
        if !seen.iter().any(|(known, _)| *known == rule) {
            let breach = Breach {
                check: check.id,
                what,
                transcript: tried.transcript.clone(),
            };
            seen.push((rule, breach));
        }
    }
    tried.report(check, started.elapsed())
}

/// The checks that send no prompt, beside those of embeddings and scores. They remain for an engine that takes no prompts.
const WITHOUT_PROMPTS: [&str; 15] = [
    "LC01", "LC04", "LC05", "LC06", "LC07", "LC08", "LC09", "LC10", "SH01", "SH03", "SH04", "SH07",
    "SH08", "MT04", "WB01",
];

/// Whether a check sends prompts.
fn sends_prompts(check: &Check) -> bool {
    let has_own_inputs = matches!(check.profile, Profile::Embeddings | Profile::Scores);
    !has_own_inputs && !WITHOUT_PROMPTS.contains(&check.id)
}

/// Why a check is not run; `None` if it is. If the engine did not start, it is unknown whether it declares the check's profile, so
/// the check fails.
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
        if !known.has_started() {
            let unknown = "the engine did not start when it was first looked at, so it is not known whether it declares";
            return Some(Stop::Precondition(format!("{unknown} {profile}")));
        }
        let reason = format!("the engine does not declare {profile}");
        (SkipReason::NotDeclared, reason)
    } else if !known.takes_prompts() && sends_prompts(check) {
        let reason = "the check speaks in prompts, and the engine takes none".to_owned();
        (SkipReason::NeedsTokens, reason)
    } else if check.needs_tokens && !known.medium.is_tokens() {
        let reason = "the check speaks in token ids, and the engine takes only text".to_owned();
        (SkipReason::NeedsTokens, reason)
    } else {
        return None;
    };
    Some(Stop::Skip(code, reason))
}

/// The result of a check.
struct Tried {
    result: CheckResult,
    evidence: Evidence,
    measurements: BTreeMap<String, u64>,
    transcript: Transcript,
    /// The rules of the reader that were broken during the check.
    breaches: Vec<(Rule, String)>,
}

impl Tried {
    fn untried(skip: Stop) -> Self {
        Self {
            result: Err(skip),
            evidence: Evidence::Direct,
            measurements: BTreeMap::new(),
            transcript: Transcript::default(),
            breaches: Vec::new(),
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

    /// The verdict. A measurement is never judged: if the engine fails it, it is not taken.
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

/// Read-locked by running checks; write-locked by those that count resources of the whole process.
static BESIDE: RwLock<()> = RwLock::new(());

/// A soak check may take this many times the wall clock limit: minutes, for an engine in real time.
const SOAK_WALL: u32 = 30;

/// The check that runs random sequences.
pub(crate) const SEQUENCES: &str = "SQ01";

/// Runs a check on its own thread. If it exceeds the wall clock limit, it is given up with its thread, since a thread cannot be
/// killed.
fn on_own_thread(check: Check, run: &Run<'_>) -> Tried {
    let Run { known, options, .. } = *run;
    let limits = if check.is_multi_thread {
        known.threaded_limits
    } else {
        known.limits
    };
    let clock = if check.is_multi_thread {
        Clock::Threads
    } else {
        known.clock()
    };
    let variation = Variation {
        seed: options.seed,
        sequences: options.sequences,
        // A measurement is never judged, and recording would affect it.
        transcript_events: match check.level {
            Level::Info => 0,
            Level::Core | Level::Strict | Level::Soak => options.max_transcript_events,
        },
        medium: known.medium,
        keeps_virtual_time: known.is_virtual_time,
    };
    let factory = Arc::clone(run.factory);
    let trial = Trial::new(factory, check.id, limits, variation);
    let _alone = check.is_alone.then(|| BESIDE.write());
    // Each sequence takes the lock itself, so the check that waits for them must not hold it.
    let is_of_sequences = check.id == SEQUENCES;
    let _beside = (!check.is_alone && !is_of_sequences).then(|| BESIDE.read());
    let wall = match check.level {
        Level::Info | Level::Core | Level::Strict if !is_of_sequences => limits.wall,
        Level::Info | Level::Core | Level::Strict | Level::Soak => limits.wall * SOAK_WALL,
    };
    Tried {
        result: try_out(&trial, wall, clock, run.interruption, check.run),
        evidence: trial.evidence(),
        measurements: trial.measurements(),
        transcript: trial.transcript(),
        breaches: trial.broken_rules(),
    }
}

/// Runs a check beside others, for at most `wall`.
pub(crate) fn run_beside<F>(
    known: &Acquaintance,
    trial: &Trial,
    wall: Duration,
    run: impl FnOnce(Trial) -> F + Send + 'static,
) -> CheckResult
where
    F: Future<Output = CheckResult>,
{
    let _beside = BESIDE.read();
    try_out(trial, wall, known.clock(), &no_interruption, run)
}

/// Runs a check on its own thread and runtime, under a watch, and cleans up after it. Returns a skip as
/// [`Gone`](SkipReason::Gone) if the run is interrupted.
fn try_out<T, F>(
    trial: &Trial,
    limit: Duration,
    clock: Clock,
    interruption: Interruption<'_>,
    run: impl FnOnce(Trial) -> F + Send + 'static,
) -> Result<T, Stop>
where
    T: Send + 'static,
    F: Future<Output = Result<T, Stop>>,
{
    let own = trial.clone();
    watch(limit, clock, trial, interruption, move || {
        let mut builder = match clock {
            Clock::Threads => Builder::new_multi_thread(),
            Clock::Paused | Clock::Real => Builder::new_current_thread(),
        };
        let runtime = builder
            .enable_all()
            .worker_threads(2)
            .start_paused(clock == Clock::Paused)
            .thread_name("conformance-pool")
            // Otherwise idle threads of the pool would look like the engine's.
            .thread_keep_alive(Duration::from_millis(50))
            .build()
            .map_err(|error| {
                Stop::Fail(format!("the kit cannot start an async runtime: {error}"))
            })?;
        let result = runtime.block_on(async {
            let result = run(own.clone()).await;
            own.tidy().await;
            result
        });
        runtime.shutdown_timeout(Duration::from_millis(100));
        result
    })
}

#[cfg(test)]
mod tests;
