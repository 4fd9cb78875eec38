//! [`FrontendServer`]: the whole server, from `bind` to `shutdown`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use genset_runtime::Runtime;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::connection::Acceptor;
use super::handlers::{App, router};
use super::metrics::HttpMetrics;
use super::request_body::BodyBudget;
use super::tls::Tls;
use crate::config::FrontendConfig;
use crate::keys::ApiKeys;
use crate::model::Models;
use crate::responses::ResponseStore;

/// The OpenAI-compatible server. It serves whatever models live workers of its runtime serve.
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
    models: Models,
    tasks: TaskTracker,
    draining: CancellationToken,
    closing: CancellationToken,
    aborting: CancellationToken,
}

impl FrontendServer {
    /// Listens, and begins to follow the runtime's models.
    ///
    /// # Errors
    /// When the address cannot be listened on, or the config names a parser there is none of, a file of keys that cannot be
    /// used, or a certificate that is none.
    pub async fn bind(runtime: &Runtime, config: FrontendConfig) -> std::io::Result<Self> {
        config.parsers.check().map_err(std::io::Error::other)?;
        let tls = config.tls.as_ref().map(Tls::try_new).transpose()?;
        let keys = config.api_keys.clone();
        let keys = keys.map(|path| ApiKeys::load(path, runtime.metrics()));
        let keys = keys.transpose().map_err(std::io::Error::other)?;
        let listener = TcpListener::bind(config.address).await?;
        let address = listener.local_addr()?;
        let models = Models::follow(runtime, &config);
        let metrics = HttpMetrics::register(runtime.metrics(), config.access_log);
        let config = Arc::new(config);
        let server = Self {
            address,
            models: models.clone(),
            tasks: TaskTracker::new(),
            draining: CancellationToken::new(),
            closing: CancellationToken::new(),
            aborting: CancellationToken::new(),
        };
        let app = App {
            models,
            config: Arc::clone(&config),
            metrics: metrics.clone(),
            registry: runtime.metrics().clone(),
            responses: Arc::new(ResponseStore::new(
                config.max_stored_responses,
                config.max_stored_bytes,
            )),
            bodies: BodyBudget::new(config.max_bodies_bytes),
            keys: keys.clone(),
            draining: server.draining.clone(),
        };
        if let Some(keys) = keys {
            server.tasks.spawn(keys.follow(server.closing.clone()));
        }
        let acceptor = Acceptor {
            listener,
            router: router(app),
            tls,
            config,
            metrics,
            tasks: server.tasks.clone(),
            closing: server.closing.clone(),
            aborting: server.aborting.clone(),
        };
        server.tasks.spawn(acceptor.run());
        Ok(server)
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The models it serves.
    #[must_use]
    pub fn models(&self) -> &Models {
        &self.models
    }

    /// From now on `/health` says 503 and new requests are refused with a 503; those under way go on.
    pub fn drain(&self) {
        self.draining.cancel();
    }

    /// Closes the listener, lets open connections finish their requests for `grace`, drops the rest, and waits until no task
    /// of the server is alive. Says whether nothing had to be dropped.
    ///
    /// # Cancel safety
    /// The server is closing, but may have live tasks, when the future is dropped; call it again.
    pub async fn shutdown(&self, grace: Duration) -> bool {
        self.draining.cancel();
        self.closing.cancel();
        self.tasks.close();
        let finished = tokio::time::timeout(grace, self.tasks.wait()).await.is_ok();
        if !finished {
            tracing::warn!(
                connections = self.tasks.len(),
                "connections dropped: the time to finish is over"
            );
            self.aborting.cancel();
            self.tasks.wait().await;
        }
        self.models.shutdown().await;
        finished
    }
}
