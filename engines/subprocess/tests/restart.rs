//! A process that ended is restarted if configured: with pauses, up to the limit, and as the same engine.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    unreachable_pub,
    reason = "a test fails by panicking"
)]

mod support;

use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::StreamExt;
use genset_backend_common::{
    EngineError, ErrorKind, GenerateRequest, LLMEngine, Output, RequestContext, StartContext,
};
use genset_engine_subprocess::{RestartPolicy, SubprocessConfig, SubprocessEngine};
use tempfile::TempDir;
use tokio::time::timeout;

/// Only to fail instead of hanging.
const PATIENCE: Duration = Duration::from_secs(60);

/// Almost no pauses.
fn at_once(max_restarts: u32) -> RestartPolicy {
    RestartPolicy {
        first_pause: Duration::from_millis(1),
        longest_pause: Duration::from_millis(2),
        ..RestartPolicy::new(max_restarts)
    }
}

/// An engine whose processes each record their start. What they do depends on their number and on `fault`.
struct Lives {
    engine: SubprocessEngine,
    ctx: StartContext,
    folder: TempDir,
}

impl Lives {
    async fn start(fault: &str, policy: RestartPolicy) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let ctx = StartContext::detached(1);
        let mut config = config(fault, &folder.path().join("lives"));
        config.restart = Some(policy);
        let engine = SubprocessEngine::new(config);
        engine.start(ctx.clone()).await.unwrap();
        Self {
            engine,
            ctx,
            folder,
        }
    }

    /// The number of processes started.
    fn count(&self) -> usize {
        let notes: PathBuf = self.folder.path().join("lives");
        std::fs::read_to_string(notes).unwrap().lines().count()
    }

    async fn is_down(&self, is_down: bool) {
        let mut downs = self.ctx.health.downs();
        let changed = downs.wait_for(|down| down.is_some() == is_down);
        timeout(PATIENCE, changed).await.unwrap().unwrap();
    }

    async fn answer(&self) -> Result<Vec<Output>, EngineError> {
        let request = GenerateRequest::from_tokens("bad", vec![1]);
        let ctx = RequestContext::new("r");
        let outputs = self.engine.generate(request, ctx).await?;
        let items: Vec<_> = outputs.collect().await;
        items.into_iter().collect()
    }
}

fn config(fault: &str, notes: &Path) -> SubprocessConfig {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/children/lives.py");
    support::program(&script).with_args([fault.to_owned(), notes.display().to_string()])
}

#[tokio::test]
async fn a_process_that_died_is_started_again_and_serves() {
    let lives = Lives::start("first_dies", at_once(3)).await;
    let died = lives.answer().await.unwrap_err();
    assert_eq!(died.kind(), ErrorKind::Disconnected, "{died}");
    assert!(died.policy().is_migratable);
    lives.is_down(false).await;
    assert_eq!(lives.answer().await.unwrap().len(), 2);
    assert_eq!(lives.count(), 2);
    assert_eq!(lives.ctx.health.dead_reason(), None);
    let metrics = lives.ctx.metrics.encode();
    assert!(
        metrics.contains("genset_engine_process_restarts_total 1"),
        "{metrics}"
    );
    lives.engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn while_it_is_down_requests_may_go_elsewhere_and_what_it_published_is_gone() {
    let policy = RestartPolicy {
        first_pause: Duration::from_secs(3600),
        longest_pause: Duration::from_secs(3600),
        ..RestartPolicy::new(1)
    };
    let lives = Lives::start("first_dies", policy).await;
    let mut load = lives.ctx.load.subscribe();
    let published = load.wait_for(|load| load.running_requests == 3);
    timeout(PATIENCE, published).await.unwrap().unwrap();
    lives.answer().await.unwrap_err();
    lives.is_down(true).await;
    let gone = load.wait_for(|load| load.running_requests == 0);
    timeout(PATIENCE, gone).await.unwrap().unwrap();
    let refused = async {
        loop {
            let error = lives.answer().await.unwrap_err();
            // For a moment the process is gone, and the length of the pause is not yet known.
            if error.kind() != ErrorKind::Disconnected {
                return error;
            }
            tokio::task::yield_now().await;
        }
    };
    let refused = timeout(PATIENCE, refused).await.unwrap();
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    assert!(refused.policy().is_migratable && refused.details().retry_after.is_some());
    assert!(lives.ctx.kv_events.subscribe().snapshot.blocks.is_empty());
    // Does not wait for the pause of an hour.
    timeout(PATIENCE, lives.engine.cleanup())
        .await
        .unwrap()
        .unwrap();
    assert_eq!(lives.count(), 1);
}

#[tokio::test]
async fn attempts_are_counted_and_end() {
    let lives = Lives::start("never_again", at_once(3)).await;
    lives.answer().await.unwrap_err();
    let reason = timeout(PATIENCE, lives.ctx.health.died()).await.unwrap();
    assert!(reason.contains("3 restarts did not help"), "{reason}");
    assert!(reason.contains("exited with code 4"), "{reason}");
    assert_eq!(lives.count(), 4);
    let refused = lives.answer().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Disconnected);
    lives.engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn what_the_last_attempt_failed_of_is_no_error_of_requests() {
    let lives = Lives::start("misses_its_weights_again", at_once(2)).await;
    lives.answer().await.unwrap_err();
    let reason = timeout(PATIENCE, lives.ctx.health.died()).await.unwrap();
    assert!(reason.contains("no such weights"), "{reason}");
    let refused = lives.answer().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Disconnected);
    lives.engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_process_that_comes_back_as_another_engine_is_not_taken() {
    let lives = Lives::start("another_engine", at_once(3)).await;
    lives.answer().await.unwrap_err();
    let reason = timeout(PATIENCE, lives.ctx.health.died()).await.unwrap();
    assert!(reason.contains("came back as another engine"), "{reason}");
    lives.engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn an_engine_that_reports_itself_dead_gets_a_new_process() {
    let lives = Lives::start("first_reports_dead", at_once(3)).await;
    lives.is_down(true).await;
    lives.is_down(false).await;
    assert_eq!(lives.answer().await.unwrap().len(), 2);
    assert_eq!(lives.ctx.health.dead_reason(), None);
    lives.engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_restart_that_is_under_way_ends_with_the_engine() {
    let lives = Lives::start("second_hangs_in_start", at_once(3)).await;
    lives.answer().await.unwrap_err();
    let restarted = async {
        while lives.count() < 2 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, restarted).await.unwrap();
    timeout(PATIENCE, lives.engine.cleanup())
        .await
        .unwrap()
        .unwrap();
}

#[tokio::test]
async fn a_start_that_fails_is_not_tried_again() {
    let folder = tempfile::tempdir().unwrap();
    let notes = folder.path().join("lives");
    let mut config = config("fails_in_start", &notes);
    config.restart = Some(at_once(3));
    let engine = SubprocessEngine::new(config);
    let error = engine.start(StartContext::detached(1)).await.unwrap_err();
    assert!(error.message().contains("exited with code 4"), "{error}");
    engine.cleanup().await.unwrap();
    assert_eq!(std::fs::read_to_string(notes).unwrap().lines().count(), 1);
}
