//! [`WireTlsArgs`]: the flags about TLS on the tcp request plane.

use std::path::PathBuf;

use clap::Args;
use genset_backend_common::EngineError;

use super::{identity_of, text_of_file};
use crate::plane::{ClientCertificates, WireTls};

/// Flags about TLS on the tcp request plane.
#[derive(Debug, Clone, Args)]
pub struct WireTlsArgs {
    /// PEM file of the authorities that sign the certificates of every process; makes every connection of the tcp request
    /// plane TLS
    #[arg(long, env = "GENSET_WIRE_TLS_CA", value_name = "FILE")]
    pub wire_tls_ca: Option<PathBuf>,
    /// PEM file of this process's certificate, and of those between it and its authority
    #[arg(
        long,
        env = "GENSET_WIRE_TLS_CERT",
        value_name = "FILE",
        requires = "wire_tls_key",
        requires = "wire_tls_ca"
    )]
    pub wire_tls_cert: Option<PathBuf>,
    /// PEM file of that certificate's private key
    #[arg(
        long,
        env = "GENSET_WIRE_TLS_KEY",
        value_name = "FILE",
        requires = "wire_tls_cert"
    )]
    pub wire_tls_key: Option<PathBuf>,
    /// Name that the certificates of all workers are for [default: the host each is reached at]
    #[arg(
        long,
        env = "GENSET_WIRE_TLS_SERVER_NAME",
        value_name = "NAME",
        requires = "wire_tls_ca"
    )]
    pub wire_tls_server_name: Option<String>,
    /// Certificates of callers of this process: required or none
    #[arg(
        long,
        env = "GENSET_WIRE_TLS_CLIENT_CERTIFICATES",
        value_name = "required|none",
        default_value_t
    )]
    pub wire_tls_client_certificates: ClientCertificates,
}

impl WireTlsArgs {
    /// The TLS settings of the flags, with the files read; `None` if the flags ask for no TLS.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the flag with an unreadable file.
    pub(super) fn tls(&self) -> Result<Option<WireTls>, EngineError> {
        let Some(authorities) = &self.wire_tls_ca else {
            return Ok(None);
        };
        let identity = identity_of(
            ("--wire-tls-cert", &self.wire_tls_cert),
            ("--wire-tls-key", &self.wire_tls_key),
        )?;
        Ok(Some(WireTls {
            ca_pem: text_of_file("--wire-tls-ca", authorities)?,
            identity,
            server_name: self.wire_tls_server_name.clone(),
            client_certificates: self.wire_tls_client_certificates,
        }))
    }

    /// Refuses flags that the nats plane would ignore.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the flag.
    pub(super) fn refuse_on_nats(&self) -> Result<(), EngineError> {
        if self.wire_tls_ca.is_none() {
            return Ok(());
        }
        let problem = "is about the tcp request plane and this process is on nats; use --request-plane tcp, or --nats-ca for TLS to NATS";
        Err(EngineError::invalid_argument("--wire-tls-ca", problem))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Alone {
        #[command(flatten)]
        tls: WireTlsArgs,
    }

    fn args(words: &[&str]) -> Result<WireTlsArgs, clap::Error> {
        Alone::try_parse_from(["test"].iter().chain(words)).map(|alone| alone.tls)
    }

    #[test]
    fn without_flags_there_is_no_tls() {
        assert!(args(&[]).unwrap().tls().unwrap().is_none());
    }

    #[test]
    fn flags_that_say_half_are_refused() {
        for words in [
            &["--wire-tls-cert=a", "--wire-tls-key=b"][..],
            &["--wire-tls-cert=a", "--wire-tls-ca=b"],
            &["--wire-tls-key=a", "--wire-tls-ca=b"],
            &["--wire-tls-server-name=a"],
            &["--wire-tls-ca=a", "--wire-tls-client-certificates=some"],
        ] {
            args(words).unwrap_err();
        }
    }

    #[test]
    fn the_nats_plane_refuses_what_it_would_not_heed() {
        let args = |words: &[&str]| args(words).unwrap();
        let error = args(&["--wire-tls-ca=a"]).refuse_on_nats().unwrap_err();
        assert!(error.message().contains("--nats-ca"), "{error}");
        args(&[]).refuse_on_nats().unwrap();
    }

    #[test]
    fn a_file_that_cannot_be_read_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("ca.pem");
        let flag = format!("--wire-tls-ca={}", missing.display());
        let error = args(&[&flag]).unwrap().tls().unwrap_err();
        assert_eq!(error.at().map(|at| at.name()), Some("--wire-tls-ca"));
        assert!(error.message().contains("ca.pem"), "{error}");
    }

    #[test]
    fn the_files_are_read_and_callers_asked_unless_told_otherwise() {
        let folder = tempfile::tempdir().unwrap();
        let flag = |name: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, name).unwrap();
            format!("--wire-tls-{name}={}", path.display())
        };
        let [ca, cert, key] = [flag("ca"), flag("cert"), flag("key")];
        let tls = args(&[&ca, &cert, &key]).unwrap().tls().unwrap().unwrap();
        let identity = tls.identity.unwrap();
        assert_eq!(
            (tls.ca_pem, identity.certificate_pem, identity.key_pem),
            ("ca".into(), "cert".into(), "key".into())
        );
        assert_eq!(tls.client_certificates, ClientCertificates::Required);
        let open = args(&[&ca, "--wire-tls-client-certificates=none"]);
        let open = open.unwrap().tls().unwrap().unwrap();
        assert_eq!(open.client_certificates, ClientCertificates::NotAsked);
        assert!(open.identity.is_none());
    }
}
