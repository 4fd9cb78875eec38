//! [`NatsTls`] as a configuration of rustls.

use std::sync::Arc;

use async_nats::rustls::crypto::ring;
use async_nats::rustls::pki_types::pem::PemObject;
use async_nats::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use async_nats::rustls::{ClientConfig, RootCertStore};
use genset_backend_common::EngineError;

use super::config::{NatsTls, invalid};
use crate::tls_identity::TlsIdentity;

/// Builds the rustls configuration. The crypto provider is always ring, so that no process-wide default is needed.
///
/// # Errors
/// `InvalidArgument`, naming the field without a valid certificate or key.
pub(super) fn client_config(tls: &NatsTls) -> Result<ClientConfig, EngineError> {
    let roots = match &tls.ca_pem {
        Some(pem) => roots_of(pem)?,
        None => system_roots(),
    };
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| EngineError::internal("TLS has no protocol version").with_source(error))?
        .with_root_certificates(roots);
    match &tls.identity {
        None => Ok(builder.with_no_client_auth()),
        Some(TlsIdentity {
            certificate_pem,
            key_pem,
        }) => {
            let chain = certificates("tls.identity.certificate_pem", certificate_pem)?;
            // Omit the error: it could contain a part of the key.
            let key = PrivateKeyDer::from_pem_slice(key_pem.as_bytes())
                .map_err(|_| invalid("tls.identity.key_pem", "holds no private key in PEM"))?;
            builder.with_client_auth_cert(chain, key).map_err(|error| {
                invalid(
                    "tls.identity",
                    format!("certificate and key cannot be used together: {error}"),
                )
            })
        }
    }
}

fn roots_of(pem: &str) -> Result<RootCertStore, EngineError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates("tls.ca_pem", pem)? {
        roots.add(certificate).map_err(|error| {
            invalid(
                "tls.ca_pem",
                format!("a certificate in it cannot be used: {error}"),
            )
        })?;
    }
    Ok(roots)
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

fn certificates(field: &str, pem: &str) -> Result<Vec<CertificateDer<'static>>, EngineError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    match found {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        Ok(_) => Err(invalid(
            field,
            "holds no certificate; give the content of a PEM file, and not its path",
        )),
        Err(error) => Err(invalid(field, format!("is no PEM: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use rcgen::KeyPair;

    use super::*;

    fn self_signed() -> (String, KeyPair) {
        let made = rcgen::generate_simple_self_signed(["a".to_owned()]).unwrap();
        (made.cert.pem(), made.signing_key)
    }

    fn with_identity(certificate_pem: &str, key_pem: &str) -> NatsTls {
        NatsTls {
            ca_pem: Some(self_signed().0),
            identity: Some(TlsIdentity {
                certificate_pem: certificate_pem.into(),
                key_pem: key_pem.into(),
            }),
        }
    }

    #[test]
    fn certificates_and_a_key_that_fit_are_taken() {
        let (certificate, key) = self_signed();
        client_config(&with_identity(&certificate, &key.serialize_pem())).unwrap();
    }

    #[test]
    fn what_is_no_certificate_or_key_is_named() {
        let (certificate, key) = self_signed();
        let (_, other_key) = self_signed();
        let path = NatsTls {
            ca_pem: Some("/etc/ca.pem".into()),
            identity: None,
        };
        let cases = [
            (path, "nats.tls.ca_pem"),
            (
                with_identity("", &key.serialize_pem()),
                "nats.tls.identity.certificate_pem",
            ),
            (
                with_identity(&certificate, "secret"),
                "nats.tls.identity.key_pem",
            ),
            (
                with_identity(&certificate, &other_key.serialize_pem()),
                "nats.tls.identity",
            ),
        ];
        for (tls, field) in cases {
            let error = client_config(&tls).unwrap_err();
            assert_eq!(error.at().map(|at| at.name()), Some(field));
            assert!(!format!("{error:?}").contains("secret"));
        }
    }
}
