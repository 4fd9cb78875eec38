//! [`Launch`]: the engine's process as a supervised program: spawn it, exchange Hellos, and start its engine.

use std::sync::Arc;

use genset_backend_common::{EngineConfig, EngineError, ProgressReporter, StartContext};
use genset_process::{End, Process, Program, Started, Supervision, Terms};
use genset_wire::RequestHead;
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::call::Call;
use crate::config::SubprocessConfig;
use crate::ending::{ended, settle};
use crate::events::Sinks;
use crate::failure::ChildFailure;
use crate::link::Link;
use crate::messages::{StartItem, StartRequest};
use crate::process::spawn;
use crate::tasks;

/// The maximum number of items in flight on the small endpoints.
pub(crate) const SMALL_WINDOW: u32 = 16;
/// The maximum number of events in flight.
const EVENT_WINDOW: u32 = 1024;

/// Everything needed to start the process, any number of times.
#[derive(Debug, Clone)]
pub(crate) struct Launch {
    config: Arc<SubprocessConfig>,
    supervision: Supervision,
    sinks: Sinks,
    progress: ProgressReporter,
    asked: StartRequest,
}

/// The process's name in messages, and its time limits.
pub(crate) fn terms(config: &SubprocessConfig) -> Terms {
    Terms {
        name: "the engine's process".to_owned(),
        stopped: ChildFailure::Stopped.to_error(&[]),
        start_timeout: config.start_timeout,
        exit_timeout: config.exit_timeout,
        restart: config.restart,
    }
}

impl Launch {
    pub(crate) fn new(
        config: &SubprocessConfig,
        supervision: &Supervision,
        ctx: &StartContext,
    ) -> Self {
        Self {
            config: Arc::new(config.clone()),
            supervision: supervision.clone(),
            sinks: Sinks::new(ctx, config.restart.is_some()),
            progress: ctx.progress.clone(),
            asked: StartRequest {
                worker_id: ctx.worker_id,
                role: ctx.role,
            },
        }
    }

    /// Exchanges Hellos with the process, starts its engine, and follows its events.
    async fn begin(self, socket: UnixStream, link: Arc<Link>) -> Result<EngineConfig, EngineError> {
        let limit = self.config.hello_timeout;
        let what = "greet over GENSET_ENGINE_FD (does the program serve an engine?)";
        let greeted = timeout(limit, self.greet(socket, &link)).await;
        if let Err(failure) = greeted.unwrap_or(Err(ChildFailure::TooLate { what, limit })) {
            link.report(failure);
            // How the process ends determines the error.
            return std::future::pending().await;
        }
        let call = link.call(head("start"), &self.asked, SMALL_WINDOW).await?;
        let declared = started(call, &self.progress).await?;
        self.sinks.know_ranks(&declared);
        let events = link.call(head("events"), &(), EVENT_WINDOW).await?;
        let follow = self.sinks.follow(events, Arc::clone(&link));
        self.supervision.tasks().spawn(follow);
        Ok(declared)
    }

    /// Exchanges Hellos with the process, then starts the tasks that read and write frames.
    async fn greet(&self, mut socket: UnixStream, link: &Arc<Link>) -> Result<(), ChildFailure> {
        let greeted = tasks::greet(&mut socket, self.config.max_frame_bytes).await;
        let (max_frame_bytes, decoder) = greeted?;
        link.outbox.set_max_frame_bytes(max_frame_bytes as usize);
        let (read, write) = socket.into_split();
        let (reader, writer) = (Arc::clone(link), Arc::clone(link));
        let tasks = self.supervision.tasks();
        tasks.spawn(async move { tasks::read(&reader, read, decoder).await });
        let supervision = self.supervision.clone();
        tasks.spawn(async move { tasks::write(&writer, write, &supervision).await });
        Ok(())
    }
}

impl Program for Launch {
    type Session = Link;
    type Declared = EngineConfig;
    type Failure = ChildFailure;

    fn spawn(&self) -> Result<Started<Link, EngineConfig>, EngineError> {
        self.progress.report("starting the engine's process", None);
        let (process, socket) = spawn(&self.config, self.supervision.tasks())?;
        let link = Arc::new(Link::new());
        let begin = self.clone().begin(socket, Arc::clone(&link));
        Ok((process, link, Box::pin(begin)))
    }

    async fn ended(&self, process: &mut Process, link: &Link) -> ChildFailure {
        ended(process, link).await
    }

    async fn watch(&self, link: &Link) -> ChildFailure {
        tasks::watch(link, &self.config).await
    }

    fn too_late(&self) -> ChildFailure {
        ChildFailure::TooLate {
            what: "answer `start`",
            limit: self.config.start_timeout,
        }
    }

    fn error(&self, failure: ChildFailure, end: Option<End>, lines: &[String]) -> EngineError {
        settle(failure, end).to_error(lines)
    }

    fn close(&self, link: &Link, error: EngineError) {
        link.fail(error);
    }

    fn forget(&self) {
        self.sinks.forget();
    }

    fn readmit(
        &self,
        _: &Arc<Link>,
        first: &EngineConfig,
        again: &EngineConfig,
    ) -> Result<(), EngineError> {
        if is_same(first, again) {
            return Ok(());
        }
        Err(EngineError::internal(format!(
            "the engine's process came back as another engine, and clients know the first: {again:?} instead of {first:?}"
        )))
    }
}

pub(crate) fn head(endpoint: &str) -> RequestHead {
    RequestHead {
        endpoint: endpoint.to_owned(),
        ..RequestHead::default()
    }
}

/// Follows a start to its end; the last item is the config.
async fn started(mut call: Call, progress: &ProgressReporter) -> Result<EngineConfig, EngineError> {
    let mut declared = None;
    while let Some(item) = call.item().await? {
        match item {
            StartItem::Progress { stage, fraction } => progress.report(&stage, fraction),
            StartItem::Config(config) => declared = Some(config),
        }
    }
    let Some(mut declared) = declared else {
        return Err(EngineError::internal(
            "the engine's process ended `start` without a config",
        ));
    };
    // A socket does not follow tokio's paused clock.
    declared.capabilities.virtual_time = false;
    declared.validate()?;
    Ok(*declared)
}

/// Whether requests made for one fit the other. Concurrency limits may differ: many engines measure them at each start.
fn is_same(first: &EngineConfig, second: &EngineConfig) -> bool {
    let second = EngineConfig {
        kv_total_blocks: first.kv_total_blocks,
        max_num_seqs: first.max_num_seqs,
        max_num_batched_tokens: first.max_num_batched_tokens,
        canary: first.canary.clone(),
        ..second.clone()
    };
    *first == second
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_requests_rely_on_must_stay() {
        let first = EngineConfig::new("m", 100).with_vocab_size(10);
        let mut second = first.clone();
        second.kv_total_blocks = Some(7);
        assert!(is_same(&first, &second));
        second.context_length_tokens = 99;
        assert!(!is_same(&first, &second));
    }
}
