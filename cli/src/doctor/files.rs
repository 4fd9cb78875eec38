//! The files that settings name, and the models that were fetched.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use genset_frontend::{FrontendConfig, FrontendServer};
use genset_runtime::Runtime;
use indicatif::HumanBytes;

use super::DoctorArgs;
use super::finding::Finding;
use crate::hub;

const AREA: &str = "Files";

/// The rights of everybody but the owner.
const OTHERS: u32 = 0o077;

pub(super) async fn look(args: &DoctorArgs) -> Vec<Finding> {
    let network = &args.network;
    let secrets = [
        ("--http-tls-key", &args.http.http_tls_key),
        ("--wire-secret-file", &network.wire_secret_file),
        ("--control-secret-file", &network.control_secret_file),
        ("--etcd-password-file", &network.etcd_password_file),
        ("--etcd-key", &network.etcd_key),
        ("--nats-creds", &network.nats_creds),
    ];
    let given = secrets
        .iter()
        .filter_map(|(flag, path)| Some((*flag, path.as_deref()?)));
    let mut findings: Vec<Finding> = given.map(|(flag, path)| secret(flag, path)).collect();
    findings.extend(server(args).await);
    findings.push(models());
    findings
}

fn secret(flag: &str, path: &Path) -> Finding {
    let shown = path.display();
    match fs::metadata(path).and_then(|about| fs::read(path).map(|content| (about, content))) {
        Err(error) => Finding::problem(
            AREA,
            format!("{flag}: {shown}: {error}"),
            format!("make it, or name another with {flag}"),
        ),
        Ok((_, content)) if content.is_empty() => Finding::problem(
            AREA,
            format!("{flag}: {shown} is empty"),
            format!("openssl rand -base64 32 > {shown}"),
        ),
        Ok((about, _)) if about.permissions().mode() & OTHERS != 0 => Finding::warning(
            AREA,
            format!("{flag}: others can read {shown}"),
            format!("chmod 600 {shown}"),
        ),
        Ok(_) => Finding::ok(AREA, format!("{flag}: {shown}")),
    }
}

/// Keys and certificate, read as a server reads them: it is started on a port of its own, and stopped.
async fn server(args: &DoctorArgs) -> Option<Finding> {
    let config = match args.http.config(FrontendConfig::default()) {
        Ok(config) if config.api_keys.is_none() && config.tls.is_none() => return None,
        Ok(config) => FrontendConfig {
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            ..config
        },
        Err(error) => {
            let mend = "name a file that this user can read";
            return Some(Finding::problem(AREA, error.to_string(), mend));
        }
    };
    Some(
        match FrontendServer::bind(&Runtime::in_process(), config).await {
            Ok(server) => {
                server.shutdown(Duration::ZERO).await;
                Finding::ok(AREA, "the API keys and the certificate can be served with")
            }
            Err(error) => {
                let mend = "genset key NAME makes lines for --api-keys; certificate and key must belong to each other";
                // In one line, as every finding is.
                let words: Vec<String> = error
                    .to_string()
                    .split_whitespace()
                    .map(Into::into)
                    .collect();
                Finding::problem(AREA, words.join(" "), mend)
            }
        },
    )
}

fn models() -> Finding {
    let listed =
        hub::hub().and_then(|hub| Ok((hub.cache().root().to_owned(), hub.cache().list()?)));
    let (root, models) = match listed {
        Ok(listed) => listed,
        Err(error) => {
            return Finding::warning(AREA, error.to_string(), "set HF_HOME to a folder of yours");
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
        [] => Finding::ok(AREA, what),
        [first, ..] => Finding::warning(
            AREA,
            format!("{what}; not whole: {}", partial.join(", ")),
            format!(
                "genset pull {first}, with :QUANTIZATION, @REVISION or /FILE if it was written so; or genset rm {first}"
            ),
        ),
    }
}
