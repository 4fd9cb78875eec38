//! The right to use `control`: it changes a worker for all its users, so access to the worker is not enough.
//!
//! With a control secret, each request to `control` carries a proof over both nonces of the connection, the stream's id and the
//! request: an observed proof is useless for another request. Without a secret, only listeners that this machine alone
//! reaches serve `control`.

use bytes::Bytes;
use genset_backend_common::{EngineError, error::At};

use super::config::WireSecret;
use crate::registrar::endpoints;

/// The prefix of each proof.
const LABEL: &[u8] = b"genset wire control";

/// What one end of a connection needs to prove or check the right.
#[derive(Debug, Clone)]
pub(super) struct ControlRight {
    /// The secret, if this process has one.
    pub(super) secret: Option<WireSecret>,
    /// The caller's nonce and the callee's.
    pub(super) nonces: [Bytes; 2],
    /// Whether only processes of this machine can reach our listener.
    pub(super) is_local: bool,
}

/// Whether the endpoint with this full name needs the right.
fn is_control(endpoint: &str) -> bool {
    endpoint.rsplit('.').next() == Some(endpoints::CONTROL)
}

impl ControlRight {
    /// The proof for a request; empty if none is needed or possible.
    pub(super) fn prove(&self, endpoint: &str, stream: u32, body: &[u8]) -> Bytes {
        match &self.secret {
            Some(secret) if is_control(endpoint) => self.proof(secret, stream, body),
            Some(_) | None => Bytes::new(),
        }
    }

    fn proof(&self, secret: &WireSecret, stream: u32, body: &[u8]) -> Bytes {
        let [caller, callee] = &self.nonces;
        secret.proof(&[LABEL, caller, callee, &stream.to_be_bytes(), body])
    }

    /// Checks whether a request is allowed.
    ///
    /// # Errors
    /// `Unsupported` if `control` is off here, `InvalidArgument` for a missing or wrong proof.
    pub(super) fn check(
        &self,
        endpoint: &str,
        stream: u32,
        body: &[u8],
        given: &[u8],
    ) -> Result<(), EngineError> {
        if !is_control(endpoint) {
            return Ok(());
        }
        match &self.secret {
            None if self.is_local => Ok(()),
            None => Err(EngineError::unsupported(
                At::other("control"),
                "is off: other machines can reach this worker, and it has no control secret; start it and the controlling \
                 process with the same --control-secret-file",
            )),
            Some(secret) => {
                let expected = self.proof(secret, stream, body);
                if constant_time_eq::constant_time_eq(given, &expected) {
                    return Ok(());
                }
                let problem = "is missing or wrong; start the controlling process with the worker's --control-secret-file";
                Err(EngineError::invalid_argument("control secret", problem))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn right(nonce: u8) -> ControlRight {
        ControlRight {
            secret: Some(WireSecret::try_new(b"correct horse battery staple").unwrap()),
            nonces: [
                (0..32).collect(),
                (32..64).map(|byte| byte ^ nonce).collect(),
            ],
            is_local: true,
        }
    }

    /// Other implementations are tested with the document's test vector.
    #[test]
    fn the_proof_is_that_of_the_document() {
        let document = include_str!("../../../../docs/wire-protocol.md");
        let mut lines = document.lines();
        let vector = lines
            .find_map(|line| line.strip_prefix("control proof: "))
            .unwrap();
        let proof = right(0).prove("demo.backend.control", 1, &[0xc0]);
        let hex: String = proof.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, vector);
    }

    #[test]
    fn a_proof_holds_for_its_own_request_on_its_own_connection_alone() {
        let name = "demo.backend.control";
        let given = right(0).prove(name, 1, b"wake");
        right(0).check(name, 1, b"wake", &given).unwrap();
        for refused in [
            right(0).check(name, 2, b"wake", &given),
            right(0).check(name, 1, b"sleep", &given),
            right(1).check(name, 1, b"wake", &given),
            right(0).check(name, 1, b"wake", b""),
        ] {
            assert!(
                refused
                    .unwrap_err()
                    .message()
                    .contains("--control-secret-file")
            );
        }
        assert!(right(0).prove("demo.control.generate", 1, b"").is_empty());
        right(0)
            .check("demo.control.generate", 1, b"", b"")
            .unwrap();
    }
}
