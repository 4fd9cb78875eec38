//! The connections of the status port: their number is small, and a new one evicts the oldest. So idle connections
//! exhaust neither memory nor file descriptors, and block no requests.

use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::accepting::TcpAcceptor;
use crate::strangers::{Stranger, Strangers};

/// Probes and scrapers hold one each, or none for long.
const MAX_CONNECTIONS: usize = 64;

/// The same, per peer.
const MAX_OF_PEER: usize = 32;

/// How long receiving a request's head may take, and how long a connection may wait for the next request.
const HEAD_TIME: Duration = Duration::from_secs(10);

/// The maximum size of a head in bytes.
const MAX_HEAD_BYTES: usize = 16 << 10;

/// Serves `router` as long as it is polled.
pub(super) async fn serve(listener: TcpListener, router: Router) {
    let places = Strangers::new(MAX_CONNECTIONS, MAX_OF_PEER);
    let mut connections = JoinSet::new();
    let acceptor = TcpAcceptor::new(listener);
    loop {
        let (stream, peer) = tokio::select! {
            accepted = acceptor.accept() => accepted,
            Some(_ended) = connections.join_next() => continue,
        };
        let place = places.enter(&peer.to_string());
        connections.spawn(connection(stream, place, router.clone()));
    }
}

async fn connection(stream: TcpStream, place: Stranger, router: Router) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "TCP_NODELAY cannot be set; the peer has gone");
        return;
    }
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_buf_size(MAX_HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    match place.until_evicted(serving).await {
        Some(Ok(())) => {}
        Some(Err(error)) => tracing::debug!(%error, "a connection to the status port ended"),
        None => tracing::debug!("a connection to the status port was closed for another"),
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn whoever_only_connects_keeps_out_nobody() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/live", get(|| async { "live\n" }));
        let asking = async {
            let mut idle = Vec::new();
            for _ in 0..3 * MAX_CONNECTIONS {
                idle.push(TcpStream::connect(address).await.unwrap());
            }
            let mut probe = TcpStream::connect(address).await.unwrap();
            let request = "GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
            probe.write_all(request.as_bytes()).await.unwrap();
            let mut answer = String::new();
            probe.read_to_string(&mut answer).await.unwrap();
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
            // All but the last of them were closed.
            for stream in &mut idle[..2 * MAX_CONNECTIONS] {
                assert_eq!(stream.read(&mut [0]).await.unwrap(), 0);
            }
        };
        tokio::select! {
            () = serve(listener, router) => unreachable!("it ends with its future"),
            () = asking => {}
        }
    }
}
