//! [`Supervisor`]: watches the server, ends its requests when it dies, and starts it again where that was asked for.

use std::sync::Arc;

use genset_backend_common::{EngineError, ErrorKind, HealthReporter, ProgressReporter};
use genset_process::Backoff;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::command::Plan;
use crate::config::LauncherConfig;
use crate::desk::Desk;
use crate::failure::ServerFailure;
use crate::health;
#[cfg(feature = "kv-events")]
use crate::kv::KvFollower;
use crate::launch::{Life, launch};
use crate::server::Server;

/// How the worker lets the server go.
#[derive(Debug, Clone, Default)]
pub(crate) struct Release {
    /// It is told to go, and may take its time.
    pub(crate) leave: CancellationToken,
    /// It ends now.
    pub(crate) kill: CancellationToken,
}

impl Release {
    pub(crate) async fn wanted(&self) {
        tokio::select! {
            () = self.kill.cancelled() => {}
            () = self.leave.cancelled() => {}
        }
    }
}

/// The one task that owns the server while it serves.
pub(crate) struct Supervisor {
    pub(crate) config: LauncherConfig,
    pub(crate) plan: Plan,
    pub(crate) desk: Arc<Desk>,
    pub(crate) health: HealthReporter,
    pub(crate) release: Release,
    pub(crate) tasks: TaskTracker,
    /// Who follow the KV events of each server, one a rank.
    #[cfg(feature = "kv-events")]
    pub(crate) kv_followers: Vec<KvFollower>,
}

impl Supervisor {
    /// Returns when the last server is gone, with its group, and every request has its error.
    pub(crate) async fn run(self, mut life: Life, mut server: Arc<Server>) {
        let mut backoff = self.config.restart.map(Backoff::new);
        loop {
            let begun = Instant::now();
            let failure = self.watch(&mut life, &server).await;
            let is_stopped = failure == ServerFailure::Stopped;
            let kind = failure.kind();
            // Requests end before the process does: killing and reaping may take a while.
            let at_once = failure.to_error(self.config.kind.title(), &[]);
            self.desk.close(self.away(kind, is_stopped), at_once);
            let error = life.close(failure).await;
            if is_stopped {
                return;
            }
            tracing::error!(%error, "the server died");
            if let Some(backoff) = &mut backoff {
                backoff.served(begun.elapsed());
            }
            match self.restart(backoff.as_mut(), error).await {
                Ok((next_life, next_server)) => {
                    (life, server) = (next_life, Arc::clone(&next_server));
                    #[cfg(feature = "kv-events")]
                    for follower in &self.kv_followers {
                        self.tasks.spawn(follower.clone().run(Arc::clone(&server)));
                    }
                    self.desk.open(next_server);
                    self.health.report_up();
                }
                Err(Some(error)) => {
                    self.desk.close(error.clone(), error.clone());
                    self.health.report_dead(error.to_string());
                    return;
                }
                Err(None) => return,
            }
        }
    }

    /// What requests are told while there is no server.
    fn away(&self, kind: ErrorKind, is_stopped: bool) -> EngineError {
        let title = self.config.kind.title();
        if is_stopped {
            return EngineError::engine_shutdown(format!("the {title} server was stopped"));
        }
        let Some(policy) = self.config.restart else {
            return EngineError::new(kind, format!("the {title} server died"));
        };
        let message = format!("the {title} server died and is being started again");
        EngineError::new(ErrorKind::Unavailable, message).with_retry_after(policy.first_pause)
    }

    /// Waits until the server has ended or has to.
    async fn watch(&self, life: &mut Life, server: &Server) -> ServerFailure {
        let config = &self.config;
        tokio::select! {
            biased;
            () = self.release.kill.cancelled() => ServerFailure::Stopped,
            () = self.release.leave.cancelled() => {
                tokio::select! {
                    biased;
                    () = self.release.kill.cancelled() => {}
                    () = life.leave(config.exit_timeout) => {}
                }
                ServerFailure::Stopped
            }
            failure = life.ended() => failure,
            failure = health::watched(
                &server.client,
                self.plan.dialect,
                config.health_interval,
                config.health_timeout,
            ) => failure,
        }
    }

    /// Another server, as long as there may be one; `Err(None)` when the worker wants none any more.
    async fn restart(
        &self,
        mut backoff: Option<&mut Backoff>,
        mut error: EngineError,
    ) -> Result<(Life, Arc<Server>), Option<EngineError>> {
        while let Some(pause) = (backoff.as_mut()).and_then(|it| it.next_pause(rand::random())) {
            self.health.report_down(error.to_string());
            tracing::warn!(?pause, "starting the server again");
            let progress = ProgressReporter::default();
            let again = async {
                sleep(pause).await;
                launch(&self.config, &self.plan, &self.tasks, &progress).await
            };
            let launched = tokio::select! {
                biased;
                () = self.release.wanted() => return Err(None),
                launched = again => launched,
            };
            match launched {
                Ok(launched) => return Ok(launched),
                Err(failed) => error = failed,
            }
        }
        Err(Some(error))
    }
}
