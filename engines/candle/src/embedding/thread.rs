//! The thread that loads an embedder and serves it. Each step plans, computes and answers; commands are taken between steps.

use std::ops::ControlFlow::{self, Break, Continue};
use std::time::Duration;

use genset_backend_common::{
    EngineConfig, EngineError, ErrorKind, HealthReporter, StartContext, handles::LoadPublisher,
    log_limit::OncePerMinute,
};
use genset_scheduler::Stats;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::loading::{LoadedEmbedder, MakeVectors};
use super::queue::{Pending, Queue};
use crate::engine::forward::{ForwardError, contained};
use crate::engine::metrics::{Metrics, StepFigures};
use crate::engine::thread::{Loader, Ready};
use crate::model::embedder::WholeSequence;

/// Commands that may queue during a step; further senders wait.
const COMMANDS: usize = 256;

/// How long a client should wait after it was rejected because the queue is full.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// A command to the engine thread.
#[derive(Debug)]
pub(super) enum Told {
    /// Adds a request.
    Add(Pending),
    /// Ends every request and the thread.
    Stop,
}

/// The engine's handle of a serving thread.
#[derive(Debug)]
pub(super) struct Serving {
    pub(super) told: mpsc::Sender<Told>,
    pub(super) config: EngineConfig,
}

/// The thread's body.
pub(super) fn serve(
    loader: &dyn Loader<LoadedEmbedder>,
    start: &StartContext,
    ready: Ready<Serving>,
) {
    let loaded = match loader.load(start, &|| ready.is_closed()) {
        Ok(loaded) => loaded,
        Err(error) => return drop(ready.send(Err(error))),
    };
    let LoadedEmbedder {
        model,
        config,
        room,
        max_waiting,
    } = loaded;
    let (told, commands) = mpsc::channel(COMMANDS);
    let core = EmbeddingCore {
        queue: Queue::new(room, max_waiting),
        model,
        metrics: Metrics::register(&start.metrics),
        load: start.load.clone(),
        health: start.health.clone(),
        prompt_tokens: 0,
        logged: OncePerMinute::default(),
    };
    // If the receiver is gone, nobody can send a command, and there is nothing to do.
    if ready.send(Ok(Serving { told, config })).is_ok() {
        core.run(commands);
    }
}

/// The engine thread's state.
struct EmbeddingCore {
    queue: Queue,
    model: Box<MakeVectors>,
    metrics: Metrics,
    load: LoadPublisher,
    health: HealthReporter,
    prompt_tokens: u64,
    /// Limits the log about steps that fail.
    logged: OncePerMinute,
}

impl EmbeddingCore {
    /// Serves until it is stopped, all command senders are gone, or the model fails for good.
    fn run(mut self, mut commands: mpsc::Receiver<Told>) {
        while self.take_commands(&mut commands).is_continue() && self.step().is_continue() {}
        commands.close();
        while let Ok(command) = commands.try_recv() {
            let _ = self.obey(command);
        }
        self.queue.fail_all(&self.health.stopped());
        self.publish();
    }

    /// Takes the queued commands; waits if there is nothing to compute.
    fn take_commands(&mut self, commands: &mut mpsc::Receiver<Told>) -> ControlFlow<()> {
        if self.queue.is_empty() {
            self.publish();
            match commands.blocking_recv() {
                Some(command) => self.obey(command)?,
                None => return Break(()),
            }
        }
        while let Ok(command) = commands.try_recv() {
            self.obey(command)?;
        }
        Continue(())
    }

    /// Breaks if the thread is to end.
    fn obey(&mut self, command: Told) -> ControlFlow<()> {
        match command {
            Told::Add(request) => {
                if let Err(refused) = self.queue.add(request) {
                    let problem = "too many inputs wait; try again later";
                    let error = EngineError::new(ErrorKind::Overloaded, problem);
                    refused.end(error.with_retry_after(RETRY_AFTER));
                }
                Continue(())
            }
            Told::Stop => Break(()),
        }
    }

    fn step(&mut self) -> ControlFlow<()> {
        let began = Instant::now();
        self.queue.plan();
        self.publish();
        let inputs = self.queue.planned();
        if inputs.is_empty() {
            return Continue(());
        }
        let sequences = inputs.len();
        let tokens: usize = inputs.iter().map(|input| input.tokens.len()).sum();
        let computing = Instant::now();
        let computed = compute(&mut *self.model, &inputs);
        let forward = computing.elapsed();
        match computed {
            Ok(vectors) => {
                self.health.report_step();
                self.prompt_tokens += u64::try_from(tokens).unwrap_or(0);
                self.queue.finish(vectors);
                self.metrics.step(StepFigures {
                    step: began.elapsed(),
                    forward,
                    sequences,
                    tokens,
                    generated_tokens: 0,
                });
                Continue(())
            }
            Err(problem) => self.fail_step(&problem),
        }
    }

    fn fail_step(&mut self, problem: &ForwardError) -> ControlFlow<()> {
        if let Some(unlogged) = self.logged.unlogged("step") {
            tracing::error!(%problem, unlogged, "the model failed to compute a step; further ones are only counted for a minute");
        }
        self.metrics.failed_step();
        self.queue.fail(&EngineError::internal(
            "the model failed to compute a step of this request; see the worker's log",
        ));
        // A request may be the cause of one failed step, but not of a failed step with a single, arbitrary token.
        match compute(&mut *self.model, &[&WholeSequence::of_one_text(vec![0])]) {
            Ok(_) => Continue(()),
            Err(problem) => {
                let problem = format!("the model computes no more: {problem}");
                self.health.report_dead(problem);
                Break(())
            }
        }
    }

    fn publish(&mut self) {
        let (running, waiting) = self.queue.counts();
        let stats = Stats {
            running,
            waiting,
            prompt_tokens: self.prompt_tokens,
            ..Stats::default()
        };
        self.metrics.state(stats);
        self.load.publish(stats.load());
    }
}

/// Computes one vector for each input. Turns a panic into an error.
fn compute(
    model: &mut MakeVectors,
    inputs: &[&WholeSequence],
) -> Result<Vec<Vec<f32>>, ForwardError> {
    let vectors = contained(|| model(inputs))?;
    if vectors.len() == inputs.len() {
        return Ok(vectors);
    }
    Err(format!("{} vectors for {} inputs", vectors.len(), inputs.len()).into())
}
