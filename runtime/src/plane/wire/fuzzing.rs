//! The handshake with a peer that sends given bytes.

use tokio::runtime::Builder;

use super::config::{WireConfig, WireSecret};
use super::handshake::{Role, greet as greet_peer};
use super::transport::Io;

const SECRET: &[u8] = b"a secret that no stranger knows!";

/// Whether the handshake succeeds with a peer that sends these bytes and then nothing, for a caller or a callee, with or without
/// a secret.
///
/// # Panics
/// If no runtime can be created.
#[must_use]
#[expect(clippy::expect_used, reason = "fuzz targets report by panics")]
pub fn greet(sent: &[u8], is_caller: bool, has_secret: bool) -> bool {
    let secret = has_secret.then(|| WireSecret::try_new(SECRET).expect("the secret is long"));
    let config = WireConfig {
        secret,
        ..WireConfig::default()
    };
    let role = if is_caller {
        Role::Caller
    } else {
        Role::Callee
    };
    let mut io = Io {
        reader: Box::new(std::io::Cursor::new(sent.to_vec())),
        writer: Box::new(tokio::io::sink()),
        peer: "fuzz".into(),
    };
    let runtime = Builder::new_current_thread().enable_time().build();
    let runtime = runtime.expect("a runtime can be made");
    let greeted = runtime.block_on(greet_peer(&mut io, role, &config));
    greeted.is_ok()
}
