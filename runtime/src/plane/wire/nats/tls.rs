//! [`NatsTls`] as a configuration of rustls.

use std::sync::Arc;

use async_nats::rustls::crypto::ring;
use async_nats::rustls::{ClientConfig, RootCertStore};
use genset_backend_common::EngineError;

use super::config::{NatsTls, invalid};
use crate::tls_identity::pem::{Identity, PemProblem, roots_of};

/// Builds the rustls configuration. The crypto provider is always ring, so that no process-wide default is needed.
///
/// # Errors
/// `InvalidArgument`, naming the field without a valid certificate or key.
pub(super) fn client_config(tls: &NatsTls) -> Result<ClientConfig, EngineError> {
    let roots = match &tls.ca_pem {
        Some(pem) => roots_of(pem).map_err(named)?,
        None => system_roots(),
    };
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| EngineError::internal("TLS has no protocol version").with_source(error))?
        .with_root_certificates(roots);
    match &tls.identity {
        None => Ok(builder.with_no_client_auth()),
        Some(identity) => {
            let Identity { chain, key } = Identity::try_new(identity).map_err(named)?;
            let config = builder.with_client_auth_cert(chain, key);
            config.map_err(|error| named(Identity::unusable(&error)))
        }
    }
}

fn system_roots() -> RootCertStore {
    let found = rustls_native_certs::load_native_certs();
    for error in &found.errors {
        tracing::warn!(%error, "some of the system's certificate authorities cannot be read");
    }
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    roots
}

fn named(PemProblem { field, problem }: PemProblem) -> EngineError {
    invalid(&format!("tls.{field}"), problem)
}

#[cfg(test)]
mod tests {
    use rcgen::KeyPair;

    use super::*;
    use crate::tls_identity::TlsIdentity;

    #[test]
    fn certificates_and_a_key_that_fit_are_taken_and_others_named() {
        let made = || rcgen::generate_simple_self_signed(["a".to_owned()]).unwrap();
        let (own, other) = (made(), made());
        let tls = |ca_pem: String, key: &KeyPair| NatsTls {
            ca_pem: Some(ca_pem),
            identity: Some(TlsIdentity {
                certificate_pem: own.cert.pem(),
                key_pem: key.serialize_pem(),
            }),
        };
        client_config(&tls(other.cert.pem(), &own.signing_key)).unwrap();
        for (wrong, field) in [
            (tls("/etc/ca.pem".into(), &own.signing_key), "ca_pem"),
            (tls(other.cert.pem(), &other.signing_key), "identity"),
        ] {
            let error = client_config(&wrong).unwrap_err();
            let at = error.at().map(|at| at.name().to_owned());
            assert_eq!(at, Some(format!("nats.tls.{field}")));
        }
    }
}
