//! Connections: accepted up to a limit, each on a task of its own, closed gracefully.

use std::future::poll_fn;
use std::io;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;

use axum::Router;
use axum::response::Response;
use genset_runtime::TcpAcceptor;
use http::{HeaderValue, header};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::util::MapResponse;

use super::metrics::{ConnectionGuard, HttpMetrics};
use super::peers::{PeerPlace, Peers};
use super::poll_again::PollAgain;
use super::stall::StallGuard;
use super::tls::Tls;
use crate::config::FrontendConfig;

/// The smallest header buffer that a connection works with.
const MIN_HEADER_BYTES: usize = 8192;

/// Accepts connections until it is closed.
pub(super) struct Acceptor {
    pub(super) listener: TcpAcceptor,
    pub(super) router: Router,
    /// `None` for plain HTTP.
    pub(super) tls: Option<Tls>,
    pub(super) config: Arc<FrontendConfig>,
    pub(super) metrics: HttpMetrics,
    pub(super) tasks: TaskTracker,
    /// Ends each connection with its next answer.
    pub(super) draining: CancellationToken,
    /// Takes no new connections; open ones finish their requests.
    pub(super) closing: CancellationToken,
    /// Drops open connections.
    pub(super) aborting: CancellationToken,
}

impl Acceptor {
    pub(super) async fn run(self) {
        let permits = Arc::new(Semaphore::new(
            self.config.max_connections.min(Semaphore::MAX_PERMITS),
        ));
        let peers = Peers::new(self.config.max_connections_per_peer);
        loop {
            let next = async {
                let permit = Arc::clone(&permits).acquire_owned().await;
                (permit, self.listener.accept().await)
            };
            let (permit, (stream, peer)) = tokio::select! {
                biased;
                () = self.closing.cancelled() => return,
                next = next => next,
            };
            let Ok(permit) = permit else {
                return;
            };
            self.greet(stream, peer.ip(), &peers, permit);
        }
    }

    /// Serves the connection, or closes it if its peer has too many.
    fn greet(&self, stream: TcpStream, peer: IpAddr, peers: &Peers, permit: OwnedSemaphorePermit) {
        match peers.enter(peer) {
            Some(place) => self.serve(stream, place, permit),
            None => {
                self.metrics.refuse_connection();
                tracing::debug!(%peer, "a connection was closed: its peer has too many");
            }
        }
    }

    fn serve(&self, stream: TcpStream, place: PeerPlace, permit: OwnedSemaphorePermit) {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY cannot be set; the peer has gone");
            return;
        }
        let connection = Connection {
            router: self.router.clone(),
            config: Arc::clone(&self.config),
            draining: self.draining.clone(),
            closing: self.closing.clone(),
            aborting: self.aborting.clone(),
            _places: (permit, place, self.metrics.connection()),
        };
        self.tasks.spawn(connection.run(stream, self.tls.clone()));
    }
}

/// Serves one open connection.
struct Connection {
    router: Router,
    config: Arc<FrontendConfig>,
    draining: CancellationToken,
    closing: CancellationToken,
    aborting: CancellationToken,
    _places: (OwnedSemaphorePermit, PeerPlace, ConnectionGuard),
}

impl Connection {
    async fn run(self, stream: TcpStream, tls: Option<Tls>) {
        let stream = StallGuard::new(stream, self.config.write_timeout);
        let Some(tls) = tls else {
            return self.serve(stream).await;
        };
        // Boxed: a TLS connection is kilobytes larger, and the tasks of plain connections would reserve that space too.
        Box::pin(self.greet_and_serve(stream, tls)).await;
    }

    async fn greet_and_serve(self, stream: StallGuard, tls: Tls) {
        let greeted = tokio::select! {
            biased;
            () = self.closing.cancelled() => return,
            greeted = tokio::time::timeout(self.config.header_timeout, tls.greet(stream)) => greeted,
        };
        match greeted {
            Ok(Ok(stream)) => self.serve(stream).await,
            Ok(Err(error)) => tracing::debug!(%error, "the TLS handshake with a client failed"),
            Err(_elapsed) => tracing::debug!("a client did not finish the TLS handshake in time"),
        }
    }

    async fn serve(self, stream: impl AsyncRead + AsyncWrite + Unpin) {
        let io = TokioIo::new(stream);
        // Each request clones the service, and the clone of a token takes a lock that all connections share.
        let draining = Arc::new(self.draining);
        // A client with connections of its own would send every further request to this server, and every attempt to repeat it.
        let end = move |mut response: Response| {
            if draining.is_cancelled() {
                let headers = response.headers_mut();
                headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            response
        };
        let service = TowerToHyperService::new(MapResponse::new(self.router, end));
        let serving = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.config.header_timeout)
            .max_buf_size(self.config.max_header_bytes.max(MIN_HEADER_BYTES))
            .serve_connection(io, service);
        let mut serving = pin!(serving);
        let again = PollAgain::new();
        let ended = tokio::select! {
            biased;
            ended = poll_fn(|cx| again.poll(serving.as_mut(), cx)) => ended,
            () = self.closing.cancelled() => {
                serving.as_mut().graceful_shutdown();
                tokio::select! {
                    biased;
                    ended = poll_fn(|cx| again.poll(serving.as_mut(), cx)) => ended,
                    () = self.aborting.cancelled() => Ok(()),
                }
            }
        };
        if let Err(error) = ended {
            log_end(&error);
        }
    }
}

/// Clients come and go: logs above debug level only what an operator can fix.
fn log_end(error: &hyper::Error) {
    let source =
        std::error::Error::source(error).and_then(|source| source.downcast_ref::<io::Error>());
    let is_stalled = source.is_some_and(|source| source.kind() == io::ErrorKind::TimedOut);
    if is_stalled {
        tracing::info!("a connection was closed: its client read nothing for too long");
    } else {
        tracing::debug!(%error, "a connection ended");
    }
}
