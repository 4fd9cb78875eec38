//! The terminal inputs, with a worker in the same process or for workers of other processes.

use std::convert::Infallible;
use std::sync::Arc;

use genset_backend_common::{EngineError, ErrorKind};
use genset_frontend::model::{Models, ServedModel};
use genset_runtime::{Signals, in_seconds};

use super::{CUT_SHORT, FAILED, Node, NotReady, ready, shut_down, tell, unservable};
use crate::args::{EngineKind, InputKind};
use crate::bench::progress::PROGRESS_AFTER;
use crate::input::{self, Ending};

/// Runs a terminal and its worker in one process.
///
/// # Errors
/// A configuration that cannot run; returned before anything is started.
pub(super) async fn run_with_worker(
    node: &Node,
    kind: EngineKind,
    mut signals: Signals,
) -> Result<u8, EngineError> {
    let (worker, _status) = node.spawn_worker(kind).await?;
    let models = Models::follow(&node.runtime, &node.config.frontend);
    let ended = tokio::select! {
        ready = ready(&worker, &models) => match ready {
            Ok(model) => tokio::select! {
                biased;
                ended = run_input(node, &models, model, &mut signals) => ended,
                _ = worker.stopped() => Ok(without_engine(node)),
            },
            Err(NotReady::Stopped(report)) => return Ok(tell(&report)),
            Err(NotReady::Unservable(error)) => Err(error),
        },
        _ = signals.next() => Ok(Ending::Signalled),
    };
    let report = shut_down(&worker, &mut signals).await;
    models.shutdown().await;
    let code = tell(&report);
    Ok(code_of(node, ended, code))
}

/// Runs a terminal for the workers that discovery lists.
///
/// # Errors
/// A configuration that cannot run; returned before anything is started.
pub(super) async fn run_alone(node: &Node, mut signals: Signals) -> Result<u8, EngineError> {
    let models = Models::follow(&node.runtime, &node.config.frontend);
    let _status = node.status_without_worker(&models, || false).await?;
    let ended = tokio::select! {
        model = asked_model(node, &models) => match model {
            Ok(model) => run_input(node, &models, model, &mut signals).await,
            Err(error) => Err(error),
        },
        _ = signals.next() => Ok(Ending::Signalled),
    };
    models.shutdown().await;
    Ok(code_of(node, ended, 0))
}

async fn run_input(
    node: &Node,
    models: &Models,
    model: Arc<ServedModel>,
    signals: &mut Signals,
) -> Result<Ending, EngineError> {
    input::run_terminal(&node.runtime, &node.config, models, model, signals).await
}

/// Ends the input, because nothing answers it any more. The worker's outcome says the rest.
fn without_engine(node: &Node) -> Ending {
    match node.config.input {
        InputKind::Batch(_) => input::note(
            "the engine has ended; the same command continues with the prompts that have no answer",
        ),
        // After a partial answer, or after the prompt.
        InputKind::Text => input::print("\n"),
        InputKind::Stdin | InputKind::Http | InputKind::Dyn(_) => {}
    }
    Ending::Done
}

/// The model of `--model-name`, or the first ready model. Prints a message if the wait is long.
///
/// # Errors
/// The model cannot be served, or the input is not interactive and no worker came in time.
async fn asked_model(node: &Node, models: &Models) -> Result<Arc<ServedModel>, EngineError> {
    let name = node.config.worker.model_name.as_deref();
    let model = async {
        match name {
            Some(name) => {
                let model = models.named(name).await;
                model.map_err(|error| unservable(name, error))
            }
            None => {
                let over = || EngineError::internal("this process no longer follows the models");
                models.any().await.ok_or_else(over)
            }
        }
    };
    let model = async {
        match node.config.input {
            InputKind::Stdin | InputKind::Batch(_) => {
                let waited = tokio::time::timeout(node.config.worker_wait, model).await;
                waited.unwrap_or_else(|_| Err(no_worker(node)))
            }
            // A person sees that it waits, and can end it.
            InputKind::Text | InputKind::Http | InputKind::Dyn(_) => model.await,
        }
    };
    tokio::select! {
        biased;
        model = model => model,
        never = tell_of_wait(node, models) => match never {},
    }
}

/// Prints what the process waits for, once the wait is long.
async fn tell_of_wait(node: &Node, models: &Models) -> Infallible {
    tokio::time::sleep(PROGRESS_AFTER).await;
    match node.config.worker.model_name.as_deref() {
        Some(name) => input::note(input::waiting_for_model(name, models)),
        None => input::note(input::waiting_for_workers(&node.config)),
    }
    std::future::pending().await
}

/// The error of a non-interactive input that stops waiting.
fn no_worker(node: &Node) -> EngineError {
    let config = &node.config;
    let name = config.worker.model_name.as_deref();
    let problem = format!(
        "no worker of out={} served {} within {} s (--worker-wait); `genset models` lists what is served",
        config.output.word(),
        name.map_or("a model".into(), |name| format!("the model {name}")),
        in_seconds(config.worker_wait)
    );
    EngineError::new(ErrorKind::Unavailable, problem)
}

fn code_of(node: &Node, ended: Result<Ending, EngineError>, code: u8) -> u8 {
    match (ended, &node.config.input) {
        // These have unanswered questions; a chat, in contrast, ends when its user says so.
        (Ok(Ending::Signalled), InputKind::Stdin | InputKind::Batch(_)) => code.max(CUT_SHORT),
        (Ok(Ending::Failed), _) => code.max(FAILED),
        (Ok(Ending::Signalled | Ending::Done), _) => code,
        (Err(error), _) => {
            input::complain(error);
            FAILED
        }
    }
}
