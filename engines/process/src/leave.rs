//! [`leave`]: a process that was told to go has some time for it.

use std::time::Duration;

use tokio::process::Child;
use tokio::time::timeout;

/// Waits until `child` has exited, for `limit` at most; says so in the log when it did not, and leaves it as it is.
pub async fn leave(child: &mut Child, limit: Duration, what: &str) {
    if timeout(limit, child.wait()).await.is_err() {
        tracing::warn!("{what} did not exit within {limit:?} after it was told to; it is killed");
    }
}
