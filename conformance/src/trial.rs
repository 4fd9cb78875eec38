//! The tools of a check: a [`Trial`] builds engines, a [`Live`] is a started engine, a [`Running`] is a request whose stream is
//! read, an [`Answer`] is what was read. Every wait has a limit. A wait that exceeds it fails the check with its name.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use genset_backend_common::{LLMEngine, Role, StartContext, transfer::LocalKvCarrier};
use parking_lot::Mutex;

use crate::check::Stop;
use crate::limits::Limits;
use crate::medium::Medium;
use crate::patience::LEAST_SHARE;
use crate::report::Evidence;
use crate::rules::{Breaches, Rule, Watched};
use crate::subject::{Factory, Scenario, Subject};
use crate::transcript::{self, Recorder, Transcript};

mod live;

pub use live::Live;

/// One run of a check, which builds its engines. Clones share.
#[derive(Clone)]
pub struct Trial {
    shared: Arc<Shared>,
}

struct Shared {
    factory: Arc<dyn Factory>,
    check: &'static str,
    limits: Limits,
    /// The longest time that an author asks for a start.
    start_timeout: Mutex<Duration>,
    evidence: Mutex<Evidence>,
    /// The engines to clean up after the check.
    built: Mutex<Vec<Arc<dyn LLMEngine>>>,
    /// The engines that were started, including those released since.
    watched: Mutex<Vec<Watched>>,
    breaches: Breaches,
    requests: AtomicU64,
    /// Whether an engine has started.
    has_started: AtomicBool,
    clock: Clock,
    /// Transfers KV blocks between the engines of one check.
    kv_carrier: LocalKvCarrier,
    variation: Variation,
    measurements: Mutex<BTreeMap<String, u64>>,
    recorder: Arc<Recorder>,
}

/// The counters for the watch on the wall clock.
#[derive(Default)]
struct Clock {
    /// The number of stream items read, without errors.
    items_read: AtomicU64,
    /// How often a wait with a long limit, or for the process itself, made progress.
    waits_seen: AtomicU64,
    /// Microseconds of real time in which the machine did not let the check run.
    starved_us: AtomicU64,
}

/// The progress of a check.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// The number of stream items read, without errors.
    pub(crate) items: u64,
    /// How often a wait with its own limit made progress.
    pub(crate) waits: u64,
}

/// Parameters that vary between runs.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Variation {
    /// The seed of the prompts.
    pub(crate) seed: u64,
    /// The number of random sequences for SQ01.
    pub(crate) sequences: u32,
    /// The maximum number of events in a transcript.
    pub(crate) transcript_events: usize,
    /// The medium for engines that have not declared one yet.
    pub(crate) medium: Medium,
    /// Whether the engine was seen to keep virtual time; a declaration alone is not enough.
    pub(crate) keeps_virtual_time: bool,
}

/// The time of one wait.
struct Wait {
    limit: Duration,
    /// How long the machine had not let the check run when that was last read.
    noted: Duration,
    waited: Duration,
    left: Duration,
}

