//! The operations of vLLM's and SGLang's HTTP APIs: one call each, with limits on time and answer size.
//! [`Controls`](crate::controls::Controls) decides when and whether to make them.
//!
//! # Source
//! vLLM 0.32.0: `vllm/entrypoints/serve/dev/{sleep,cache}/api_router.py`, `serve/profile/api_router.py`, `v1/engine/core.py`.
//! The routes of `dev` need `VLLM_SERVER_DEV_MODE=1`; the server's key protects none of them
//! (`serve/middleware/authenticate.py`). SGLang 0.5.23: `sglang/srt/entrypoints/http_server.py`,
//! `managers/scheduler_components/weight_updater.py`. A failed assertion ends its scheduler: it must be idle when memory is
//! released, and may resume only what was released.
//!
//! vLLM's routes for adapters are from its source alone (`serve/lora/api_router.py`, `openai/models/serving.py`). They need
//! `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`, and the key protects them, for they begin with `/v1`.

use std::time::Duration;

use bytes::Bytes;
use genset_backend_common::{EngineError, ErrorKind};
use serde_json::Value;
use tokio::time::timeout;

use super::error_of;
use crate::http::HttpError;
use crate::server::Server;

/// The time limit of calls that move no large data.
const QUICK: Duration = Duration::from_secs(60);

/// The largest answer that is read, in bytes.
const MAX_ANSWER_BYTES: usize = 64 << 10;

/// How an operation failed.
#[derive(Debug)]
pub(crate) enum Failed {
    /// The server refused it; nothing has changed.
    Refused(EngineError),
    /// It is unknown whether it was done.
    Lost(EngineError),
}

impl From<Failed> for EngineError {
    fn from(failed: Failed) -> Self {
        match failed {
            Failed::Refused(error) | Failed::Lost(error) => error,
        }
    }
}

impl Failed {
    /// Whether the server has no such route.
    pub(crate) fn is_missing(&self) -> bool {
        matches!(self, Self::Refused(error) if error.kind() == ErrorKind::NotFound)
    }
}

/// Sends an operation and reads the answer.
async fn ask(
    server: &Server,
    path: &str,
    body: impl Into<Bytes>,
    limit: Duration,
) -> Result<Bytes, Failed> {
    let exchange = async {
        let answer = server.client.post(path, body, &[]).await?;
        let status = answer.status;
        let body = answer.body.read_up_to(MAX_ANSWER_BYTES).await?;
        Ok::<_, HttpError>((status, Bytes::from(body)))
    };
    let asked = tokio::select! {
        biased;
        failure = server.ended() => return Err(Failed::Lost(failure)),
        asked = timeout(limit, exchange) => asked,
    };
    match asked {
        Ok(Ok((status, body))) if status.is_success() => Ok(body),
        Ok(Ok((status, body))) => {
            let text = || Value::from(String::from_utf8_lossy(&body).trim());
            let said = serde_json::from_slice(&body).unwrap_or_else(|_| text());
            Err(Failed::Refused(error_of(Some(status.as_u16()), &said)))
        }
        Ok(Err(error)) => {
            let message = format!("asking the server for {path} failed: {error}");
            let lost = EngineError::new(ErrorKind::Disconnected, message);
            Err(Failed::Lost(lost.with_source(error)))
        }
        Err(_) => {
            let limit = limit.as_secs_f64();
            let message = format!("the server did not answer {path} within {limit} s");
            Err(Failed::Lost(EngineError::new(
                ErrorKind::DeadlineExceeded,
                message,
            )))
        }
    }
}

/// Sends an operation whose answer says no more than that it was done.
async fn tell(
    server: &Server,
    path: &str,
    body: impl Into<Bytes>,
    limit: Duration,
) -> Result<(), Failed> {
    ask(server, path, body, limit).await.map(drop)
}

/// vLLM's routes.
pub(crate) mod vllm {
    use std::time::Duration;

    use genset_backend_common::{EngineError, ErrorKind, controls::SleepLevel};
    use hyper::StatusCode;
    use serde::Deserialize;
    use serde_json::json;
    use tokio::time::timeout;

    use super::{Failed, QUICK, ask, tell};
    use crate::server::Server;

    /// Loads an adapter.
    const LOAD_ADAPTER: &str = "/v1/load_lora_adapter";

    /// Frees the KV cache of a paused server; level 0 of sleep pauses it. Only newer versions have this route.
    const RELEASE_KV_CACHE: &str = "/release_kv_cache_memory";

    /// Whether the server has the routes for sleep.
    ///
    /// # Errors
    /// `Unavailable` if it does not answer.
    pub(crate) async fn has_sleep(server: &Server) -> Result<bool, EngineError> {
        match timeout(QUICK, server.client.status("/is_sleeping")).await {
            Ok(Ok(status)) => Ok(status.is_success()),
            Ok(Err(_)) | Err(_) => Err(unsaid()),
        }
    }

