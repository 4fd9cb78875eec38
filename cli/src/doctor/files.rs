//! The files that settings name, and the downloaded models.

use std::fs;
use std::io::{self, Read as _};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::time::Duration;

use genset_frontend::{FrontendConfig, FrontendServer};
use genset_runtime::Runtime;
use indicatif::HumanBytes;

use super::finding::Finding;
use super::{CheckedModel, DoctorArgs};
use crate::hub;

/// The permissions of the group, and those of everybody else.
const GROUP: u32 = 0o070;
const WORLD: u32 = 0o007;

/// The content of a file with a secret.
#[derive(Debug, Clone, Copy)]
enum Content {
    /// Random bytes, which anybody may generate.
    Random,
    /// Issued by somebody else, as the text says.
    Given(&'static str),
}

pub(super) async fn look(args: &DoctorArgs) -> Vec<Finding> {
    use Content::{Given, Random};
    let (http, network) = (&args.http, &args.network);
    let secrets = [
        (
            "--http-tls-key",
            Given("the private key of the server's certificate"),
            &http.http_tls_key,
        ),
        (
            "--wire-tls-key",
            Given("the private key of --wire-tls-cert"),
            &network.wire_tls.wire_tls_key,
        ),
        ("--wire-secret-file", Random, &network.wire_secret_file),
        (
            "--control-secret-file",
            Random,
            &network.control_secret_file,
        ),
        (
            "--etcd-password-file",
            Given("the password of etcd's user"),
            &network.etcd_password_file,
        ),
        (
            "--etcd-key",
            Given("the private key of --etcd-cert"),
            &network.etcd_key,
        ),
        (
            "--nats-creds",
            Given("the credentials that nsc made"),
            &network.nats_login.nats_creds,
        ),
        (
            "--nats-password-file",
            Given("the password of the user of NATS"),
            &network.nats_login.nats_password_file,
        ),
        (
            "--nats-token-file",
            Given("the token of the servers of NATS"),
            &network.nats_login.nats_token_file,
        ),
        (
            "--nats-nkey-file",
            Given("the seed that nk made"),
            &network.nats_login.nats_nkey_file,
        ),
        (
            "--nats-key",
            Given("the private key of --nats-cert"),
            &network.nats_login.nats_key,
        ),
    ];
    let given = secrets
        .into_iter()
        .filter_map(|(flag, content, path)| Some((flag, content, path.as_deref()?)));
    let mut findings: Vec<Finding> = given
        .map(|(flag, content, path)| secret(flag, content, path))
        .collect();
    findings.extend(server(args).await);
    findings.extend(args.model.as_ref().map(model));
    findings.push(models());
    findings
}

fn secret(flag: &str, content: Content, path: &Path) -> Finding {
    let shown = path.display();
    match fs::metadata(path).and_then(|about| Ok((about, is_empty(path)?))) {
        Err(error) => Finding::problem(
            format!("{flag}: {shown}: {error}"),
            format!("make it, or name another with {flag}"),
        ),
        Ok((_, true)) => {
            let mend = match content {
                Content::Random => format!("openssl rand -base64 32 > {shown}"),
                Content::Given(what) => {
                    format!("put {what} there, or name another file with {flag}")
                }
            };
            Finding::problem(format!("{flag}: {shown} is empty"), mend)
        }
        Ok((about, false)) => match too_open(about.permissions().mode(), Owner::of(&about)) {
            Some(mend) => Finding::warning(
                format!("{flag}: others can read {shown}"),
                mend.replace("FILE", &shown.to_string()),
            ),
            None => Finding::ok(format!("{flag}: {shown}")),
        },
    }
}

/// Reads no more than the first byte: a device has no end.
fn is_empty(path: &Path) -> io::Result<bool> {
    let mut first = Vec::new();
    Ok(fs::File::open(path)?.take(1).read_to_end(&mut first)? == 0)
}

/// The owner of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// This user and its group.
    User,
    /// This user, with a group that somebody chose.
    UserWithGroup,
    /// Another user, who lets this one read it.
    Other,
}

impl Owner {
    fn of(about: &fs::Metadata) -> Self {
        if about.uid() != rustix::process::geteuid().as_raw() {
            Self::Other
        } else if about.gid() == rustix::process::getegid().as_raw() {
            Self::User
        } else {
            Self::UserWithGroup
        }
    }
}