impl Trial {
    pub(crate) fn new(
        factory: Arc<dyn Factory>,
        check: &'static str,
        limits: Limits,
        variation: Variation,
    ) -> Self {
        let shared = Shared {
            factory,
            check,
            limits,
            start_timeout: Mutex::default(),
            evidence: Mutex::new(Evidence::Direct),
            built: Mutex::default(),
            watched: Mutex::default(),
            breaches: Breaches::default(),
            requests: AtomicU64::new(0),
            has_started: AtomicBool::new(false),
            clock: Clock::default(),
            kv_carrier: LocalKvCarrier::default(),
            variation,
            measurements: Mutex::default(),
            recorder: Arc::new(Recorder::new(variation.transcript_events)),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// The time limits for the engine, with the time for a start that its author asks for.
    #[must_use]
    pub fn limits(&self) -> Limits {
        let limits = self.shared.limits;
        Limits {
            start: limits.start.max(*self.shared.start_timeout.lock()),
            ..limits
        }
    }

    /// The medium for the engines of this factory.
    pub(crate) fn medium(&self) -> Medium {
        self.shared.variation.medium
    }

    /// Notes that the evidence is indirect, for lack of a probe.
    pub fn note_indirect(&self) {
        *self.shared.evidence.lock() = Evidence::Indirect;
    }

    pub(crate) fn evidence(&self) -> Evidence {
        *self.shared.evidence.lock()
    }

    /// Records a measurement. `name` ends with its unit: `first_token_us`.
    pub fn measured(&self, name: impl Into<String>, value: u64) {
        self.shared.measurements.lock().insert(name.into(), value);
    }

    pub(crate) fn measurements(&self) -> BTreeMap<String, u64> {
        self.shared.measurements.lock().clone()
    }

    pub(crate) fn transcript(&self) -> Transcript {
        self.shared.recorder.transcript()
    }

    pub(crate) fn seed(&self) -> u64 {
        self.shared.variation.seed
    }

    /// The number of random sequences for SQ01.
    pub(crate) fn sequences(&self) -> u32 {
        self.shared.variation.sequences
    }

    /// Whether the engine declares virtual time and was seen to keep it. Then hours cost nothing and times are exact.
    pub(crate) fn keeps_virtual_time(&self) -> bool {
        self.shared.variation.keeps_virtual_time
    }

    pub(crate) fn factory(&self) -> &Arc<dyn Factory> {
        &self.shared.factory
    }

    pub(crate) fn recorder(&self) -> &Arc<Recorder> {
        &self.shared.recorder
    }

    /// Notes that a request received something other than an error.
    pub(crate) fn note_served(&self) {
        self.shared.clock.items_read.fetch_add(1, Ordering::Relaxed);
    }

    /// The number of stream items read, without errors.
    pub(crate) fn items_read(&self) -> u64 {
        self.shared.clock.items_read.load(Ordering::Relaxed)
    }

    /// Notes progress of a wait that has its own limit: the check's thread is not blocked.
    pub(crate) fn note_wait(&self) {
        self.shared.clock.waits_seen.fetch_add(1, Ordering::Relaxed);
    }

    /// The check's progress, for the watch on the wall clock.
    pub(crate) fn progress(&self) -> Progress {
        Progress {
            items: self.items_read(),
            waits: self.shared.clock.waits_seen.load(Ordering::Relaxed),
        }
    }

    /// The maximum interval between notes of a wait's progress: a fraction of the silence that the wall clock allows.
    pub(crate) fn wait_interval(&self) -> Duration {
        self.limits().wall / 8
    }

    /// Adds time in which the machine did not let the check run.
    pub(crate) fn note_starved(&self, time: Duration) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        self.shared
            .clock
            .starved_us
            .fetch_add(us, Ordering::Relaxed);
    }

    /// The total time in which the machine did not let the check run.
    fn starved(&self) -> Duration {
        Duration::from_micros(self.shared.clock.starved_us.load(Ordering::Relaxed))
    }

    /// Records breaches of the rules of the reader.
    pub(crate) fn breaches(&self) -> &Breaches {
        &self.shared.breaches
    }

    /// The rules that were broken, with details.
    pub(crate) fn broken_rules(&self) -> Vec<(Rule, String)> {
        self.shared.breaches.seen()
    }

    /// Reads the KV events of every engine so far.
    pub(crate) fn read_kv_events(&self) {
        for watched in self.shared.watched.lock().iter_mut() {
            watched.read(&self.shared.breaches);
        }
    }

    /// Notes that the check kills an engine on purpose.
    pub(crate) fn expect_death(&self, subject: &Subject) {
        for watched in self.shared.watched.lock().iter_mut() {
            if watched.is(&subject.engine) {
                watched.may_die();
            }
        }
    }

    /// Builds a new engine, not started.
    #[must_use]
    pub fn build(&self) -> Subject {
        self.build_as(Role::Aggregated)
    }

    /// Builds a new engine for a role, not started.
    #[must_use]
    pub fn build_as(&self, role: Role) -> Subject {
        let mut scenario = Scenario::of(self.shared.check);
        scenario.role = role;
        let mut subject = self.shared.factory.build(&scenario);
        let mut longest = self.shared.start_timeout.lock();
        *longest = subject.start_timeout.max(*longest);
        drop(longest);
        subject.engine = transcript::recorded(subject.engine, &self.shared.recorder);
        self.shared.built.lock().push(Arc::clone(&subject.engine));
        subject
    }

    /// Builds and starts an engine.
    ///
    /// # Errors
    /// Fails the check if the engine does not start in time.
    pub async fn start(&self) -> Result<Live, Stop> {
        self.start_as(Role::Aggregated).await
    }

    /// Builds and starts an engine for a role.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub async fn start_as(&self, role: Role) -> Result<Live, Stop> {
        let subject = self.build_as(role);
        // The worker's id: each engine of a check has its own.
        let built = u64::try_from(self.shared.built.lock().len()).unwrap_or(1);
        let ctx = StartContext {
            role,
            kv_transfers: self.shared.kv_carrier.join(built),
            ..StartContext::detached(built)
        };
        let mut watched = Watched::new(&subject.engine, &ctx);
        let is_first = !self.shared.has_started.load(Ordering::Relaxed);
        let failed = |what: String| match is_first {
            true => Stop::Precondition(what),
            false => Stop::Fail(what),
        };
        let started = self
            .starting("start", subject.engine.start(ctx.clone()))
            .await
            .map_err(|late| failed(late.to_string()))?;
        match started {
            Ok(config) => {
                self.shared.has_started.store(true, Ordering::Relaxed);
                watched.declares(&config);
                self.shared.watched.lock().push(watched);
                Ok(Live {
                    trial: self.clone(),
                    subject,
                    config,
                    start: ctx,
                })
            }
            Err(error) => Err(failed(format!("start failed: {error} ({})", error.kind()))),
        }
    }

