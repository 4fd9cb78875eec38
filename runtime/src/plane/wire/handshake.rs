//! The first frames of a connection: `Hello` each way and, if there is a secret, `Auth` each way.
//!
//! The caller speaks first, so that a listener reveals nothing to a stranger. A refused peer receives a `GoAway` with the
//! reason. The proofs are keyed BLAKE2b (RFC 7693) over role and both nonces: the secret is never sent, a recorded proof is
//! useless later, and one end cannot reflect the other's.

use bytes::Bytes;
use genset_wire::{
    Auth, FrameDecoder, FrameKind, GoAway, GoAwayCode, Greeting, GreetingError, Hello,
};
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, join};

use super::config::{MIN_FRAME_BYTES, WireConfig, WireSecret};
use super::transport::{Io, Refusal};

/// Bytes of a nonce.
const NONCE_BYTES: usize = 32;

/// The minimum length of a peer's nonce, in bytes, for us to give a proof over it.
const MIN_NONCE_BYTES: usize = 16;

/// The first bytes of a TLS connection.
const TLS_HANDSHAKE: [u8; 2] = [22, 3];

/// Which end of a connection this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// Dials and opens streams.
    Caller,
    /// Accepts and serves streams.
    Callee,
}

impl Role {
    fn proof_label(self) -> &'static [u8] {
        match self {
            Self::Caller => b"genset wire caller",
            Self::Callee => b"genset wire callee",
        }
    }

    fn other(self) -> Self {
        match self {
            Self::Caller => Self::Callee,
            Self::Callee => Self::Caller,
        }
    }
}

/// Why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    #[error("the peer closed the connection in the handshake")]
    Closed,
    #[error("{}", io_problem(.0))]
    Io(#[source] std::io::Error),
    #[error("the peer does not speak this protocol: {0}")]
    NotOurs(String),
    #[error("{0}")]
    Version(String),
    #[error("the peer takes frames of {0} bytes at most, and must take {MIN_FRAME_BYTES}")]
    FrameLimit(u32),
    #[error("{0}")]
    Unauthorized(String),
    #[error("the peer refused the connection: {}", .0.reason)]
    Refused(GoAway),
    #[error("the handshake took too long")]
    TimedOut,
}

impl From<GreetingError> for HandshakeError {
    fn from(error: GreetingError) -> Self {
        match error {
            GreetingError::Closed => Self::Closed,
            GreetingError::Io(error) => Self::Io(error),
            GreetingError::NoFrames(error) => Self::NotOurs(error.to_string()),
            GreetingError::Unexpected(problem) => Self::NotOurs(problem),
            GreetingError::Refused(go_away) => Self::Refused(go_away),
        }
    }
}

impl HandshakeError {
    /// The `GoAway` for the peer, if any: a stranger that speaks another protocol receives nothing.
    fn told(&self) -> Option<GoAway> {
        let code = match self {
            Self::Version(_) => GoAwayCode::Version,
            Self::FrameLimit(_) => GoAwayCode::Protocol,
            Self::Unauthorized(_) => GoAwayCode::Unauthorized,
            Self::Closed | Self::Io(_) | Self::NotOurs(_) | Self::Refused(_) | Self::TimedOut => {
                return None;
            }
        };
        Some(GoAway {
            code,
            reason: self.to_string(),
        })
    }

    /// The label in metrics.
    pub(super) fn label(&self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Io(error) => refusal(error).map_or("closed", |refusal| refusal.label),
            Self::NotOurs(_) => "not_our_protocol",
            Self::Version(_) => "version",
            Self::FrameLimit(_) => "frame_limit",
            Self::Unauthorized(_) => "unauthorized",
            Self::Refused(_) => "refused_by_peer",
            Self::TimedOut => "timeout",
        }
    }
}

/// The transport's refusal of the peer, if the error is one.
fn refusal(error: &std::io::Error) -> Option<&Refusal> {
    error.get_ref()?.downcast_ref()
}

