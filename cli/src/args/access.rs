//! The files that the flags about HTTPS name, read.

use std::path::Path;

use genset_backend_common::EngineError;
use genset_frontend::FrontendTls;

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
