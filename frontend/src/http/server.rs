//! [`FrontendServer`]: the whole server, from `bind` to `shutdown`.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::CancelReason;
use genset_runtime::{Runtime, TcpAcceptor};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::connection::Acceptor;
use super::handlers::{App, router};
use super::tls::Tls;
use crate::batch::run::Stops;
use crate::batch::store::BatchStore;
use crate::config::{AllowedHost, FrontendConfig};
use crate::keys::{ApiKeys, KeyFileError};
use crate::model::Models;

/// How long a shutdown waits for aborted tasks. A task that blocks its thread cannot be aborted.
const TASK_END_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a server did not start.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The server cannot listen on the address.
    #[error("cannot listen on {address}: {source}")]
    Address {
        /// The config's address.
        address: SocketAddr,
        /// The cause.
        source: io::Error,
    },
    /// The file of API keys cannot be used.
    #[error(transparent)]
    Keys(#[from] KeyFileError),
    /// Something else that the config names cannot be used; the error says what.
    #[error(transparent)]
    Config(#[from] io::Error),
}

impl From<BindError> for io::Error {
    fn from(error: BindError) -> Self {
        let kind = match &error {
            BindError::Address { source, .. } | BindError::Config(source) => source.kind(),
            BindError::Keys(_) => io::ErrorKind::Other,
        };
        Self::new(kind, error)
    }
}

/// The OpenAI-compatible server. It serves all models that live workers of its runtime serve.
///
/// # Examples
/// ```no_run
/// use std::time::Duration;
/// use genset_frontend::{FrontendConfig, FrontendServer};
/// use genset_runtime::Runtime;
///
/// # async fn serve() -> std::io::Result<()> {
/// let server = FrontendServer::bind(&Runtime::in_process(), FrontendConfig::default()).await?;
/// println!("listening on http://{}", server.address());
/// // ... until a signal comes:
/// server.drain();
/// server.shutdown(Duration::from_secs(5)).await;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct FrontendServer {
    address: SocketAddr,
    /// Without batches: their folder is free for another server once this one is shut down.
    app: App,
    tasks: TaskTracker,
    closing: CancellationToken,
    aborting: CancellationToken,
}

impl FrontendServer {
    /// Listens on the address, and starts to follow the runtime's models.
    ///
    /// # Errors
    /// When it cannot listen on the address, or the config names an unknown parser, an unusable key file or batch folder, or an
    /// invalid certificate.
    pub async fn bind(runtime: &Runtime, config: FrontendConfig) -> Result<Self, BindError> {
        config.parsers.check().map_err(io::Error::other)?;
        let tls = config.tls.as_ref().map(Tls::try_new).transpose()?;
        let keys = config.api_keys.clone();
        let keys = keys.map(|path| ApiKeys::load(path, runtime.metrics()));
        let keys = keys.transpose()?;
        let batches = config.batches.clone();
        let store = match batches.folder.clone() {
            Some(folder) => {
                let opened = tokio::task::spawn_blocking(move || BatchStore::open(folder, batches));
                Some(opened.await.map_err(io::Error::other)??)
            }
            None => None,
        };
        let listener = TcpListener::bind(config.address).await;
        let listener = listener.map_err(|source| BindError::Address {
            address: config.address,
            source,
        })?;
        let address = listener.local_addr()?;
        if let Some(warning) = warning_of(&config, address) {
            tracing::warn!("{warning}");
        }
        let models = Models::follow(runtime, &config);
        let (config, draining) = (Arc::new(config), CancellationToken::new());
        let app = App::new(runtime, models, Arc::clone(&config), keys.clone(), draining);
        let server = Self {
            address,
            app: app.clone(),
            tasks: TaskTracker::new(),
            closing: CancellationToken::new(),
            aborting: CancellationToken::new(),
        };
        let app = match store {
            Some(store) => {
                let stops = Stops {
                    tasks: server.tasks.clone(),
                    draining: app.draining.clone(),
                    aborting: server.aborting.clone(),
                };
                app.with_batches(store, stops)
            }
            None => app,
        };
        if let Some(batches) = &app.batches {
            batches.resume();
        }
        if let Some(keys) = keys {
            server.tasks.spawn(keys.follow(server.closing.clone()));
        }
        let acceptor = Acceptor {
            listener: TcpAcceptor::new(listener),
            router: router(app),
            tls,
            config,
            metrics: server.app.metrics.clone(),
            tasks: server.tasks.clone(),
            draining: server.app.draining.clone(),
            closing: server.closing.clone(),
            aborting: server.aborting.clone(),
        };
        server.tasks.spawn(acceptor.run());
        Ok(server)
    }