    /// Whether the server can free only its KV cache. Otherwise it must not sleep at level 0: in versions in which that is not
    /// a pause, the weights are lost.
    ///
    /// # Errors
    /// As [`has_sleep`].
    pub(crate) async fn frees_kv_cache(server: &Server) -> Result<bool, EngineError> {
        has_post(server, RELEASE_KV_CACHE).await.ok_or_else(unsaid)
    }

    /// Whether the server has this route for POST; `None` if it does not say.
    async fn has_post(server: &Server, path: &str) -> Option<bool> {
        // The route needs another method, so this call does nothing.
        match timeout(QUICK, server.client.status(path)).await {
            Ok(Ok(StatusCode::METHOD_NOT_ALLOWED)) => Some(true),
            Ok(Ok(StatusCode::NOT_FOUND)) => Some(false),
            Ok(_) | Err(_) => None,
        }
    }

    fn unsaid() -> EngineError {
        let message = "the server does not say whether it can sleep";
        EngineError::new(ErrorKind::Unavailable, message)
    }

    /// Makes the server sleep. Its level 1 keeps the weights in host memory and restores them on wake-up. Its level 2 is not
    /// used: the weights would have to be loaded again.
    pub(crate) async fn sleep(
        server: &Server,
        level: SleepLevel,
        limit: Duration,
    ) -> Result<(), Failed> {
        match level {
            SleepLevel::Weights => tell(server, "/sleep?level=1", "", limit).await,
            SleepLevel::KvCache => {
                tell(server, "/sleep?level=0", "", limit).await?;
                tell(server, RELEASE_KV_CACHE, "", limit).await
            }
        }
    }

    #[derive(Debug, Default, Deserialize)]
    #[serde(default)]
    struct Woken {
        status: Option<String>,
    }

    /// Wakes the server, or resumes it after a failed sleep.
    pub(crate) async fn wake(server: &Server, limit: Duration) -> Result<(), Failed> {
        let answer = ask(server, "/wake_up", "", limit).await?;
        // Older versions return nothing.
        let woken: Woken = serde_json::from_slice(&answer).unwrap_or_default();
        match woken.status.as_deref() {
            Some("sleeping") => {
                let message = "the server says that it still sleeps";
                let error = EngineError::new(ErrorKind::Unavailable, message);
                Err(Failed::Refused(error))
            }
            Some(_) | None => Ok(()),
        }
    }

    #[derive(Debug, Default, Deserialize)]
    #[serde(default)]
    struct Reset {
        success: Option<bool>,
    }

    /// Clears the prefix cache. If requests run, the first call clears nothing and says so (older versions do not report
    /// success at all). The second call makes the server recompute those requests.
    pub(crate) async fn clear(server: &Server) -> Result<(), Failed> {
        if reset(server, "/reset_prefix_cache").await? == Some(true) {
            return Ok(());
        }
        let message = "requests under way hold KV blocks; ask again";
        let held = EngineError::new(ErrorKind::Unavailable, message);
        let again = "/reset_prefix_cache?reset_running_requests=true";
        match reset(server, again).await {
            Ok(Some(false)) => Err(Failed::Refused(held)),
            Ok(Some(true) | None) => Ok(()),
            // Blocks in transfer cannot be cleared; the server reports that as an internal error.
            Err(Failed::Refused(error)) if error.kind() == ErrorKind::Internal => {
                Err(Failed::Refused(held.with_source(error)))
            }
            Err(failed) => Err(failed),
        }
    }

    /// Tries to clear the prefix cache; returns whether it was cleared, if the server says so.
    async fn reset(server: &Server, path: &str) -> Result<Option<bool>, Failed> {
        let answer = ask(server, path, "", QUICK).await?;
        let reset: Reset = serde_json::from_slice(&answer).unwrap_or_default();
        Ok(reset.success)
    }

    pub(crate) async fn start_profile(server: &Server) -> Result<(), Failed> {
        tell(server, "/start_profile", "", QUICK).await
    }

    /// Whether the server loads adapters while it serves.
    pub(crate) async fn loads_adapters(server: &Server) -> bool {
        has_post(server, LOAD_ADAPTER).await == Some(true)
    }

    /// Loads the adapter in a folder, under a name that no loaded adapter has.
    pub(crate) async fn load_adapter(
        server: &Server,
        name: &str,
        folder: &str,
        limit: Duration,
    ) -> Result<(), Failed> {
        let body = json!({"lora_name": name, "lora_path": folder}).to_string();
        tell(server, LOAD_ADAPTER, body, limit).await
    }