    /// Waits for `future`, for at most `limit` plus the time in which the machine did not let it run. A limit that is not shorter
    /// than the wall clock's holds too: nothing can be read during the wait, so it does not count as silence, unless `future`
    /// blocks the check's thread.
    ///
    /// # Errors
    /// Fails with `what` if the limit passes.
    pub fn within<T>(
        &self,
        what: &str,
        limit: Duration,
        future: impl Future<Output = T>,
    ) -> impl Future<Output = Result<T, Stop>> {
        let Limits { call, wall, .. } = self.limits();
        // Not for shorter waits: an answer of slow items would then have the limit for each item. And not on a paused clock,
        // where a call has hours: waits in parts would give time to things that do not follow that clock.
        let is_noted = limit >= wall && call < wall;
        let part = if is_noted {
            self.wait_interval()
        } else {
            limit
        };
        self.in_parts(what, limit, part, future)
    }

    /// As [`Self::within`]; a wait longer than `part` notes progress after each part.
    async fn in_parts<T>(
        &self,
        what: &str,
        limit: Duration,
        part: Duration,
        future: impl Future<Output = T>,
    ) -> Result<T, Stop> {
        // A late result is dropped before the failure is returned.
        {
            let mut future = pin!(future);
            let mut wait = Wait {
                limit,
                noted: self.starved(),
                waited: Duration::ZERO,
                left: limit,
            };
            loop {
                let step = wait.left.min(part);
                if let Ok(value) = tokio::time::timeout(step, future.as_mut()).await {
                    return Ok(value);
                }
                if !self.goes_on(&mut wait, step) {
                    break;
                }
            }
        }
        Err(self.late(what, limit))
    }

