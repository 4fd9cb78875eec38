//! [`simulate`] turns a plan into a report.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use genset_backend_common::output::{Finished, Output};
use genset_backend_common::ports::Generate;
use genset_backend_common::{EngineError, GenerateRequest, RequestContext, TokenId};
use genset_engine_mocker::{MockerArgs, MockerEngine, MockerModel};
use genset_router::KvConfig;
use parking_lot::Mutex;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use crate::faults::{Action, Fault, What};
use crate::fleet::{Fleet, MODEL};
use crate::frontends::Frontends;
use crate::load::{Load, Session, VOCAB_SIZE};
use crate::policy::Policy;
use crate::quantiles::Quantiles;
use crate::report::{Report, Row};
use crate::timeline::Timeline;

/// Longer than any conversation.
const CONTEXT_LENGTH: u32 = 1 << 21;

/// What to simulate.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The number of workers, at least 1.
    pub workers: usize,
    /// The number of frontends, at least 1; each request goes to a random one.
    pub frontends: usize,
    /// The settings of each worker.
    pub engine: MockerArgs,
    /// The requests and their times.
    pub load: Load,
    /// The faults during the run, in order of time.
    pub faults: Vec<Fault>,
    /// How an instance is chosen: each policy serves the same load with its own fleets.
    pub policies: Vec<Policy>,
    /// The fleets, by their number of workers that only prefill, while the others decode; 0 for a fleet whose workers do
    /// both. Policies that do not support roles serve only that one.
    pub prefill_workers: Vec<usize>,
    /// The configuration of the router's mode `kv`; its seed is the plan's.
    pub kv: KvConfig,
    /// The seed of the load and of random choices.
    pub seed: u64,
}

/// The results so far.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) ttft: Quantiles,
    pub(crate) itl: Quantiles,
    pub(crate) timeline: Timeline,
    pub(crate) requests: u64,
    /// Requests that ended in an error, by its kind.
    pub(crate) lost: BTreeMap<&'static str, u64>,
    pub(crate) prompt_tokens: u64,
    pub(crate) cached_tokens: u64,
    pub(crate) completion_tokens: u64,
    /// When the last answer ended.
    pub(crate) duration: Duration,
}

/// Simulates a plan, each policy on a thread of its own.
///
/// # Errors
/// `InvalidArgument`, naming what is invalid in the plan; `Internal` if a worker did not start.
pub fn simulate(plan: &Plan) -> Result<Report, EngineError> {
    simulate_counted(plan, &Arc::default())
}

/// As [`simulate`]; adds every request that has ended, in all rows of the report, to `ended`. In the end there are
/// [as many as planned](Plan::requests), without those of conversations that ended early.
///
/// # Errors
/// Same as [`simulate`].
pub fn simulate_counted(plan: &Plan, ended: &Arc<AtomicU64>) -> Result<Report, EngineError> {
    for (flag, count) in [("--workers", plan.workers), ("--frontends", plan.frontends)] {
        if count == 0 {
            return Err(EngineError::invalid_argument(flag, "must be at least 1"));
        }
    }
    let runs = plan.runs()?;
    let model = MockerModel::new(VOCAB_SIZE, CONTEXT_LENGTH);
    let engine = MockerEngine::try_new(plan.engine.clone(), model)?;
    let rows = std::thread::scope(|scope| {
        let engine = &engine;
        let threads: Vec<_> = runs
            .into_iter()
            .map(|one| scope.spawn(move || simulate_one(plan, engine, one, ended)))
            .collect();
        let joined = threads.into_iter().map(|thread| {
            let panicked = |_| EngineError::internal("a simulation panicked; please report it");
            thread.join().map_err(panicked)?
        });
        joined.collect::<Result<Vec<Row>, EngineError>>()
    })?;
    Ok(Report {
        load: plan.load.name(),
        workers: plan.workers,
        frontends: plan.frontends,
        seed: plan.seed,
        faults: plan.faults.clone(),
        rows,
    })
}

