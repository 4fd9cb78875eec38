//! Flags about who may ask over HTTP, checked.

use std::path::Path;

use genset_backend_common::EngineError;
use genset_frontend::FrontendTls;
use http::HeaderValue;

/// The certificate of the HTTP port; each flag requires the other.
pub(super) fn tls(
    certificate: Option<&Path>,
    key: Option<&Path>,
) -> Result<Option<FrontendTls>, EngineError> {
    let (Some(certificate), Some(key)) = (certificate, key) else {
        return Ok(None);
    };
    Ok(Some(FrontendTls {
        certificate_pem: read("--http-tls-cert", certificate)?,
        key_pem: read("--http-tls-key", key)?,
    }))
}

fn read(flag: &str, path: &Path) -> Result<String, EngineError> {
    std::fs::read_to_string(path).map_err(|error| {
        let problem = format!("{} cannot be read: {error}", path.display());
        EngineError::invalid_argument(flag, problem)
    })
}

/// The origins that may ask.
pub(super) fn origins(origins: &[String]) -> Result<Vec<HeaderValue>, EngineError> {
    let origins = origins.iter().map(|origin| {
        // A path or a slash at the end would never match what browsers send.
        let parts = origin.split_once("://");
        let is_origin = parts.is_some_and(|(scheme, host)| {
            // Extensions of browsers have schemes of their own.
            let is_scheme = |byte: u8| byte.is_ascii_lowercase() || byte == b'-';
            !scheme.is_empty()
                && scheme.bytes().all(is_scheme)
                && !host.is_empty()
                && !host.contains('/')
        });
        HeaderValue::from_str(origin)
            .ok()
            .filter(|_| is_origin || origin == "*")
            .ok_or_else(|| {
                let problem = format!(
                    "{origin:?} is no origin; expected a scheme, a host and perhaps a port, as in \
                     https://app.example.com, or *"
                );
                EngineError::invalid_argument("--cors-origins", problem)
            })
    });
    origins.collect()
}

/// The names that the server answers to, as they are compared: without ports, in lower case.
pub(super) fn hosts(hosts: &[String]) -> Result<Vec<String>, EngineError> {
    let hosts = hosts.iter().map(|host| {
        let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        let host = host.strip_suffix('.').unwrap_or(host);
        if host == "*" || (!host.is_empty() && host.bytes().all(is_part)) {
            return Ok(host.to_ascii_lowercase());
        }
        let problem = format!(
            "{host:?} is no name of a host; expected one without scheme and port, as in gpu.example.com, or *"
        );
        Err(EngineError::invalid_argument("--allowed-hosts", problem))
    });
    hosts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_origins_are_taken() {
        let check = |origin: &str| origins(&[origin.to_owned()]).is_ok();
        for good in [
            "*",
            "https://a.example",
            "http://localhost:3000",
            "chrome-extension://abcdef",
        ] {
            assert!(check(good), "{good}");
        }
        for bad in [
            "",
            "a.example",
            "https://",
            "://a.example",
            "https://a.example/",
            "https://a/b",
            "https://a\n",
        ] {
            assert!(!check(bad), "{bad}");
        }
    }

    #[test]
    fn names_of_hosts_are_taken_as_they_are_compared() {
        let check = |host: &str| hosts(&[host.to_owned()]).ok();
        for (good, expected) in [
            ("*", "*"),
            ("gpu-1", "gpu-1"),
            ("GPU.Example.com.", "gpu.example.com"),
        ] {
            assert_eq!(check(good), Some(vec![expected.to_owned()]), "{good}");
        }
        for bad in ["", ".", "a.example:80", "https://a.example", "a/b", "a b"] {
            assert_eq!(check(bad), None, "{bad}");
        }
    }
}