    /// Whether `wait` goes on after a step without a result.
    fn goes_on(&self, wait: &mut Wait, step: Duration) -> bool {
        wait.waited += step;
        wait.left -= step;
        if !wait.left.is_zero() {
            self.note_wait();
            return true;
        }
        let starved = self.starved();
        let most = (wait.limit * LEAST_SHARE).saturating_sub(wait.waited);
        wait.left = starved.saturating_sub(wait.noted).min(most);
        wait.noted = starved;
        !wait.left.is_zero()
    }

    /// The failure of a wait that exceeded its limit.
    fn late(&self, what: &str, limit: Duration) -> Stop {
        let late = format!("{what} was not done within {} s", limit.as_secs_f64());
        self.shared.recorder.note(None, || late.clone());
        Stop::Fail(late)
    }

    /// Waits for a start, with the limit of a start.
    ///
    /// # Errors
    /// Fails with `what` if the limit passes.
    pub(crate) async fn starting<T>(
        &self,
        what: &str,
        start: impl Future<Output = T>,
    ) -> Result<T, Stop> {
        let limit = self.limits().start;
        self.in_parts(what, limit, self.wait_interval(), start)
            .await
    }

    /// Waits for a method that should return soon.
    ///
    /// # Errors
    /// Fails with `what` if it does not.
    pub async fn call<T>(&self, what: &str, future: impl Future<Output = T>) -> Result<T, Stop> {
        self.within(what, self.limits().call, future).await
    }

    /// Waits for a cleanup, with the limit of a cleanup. A check may clean up several engines and read nothing between, so the
    /// next one begins the silence that the wall clock allows anew.
    ///
    /// # Errors
    /// Fails with `what` if the limit passes.
    pub(crate) async fn cleaning<T>(
        &self,
        what: &str,
        cleanup: impl Future<Output = T>,
    ) -> Result<T, Stop> {
        let limit = self.limits().cleanup;
        let cleaned = self.within(what, limit, cleanup).await;
        self.note_wait();
        cleaned
    }

    /// Releases an engine: it is not cleaned up after the check, and is dropped with the check's last handle.
    pub fn release(&self, subject: &Subject) {
        let is_other = |built: &Arc<dyn LLMEngine>| !Arc::ptr_eq(built, &subject.engine);
        self.shared.built.lock().retain(is_other);
        let mut watched = self.shared.watched.lock();
        watched.retain(|watched| !watched.is(&subject.engine));
    }

    /// Checks the started engines a last time, and cleans up all that were built. The result of the cleanup is not judged here.
    pub(crate) async fn tidy(&self) {
        self.shared.recorder.close();
        for mut watched in std::mem::take(&mut *self.shared.watched.lock()) {
            watched.end(&self.shared.breaches);
        }
        let built = std::mem::take(&mut *self.shared.built.lock());
        for engine in built {
            // The next check's engine may need the resources of this one: wait as long as for a cleanup that is judged.
            drop(self.cleaning("cleanup", engine.cleanup()).await);
        }
    }

    /// Adds an engine that the check made itself, to be cleaned up after the check.
    pub(crate) fn adopt(&self, engine: &Arc<dyn LLMEngine>) {
        self.shared.built.lock().push(Arc::clone(engine));
    }

    fn next_id(&self) -> String {
        let number = self.shared.requests.fetch_add(1, Ordering::Relaxed);
        format!("{}-{number}", self.shared.check)
    }
}

genset_backend_common::debug_as!(|it| Trial {
    check: it.shared.check,
    ..
});

#[cfg(test)]
mod tests {
    use genset_backend_common::{EngineConfig, EngineError, async_trait};
    use tokio::time::Instant;

    use super::*;
    use crate::mutants::capable::capable;
    use crate::mutants::fault::{Fault, Inner, faulty};

    fn trial() -> Trial {
        let factory = |_: &Scenario| -> Subject { unreachable!("no engine is built") };
        Trial::new(
            Arc::new(factory),
            "LC01",
            Limits::default(),
            Variation::default(),
        )
    }

