//! [`WireConfig`]: the limits of wire connections.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use blake2b_simd::Params;
use bytes::Bytes;
use genset_backend_common::EngineError;
use genset_wire::MAX_FRAME_BYTES;

/// The smallest frame limit: large enough for a card with its artifacts' names.
pub(super) const MIN_FRAME_BYTES: usize = 64 << 10;

/// The smallest memory budget: room for a few requests.
const MIN_MEMORY_BYTES: usize = 1 << 20;

/// The limits of wire connections. The defaults suit a fleet in one data centre.
#[derive(Debug, Clone)]
pub struct WireConfig {
    /// The largest frame payload accepted from a peer, in bytes.
    pub max_frame_bytes: usize,
    /// Items of a stream in transit or unread by the caller; more wait at the callee.
    pub window_items: u32,
    /// How long an item may wait for a caller that reads nothing; then its stream ends.
    pub credit_timeout: Duration,
    /// Streams a peer may have open on one connection; more are refused as overloaded.
    pub max_streams: usize,
    /// The maximum number of accepted connections; more are refused.
    pub max_connections: usize,
    /// The maximum number of connections in the handshake; beyond it, the oldest is closed.
    pub max_strangers: usize,
    /// The same, per address.
    pub max_strangers_of_address: usize,
    /// The memory of requests and unread items in this process, in bytes; what exceeds it is refused as overloaded.
    pub max_memory_bytes: usize,
    /// The same, per connection.
    pub max_connection_memory_bytes: usize,
    /// Bytes that may wait for a connection's socket; beyond it, streams wait to send.
    pub max_outbox_bytes: usize,
    /// Silence after which the peer is pinged.
    pub ping_interval: Duration,
    /// Silence after which the peer counts as dead.
    pub peer_timeout: Duration,
    /// How long a peer may read nothing of what is written to it.
    pub write_timeout: Duration,
    /// Time limit for establishing a connection, handshake included. Connecting to NATS has its own.
    pub connect_timeout: Duration,
    /// A secret that both ends must know, if set, so that strangers cannot call. It authenticates the start of a connection;
    /// later traffic is neither encrypted nor authenticated without TLS.
    pub secret: Option<WireSecret>,
    /// A secret that callers of `control` must know. Without it, only listeners on loopback serve `control`.
    pub control_secret: Option<WireSecret>,
}

impl Default for WireConfig {
    fn default() -> Self {
        Self {
            max_frame_bytes: MAX_FRAME_BYTES,
            window_items: 128,
            credit_timeout: Duration::from_secs(120),
            max_streams: 16_384,
            max_connections: 4096,
            max_strangers: 512,
            max_strangers_of_address: 128,
            max_memory_bytes: 1 << 30,
            max_connection_memory_bytes: 512 << 20,
            max_outbox_bytes: 4 << 20,
            ping_interval: Duration::from_millis(500),
            peer_timeout: Duration::from_millis(1500),
            write_timeout: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(3),
            secret: None,
            control_secret: None,
        }
    }
}

impl WireConfig {
    /// Checks the limits and their relations.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the field.
    pub fn validate(&self) -> Result<(), EngineError> {
        let bad = |field, problem: String| Err(EngineError::invalid_argument(field, problem));
        if !(MIN_FRAME_BYTES..=MAX_FRAME_BYTES).contains(&self.max_frame_bytes) {
            return bad(
                "max_frame_bytes",
                format!("must be between {MIN_FRAME_BYTES} and {MAX_FRAME_BYTES} bytes"),
            );
        }
        if self.window_items < 2 {
            return bad("window_items", "must be at least 2".into());
        }
        if self.max_streams == 0 || self.max_connections == 0 || self.max_outbox_bytes == 0 {
            return bad(
                "max_streams, max_connections, max_outbox_bytes",
                "must be more than 0".into(),
            );
        }
        if self.max_strangers == 0 || self.max_strangers_of_address == 0 {
            return bad(
                "max_strangers, max_strangers_of_address",
                "must be more than 0".into(),
            );
        }
        if self.max_connection_memory_bytes < MIN_MEMORY_BYTES
            || self.max_memory_bytes < self.max_connection_memory_bytes
        {
            return bad(
                "--wire-memory-budget, --wire-connection-memory-budget",
                format!(
                    "must be at least {MIN_MEMORY_BYTES} bytes, and a connection's at most the process's"
                ),
            );
        }
        if self.ping_interval.is_zero() || self.peer_timeout < 2 * self.ping_interval {
            return bad(
                "peer_timeout",
                "must be at least twice ping_interval, which must be more than 0: a peer needs time to answer a ping"
                    .into(),
            );
        }
        if self.write_timeout.is_zero()
            || self.connect_timeout.is_zero()
            || self.credit_timeout.is_zero()
        {
            return bad(
                "write_timeout, connect_timeout, credit_timeout",
                "must be more than 0".into(),
            );
        }
        Ok(())
    }
}

/// A secret that both ends of a connection know. It is never sent and never displayed.
#[derive(Clone)]
pub struct WireSecret {
    bytes: Arc<[u8]>,
}

impl WireSecret {
    /// The minimum length of a secret in bytes: shorter ones could be guessed.
    pub const MIN_BYTES: usize = 16;

    /// Creates a secret of at least [`Self::MIN_BYTES`] bytes. Ignores surrounding white space: files end with a line break.
    ///
    /// # Errors
    /// `InvalidArgument` if it is shorter.
    pub fn try_new(bytes: &[u8]) -> Result<Self, EngineError> {
        let bytes = bytes.trim_ascii();
        if bytes.len() < Self::MIN_BYTES {
            let problem = format!(
                "has {} bytes and needs {}; `head -c 32 /dev/urandom | base64` makes a good one",
                bytes.len(),
                Self::MIN_BYTES
            );
            return Err(EngineError::invalid_argument("wire secret", problem));
        }
        Ok(Self {
            bytes: bytes.into(),
        })
    }

    /// Whether `given` is this secret, compared in constant time.
    pub(crate) fn is(&self, given: &[u8]) -> bool {
        constant_time_eq::constant_time_eq(given, &self.bytes)
    }

    /// A proof that its giver knows the secret: a keyed BLAKE2b over `parts`.
    pub(super) fn proof(&self, parts: &[&[u8]]) -> Bytes {
        // A key has at most 64 bytes; hashing first allows secrets of any length.
        let key = Params::new().hash_length(32).hash(&self.bytes);
        let mut hash = Params::new().hash_length(32).key(key.as_bytes()).to_state();
        for part in parts {
            hash.update(part);
        }
        Bytes::copy_from_slice(hash.finalize().as_bytes())
    }
}

impl fmt::Debug for WireSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WireSecret(hidden)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid_and_contradictions_are_named() {
        WireConfig::default().validate().unwrap();
        let impatient = WireConfig {
            peer_timeout: Duration::from_millis(600),
            ..WireConfig::default()
        };
        let error = impatient.validate().unwrap_err();
        assert!(error.to_string().contains("peer_timeout"), "{error}");
    }

    #[test]
    fn a_secret_is_long_enough_and_hidden() {
        let error = WireSecret::try_new(b"  short  \n").unwrap_err();
        assert!(error.to_string().contains("5 bytes"), "{error}");
        let secret = WireSecret::try_new(b"0123456789abcdef\n").unwrap();
        assert_eq!(&*secret.bytes, b"0123456789abcdef");
        assert_eq!(format!("{secret:?}"), "WireSecret(hidden)");
    }
}
