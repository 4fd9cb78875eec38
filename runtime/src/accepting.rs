//! [`TcpAcceptor`]: the connections to a port. Used by every server of this process.

use std::net::SocketAddr;
use std::time::Duration;

use genset_backend_common::log_limit::OncePerMinute;
use rustix::net::sockopt;
use tokio::net::{TcpListener, TcpStream};

/// Pause after the operating system refuses a connection, such as when it is out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// When the operating system asks the peer of a silent connection whether it still exists, and how often if it says nothing. After
/// `ASK_TIMES`, the connection is lost: about a minute.
const ASK_AFTER: Duration = Duration::from_secs(30);
const ASK_EVERY: Duration = Duration::from_secs(10);
const ASK_TIMES: u32 = 3;

/// Accepts connections, and tries again where the operating system refuses one. This is logged once a minute: it may last, and
/// clients can cause it.
#[derive(Debug)]
pub struct TcpAcceptor {
    listener: TcpListener,
    logged: OncePerMinute,
}

impl TcpAcceptor {
    /// Creates the acceptor of a listener.
    #[must_use]
    pub fn new(listener: TcpListener) -> Self {
        Self {
            listener,
            logged: OncePerMinute::default(),
        }
    }

    /// The next connection, and its peer.
    ///
    /// # Cancel safety
    /// If another branch of `select!` completes first, no connection was accepted.
    pub async fn accept(&self) -> (TcpStream, SocketAddr) {
        loop {
            match self.listener.accept().await {
                Ok((stream, peer)) => {
                    if let Err(error) = keep_alive(&stream) {
                        tracing::debug!(%error, "a peer that vanishes will not be noticed");
                    }
                    return (stream, peer);
                }
                Err(error) => {
                    if self.logged.may_log("accept") {
                        let address = self.listener.local_addr().ok();
                        let address = address.map(tracing::field::display);
                        tracing::warn!(address, %error, "a connection could not be accepted; logged once a minute");
                    }
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

/// Notices that a peer vanished without a word, as with its power or a route. The next write would notice it too, but that of a
/// whole answer comes at its end.
fn keep_alive(stream: &TcpStream) -> rustix::io::Result<()> {
    sockopt::set_tcp_keepidle(stream, ASK_AFTER)?;
    sockopt::set_tcp_keepintvl(stream, ASK_EVERY)?;
    sockopt::set_tcp_keepcnt(stream, ASK_TIMES)?;
    sockopt::set_socket_keepalive(stream, true)
}
