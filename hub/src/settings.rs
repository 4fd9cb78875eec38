//! [`HubSettings`]: the hub's address, the cache folder and the token.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::HubError;
use crate::urls::without_password;

/// The largest token file, in bytes.
const MAX_TOKEN_BYTES: u64 = 4096;

/// The hub's address, the cache folder and the token. `Debug` omits the token, and a name and password in the address.
#[derive(Clone)]
pub struct HubSettings {
    /// The hub's address, without a trailing slash.
    pub endpoint: String,
    /// The cache folder.
    pub cache: PathBuf,
    /// The access token; `None` for anonymous requests.
    pub token: Option<String>,
    /// Whether to use only the cache.
    pub is_offline: bool,
    /// How long the hub may send nothing.
    pub silence: Duration,
    /// The pause before the first retry; each later pause is twice as long.
    pub retry_pause: Duration,
}

impl HubSettings {
    /// Reads the hub's environment variables, as its own tools do: `HF_ENDPOINT`, `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN`,
    /// `HF_TOKEN_PATH`, `HF_HUB_OFFLINE`, `XDG_CACHE_HOME` and `HOME`. `get` reads a variable.
    ///
    /// # Errors
    /// `Settings`, naming the variable, if there is no folder for the cache, or the address is invalid.
    pub fn from_variables(get: impl Fn(&str) -> Option<OsString>) -> Result<Self, HubError> {
        let path = |name: &str| {
            get(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let text = |name: &str| {
            let value = get(name)?.into_string().ok()?;
            Some(value.trim().to_owned()).filter(|value| !value.is_empty())
        };
        let of_user = || {
            let caches = path("XDG_CACHE_HOME").or_else(|| Some(path("HOME")?.join(".cache")));
            Some(caches?.join("huggingface"))
        };
        let home = path("HF_HOME").or_else(of_user);
        let cache = path("HF_HUB_CACHE")
            .or_else(|| path("HUGGINGFACE_HUB_CACHE"))
            .or_else(|| Some(home.as_ref()?.join("hub")));
        let cache = cache.ok_or_else(|| HubError::Settings {
            variable: "HF_HOME",
            problem: "is not set, and neither is HOME, so there is no folder for the cache; set one of them".into(),
        })?;
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        let is_web = endpoint.starts_with("https://") || endpoint.starts_with("http://");
        if !is_web || reqwest::Url::parse(&endpoint).is_err() {
            // In text that is no address, a password cannot be told from the rest.
            let given = endpoint.rsplit('@').next().unwrap_or_default();
            let problem =
                format!("{given:?} is no address; expected one such as https://huggingface.co");
            let variable = "HF_ENDPOINT";
            return Err(HubError::Settings { variable, problem });
        }
        let token = text("HF_TOKEN").or_else(|| text("HUGGING_FACE_HUB_TOKEN"));
        let token_file = path("HF_TOKEN_PATH").or_else(|| Some(home?.join("token")));
        Ok(Self {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            cache,
            token: token.or_else(|| token_in(&token_file?)),
            is_offline: text("HF_HUB_OFFLINE").is_some_and(|value| is_yes(&value)),
            silence: Duration::from_secs(30),
            retry_pause: Duration::from_millis(500),
        })
    }

    /// The hub's address for errors: without name and password.
    pub(crate) fn shown_endpoint(&self) -> String {
        without_password(&self.endpoint)
    }
}

impl fmt::Debug for HubSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HubSettings")
            .field("endpoint", &self.shown_endpoint())
            .field("cache", &self.cache)
            .field("has_token", &self.token.is_some())
            .field("is_offline", &self.is_offline)
            .finish_non_exhaustive()
    }
}

/// The token that a login with the hub's own tools stores.
fn token_in(path: &Path) -> Option<String> {
    let is_small = std::fs::metadata(path).is_ok_and(|file| file.len() <= MAX_TOKEN_BYTES);
    let text = is_small.then(|| std::fs::read_to_string(path).ok())??;
    Some(text.trim().to_owned()).filter(|token| !token.is_empty())
}

fn is_yes(value: &str) -> bool {
    ["1", "on", "yes", "true"].contains(&value.to_ascii_lowercase().as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Result<HubSettings, HubError> {
        HubSettings::from_variables(|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| value.into())
        })
    }

    #[test]
    fn variables_are_read_as_the_hubs_own_tools_read_them() {
        let plain = settings(&[("HOME", "/home/u")]).unwrap();
        assert_eq!(plain.cache, Path::new("/home/u/.cache/huggingface/hub"));
        assert_eq!(plain.endpoint, "https://huggingface.co");
        assert!(!plain.is_offline && plain.token.is_none());
        let moved = settings(&[
            ("HOME", "/home/u"),
            ("HF_HOME", "/data"),
            ("HF_ENDPOINT", "http://mirror:8080/"),
            ("HF_TOKEN", " hf_x\n"),
            ("HF_HUB_OFFLINE", "ON"),
        ]);
        let moved = moved.unwrap();
        assert_eq!(moved.cache, Path::new("/data/hub"));
        assert_eq!(moved.endpoint, "http://mirror:8080");
        assert_eq!(moved.token.as_deref(), Some("hf_x"));
        assert!(moved.is_offline);
        assert!(!format!("{moved:?}").contains("hf_x"));
        let direct = settings(&[("HF_HUB_CACHE", "/c"), ("HF_HOME", "/data")]).unwrap();
        assert_eq!(direct.cache, Path::new("/c"));
        settings(&[]).unwrap_err();
        for endpoint in ["mirror", "http://", "http://mirror:port"] {
            let error = settings(&[("HOME", "/"), ("HF_ENDPOINT", endpoint)]).unwrap_err();
            assert!(error.to_string().contains("HF_ENDPOINT"), "{error}");
        }
    }

    #[test]
    fn a_password_in_the_address_is_used_and_not_shown() {
        let with = |endpoint| settings(&[("HOME", "/"), ("HF_ENDPOINT", endpoint)]);
        let endpoint = "https://me:secret@mirror/api";
        let found = with(endpoint).unwrap();
        assert_eq!(found.endpoint, endpoint);
        assert_eq!(found.shown_endpoint(), "https://mirror/api");
        assert!(!format!("{found:?}").contains("secret"));
        for wrong in ["https://me:secret@mirror:port", "me:secret@mirror:8080"] {
            let error = with(wrong).unwrap_err();
            assert!(!error.to_string().contains("secret"), "{error}");
        }
    }

    #[test]
    fn the_token_that_logging_in_left_is_found() {
        let home = tempfile::tempdir().unwrap();
        std::fs::write(home.path().join("token"), "hf_file\n").unwrap();
        let home = home.path().to_str().unwrap();
        let token = |more| settings(&[("HF_HOME", home), more]).unwrap().token;
        assert_eq!(token(("X", "")).as_deref(), Some("hf_file"));
        assert_eq!(token(("HF_TOKEN", "hf_env")).as_deref(), Some("hf_env"));
    }
}
