//! [`TcpAcceptor`]: the connections to a port. Used by every server of this process.

use std::net::SocketAddr;
use std::time::Duration;

use genset_backend_common::log_limit::OncePerMinute;
use tokio::net::{TcpListener, TcpStream};

/// Pause after the operating system refuses a connection, such as when it is out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

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
                Ok(accepted) => return accepted,
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
