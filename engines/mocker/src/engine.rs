//! [`MockerEngine`]: the [`LLMEngine`] in front of the ranks.

use std::sync::Arc;

use futures_util::future::try_join_all;
use genset_backend_common::kv::sequence_root;
use genset_backend_common::output::{self, OutputStream};
use genset_backend_common::{
    Capabilities, DrainContext, EngineConfig, EngineControls, EngineError, EngineState,
    GenerateRequest, LLMEngine, RequestContext, Role, StartContext, async_trait,
    transfer::receiving,
};
use genset_scheduler::{FreedSequences, Limits, NewSequence, Scheduler, SequenceId};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::active::{Active, Arrival, InFlight};
use crate::args::MockerArgs;
use crate::board::Board;
use crate::rank::{Command, Rank};
use crate::time::{StepTimes, float};
use crate::tokens::{MockerModel, Tokens};
use crate::transfer::{PrefillLeg, Transfers};

/// Commands that may queue during a step; further senders wait.
const COMMANDS: usize = 256;

/// Sequences that may wait in a rank. vLLM has no limit; here the limit keeps a forgotten queue from filling the memory.
const MAX_WAITING: usize = 65_536;

/// The mocker's engine. The [crate's documentation](crate) has an example.
#[derive(Debug)]
pub struct MockerEngine {
    args: MockerArgs,
    model: MockerModel,
    state: EngineState<Running>,
}

/// An engine's counts, as of the last step of each rank.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MockerStats {
    /// Requests with a place in a queue or KV blocks.
    pub active_requests: u64,
    /// KV blocks that sequences hold.
    pub kv_used_blocks: u64,
    /// Tokens generated since the start.
    pub produced_tokens: u64,
    /// Preemptions since the start.
    pub preemptions: u64,
}

#[derive(Debug)]
struct Running {
    config: EngineConfig,
    tokens: Tokens,
    ranks: Vec<Handle>,
    board: Arc<Board>,
    transfers: Transfers,
    stop: CancellationToken,
    tasks: Mutex<JoinSet<()>>,
}

/// A rank, as seen from outside its task.
#[derive(Debug)]
struct Handle {
    commands: mpsc::Sender<Command>,
    in_flight: InFlight,
}

impl MockerEngine {
    /// Creates an engine that is not started yet.
    ///
    /// # Errors
    /// A setting is out of its range, the model has no token to answer with, or its context is empty.
    pub fn try_new(args: MockerArgs, model: MockerModel) -> Result<Self, EngineError> {
        args.validate()?;
        if model.used_tokens() == 0 {
            let problem = "must leave at least one token to answer with";
            return Err(EngineError::invalid_argument("vocab_size", problem));
        }
        if model.context_length_tokens == 0 {
            let problem = "must be at least 1";
            return Err(EngineError::invalid_argument(
                "context_length_tokens",
                problem,
            ));
        }
        Ok(Self {
            args,
            model,
            state: EngineState::new(),
        })
    }

    /// Creates another engine, not started, with the same settings and model.
    #[must_use]
    pub fn fresh(&self) -> Self {
        Self {
            args: self.args.clone(),
            model: self.model.clone(),
            state: EngineState::new(),
        }
    }

    /// Current counts; all 0 while the engine does not run.
    #[must_use]
    pub fn stats(&self) -> MockerStats {
        let Ok(running) = self.state.get() else {
            return MockerStats::default();
        };
        let stats = running.board.stats();
        let active: usize = running
            .ranks
            .iter()
            .map(|rank| rank.in_flight.count())
            .sum();
        MockerStats {
            active_requests: u64::try_from(active).unwrap_or(u64::MAX),
            kv_used_blocks: u64::try_from(stats.used_blocks).unwrap_or(u64::MAX),
            produced_tokens: running.board.produced_tokens(),
            preemptions: stats.preemptions,
        }
    }

    /// Fails at once and for good, like an engine that lost its device: the health reports it, and every request ends with an
    /// error that lets it migrate. Returns whether the engine was running.
    pub fn crash(&self, reason: &str) -> bool {
        let Ok(running) = self.state.get() else {
            return false;
        };
        running.board.health.report_dead(reason);
        running.stop.cancel();
        true
    }