    /// Unloads an adapter. Running requests with it continue: the server loads it again for them, from its folder.
    pub(crate) async fn unload_adapter(server: &Server, name: &str) -> Result<(), Failed> {
        let body = json!({ "lora_name": name }).to_string();
        tell(server, "/v1/unload_lora_adapter", body, QUICK).await
    }
}

/// SGLang's routes.
pub(crate) mod sglang {
    use std::time::Duration;

    use genset_backend_common::{EngineError, ErrorKind, controls::SleepLevel};
    use serde::Deserialize;
    use serde_json::{Value, json};
    use tokio::time::{Instant, timeout};

    use super::{Failed, QUICK, ask, tell};
    use crate::server::Server;

    /// How long a server without requests may take to become idle: cancelled requests may still run.
    const IDLE: Duration = Duration::from_secs(30);
    /// The pause between two checks.
    const IDLE_PAUSE: Duration = Duration::from_millis(100);

    /// The options that the server was started with.
    #[derive(Debug, Clone, Copy, Default, Deserialize)]
    #[serde(default)]
    pub(crate) struct Started {
        pub(crate) enable_memory_saver: bool,
        pub(crate) enable_weights_cpu_backup: bool,
    }

    /// Queries the start options.
    ///
    /// # Errors
    /// `Unavailable` if it does not answer.
    pub(crate) async fn started(server: &Server) -> Result<Started, EngineError> {
        match timeout(QUICK, server.client.get("/server_info")).await {
            Ok(Ok(started)) => Ok(started),
            Ok(Err(_)) | Err(_) => {
                let message = "the server does not say what it was started with";
                Err(EngineError::new(ErrorKind::Unavailable, message))
            }
        }
    }

    /// Waits until the server is idle, and clears its prefix cache. Newer versions do the waiting.
    pub(crate) async fn idle(server: &Server) -> Result<(), EngineError> {
        let deadline = Instant::now() + IDLE;
        loop {
            let path = "/flush_cache?timeout=5";
            match ask(server, path, "", QUICK).await {
                Ok(_) => return Ok(()),
                Err(Failed::Refused(error)) if Instant::now() >= deadline => {
                    return Err(busy(&error));
                }
                Err(Failed::Refused(_)) => tokio::time::sleep(IDLE_PAUSE).await,
                Err(Failed::Lost(error)) => return Err(error),
            }
        }
    }

    /// Clears the prefix cache, if the server becomes idle within seconds.
    pub(crate) async fn clear(server: &Server) -> Result<(), EngineError> {
        match ask(server, "/flush_cache?timeout=5", "", QUICK).await {
            Ok(_) => Ok(()),
            Err(Failed::Refused(error)) => Err(busy(&error)),
            Err(Failed::Lost(error)) => Err(error),
        }
    }

    fn busy(error: &EngineError) -> EngineError {
        let message = format!(
            "SGLang does this only while no request runs; ask again ({})",
            error.message()
        );
        EngineError::new(ErrorKind::Unavailable, message)
    }

    /// The tags to release for a level, if the server already sleeps at the level `behind`.
    fn tags(level: SleepLevel, behind: Option<SleepLevel>) -> &'static [&'static str] {
        match (level, behind) {
            (SleepLevel::KvCache, _) => &["kv_cache"],
            (SleepLevel::Weights, None) => &["kv_cache", "weights"],
            (SleepLevel::Weights, Some(_)) => &["weights"],
        }
    }

    /// Releases the memory of an idle server; if it already sleeps, the rest of it.
    pub(crate) async fn sleep(
        server: &Server,
        level: SleepLevel,
        behind: Option<SleepLevel>,
        limit: Duration,
    ) -> Result<(), Failed> {
        let body = json!({"tags": tags(level, behind)}).to_string();
        tell(server, "/release_memory_occupation", body, limit).await
    }

    /// Restores what a level released.
    pub(crate) async fn wake(
        server: &Server,
        level: SleepLevel,
        limit: Duration,
    ) -> Result<(), Failed> {
        let body = json!({"tags": tags(level, None)}).to_string();
        tell(server, "/resume_memory_occupation", body, limit).await
    }

    /// Replaces the weights of an idle server.
    pub(crate) async fn update_weights(
        server: &Server,
        source: &Value,
        limit: Duration,
    ) -> Result<(), Failed> {
        let path = "/update_weights_from_disk";
        tell(server, path, source.to_string(), limit).await
    }

    pub(crate) async fn start_profile(server: &Server, folder: &str) -> Result<(), Failed> {
        let body = json!({"output_dir": folder}).to_string();
        tell(server, "/start_profile", body, QUICK).await
    }
}

/// Ends a profile of either server. Writing the profile takes a while.
pub(crate) async fn stop_profile(server: &Server, limit: Duration) -> Result<(), Failed> {
    tell(server, "/stop_profile", "", limit).await
}