    /// Waits 8 s with a limit of 5 s, on a machine that stops the check for this long after a second.
    async fn eight_seconds(stopped_s: u64) -> (Result<(), Stop>, Duration) {
        let (trial, begun) = (trial(), Instant::now());
        let work = async {
            tokio::time::sleep(Duration::from_secs(1)).await;
            trial.note_starved(Duration::from_secs(stopped_s));
            tokio::time::sleep(Duration::from_secs(7)).await;
        };
        let done = trial.within("work", Duration::from_secs(5), work).await;
        (done, begun.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn time_in_which_the_machine_did_not_let_it_run_is_not_held_against_an_engine() {
        let late = Stop::Fail("work was not done within 5 s".into());
        let seconds = Duration::from_secs;
        assert_eq!(eight_seconds(0).await, (Err(late.clone()), seconds(5)));
        assert_eq!(eight_seconds(2).await, (Err(late), seconds(7)));
        assert_eq!(eight_seconds(4).await, (Ok(()), seconds(8)));
    }

    /// An engine that needs some time to release its resources.
    struct GivesBack {
        time: Duration,
        is_free: Arc<AtomicBool>,
    }

    #[async_trait]
    impl Fault for GivesBack {
        async fn cleanup(&self, inner: &Inner) -> Result<(), EngineError> {
            tokio::time::sleep(self.time).await;
            self.is_free.store(true, Ordering::Relaxed);
            inner.cleanup().await
        }
    }

    /// Whether an engine has released its resources at the end of its check.
    async fn is_free_after(time: Duration) -> bool {
        let is_free = Arc::new(AtomicBool::new(false));
        let held = Arc::clone(&is_free);
        let factory = move |scenario: &Scenario| {
            let is_free = Arc::clone(&held);
            faulty(capable(scenario), GivesBack { time, is_free })
        };
        let (limits, variation) = (Limits::default(), Variation::default());
        let trial = Trial::new(Arc::new(factory), "LC01", limits, variation);
        trial.start().await.unwrap();
        trial.tidy().await;
        is_free.load(Ordering::Relaxed)
    }

    #[tokio::test(start_paused = true)]
    async fn an_engine_has_the_time_of_a_cleanup_after_a_check() {
        let Limits { cleanup, .. } = Limits::default();
        assert!(is_free_after(cleanup - Duration::from_secs(1)).await);
        assert!(!is_free_after(cleanup + Duration::from_secs(1)).await);
    }

    /// Loads for a minute and a half.
    struct Loads;

    #[async_trait]
    impl Fault for Loads {
        async fn start(
            &self,
            inner: &Inner,
            ctx: StartContext,
        ) -> Result<EngineConfig, EngineError> {
            tokio::time::sleep(Duration::from_secs(90)).await;
            inner.start(ctx).await
        }
    }

    async fn starts_within(seconds: u64) -> bool {
        let factory = move |scenario: &Scenario| {
            let slow = faulty(capable(scenario), Loads);
            slow.with_start_timeout(Duration::from_secs(seconds))
        };
        let (limits, variation) = (Limits::default(), Variation::default());
        let trial = Trial::new(Arc::new(factory), "LC01", limits, variation);
        trial.start().await.is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn a_start_has_a_minute_or_the_time_that_its_author_asks_for() {
        assert!(!starts_within(0).await);
        assert!(starts_within(120).await);
    }

    #[tokio::test(start_paused = true)]
    async fn no_wait_is_without_end() {
        let (trial, begun) = (trial(), Instant::now());
        let starving = async {
            loop {
                trial.note_starved(Duration::from_secs(10));
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        };
        let limit = Duration::from_secs(2);
        let done: Result<(), Stop> = trial.within("it", limit, starving).await;
        assert_eq!(done, Err(Stop::Fail("it was not done within 2 s".into())));
        assert_eq!(begun.elapsed(), limit * LEAST_SHARE);
    }
}