fn io_problem(error: &std::io::Error) -> String {
    match refusal(error) {
        Some(refusal) => refusal.problem.clone(),
        None => format!("the connection broke in the handshake: {error}"),
    }
}

/// A peer after the handshake.
#[derive(Debug)]
pub(super) struct Greeted {
    /// Its `Hello`.
    pub(super) hello: Hello,
    /// The caller's nonce and the callee's.
    pub(super) nonces: [Bytes; 2],
    /// Holds the bytes that it sent after its last handshake frame.
    pub(super) decoder: FrameDecoder,
}

/// Performs the handshake within the configured time.
///
/// # Errors
/// [`HandshakeError`]; the peer received the reason.
pub(super) async fn greet(
    io: &mut Io,
    role: Role,
    config: &WireConfig,
) -> Result<Greeted, HandshakeError> {
    let greeting = async {
        let mut handshake = Handshake {
            greeting: Greeting::new(join(&mut io.reader, &mut io.writer)),
            role,
            config,
        };
        let greeted = handshake.run().await;
        if let Err(error) = &greeted
            && let Some(go_away) = error.told()
        {
            // The peer may be gone; the refusal stands.
            let _ = handshake.greeting.send(FrameKind::GoAway, &go_away).await;
        }
        greeted.map(|(ours, hello)| {
            let nonces = match role {
                Role::Caller => [ours.nonce, hello.nonce.clone()],
                Role::Callee => [hello.nonce.clone(), ours.nonce],
            };
            Greeted {
                hello,
                nonces,
                decoder: handshake.greeting.into_decoder(config.max_frame_bytes),
            }
        })
    };
    tokio::time::timeout(config.connect_timeout, greeting)
        .await
        .unwrap_or(Err(HandshakeError::TimedOut))
}

/// Refuses a caller, before the greeting or after it.
pub(super) async fn refuse(mut io: Io, go_away: &GoAway) {
    let mut greeting = Greeting::new(join(&mut io.reader, &mut io.writer));
    // The caller may be gone already.
    if greeting.send(FrameKind::GoAway, go_away).await.is_ok() {
        let _ = io.writer.shutdown().await;
    }
}

struct Handshake<'a, S> {
    greeting: Greeting<S>,
    role: Role,
    config: &'a WireConfig,
}

