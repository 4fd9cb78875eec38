//! The hub's HTTP API: a repository's file list, and a file's bytes. Distinguishes failures by the hub's codes
//! (`X-Error-Code`) and by status.

use std::time::Duration;

use reqwest::header::{CONTENT_RANGE, HeaderValue, RANGE, RETRY_AFTER};
use reqwest::{Client, Response, StatusCode};
use serde::Deserialize;

use crate::cache::is_commit;
use crate::error::HubError;
use crate::reference::{ModelRef, is_safe_path};
use crate::settings::HubSettings;

/// The longest file list that is read, in bytes.
const MAX_LIST_BYTES: usize = 32 << 20;

/// The longest retry delay that the hub may ask for.
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// A file of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RemoteFile {
    pub(crate) path: String,
    pub(crate) bytes: u64,
    pub(crate) hash: Hash,
}

/// The hash of the content; also the blob's name in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Hash {
    /// For large files: SHA-256.
    Sha256(String),
    /// For small files: git's blob hash, SHA-1 over a header and the content.
    Git(String),
}

impl Hash {
    pub(crate) fn hex(&self) -> &str {
        match self {
            Self::Sha256(hex) | Self::Git(hex) => hex,
        }
    }
}

/// A repository at a commit.
#[derive(Debug, Clone)]
pub(crate) struct Snapshot {
    pub(crate) commit: String,
    pub(crate) files: Vec<RemoteFile>,
}

/// Why a request failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// A retry would fail again.
    Lasting(HubError),
    /// A retry may succeed, after the delay that the hub asked for, if any.
    Passing {
        error: HubError,
        pause: Option<Duration>,
    },
}

/// A client of the hub.
#[derive(Debug, Clone)]
pub(crate) struct HubClient {
    http: Client,
    endpoint: String,
    /// The same for errors.
    shown_endpoint: String,
    token: Option<String>,
}

#[derive(Deserialize)]
struct ModelInfo {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: String,
    size: Option<u64>,
}

impl HubClient {
    pub(crate) fn try_new(settings: &HubSettings) -> Result<Self, HubError> {
        let unreachable = |error: reqwest::Error| HubError::Unreachable {
            endpoint: settings.shown_endpoint(),
            problem: causes(&error),
        };
        let token = settings.token.clone();
        if (token.as_ref()).is_some_and(|token| HeaderValue::from_str(token).is_err()) {
            return Err(HubError::Settings {
                variable: "HF_TOKEN",
                problem: "(or the token file) has a character that no HTTP header may have".into(),
            });
        }
        // An error says that one is installed already, which is fine.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = Client::builder()
            .user_agent(concat!("genset/", env!("CARGO_PKG_VERSION")))
            .connect_timeout(settings.silence)
            .read_timeout(settings.silence)
            .build()
            .map_err(unreachable)?;
        Ok(Self {
            http,
            endpoint: settings.endpoint.clone(),
            shown_endpoint: settings.shown_endpoint(),
            token,
        })
    }

    /// The files of the repository at the revision.
    pub(crate) async fn snapshot(&self, model: &ModelRef) -> Result<Snapshot, Failure> {
        let (repo, revision) = (&model.repo, model.revision());
        let url = format!(
            "{}/api/models/{repo}/revision/{revision}?blobs=true",
            self.endpoint
        );
        let response = self.send(&url, 0).await?;
        let mut response = self.checked(response, model, None)?;
        let mut body = Vec::new();
        while let Some(piece) = response
            .chunk()
            .await
            .map_err(|error| self.passing(&error))?
        {
            if body.len() + piece.len() > MAX_LIST_BYTES {
                return Err(lasting("its list of files is too long"));
            }
            body.extend_from_slice(&piece);
        }
        let info: ModelInfo = serde_json::from_slice(&body)
            .map_err(|error| lasting(&format!("its list of files cannot be read: {error}")))?;
        if !is_commit(&info.sha) {
            return Err(lasting("it names no commit"));
        }
        let files = info.siblings.into_iter().filter_map(remote_file);
        Ok(Snapshot {
            commit: info.sha,
            files: files.collect(),
        })
    }

    /// The bytes of a file from `offset` on. The response may nevertheless begin at 0: see the returned number.
    pub(crate) async fn content(
        &self,
        model: &ModelRef,
        commit: &str,
        file: &RemoteFile,
        offset: u64,
    ) -> Result<(Response, u64), Failure> {
        let path: Vec<String> = file.path.split('/').map(escaped).collect();
        let url = format!(
            "{}/{}/resolve/{commit}/{}",
            self.endpoint,
            model.repo,
            path.join("/")
        );
        let response = self.send(&url, offset).await?;
        let response = self.checked(response, model, Some(&file.path))?;
        if response.status() != StatusCode::PARTIAL_CONTENT {
            return Ok((response, 0));
        }
        let range = response.headers().get(CONTENT_RANGE);
        let range = range.and_then(|range| range.to_str().ok()?.strip_prefix("bytes "));
        let from = range.and_then(|range| range.split_once('-')?.0.parse::<u64>().ok());
        match from {
            Some(from) if from == offset => Ok((response, offset)),
            _ => Err(lasting("it sent another byte range than requested")),
        }
    }

    async fn send(&self, url: &str, offset: u64) -> Result<Response, Failure> {
        let mut request = self.http.get(url);
        if offset > 0 {
            request = request.header(RANGE, format!("bytes={offset}-"));
        }
        if let Some(token) = &self.token {
            // Redirects to other hosts omit it.
            request = request.bearer_auth(token);
        }
        request.send().await.map_err(|error| self.passing(&error))
    }