/// A policy, and the number of its fleet's workers that only prefill.
#[derive(Debug, Clone, Copy)]
struct Run {
    policy: Policy,
    prefill_workers: usize,
}

impl Plan {
    /// The requests of all rows of the report together.
    ///
    /// # Errors
    /// `InvalidArgument`, naming what is invalid in the plan.
    pub fn requests(&self) -> Result<u64, EngineError> {
        let rows = u64::try_from(self.runs()?.len()).unwrap_or(u64::MAX);
        Ok(rows.saturating_mul(self.load.requests()))
    }

    /// The runs, one per row of the report.
    fn runs(&self) -> Result<Vec<Run>, EngineError> {
        let bad = |problem: String| EngineError::invalid_argument("--prefill-workers", problem);
        let too_many = self.prefill_workers.iter().find(|it| **it >= self.workers);
        if let Some(prefill_workers) = too_many {
            let workers = self.workers;
            return Err(bad(format!(
                "{prefill_workers} of {workers} workers leave none to answer; it must be below --workers"
            )));
        }
        let all = self.policies.iter().flat_map(|policy| {
            self.prefill_workers.iter().map(|prefill_workers| Run {
                policy: *policy,
                prefill_workers: *prefill_workers,
            })
        });
        let runs: Vec<Run> = all
            .filter(|run| run.prefill_workers == 0 || run.policy.knows_roles())
            .collect();
        if runs.is_empty() {
            let problem = "random and oracle serve fleets whose workers do the whole: add 0";
            return Err(bad(problem.into()));
        }
        Ok(runs)
    }
}

fn simulate_one(
    plan: &Plan,
    engine: &MockerEngine,
    one: Run,
    ended: &Arc<AtomicU64>,
) -> Result<Row, EngineError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .map_err(|error| {
            EngineError::internal("the async runtime cannot be started").with_source(error)
        })?;
    runtime.block_on(run(plan, engine, one, ended))
}

