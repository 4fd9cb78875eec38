//! Ports that accept nothing, and connections whose peers may vanish.

use std::net::UdpSocket;
use std::os::fd::OwnedFd;
use std::time::Duration;

use genset_runtime::TcpAcceptor;
use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpStream};

use crate::plane::Log;

/// A listener that is always ready and accepts nothing: its socket is one of UDP, with a datagram to read.
fn failing_listener() -> TcpListener {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.send_to(b"x", socket.local_addr().unwrap()).unwrap();
    socket.set_nonblocking(true).unwrap();
    TcpListener::from_std(OwnedFd::from(socket).into()).unwrap()
}

/// Whoever calls gives up each time, as one does that has other events.
#[tokio::test(start_paused = true)]
async fn that_no_connection_can_be_accepted_is_logged_once_a_minute() {
    let log = Log::watched();
    let acceptor = TcpAcceptor::new(failing_listener());
    for seconds in [30, 31] {
        let time = Duration::from_secs(seconds);
        tokio::time::timeout(time, acceptor.accept())
            .await
            .unwrap_err();
    }
    assert_eq!(log.lines(), 2);
}

#[tokio::test]
async fn a_peer_that_is_silent_is_asked_whether_it_exists() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let acceptor = TcpAcceptor::new(listener);
    let (near, (far, _)) = tokio::join!(TcpStream::connect(address), acceptor.accept());
    assert!(sockopt::socket_keepalive(&far).unwrap());
    assert!(sockopt::tcp_keepidle(&far).unwrap() < Duration::from_secs(60));
    drop(near.unwrap());
}
