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
    // Omit the error: it could contain the key, where that is in this file.
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem.as_bytes()).collect();
    match found {
        Ok(certificates) if !certificates.is_empty() => Ok(certificates),
        Ok(_) | Err(_) => Err(PemProblem {
            field,
            problem: "holds no certificate in PEM".into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As where a variable lost the line breaks. The library's error has every byte as a number.
    #[test]
    fn a_key_without_line_breaks_is_in_no_error() {
        let key = "-----BEGIN PRIVATE KEY-----AAAA-----END PRIVATE KEY-----";
        let problem = certificates("ca_pem", key).unwrap_err().problem;
        assert_eq!(problem, "holds no certificate in PEM");
    }
}