    /// The address that it listens on.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The models it serves.
    #[must_use]
    pub fn models(&self) -> &Models {
        &self.app.models
    }

    /// Refuses new requests with a 503 from now on; `/health` returns 503 too. Requests under way continue. Each answer ends its
    /// connection.
    pub fn drain(&self) {
        self.app.draining.cancel();
    }

    /// Whether new requests are refused.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.app.draining.is_cancelled()
    }

    /// Waits until no request is under way, including those of batches. More may arrive later, unless the server drains: it does
    /// not wait for those it refuses then.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped.
    pub async fn idle(&self) {
        self.app.metrics.idle().await;
    }

    /// Ends every request under way at once: a stream with an error event, others with a 503. Both tell the client to send it
    /// again. Like [`drain`](Self::drain), it refuses new requests.
    pub fn cut_short(&self) {
        self.app.draining.cancel();
        self.app.all_requests.cancel(CancelReason::Shutdown);
    }

    /// Closes the listener and lets open connections finish their requests for `grace`. Then drops the rest, and waits until no
    /// task of the server is alive, unless an engine blocks one. Returns whether nothing had to be dropped.
    ///
    /// # Cancel safety
    /// The server is closing, but may have live tasks, when the future is dropped; call it again.
    pub async fn shutdown(&self, grace: Duration) -> bool {
        self.app.draining.cancel();
        self.closing.cancel();
        self.tasks.close();
        let finished = tokio::time::timeout(grace, self.tasks.wait()).await.is_ok();
        if !finished {
            tracing::warn!(
                connections = self.tasks.len(),
                "connections dropped: the time to finish is over"
            );
            self.aborting.cancel();
            let dropped = tokio::time::timeout(TASK_END_TIMEOUT, self.tasks.wait());
            if dropped.await.is_err() {
                tracing::error!(
                    tasks = self.tasks.len(),
                    "tasks of the server block their threads and cannot be ended"
                );
            }
        }
        self.app.models.shutdown().await;
        finished
    }
}

/// Returns a warning for the operator if others can reach the server without a key.
fn warning_of(config: &FrontendConfig, address: SocketAddr) -> Option<String> {
    if config.api_keys.is_some() || config.is_for_this_machine() {
        return None;
    }
    let names = &config.allowed_hosts;
    let pages = if names.is_empty() || names.iter().any(AllowedHost::is_any) {
        ". A web page can reach it through the browser of anybody who opens the page (DNS rebinding); --allowed-hosts with \
         the names that clients use here prevents that"
    } else {
        ""
    };
    Some(format!(
        "{address} is reachable by others, and anybody who reaches it may use it; `genset key NAME` makes a key and a line \
         for the file of --api-keys{pages}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_task_that_cannot_be_ended_keeps_no_shutdown() {
        let config = FrontendConfig {
            address: "127.0.0.1:0".parse().unwrap(),
            ..FrontendConfig::default()
        };
        let server = FrontendServer::bind(&Runtime::in_process(), config).await;
        let server = server.unwrap();
        let _blocked = server.tasks.token();
        assert!(!server.shutdown(Duration::ZERO).await);
        assert_eq!(server.tasks.len(), 1);
    }

    #[test]
    fn only_who_others_can_ask_without_a_key_is_warned_and_told_how_to_make_one() {
        let config = |address: &str, keys: Option<&str>| FrontendConfig {
            address: address.parse().unwrap(),
            api_keys: keys.map(Into::into),
            ..FrontendConfig::default()
        };
        let warning = |config: FrontendConfig| warning_of(&config, config.address);
        for address in ["0.0.0.0:80", "[::]:80", "192.0.2.1:80", "[2001:db8::1]:80"] {
            let told = warning(config(address, None)).unwrap();
            assert!(told.contains("`genset key NAME` makes a key"), "{told}");
            for (names, is_told) in [("", true), ("gpu.example", false), ("*", true)] {
                let names = names
                    .split_terminator(',')
                    .map(|name| name.parse().unwrap());
                let told = warning(FrontendConfig {
                    allowed_hosts: names.collect(),
                    ..config(address, None)
                });
                assert_eq!(told.unwrap().contains("--allowed-hosts"), is_told);
            }
            assert_eq!(warning(config(address, Some("keys.toml"))), None);
        }
        for address in [
            "127.0.0.1:80",
            "127.1.2.3:80",
            "[::1]:80",
            "[::ffff:127.0.0.1]:80",
        ] {
            assert_eq!(warning(config(address, None)), None);
        }
    }
}
