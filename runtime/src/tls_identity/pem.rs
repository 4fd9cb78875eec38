//! Certificates and keys in PEM, as rustls takes them. TLS to NATS and between processes reads its settings here.

#[cfg(all(feature = "nats", not(feature = "tls")))]
use async_nats::rustls;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{Error, RootCertStore};
#[cfg(feature = "tls")]
use tokio_rustls::rustls;

use super::TlsIdentity;

/// A setting that rustls cannot use.
#[derive(Debug)]
pub(crate) struct PemProblem {
    /// `ca_pem`, `identity`, or a field of the identity.
    pub(crate) field: &'static str,
    pub(crate) problem: String,
}

/// The authorities in `ca_pem`.
pub(crate) fn roots_of(ca_pem: &str) -> Result<RootCertStore, PemProblem> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates("ca_pem", ca_pem)? {
        roots.add(certificate).map_err(|error| PemProblem {
            field: "ca_pem",
            problem: format!("a certificate in it cannot be used: {error}"),
        })?;
    }
    Ok(roots)
}

/// A [`TlsIdentity`] that was read.
pub(crate) struct Identity {
    pub(crate) chain: Vec<CertificateDer<'static>>,
    pub(crate) key: PrivateKeyDer<'static>,
}

impl Clone for Identity {
    fn clone(&self) -> Self {
        Self {
            chain: self.chain.clone(),
            key: self.key.clone_key(),
        }
    }
}

impl Identity {
    pub(crate) fn try_new(identity: &TlsIdentity) -> Result<Self, PemProblem> {
        let chain = certificates("identity.certificate_pem", &identity.certificate_pem)?;
        // Omit the error: it could contain a part of the key.
        let key = PrivateKeyDer::from_pem_slice(identity.key_pem.as_bytes());
        let key = key.map_err(|_| PemProblem {
            field: "identity.key_pem",
            problem: "holds no private key in PEM".into(),
        })?;
        Ok(Self { chain, key })
    }

    /// Why rustls does not take certificate and key.
    pub(crate) fn unusable(error: &Error) -> PemProblem {
        PemProblem {
            field: "identity",
            problem: format!("certificate and key cannot be used together: {error}"),
        }
    }
}

fn certificates(
    field: &'static str,
    pem: &str,
) -> Result<Vec<CertificateDer<'static>>, PemProblem> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    let problem = match found {
        Ok(certificates) if !certificates.is_empty() => return Ok(certificates),
        Ok(_) => "holds no certificate in PEM".into(),
        Err(error) => format!("is no PEM: {error}"),
    };
    Err(PemProblem { field, problem })
}
