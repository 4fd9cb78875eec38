//! [`NatsLoginArgs`]: the flags about who this process is at NATS, and which servers it trusts.

use std::path::PathBuf;

use clap::Args;

#[cfg(feature = "nats")]
use {
    super::{identity_of, text_of_file},
    crate::plane::{NatsCredentials, NatsTls},
    genset_backend_common::EngineError,
};

/// Flags about who this process is at NATS, and which servers it trusts.
#[derive(Debug, Clone, Args)]
pub struct NatsLoginArgs {
    /// File with NATS credentials (.creds)
    #[arg(long, env = "NATS_CREDS", value_name = "FILE")]
    pub nats_creds: Option<PathBuf>,
    /// User at NATS, of the servers' configuration
    #[arg(
        long,
        env = "NATS_USERNAME",
        value_name = "NAME",
        requires = "nats_password_file"
    )]
    pub nats_username: Option<String>,
    /// File with the password at NATS
    #[arg(
        long,
        env = "NATS_PASSWORD_FILE",
        value_name = "FILE",
        requires = "nats_username"
    )]
    pub nats_password_file: Option<PathBuf>,
    /// File with the token at NATS
    #[arg(long, env = "NATS_TOKEN_FILE", value_name = "FILE")]
    pub nats_token_file: Option<PathBuf>,
    /// File with the seed of our NKey at NATS
    #[arg(long, env = "NATS_NKEY_FILE", value_name = "FILE")]
    pub nats_nkey_file: Option<PathBuf>,
    /// PEM file of the authorities that sign the NATS servers' certificates
    #[arg(long, env = "NATS_CA", value_name = "FILE")]
    pub nats_ca: Option<PathBuf>,
    /// PEM file of our certificate for NATS
    #[arg(long, env = "NATS_CERT", value_name = "FILE", requires = "nats_key")]
    pub nats_cert: Option<PathBuf>,
    /// PEM file of that certificate's private key
    #[arg(long, env = "NATS_KEY", value_name = "FILE", requires = "nats_cert")]
    pub nats_key: Option<PathBuf>,
}

#[cfg(feature = "nats")]
impl NatsLoginArgs {
    /// The credentials of the flags, with the files read.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the flag with an unreadable file, or flags that exclude each other.
    pub(super) fn credentials(&self) -> Result<Option<NatsCredentials>, EngineError> {
        let read = |flag: &str, path: &PathBuf| {
            let text = text_of_file(flag, path);
            text.map(|text| text.trim().to_owned())
        };
        let user = self
            .nats_username
            .as_ref()
            .zip(self.nats_password_file.as_ref());
        match (
            &self.nats_creds,
            user,
            &self.nats_token_file,
            &self.nats_nkey_file,
        ) {
            (None, None, None, None) => Ok(None),
            (Some(file), None, None, None) => {
                let creds = text_of_file("--nats-creds", file)?;
                Ok(Some(NatsCredentials::Creds(creds)))
            }
            (None, Some((user, file)), None, None) => Ok(Some(NatsCredentials::UserPassword {
                user: user.clone(),
                password: read("--nats-password-file", file)?,
            })),
            (None, None, Some(file), None) => {
                let token = read("--nats-token-file", file)?;
                Ok(Some(NatsCredentials::Token(token)))
            }
            (None, None, None, Some(file)) => {
                let seed = read("--nats-nkey-file", file)?;
                Ok(Some(NatsCredentials::Nkey(seed)))
            }
            (_, _, _, _) => {
                let flags = "--nats-creds, --nats-username, --nats-token-file and --nats-nkey-file";
                let problem = "exclude each other; give one";
                Err(EngineError::invalid_argument(flags, problem))
            }
        }
    }

    /// The certificates of the flags, with the files read; `None` if the flags name none.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the flag with an unreadable file.
    pub(super) fn tls(&self) -> Result<Option<NatsTls>, EngineError> {
        let authorities = self.nats_ca.as_ref();
        let ca_pem = authorities.map(|path| text_of_file("--nats-ca", path));
        let ca_pem = ca_pem.transpose()?;
        let identity = identity_of(
            ("--nats-cert", &self.nats_cert),
            ("--nats-key", &self.nats_key),
        )?;
        let is_given = ca_pem.is_some() || identity.is_some();
        Ok(is_given.then_some(NatsTls { ca_pem, identity }))
    }
}

#[cfg(all(test, feature = "nats"))]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Alone {
        #[command(flatten)]
        login: NatsLoginArgs,
    }

    fn args(words: &[&str]) -> NatsLoginArgs {
        Alone::parse_from(["test"].iter().chain(words)).login
    }

    #[test]
    fn each_kind_of_login_is_read_from_its_file_and_one_is_enough() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        std::fs::write(&path, "hunter2\n").unwrap();
        let flag = |name: &str| format!("--nats-{name}={}", path.display());
        let credentials = |words: &[&str]| args(words).credentials();
        let (creds, token) = (flag("creds"), flag("token-file"));
        let (nkey, password) = (flag("nkey-file"), flag("password-file"));
        let secret = || "hunter2".to_owned();
        let user = NatsCredentials::UserPassword {
            user: "ann".into(),
            password: secret(),
        };
        let cases: [(&[&str], Option<NatsCredentials>); 5] = [
            (&[], None),
            (
                &[creds.as_str()],
                Some(NatsCredentials::Creds("hunter2\n".into())),
            ),
            (&["--nats-username=ann", password.as_str()], Some(user)),
            (&[token.as_str()], Some(NatsCredentials::Token(secret()))),
            (&[nkey.as_str()], Some(NatsCredentials::Nkey(secret()))),
        ];
        for (words, expected) in cases {
            assert_eq!(credentials(words).unwrap(), expected);
        }
        let told = credentials(&[&token, &nkey]).unwrap_err().to_string();
        assert!(told.contains("--nats-nkey-file"), "{told}");
    }

    #[test]
    fn a_certificate_is_read_with_and_without_authorities() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pem");
        std::fs::write(&path, "pem").unwrap();
        let flag = |name: &str| format!("--nats-{name}={}", path.display());
        let (ca, cert, key) = (flag("ca"), flag("cert"), flag("key"));
        let parts = |words: &[&str]| {
            let tls = args(words).tls().unwrap();
            tls.map(|tls| (tls.ca_pem.is_some(), tls.identity.is_some()))
        };
        assert_eq!(parts(&[]), None);
        assert_eq!(parts(&[&ca]), Some((true, false)));
        assert_eq!(parts(&[&cert, &key]), Some((false, true)));
        assert_eq!(parts(&[&ca, &cert, &key]), Some((true, true)));
    }
}