impl<S: AsyncRead + AsyncWrite + Unpin> Handshake<'_, S> {
    /// Our `Hello` and the peer's.
    async fn run(&mut self) -> Result<(Hello, Hello), HandshakeError> {
        let ours = self.hello();
        let theirs: Hello = match self.role {
            Role::Caller => {
                self.greeting.send(FrameKind::Hello, &ours).await?;
                self.receive(FrameKind::Hello).await?
            }
            Role::Callee => {
                let theirs = self.receive(FrameKind::Hello).await?;
                self.greeting.send(FrameKind::Hello, &ours).await?;
                theirs
            }
        };
        ours.agree(&theirs)
            .map_err(|error| HandshakeError::Version(error.message().to_owned()))?;
        if usize::try_from(theirs.max_frame_bytes).is_ok_and(|limit| limit < MIN_FRAME_BYTES) {
            return Err(HandshakeError::FrameLimit(theirs.max_frame_bytes));
        }
        if let Some(secret) = self.secret_for(&theirs)? {
            self.authenticate(&secret, &ours, &theirs).await?;
        }
        Ok((ours, theirs))
    }

    fn hello(&self) -> Hello {
        let nonce: [u8; NONCE_BYTES] = rand::random();
        Hello {
            has_secret: self.config.secret.is_some(),
            nonce: Bytes::copy_from_slice(&nonce),
            ..Hello::new(u32::try_from(self.config.max_frame_bytes).unwrap_or(u32::MAX))
        }
    }

    /// The secret to prove, if both ends have one.
    fn secret_for(&self, theirs: &Hello) -> Result<Option<WireSecret>, HandshakeError> {
        let unauthorized = |text: &str| Err(HandshakeError::Unauthorized(text.into()));
        match (&self.config.secret, theirs.has_secret) {
            (None, false) => Ok(None),
            (Some(_), false) => unauthorized(
                "a shared secret is required here and the peer has none; start both ends with the same --wire-secret-file",
            ),
            (None, true) => unauthorized(
                "the peer requires a shared secret and there is none here; start both ends with the same --wire-secret-file",
            ),
            (Some(_), true) if theirs.nonce.len() < MIN_NONCE_BYTES => {
                unauthorized("the peer's nonce is shorter than 16 bytes")
            }
            (Some(secret), true) => Ok(Some(secret.clone())),
        }
    }

    async fn authenticate(
        &mut self,
        secret: &WireSecret,
        ours: &Hello,
        theirs: &Hello,
    ) -> Result<(), HandshakeError> {
        let [caller, callee] = match self.role {
            Role::Caller => [&ours.nonce, &theirs.nonce],
            Role::Callee => [&theirs.nonce, &ours.nonce],
        };
        let proof = |role: Role| secret.proof(&[role.proof_label(), caller, callee]);
        let our_proof = Auth {
            proof: proof(self.role),
        };
        let expected = proof(self.role.other());
        // The caller proves first: a callee gives no proof to a stranger.
        if self.role == Role::Caller {
            self.greeting.send(FrameKind::Auth, &our_proof).await?;
        }
        let their_proof: Auth = self.receive(FrameKind::Auth).await?;
        if !constant_time_eq::constant_time_eq(&their_proof.proof, &expected) {
            return Err(HandshakeError::Unauthorized(
                "the peer's shared secret differs from ours; start both ends with the same --wire-secret-file".into(),
            ));
        }
        if self.role == Role::Callee {
            self.greeting.send(FrameKind::Auth, &our_proof).await?;
        }
        Ok(())
    }

    async fn receive<T: DeserializeOwned>(
        &mut self,
        wanted: FrameKind,
    ) -> Result<T, HandshakeError> {
        match self.greeting.receive(wanted).await {
            Err(GreetingError::NoFrames(_))
                if self.greeting.unread().starts_with(&TLS_HANDSHAKE) =>
            {
                let problem = "it speaks TLS, and there is none here; start both ends with the --wire-tls flags, or neither";
                Err(HandshakeError::NotOurs(problem.into()))
            }
            received => Ok(received?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::metrics::OF_STRANGERS;
    use super::*;

    #[test]
    fn every_failure_is_counted_as_a_strangers() {
        let go_away = GoAway {
            code: GoAwayCode::Unauthorized,
            reason: String::new(),
        };
        for error in [
            HandshakeError::Closed,
            HandshakeError::Io(std::io::ErrorKind::BrokenPipe.into()),
            HandshakeError::NotOurs(String::new()),
            HandshakeError::Version(String::new()),
            HandshakeError::FrameLimit(0),
            HandshakeError::Unauthorized(String::new()),
            HandshakeError::Refused(go_away),
            HandshakeError::TimedOut,
        ] {
            assert!(OF_STRANGERS.contains(&error.label()), "{}", error.label());
        }
    }

    /// Other implementations are tested with the document's test vectors.
    #[test]
    fn proofs_are_those_of_the_document() {
        let document = include_str!("../../../../docs/wire-protocol.md");
        let vector = |name: &str| {
            let lines = document.lines();
            let mut values = lines.filter_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
            let value = values.next().unwrap_or_else(|| panic!("no {name:?}"));
            value.trim().to_owned()
        };
        let bytes = |name: &str| {
            let hex = vector(name);
            let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
            (0..hex.len()).step_by(2).map(byte).collect::<Bytes>()
        };
        let secret = WireSecret::try_new(vector("secret").as_bytes()).unwrap();
        let (caller, callee) = (bytes("caller nonce"), bytes("callee nonce"));
        for (role, name) in [
            (Role::Caller, "caller proof"),
            (Role::Callee, "callee proof"),
        ] {
            let proof = secret.proof(&[role.proof_label(), &caller, &callee]);
            assert_eq!(proof, bytes(name));
        }
    }
}