    async fn launch(&self, start: StartContext) -> Result<Running, EngineError> {
        if !self.args.startup_time.is_zero() {
            start.progress.report("pretending to load weights", None);
            tokio::time::sleep(self.args.startup_time).await;
        }
        let count = usize::try_from(self.args.dp_size).unwrap_or(usize::MAX);
        let board = Arc::new(Board::new(&start, count));
        let stop = CancellationToken::new();
        let transfers = Transfers::new(start.role, start.kv_transfers, &self.args);
        let (mut tasks, mut ranks) = (JoinSet::new(), Vec::new());
        let holds = transfers.holds.clone();
        let expiring = stop.clone();
        tasks.spawn(async move {
            tokio::select! {
                () = expiring.cancelled() => {}
                () = holds.expire() => {}
            }
        });
        for number in 0..count {
            let (commands, receiver) = mpsc::channel(COMMANDS);
            let times = StepTimes::new(&self.args);
            let scheduler = self.scheduler()?;
            let weak = commands.downgrade();
            let freed = FreedSequences::new(move || {
                if let Some(commands) = weak.upgrade() {
                    // If the queue is full, the rank looks anyway.
                    drop(commands.try_send(Command::Look));
                }
            });
            let board = Arc::clone(&board);
            let rank = Rank::new(number, scheduler, times, receiver, board, freed);
            tasks.spawn(rank.run(stop.clone()));
            ranks.push(Handle {
                commands,
                in_flight: InFlight::default(),
            });
        }
        Ok(Running {
            config: self.config(),
            tokens: Tokens::new(&self.model, self.args.seed),
            ranks,
            board,
            transfers,
            stop,
            tasks: Mutex::new(tasks),
        })
    }

    fn scheduler(&self) -> Result<Scheduler, EngineError> {
        let args = &self.args;
        let size = |number: u32| usize::try_from(number).unwrap_or(usize::MAX);
        let limits = Limits {
            max_num_seqs: size(args.max_num_seqs),
            max_num_batched_tokens: size(args.max_num_batched_tokens),
            max_waiting: MAX_WAITING,
        };
        let blocks = size(args.num_gpu_blocks);
        let scheduler =
            Scheduler::try_new(limits, blocks, size(args.block_size)).map_err(|error| {
                EngineError::internal(format!("checked settings make no scheduler: {error}"))
            })?;
        let mut scheduler = scheduler.with_watermark(watermark_blocks(args.watermark, blocks));
        if !args.enable_prefix_caching {
            scheduler = scheduler.without_prefix_caching();
        }
        if !args.enable_chunked_prefill {
            scheduler = scheduler.without_chunked_prefill();
        }
        Ok(scheduler)
    }

    fn config(&self) -> EngineConfig {
        let args = &self.args;
        let mut context = self.model.context_length_tokens;
        if !args.enable_chunked_prefill {
            // As in vLLM: a preempted sequence must fit a step again, so longer sequences are rejected.
            context = context.min(args.max_num_batched_tokens);
        }
        // The next token is the same at any temperature, so those options hold trivially.
        let mut can = Capabilities::tokens()
            .with_point_mass_sampling()
            .with_virtual_time()
            .with_resume()
            .with_roles(Role::ALL);
        can.priority = true;
        can.kv_events = args.enable_prefix_caching;
        can.kv_ranks = args.enable_prefix_caching;
        let mut config = EngineConfig::new("mocker", context)
            .with_vocab_size(self.model.vocab_size)
            .with_capabilities(can);
        config.kv_block_size = args.block_size.try_into().ok();
        config.kv_total_blocks = Some(u64::from(args.num_gpu_blocks) * u64::from(args.dp_size));
        config.max_num_seqs = Some(args.max_num_seqs.saturating_mul(args.dp_size));
        config.max_num_batched_tokens =
            Some(args.max_num_batched_tokens.saturating_mul(args.dp_size));
        config.data_parallel_size = args.dp_size;
        config
    }
}

/// A share of the blocks, rounded down as vLLM does.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a share below 1 of a number of blocks is a number of blocks"
)]
fn watermark_blocks(watermark: f64, blocks: usize) -> usize {
    (watermark * float(blocks)) as usize
}

