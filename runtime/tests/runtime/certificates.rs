//! Certificates for tests: an authority and the certificates it signed.

use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};

/// An authority and the certificates it signed, as PEM.
pub(crate) struct Certificates {
    pub(crate) ca: String,
    pub(crate) server: (String, String),
    pub(crate) client: (String, String),
}

impl Certificates {
    pub(crate) fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca = params.self_signed(&key).unwrap();
        let issuer = Issuer::new(params, key);
        let sign = |name: &str| {
            let key = KeyPair::generate().unwrap();
            let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
            params.extended_key_usages = vec![
                ExtendedKeyUsagePurpose::ServerAuth,
                ExtendedKeyUsagePurpose::ClientAuth,
            ];
            let certificate = params.signed_by(&key, &issuer).unwrap();
            (certificate.pem(), key.serialize_pem())
        };
        Self {
            ca: ca.pem(),
            server: sign("127.0.0.1"),
            client: sign("worker"),
        }
    }
}