async fn run(
    plan: &Plan,
    engine: &MockerEngine,
    one: Run,
    ended: &Arc<AtomicU64>,
) -> Result<Row, EngineError> {
    let Run {
        policy,
        prefill_workers,
    } = one;
    let fleet = Fleet::start(engine, plan.workers, prefill_workers).await?;
    let fleet = Arc::new(fleet);
    let frontends = Frontends::start(policy, plan, &fleet).await?;
    let driver = Arc::new(Driver {
        frontends,
        tally: Mutex::default(),
        ended: Arc::clone(ended),
        began: Instant::now(),
    });
    let tasks = TaskTracker::new();
    let script = plan.faults.clone();
    let faults = tasks.spawn(inflict(Arc::clone(&fleet), Arc::clone(&driver), script));
    for (number, session) in plan.load.sessions(plan.seed).enumerate() {
        tokio::time::sleep_until(driver.began + session.at).await;
        tasks.spawn(Arc::clone(&driver).converse(number, session));
    }
    // Faults after the last answer change no answer.
    tasks.close();
    while tasks.len() > usize::from(!faults.is_finished()) {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    faults.abort();
    tasks.wait().await;
    let tally = std::mem::take(&mut *driver.tally.lock());
    let name = match prefill_workers {
        0 => policy.to_string(),
        prefill => format!("{policy} {prefill}+{}", plan.workers - prefill),
    };
    let row = Row::new(name, prefill_workers, tally, fleet.moved());
    fleet.stop().await;
    driver.frontends.stop().await;
    Ok(row)
}

async fn inflict(fleet: Arc<Fleet>, driver: Arc<Driver>, faults: Vec<Fault>) {
    // A restarting worker may drain for long, and a frontend looks for one; faults of others must not wait for that.
    let mut starts = JoinSet::new();
    for fault in faults {
        tokio::time::sleep_until(driver.began + fault.at).await;
        match fault.what {
            What::Worker(worker, Action::Start) => {
                let fleet = Arc::clone(&fleet);
                starts.spawn(async move { fleet.start_again(worker).await });
            }
            What::Worker(worker, Action::Crash) => fleet.crash(worker),
            What::Worker(worker, Action::Stop) => fleet.stop_worker(worker),
            What::FrontendRestart(frontend) => {
                let driver = Arc::clone(&driver);
                starts.spawn(async move { driver.frontends.restart(frontend).await });
            }
        }
    }
    while starts.join_next().await.is_some() {}
}

/// Sends the requests.
struct Driver {
    frontends: Frontends,
    tally: Mutex<Tally>,
    /// Counts the requests that have ended, also those of other runs.
    ended: Arc<AtomicU64>,
    began: Instant,
}

impl Driver {
    /// Runs one session, to its end or to the first request that fails.
    async fn converse(self: Arc<Self>, number: usize, session: Session) {
        let mut prompt: Vec<TokenId> = Vec::new();
        for (turn_number, turn) in session.turns.into_iter().enumerate() {
            tokio::time::sleep(turn.after).await;
            for piece in turn.pieces {
                piece.write(&mut prompt);
            }
            let mut request = GenerateRequest::from_tokens(MODEL, prompt.clone());
            request.stop.max_tokens = Some(turn.max_tokens);
            let id = format!("{number}-{turn_number}");
            self.tally.lock().requests += 1;
            let Some(frontend) = self.frontends.of(number, turn_number) else {
                return;
            };
            let (layers, ctx) = (&*frontend.layers, RequestContext::new(id));
            let sent = self.began.elapsed();
            let answered = self.ask(layers, request, ctx, &mut prompt).await;
            self.ended.fetch_add(1, Ordering::Relaxed);
            match answered {
                Ok(finished) => self.count(sent, &finished),
                Err(error) => {
                    let mut tally = self.tally.lock();
                    *tally.lost.entry(error.kind().name()).or_default() += 1;
                    return;
                }
            }
        }
    }

    /// Sends one request, and appends the answer's tokens to the prompt.
    async fn ask(
        &self,
        layers: &dyn Generate,
        request: GenerateRequest,
        ctx: RequestContext,
        prompt: &mut Vec<TokenId>,
    ) -> Result<Finished, EngineError> {
        let sent = Instant::now();
        let mut outputs = layers.generate(request, ctx).await?;
        let mut last = None;
        loop {
            let item = outputs.next().await;
            let now = Instant::now();
            let (chunk, finished) = match item.transpose()? {
                Some(Output::Tokens(chunk)) => (chunk, None),
                Some(Output::Finished(finished)) => (finished.last.clone(), Some(finished)),
                Some(Output::Text(_) | Output::Embeddings(_) | Output::Scores(_)) | None => {
                    let problem = "an answer of the mocker had no tokens, or no end";
                    return Err(EngineError::internal(problem));
                }
            };
            if !chunk.is_empty() {
                let mut tally = self.tally.lock();
                let at = now - self.began;
                match last.replace(now) {
                    None => {
                        tally.ttft.add(now - sent);
                        tally.timeline.first_token(at, now - sent);
                    }
                    Some(before) => {
                        tally.itl.add(now - before);
                        tally.timeline.token(at, now - before);
                    }
                }
                prompt.extend(chunk.token_ids);
            }
            if let Some(finished) = finished {
                return Ok(*finished);
            }
        }
    }

    /// Counts an answer whose request was sent at `sent`, from the beginning of the run.
    fn count(&self, sent: Duration, finished: &Finished) {
        let mut tally = self.tally.lock();
        let usage = finished.usage;
        let (prompt, cached) = (usage.prompt_tokens, usage.cached_tokens.unwrap_or(0));
        tally.prompt_tokens += u64::from(prompt);
        tally.cached_tokens += u64::from(cached);
        tally.timeline.prompt(sent, prompt.into(), cached.into());
        tally.completion_tokens += u64::from(usage.completion_tokens);
        tally.duration = self.began.elapsed();
    }
}