/// The command that closes a FILE whose permissions are too open. A group that was chosen is meant to read it: removing the
/// group's permissions could lock out the server.
fn too_open(mode: u32, owner: Owner) -> Option<&'static str> {
    let is_open_to = |rights| mode & rights != 0;
    match owner {
        Owner::User => is_open_to(GROUP | WORLD).then_some("chmod 600 FILE"),
        Owner::UserWithGroup => is_open_to(WORLD).then_some("chmod o= FILE"),
        Owner::Other => is_open_to(WORLD)
            .then_some("its owner: chmod o= FILE, once this user is in a group that can read it"),
    }
}

/// Reads keys and certificate as a server does: starts one on a free port of loopback, and stops it.
async fn server(args: &DoctorArgs) -> Option<Finding> {
    let config = match args.http.config(FrontendConfig::default()) {
        Ok(config) if config.api_keys.is_none() && config.tls.is_none() => return None,
        Ok(config) => FrontendConfig {
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            ..config
        },
        Err(error) => {
            let mend = "name a file that this user can read";
            return Some(Finding::problem(error.to_string(), mend));
        }
    };
    Some(
        match FrontendServer::bind(&Runtime::in_process(), config).await {
            Ok(server) => {
                server.shutdown(Duration::ZERO).await;
                Finding::ok("the API keys and the certificate can be served with")
            }
            Err(error) => {
                let mend = "genset key NAME makes lines for --api-keys; certificate and key must belong to each other";
                // On one line, like every finding.
                let words: Vec<String> = error
                    .to_string()
                    .split_whitespace()
                    .map(Into::into)
                    .collect();
                Finding::problem(words.join(" "), mend)
            }
        },
    )
}

fn model((path, checked): &CheckedModel) -> Finding {
    match checked {
        Ok(()) => Finding::ok(format!("MODEL: {}", path.display())),
        Err(error) => {
            let mend = "name a folder or a file that the engine takes, or a model of the hub, which is written ORG/NAME; out=dyn and echo_full take none";
            Finding::problem(error.to_string(), mend)
        }
    }
}

fn models() -> Finding {
    let listed =
        hub::hub().and_then(|hub| Ok((hub.cache().root().to_owned(), hub.cache().list()?)));
    let (root, models) = match listed {
        Ok(listed) => listed,
        Err(error) => {
            return Finding::warning(error.to_string(), "set HF_HOME to a folder of yours");
        }
    };
    let bytes = models.iter().map(|model| model.bytes).sum();
    let partial: Vec<String> = { models.iter() }
        .filter(|model| model.is_partial)
        .map(|model| model.repo.to_string())
        .collect();
    let what = format!(
        "{} models from the hub in {}, {}",
        models.len(),
        root.display(),
        HumanBytes(bytes)
    );
    match &partial[..] {
        [] => Finding::ok(what),
        [first, ..] => Finding::warning(
            format!("{what}; not whole: {}", partial.join(", ")),
            format!(
                "genset pull {first}, with :QUANTIZATION, @REVISION or /FILE as before; or genset rm {first}"
            ),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_empty_is_filled_with_what_belongs_there() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mend = |content| secret("--x", content, file.path()).mend.unwrap();
        assert!(mend(Content::Random).starts_with("openssl rand -base64 32 > /"));
        assert_eq!(
            mend(Content::Given("the key")),
            "put the key there, or name another file with --x"
        );
    }

    #[test]
    fn a_file_is_closed_to_those_alone_who_are_not_meant_to_read_it() {
        for (mode, owner, expected) in [
            (0o100_600, Owner::User, None),
            (0o100_640, Owner::User, Some("chmod 600 FILE")),
            (0o100_644, Owner::User, Some("chmod 600 FILE")),
            (0o100_440, Owner::UserWithGroup, None),
            (0o100_444, Owner::UserWithGroup, Some("chmod o= FILE")),
            (0o100_440, Owner::Other, None),
        ] {
            assert_eq!(too_open(mode, owner), expected, "{mode:o} {owner:?}");
        }
        let mend = too_open(0o100_644, Owner::Other).unwrap();
        assert!(mend.contains("this user is in a group"), "{mend}");
    }
}
