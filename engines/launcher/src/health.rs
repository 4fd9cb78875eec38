//! The server's health: awaited at its start, and watched while it serves.

use std::time::Duration;

use genset_backend_common::ProgressReporter;
use genset_process::Tail;
use tokio::time::{Instant, sleep, timeout};

use crate::dialect::Dialect;
use crate::failure::ServerFailure;
use crate::http::Client;
use crate::server::Server;

/// The interval between health checks during the start.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// The time limit of one health check.
const ASK_TIMEOUT: Duration = Duration::from_secs(10);
/// The maximum length of a line shown as progress, in characters.
const STAGE_CHARS: usize = 160;

/// Whether the server reports that it is healthy, at this path.
pub(crate) async fn is_healthy(client: &Client, path: &str) -> bool {
    let asked = timeout(ASK_TIMEOUT, client.status(path)).await;
    matches!(asked, Ok(Ok(status)) if status.is_success())
}

/// Waits until the server is healthy; reports its last line as progress.
pub(crate) async fn awaited(
    client: &Client,
    dialect: Dialect,
    tail: &Tail,
    progress: &ProgressReporter,
) {
    let title = dialect.kind().title();
    let mut told = None;
    while !is_healthy(client, dialect.health_path()).await {
        let line = tail.last();
        if line.is_some() && line != told {
            let shown: String = line
                .iter()
                .flat_map(|line| line.chars())
                .take(STAGE_CHARS)
                .collect();
            progress.report(&format!("{title}: {shown}"), None);
            told = line;
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Watches a serving server; returns once it has been unhealthy for `limit`. Time in which it is busy does not count, nor does
/// time in which it answers requests: each may take a thread of its HTTP server, and then none is left for this question.
///
/// # Source
/// llama-server before March 2026 (<https://github.com/ggml-org/llama.cpp/pull/20817>): as many threads as slots and a few more.
pub(crate) async fn watched(server: &Server, interval: Duration, limit: Duration) -> ServerFailure {
    let mut last = Instant::now();
    loop {
        sleep(interval).await;
        let was_busy = server.is_busy();
        if server.is_healthy().await || was_busy || server.is_busy() {
            last = Instant::now();
            continue;
        }
        last = last.max(server.heard_at());
        if last.elapsed() >= limit {
            return ServerFailure::Hung { silent_for: limit };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use tokio_util::task::TaskTracker;

    use super::*;
    use crate::key::ApiKey;

    /// No server listens there.
    fn server() -> Server {
        Server::new(Dialect::Sglang, 1, &ApiKey::random(), TaskTracker::new())
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_answers_requests_need_not_say_that_it_is_healthy() {
        let server = server();
        let limit = Duration::from_secs(60);
        let mut watched = pin!(watched(&server, Duration::from_secs(5), limit));
        for _ in 0..10 {
            server.hear();
            let early = timeout(Duration::from_secs(50), &mut watched).await;
            assert!(early.is_err(), "{early:?}");
        }
        let failure = watched.await;
        assert_eq!(failure, ServerFailure::Hung { silent_for: limit });
        assert!(server.heard_at().elapsed() >= limit);
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_is_busy_may_be_silent() {
        let server = server();
        let busy = server.busy.lock().await;
        let limit = Duration::from_secs(60);
        let mut watched = pin!(watched(&server, Duration::from_secs(5), limit));
        let early = timeout(Duration::from_secs(1800), &mut watched).await;
        assert!(early.is_err(), "{early:?}");
        let done = Instant::now();
        drop(busy);
        let failure = watched.await;
        assert_eq!(failure, ServerFailure::Hung { silent_for: limit });
        assert!(done.elapsed() >= Duration::from_secs(45));
    }
}
