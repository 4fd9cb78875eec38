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
        let rest = origin
            .strip_prefix("https://")
            .or_else(|| origin.strip_prefix("http://"));
        let is_origin = rest.is_some_and(|rest| !rest.is_empty() && !rest.contains('/'));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_origins_are_taken() {
        let check = |origin: &str| origins(&[origin.to_owned()]).is_ok();
        for good in ["*", "https://a.example", "http://localhost:3000"] {
            assert!(check(good), "{good}");
        }
        for bad in [
            "",
            "a.example",
            "https://",
            "https://a.example/",
            "https://a/b",
            "https://a\n",
        ] {
            assert!(!check(bad), "{bad}");
        }
    }
}
