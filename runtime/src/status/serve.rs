//! The connections of the status port: their number is small, and a new one evicts the oldest. So idle connections
//! exhaust neither memory nor file descriptors, and block no requests.

use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::log_limit::LogLimit;
use crate::strangers::{Stranger, Strangers};

/// Probes and scrapers hold one each, or none for long.
const MAX_CONNECTIONS: usize = 64;

/// The same, per peer.
const MAX_OF_PEER: usize = 32;

/// How long receiving a request's head may take, and how long a connection may wait for the next request.
const HEAD_TIME: Duration = Duration::from_secs(10);

/// The maximum size of a head in bytes.
const MAX_HEAD_BYTES: usize = 16 << 10;

/// Pause after the operating system refuses a connection, such as when it is out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves `router` as long as it is polled.
pub(super) async fn serve(listener: TcpListener, router: Router) {
    let places = Strangers::new(MAX_CONNECTIONS, MAX_OF_PEER);
    let mut connections = JoinSet::new();
    let logged = LogLimit::default();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_ended) = connections.join_next() => continue,
        };
        match accepted {
            Ok((stream, peer)) => {
                let place = places.enter(&peer.to_string());
                connections.spawn(connection(stream, place, router.clone()));
            }
            Err(error) => {
                if logged.may_log("accept") {
                    tracing::warn!(%error, "a connection to the status port could not be accepted; logged once a minute");
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
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
    use std::net::UdpSocket;
    use std::os::fd::OwnedFd;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Level, Metadata, Subscriber};

    use super::*;

    /// Counts the warnings of a thread.
    struct Warnings(Arc<AtomicUsize>);

    impl Subscriber for Warnings {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            *metadata.level() <= Level::WARN
        }

        fn new_span(&self, _span: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }

        fn record(&self, _span: &Id, _values: &Record<'_>) {}

        fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

        fn event(&self, _event: &Event<'_>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }

        fn enter(&self, _span: &Id) {}

        fn exit(&self, _span: &Id) {}
    }

    /// A listener that is always ready and accepts nothing: its socket is one of UDP, with a datagram to read.
    fn failing_listener() -> TcpListener {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.send_to(b"x", socket.local_addr().unwrap()).unwrap();
        socket.set_nonblocking(true).unwrap();
        TcpListener::from_std(OwnedFd::from(socket).into()).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn that_no_connection_can_be_accepted_is_logged_once_a_minute() {
        let warnings = Arc::new(AtomicUsize::new(0));
        let _log = tracing::subscriber::set_default(Warnings(Arc::clone(&warnings)));
        let time = Duration::from_secs(60) + ACCEPT_PAUSE * 2;
        tokio::time::timeout(time, serve(failing_listener(), Router::new()))
            .await
            .unwrap_err();
        assert_eq!(warnings.load(Ordering::Relaxed), 2);
    }

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