#[async_trait]
impl LLMEngine for MockerEngine {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let start = async {
            let running = self.launch(ctx).await?;
            let config = running.config.clone();
            Ok((running, config))
        };
        self.state.start(start).await
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        self.state.get()?.generate(request, ctx).await
    }

    async fn abort(&self, ctx: &RequestContext) {
        if let Ok(running) = self.state.get() {
            running.transfers.holds.abort(ctx.id());
            for rank in &running.ranks {
                // If the queue is full, the rank looks anyway.
                drop(rank.commands.try_send(Command::Look));
            }
        }
    }

    async fn drain(&self, ctx: DrainContext) -> Result<(), EngineError> {
        if let Ok(running) = self.state.get() {
            let drained = running.transfers.holds.drained();
            // Blocks not fetched by then are lost; their requests start again.
            let _ = tokio::time::timeout(ctx.deadline, drained).await;
        }
        Ok(())
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        let Some(running) = self.state.take() else {
            return Ok(());
        };
        running.transfers.close();
        running.stop.cancel();
        let mut tasks = std::mem::take(&mut *running.tasks.lock());
        while tasks.join_next().await.is_some() {}
        Ok(())
    }

    fn controls(&self) -> Option<&dyn EngineControls> {
        Some(self)
    }
}

#[async_trait]
impl EngineControls for MockerEngine {
    async fn clear_prefix_cache(&self) -> Result<(), EngineError> {
        let running = self.state.get()?;
        let cleared = running.ranks.iter().map(|rank| async {
            let (done, is_done) = oneshot::channel();
            let command = Command::ClearPrefixCache(done);
            let sent = rank.commands.send(command).await;
            sent.map_err(|_| EngineError::engine_has_stopped())?;
            is_done.await.map_err(|_| EngineError::engine_has_stopped())
        });
        try_join_all(cleared).await?;
        Ok(())
    }
}

impl Running {
    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        self.config.check(&request)?;
        let prompt_tokens = request.prompt_tokens().unwrap_or(0);
        let max_tokens = request.max_tokens(self.config.context_length_tokens);
        let source = self.transfers.source_of(&request)?;
        let prompt = request.tokens()?;
        let answer = self.tokens.answer(prompt, request.resumed_tokens);
        let sequence = NewSequence {
            // Assigned by the rank.
            id: SequenceId(0),
            prompt: prompt.to_vec(),
            priority: request.priority,
            root: sequence_root(request.cache_salt.as_deref(), request.adapter.as_deref()),
        };
        let rank = self.rank_for(&request)?;
        let (receives, place) = source.as_ref().map(|_| oneshot::channel()).unzip();
        let prefill = (self.transfers.role == Role::Prefill).then(|| {
            Box::new(PrefillLeg {
                transfers: self.transfers.clone(),
                request_id: ctx.id().to_owned(),
                prompt_tokens: prompt.len(),
            })
        });
        let far = ctx.child();
        let (sink, outputs) = output::channel(ctx.with_prompt_tokens(prompt_tokens));
        let active = Active {
            sink,
            answer,
            stop: request.stop,
            generated: 0,
            max_tokens,
            is_paused: false,
            prefill,
            is_received: false,
            _place: rank.in_flight.enter(),
        };
        let arrival = Box::new(Arrival {
            sequence,
            receives,
            active,
        });
        let sent = rank.commands.send(Command::Add(arrival)).await;
        sent.map_err(|_| EngineError::engine_has_stopped())?;
        let Some((source, place)) = source.zip(place) else {
            return Ok(outputs);
        };
        let commands = rank.commands.downgrade();
        let fetch = self.transfers.clone().fetch(source, place, commands, far);
        Ok(receiving(outputs, fetch))
    }

    /// The rank that the request names, else the one with the fewest requests.
    fn rank_for(&self, request: &GenerateRequest) -> Result<&Handle, EngineError> {
        let named = request
            .data_parallel_rank
            .and_then(|rank| usize::try_from(rank).ok());
        let rank = match named {
            Some(rank) => self.ranks.get(rank),
            None => self.ranks.iter().min_by_key(|rank| rank.in_flight.count()),
        };
        rank.ok_or_else(|| EngineError::internal("a rank that was checked is not there"))
    }
}
