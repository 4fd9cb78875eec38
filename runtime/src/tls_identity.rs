//! [`TlsIdentity`]: the certificate that a process shows to etcd, to NATS, and to other processes.

#[cfg(any(feature = "nats", feature = "tls"))]
pub(crate) mod pem;

/// A process's own certificate. `Debug` omits the private key.
#[derive(Clone, PartialEq, Eq)]
pub struct TlsIdentity {
    /// The certificate and its intermediate certificates: PEM content, not a path.
    pub certificate_pem: String,
    /// Its private key: PEM content, not a path.
    pub key_pem: String,
}

genset_backend_common::debug_as!(|it| TlsIdentity {
    certificate_pem: it.certificate_pem,
    ..
});
