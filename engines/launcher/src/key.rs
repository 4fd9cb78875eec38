//! [`ApiKey`]: a key that the server requires, so that other users of this machine cannot bypass the API keys of our own port. Each
//! start has a new key, known only to the server and to us. It is never an argument, since anyone can read those. vLLM requires it
//! only on paths such as `/v1`, which the guide tells operators.

use std::fmt::{self, Write as _};
use std::io::{self, Write as _};

use hyper::header::HeaderValue;
use tempfile::NamedTempFile;
use tokio::process::Command;

use crate::dialect::KeyPlace;

/// The setting's name in a file.
const NAME: &str = "api-key";

/// A random key. Its `Debug` does not show it.
#[derive(Clone)]
pub(crate) struct ApiKey(String);

impl ApiKey {
    pub(crate) fn random() -> Self {
        let mut key = String::new();
        for part in rand::random::<[u64; 4]>() {
            write!(key, "{part:016x}").unwrap_or_default();
        }
        Self(key)
    }

    /// Passes the key to the server that `command` starts. The file, if there is one, must exist until the server has started.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub(crate) fn give(
        &self,
        place: KeyPlace,
        command: &mut Command,
    ) -> io::Result<Option<NamedTempFile>> {
        match place {
            KeyPlace::Nowhere => Ok(None),
            KeyPlace::Variable(name) => {
                command.env(name, &self.0);
                Ok(None)
            }
            KeyPlace::File(flag) => {
                // `tempfile` creates files that only this user can read.
                let mut file = tempfile::Builder::new()
                    .prefix("genset-server-")
                    .suffix(".yaml")
                    .tempfile()?;
                writeln!(file, "{NAME}: \"{}\"", self.0)?;
                command.arg(format!("--{flag}")).arg(file.path());
                Ok(Some(file))
            }
        }
    }

    /// The value of the header `authorization`.
    pub(crate) fn header(&self) -> Option<HeaderValue> {
        let mut value = HeaderValue::from_str(&format!("Bearer {}", self.0)).ok()?;
        value.set_sensitive(true);
        Some(value)
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(..)")
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn keys_are_long_and_each_is_another_and_none_is_shown() {
        let (first, second) = (ApiKey::random(), ApiKey::random());
        assert_eq!(first.0.len(), 64);
        assert_ne!(first.0, second.0);
        let shown = format!("{first:?} {:?}", first.header());
        assert!(!shown.contains(&first.0), "{shown}");
    }

    #[test]
    fn no_key_is_an_argument_and_a_file_is_for_us_alone() {
        let key = ApiKey::random();
        for place in [
            KeyPlace::Variable("SERVER_API_KEY"),
            KeyPlace::File("config"),
            KeyPlace::Nowhere,
        ] {
            let mut command = Command::new("server");
            let file = key.give(place, &mut command).unwrap();
            let args: Vec<_> = command.as_std().get_args().collect();
            assert!(!format!("{args:?}").contains(&key.0), "{args:?}");
            if let Some(file) = file {
                assert_eq!(args, ["--config".as_ref(), file.path().as_os_str()]);
                let mode = file.as_file().metadata().unwrap().permissions().mode();
                assert_eq!(mode & 0o077, 0);
                let text = std::fs::read_to_string(file.path()).unwrap();
                assert_eq!(text, format!("api-key: \"{}\"\n", key.0));
            }
        }
    }
}
