//! Certificates for tests: an authority and what it signed.

use std::fs;
use std::path::Path;

use genset_runtime::TlsIdentity;
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};

/// A certificate authority.
pub(crate) struct Authority {
    pub(crate) pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Self {
            pem,
            issuer: Issuer::new(params, key),
        }
    }

    /// A certificate for `name`, modified by `change` before it is signed.
    pub(crate) fn signed(
        &self,
        name: &str,
        change: impl FnOnce(&mut CertificateParams),
    ) -> TlsIdentity {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        change(&mut params);
        TlsIdentity {
            certificate_pem: params.signed_by(&key, &self.issuer).unwrap().pem(),
            key_pem: key.serialize_pem(),
        }
    }

    /// A certificate for this machine.
    pub(crate) fn identity(&self) -> TlsIdentity {
        self.signed("127.0.0.1", |_| ())
    }

    /// The paths of a server's certificate, its key and the authority's certificate, written in `folder`.
    pub(crate) fn files(&self, folder: &Path) -> [String; 3] {
        let server = self.identity();
        [
            ("server.pem", &server.certificate_pem),
            ("server.key", &server.key_pem),
            ("ca.pem", &self.pem),
        ]
        .map(|(name, content)| {
            let path = folder.join(name);
            fs::write(&path, content).unwrap();
            path.display().to_string()
        })
    }
}