    pub(crate) fn passing(&self, error: &reqwest::Error) -> Failure {
        let error = HubError::Unreachable {
            endpoint: self.shown_endpoint.clone(),
            problem: causes(error),
        };
        Failure::Passing { error, pause: None }
    }

    /// Returns the response if it is successful.
    fn checked(
        &self,
        response: Response,
        model: &ModelRef,
        file: Option<&str>,
    ) -> Result<Response, Failure> {
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let header = |name: &str| {
            response
                .headers()
                .get(name)?
                .to_str()
                .ok()
                .map(str::to_owned)
        };
        let seconds = header(RETRY_AFTER.as_str()).and_then(|after| after.parse().ok());
        let code = header("x-error-code").unwrap_or_default();
        let passing = |error| {
            let pause = seconds.map(Duration::from_secs);
            match pause {
                Some(pause) if pause > MAX_PAUSE => Failure::Lasting(error),
                pause => Failure::Passing { error, pause },
            }
        };
        if status == StatusCode::TOO_MANY_REQUESTS {
            return Err(passing(HubError::TooMany { after_s: seconds }));
        }
        if status == StatusCode::RANGE_NOT_SATISFIABLE
            || status == StatusCode::REQUEST_TIMEOUT
            || status.is_server_error()
        {
            let problem = format!("it answered {status}");
            let endpoint = self.shown_endpoint.clone();
            return Err(passing(HubError::Unreachable { endpoint, problem }));
        }
        Err(Failure::Lasting(self.refusal(status, &code, model, file)))
    }

    fn refusal(
        &self,
        status: StatusCode,
        code: &str,
        model: &ModelRef,
        file: Option<&str>,
    ) -> HubError {
        let (repo, endpoint) = (model.repo.clone(), self.shown_endpoint.clone());
        let has_token = self.token.is_some();
        match (status, code) {
            (_, "GatedRepo") | (StatusCode::FORBIDDEN, "") => HubError::Gated {
                repo,
                endpoint,
                has_token,
            },
            (_, "RevisionNotFound") => {
                let revision = model.revision().to_owned();
                HubError::NoRevision {
                    repo,
                    revision,
                    endpoint,
                }
            }
            (StatusCode::UNAUTHORIZED, "") if has_token => HubError::BadToken,
            (StatusCode::UNAUTHORIZED | StatusCode::NOT_FOUND | StatusCode::FORBIDDEN, _)
                if file.is_none() =>
            {
                HubError::NotFound { repo, endpoint }
            }
            _ => {
                let about = file.map_or(String::new(), |file| format!(" for {file}"));
                HubError::bad_answer(format!("{status}{about}"))
            }
        }
    }
}

/// A file that the cache can store and verify; `None` if the hub's path or hash is invalid.
fn remote_file(sibling: Sibling) -> Option<RemoteFile> {
    let is_hex = |text: &str, length| {
        text.len() == length && text.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    let (hash, bytes) = match sibling.lfs {
        Some(lfs) if is_hex(&lfs.sha256, 64) => (
            Hash::Sha256(lfs.sha256.to_ascii_lowercase()),
            lfs.size.or(sibling.size)?,
        ),
        Some(_) => return None,
        None => {
            let hash = sibling.blob_id.filter(|hash| is_hex(hash, 40))?;
            (Hash::Git(hash.to_ascii_lowercase()), sibling.size?)
        }
    };
    is_safe_path(&sibling.rfilename).then_some(RemoteFile {
        path: sibling.rfilename,
        bytes,
        hash,
    })
}

fn lasting(problem: &str) -> Failure {
    Failure::Lasting(HubError::bad_answer(problem))
}

/// A path segment, escaped for a URL.
fn escaped(part: &str) -> String {
    let is_plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~".contains(byte);
    let escape = |byte: u8| match is_plain(&byte) {
        true => char::from(byte).to_string(),
        false => format!("%{byte:02X}"),
    };
    part.bytes().map(escape).collect()
}

/// An error with its causes, without its URL: a redirect's URL may contain a signature.
fn causes(error: &reqwest::Error) -> String {
    let mut text = match error {
        error if error.is_timeout() => "it was silent for too long".to_owned(),
        error if error.is_connect() => "no connection".to_owned(),
        error if error.is_builder() => "no request can be made".to_owned(),
        _ => "the connection broke".to_owned(),
    };
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_in_the_address_is_in_no_error() {
        let settings = HubSettings::from_variables(|name| match name {
            "HOME" => Some("/".into()),
            "HF_ENDPOINT" => Some("https://me:secret@mirror".into()),
            _ => None,
        });
        let client = HubClient::try_new(&settings.unwrap()).unwrap();
        let model = "a/b".parse().unwrap();
        let error = client.refusal(StatusCode::NOT_FOUND, "", &model, None);
        let error = error.to_string();
        assert!(error.contains("https://mirror/a/b"), "{error}");
        assert!(!error.contains("secret"), "{error}");
    }

    #[test]
    fn a_token_that_no_request_may_have_is_named_and_not_shown() {
        let settings = HubSettings::from_variables(|name| match name {
            "HOME" => Some("/".into()),
            "HF_TOKEN" => Some("hf_secret\nhf_other".into()),
            _ => None,
        });
        let error = HubClient::try_new(&settings.unwrap()).unwrap_err();
        let error = error.to_string();
        assert!(
            error.starts_with("HF_TOKEN ") && !error.contains("secret"),
            "{error}"
        );
    }
}
