//! TLS errors, in words that name the flag to change.

use std::io;

use tokio_rustls::rustls::{AlertDescription, CertificateError, Error};

use super::super::transport::Refusal;

/// Which end of a connection we are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    /// We dialled.
    Caller,
    /// We accepted.
    Worker,
}

/// A connection without TLS: the peer sent frames of the wire protocol at once.
pub(super) fn plaintext() -> Refusal {
    Refusal {
        label: "plaintext",
        problem: "TLS is spoken here and the caller spoke none; start it with --wire-tls-ca, and with --wire-tls-cert and --wire-tls-key".into(),
    }
}

/// A connection with another protocol.
pub(super) fn not_our_protocol() -> Refusal {
    Refusal {
        label: "not_our_protocol",
        problem: "the caller speaks neither TLS nor this protocol".into(),
    }
}

/// The message for a dialled connection whose TLS handshake failed.
pub(super) fn of_dialling(error: &io::Error) -> String {
    if let Some(refusal) = refusal(error, Side::Caller) {
        return refusal.problem;
    }
    let is_end = [
        io::ErrorKind::UnexpectedEof,
        io::ErrorKind::ConnectionReset,
        io::ErrorKind::ConnectionAborted,
        io::ErrorKind::BrokenPipe,
    ]
    .contains(&error.kind());
    if !is_end {
        return error.to_string();
    }
    "it closed the connection where TLS was begun; it may speak none: start it with --wire-tls-cert, --wire-tls-key and \
     --wire-tls-ca, or this process without --wire-tls-ca"
        .into()
}

/// Describes a rustls error in words; returns other errors unchanged.
pub(super) fn explained(error: io::Error, side: Side) -> io::Error {
    match refusal(&error, side) {
        Some(refusal) => io::Error::new(error.kind(), refusal),
        None => error,
    }
}

#[expect(
    clippy::wildcard_enum_match_arm,
    reason = "another crate's, which grows"
)]
fn refusal(error: &io::Error, side: Side) -> Option<Refusal> {
    let error = error.get_ref()?.downcast_ref::<Error>()?;
    let (label, problem) = match error {
        Error::InvalidCertificate(error) => (
            "certificate",
            format!("the {}'s certificate {}", peer(side), of_certificate(error)),
        ),
        Error::NoCertificatesPresented => (
            "certificate",
            "the caller shows no certificate; start it with --wire-tls-cert and --wire-tls-key".into(),
        ),
        Error::AlertReceived(alert) => ("refused_by_peer", of_alert(*alert, side)),
        Error::NoApplicationProtocol => (
            "tls",
            format!("the {} speaks TLS and another protocol inside", peer(side)),
        ),
        Error::InvalidMessage(_) if side == Side::Caller => (
            "tls",
            "it answers with something else than TLS; start it with --wire-tls-cert, --wire-tls-key and --wire-tls-ca, \
             or this process without --wire-tls-ca"
                .into(),
        ),
        error => ("tls", format!("TLS failed: {error}")),
    };
    Some(Refusal { label, problem })
}

fn peer(side: Side) -> &'static str {
    match side {
        Side::Caller => "worker",
        Side::Worker => "caller",
    }
}

#[expect(
    clippy::wildcard_enum_match_arm,
    reason = "another crate's, which grows"
)]
fn of_certificate(error: &CertificateError) -> String {
    use CertificateError as E;
    match error {
        E::Expired | E::ExpiredContext { .. } => {
            "has expired; give that process a new one with --wire-tls-cert".into()
        }
        E::NotValidYet | E::NotValidYetContext { .. } => {
            "is not valid yet; compare its --wire-tls-cert with the clocks of both machines".into()
        }
        E::UnknownIssuer | E::BadSignature => {
            "is signed by no authority of our --wire-tls-ca".into()
        }
        E::NotValidForNameContext {
            expected,
            presented,
        } => format!(
            "is for {} and not for {}; give the name it is for as --wire-tls-server-name, or one that it is for as \
             the worker's --advertise-host",
            names(presented),
            expected.to_str()
        ),
        E::InvalidPurpose | E::InvalidPurposeContext { .. } => {
            "is for another purpose; the --wire-tls-cert of a process that serves and calls is for both server and client authentication"
                .into()
        }
        other => format!("is not accepted: {other}; see its --wire-tls-cert"),
    }
}

/// The names in a certificate; rustls shows each as `DnsName("a")` or `IpAddress(..)`.
fn names(presented: &[String]) -> String {
    if presented.is_empty() {
        return "no name".into();
    }
    presented.join(", ")
}

fn of_alert(alert: AlertDescription, side: Side) -> String {
    use AlertDescription as A;
    let peer = peer(side);
    if alert == A::CertificateRequired {
        return format!(
            "the {peer} asks for a certificate; give --wire-tls-cert and --wire-tls-key"
        );
    }
    let is_about_ours = [
        A::BadCertificate,
        A::UnsupportedCertificate,
        A::CertificateRevoked,
        A::CertificateExpired,
        A::CertificateUnknown,
        A::UnknownCA,
        A::DecryptError,
        A::AccessDenied,
    ]
    .contains(&alert);
    if is_about_ours {
        return format!(
            "the {peer} refuses our certificate ({alert:?}); its log says why. Our --wire-tls-cert must be valid now, and \
             signed by an authority of its --wire-tls-ca"
        );
    }
    format!("the {peer} ended TLS with the alert {alert:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(error: Error, side: Side) -> Refusal {
        let error = io::Error::new(io::ErrorKind::InvalidData, error);
        refusal(&error, side).unwrap()
    }

    #[test]
    fn what_is_wrong_with_a_certificate_names_the_flag() {
        for (error, words) in [
            (CertificateError::Expired, ["expired", "--wire-tls-cert"]),
            (
                CertificateError::UnknownIssuer,
                ["signed by no authority", "--wire-tls-ca"],
            ),
            (
                CertificateError::NotValidForNameContext {
                    expected: "a".try_into().unwrap(),
                    presented: vec!["DnsName(\"b\")".into()],
                },
                ["\"b\") and not for a", "--wire-tls-server-name"],
            ),
            (
                CertificateError::InvalidPurpose,
                ["purpose", "--wire-tls-cert"],
            ),
        ] {
            for (side, peer) in [(Side::Caller, "worker's"), (Side::Worker, "caller's")] {
                let refusal = of(Error::InvalidCertificate(error.clone()), side);
                assert_eq!(refusal.label, "certificate");
                for word in words.into_iter().chain([peer]) {
                    assert!(refusal.problem.contains(word), "{word}: {refusal}");
                }
            }
        }
    }

    #[test]
    fn an_error_that_is_not_of_tls_stays_as_it_is() {
        let error = explained(io::ErrorKind::ConnectionReset.into(), Side::Caller);
        assert!(error.get_ref().is_none());
    }
}
