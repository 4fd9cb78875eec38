//! API keys: which clients are admitted, and their quotas.
//!
//! A file lists the keys, hashed; it is read again when it changes. A server without such a file admits everybody.

mod file;
mod quota;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::MetricsRegistry;
use http::{HeaderMap, StatusCode, header};
use parking_lot::{Mutex, RwLock};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use tokio_util::sync::CancellationToken;

use crate::error::ApiError;
pub use file::{KeyEntry, KeyFileError, KeyHash, new_key};
use file::{read, read_again};
use quota::Quota;

/// How often the file is checked.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Requests by key.
type ByKey = Family<[(&'static str, String); 1], Counter>;

/// The current keys. Clones share them.
#[derive(Debug, Clone)]
pub struct ApiKeys {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    keys: RwLock<HashMap<KeyHash, Arc<Key>>>,
    /// The hash of the file that they were read from. Only its content tells whether a file changed: a replaced key has the
    /// same length, and a file's time may be set to anything.
    hash: Mutex<blake3::Hash>,
    requests: ByKey,
    tokens: ByKey,
}

/// One key: its name, and what is left of its quotas.
#[derive(Debug)]
pub struct Key {
    name: String,
    requests: Option<Quota>,
    tokens: Option<Quota>,
    counted_requests: Counter,
    counted_tokens: Counter,
}

impl ApiKeys {
    /// Reads the keys in `path`.
    ///
    /// # Errors
    /// If the file cannot be read, is not a list of keys, or is empty.
    pub fn load(path: PathBuf, registry: &MetricsRegistry) -> Result<Self, KeyFileError> {
        let (hash, entries) = read(&path)?;
        let shared = Shared {
            path,
            hash: Mutex::new(hash),
            keys: RwLock::default(),
            requests: registry.create_private(
                "genset_http_key_requests",
                "Requests by the name of their API key",
            ),
            tokens: registry.create_private(
                "genset_http_key_tokens",
                "Prompt and completion tokens by the name of the API key",
            ),
        };
        let keys = Self {
            shared: Arc::new(shared),
        };
        keys.take(entries);
        Ok(keys)
    }

    /// Rereads the file until `stop`, and applies changes. A file that has become unreadable changes nothing; the error is
    /// logged once, and reading is retried.
    pub(crate) async fn follow(self, stop: CancellationToken) {
        let mut problem = None;
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
            let keys = self.clone();
            let looked = tokio::task::spawn_blocking(move || keys.look()).await;
            let found = looked.ok().and_then(Result::err);
            let found = found.map(|error| error.to_string());
            if let Some(error) = found.as_ref().filter(|_| found != problem) {
                tracing::error!(error, "the API keys stay as they were");
            }
            problem = found;
        }
    }

    /// Applies the file's current content, if it changed.
    fn look(&self) -> Result<(), KeyFileError> {
        let (hash, entries) = read_again(&self.shared.path)?;
        let mut seen = self.shared.hash.lock();
        if hash != *seen {
            tracing::info!(keys = entries.len(), "API keys read again");
            self.take(entries);
            *seen = hash;
        }
        Ok(())
    }

    /// Replaces the current keys. An unchanged key keeps what is left of its quotas.
    fn take(&self, entries: Vec<KeyEntry>) {
        let mut keys = self.shared.keys.write();
        let old = std::mem::take(&mut *keys);
        for entry in entries {
            let kept = old.get(&entry.hash).filter(|key| key.is_of(&entry));
            let key = kept.cloned().unwrap_or_else(|| Arc::new(self.make(&entry)));
            keys.insert(entry.hash, key);
        }
    }

    fn make(&self, entry: &KeyEntry) -> Key {
        let labels = [("key", entry.name.clone())];
        Key {
            name: entry.name.clone(),
            requests: entry.requests_per_minute.map(Quota::new),
            tokens: entry.tokens_per_minute.map(Quota::new),
            counted_requests: self.shared.requests.get_or_create(&labels).clone(),
            counted_tokens: self.shared.tokens.get_or_create(&labels).clone(),
        }
    }

    /// Returns the key of a request with these headers: `Authorization: Bearer KEY`, or `x-api-key: KEY` as Anthropic's
    /// clients send it.
    ///
    /// # Errors
    /// A 401 if there is no key, or an unknown one.
    pub fn find(&self, headers: &HeaderMap) -> Result<Arc<Key>, ApiError> {
        let given = given(headers).ok_or_else(|| {
            refused("You did not provide an API key. Send it as 'Authorization: Bearer KEY'.")
        })?;
        // Compares only hashes, no part of which a client can choose.
        let keys = self.shared.keys.read();
        let key = keys.get(&KeyHash::of(given));
        key.cloned()
            .ok_or_else(|| refused("Incorrect API key provided."))
    }

    /// The key with this name, for work that is done on its behalf later.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<Arc<Key>> {
        let keys = self.shared.keys.read();
        keys.values().find(|key| key.name == name).cloned()
    }
}

fn given(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers
        .get(header::AUTHORIZATION)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.split_once(' '))
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"))
        .map(|(_, key)| key.trim());
    let own = headers.get("x-api-key");
    bearer.or_else(|| own.and_then(|value| value.to_str().ok()))
}

fn refused(message: &str) -> ApiError {
    ApiError {
        code: Some("invalid_api_key"),
        ..ApiError::new(StatusCode::UNAUTHORIZED, message)
    }
}

impl Key {
    /// The key's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    fn is_of(&self, entry: &KeyEntry) -> bool {
        let per_minute = |quota: &Option<Quota>| quota.as_ref().map(Quota::per_minute);
        self.name == entry.name
            && per_minute(&self.requests) == entry.requests_per_minute
            && per_minute(&self.tokens) == entry.tokens_per_minute
    }

    /// Counts a request and admits it.
    ///
    /// # Errors
    /// A 429 with the time until there is room, if a quota is used up.
    pub fn admit(&self) -> Result<(), ApiError> {
        self.counted_requests.inc();
        if let Some(Err(wait)) = self.tokens.as_ref().map(Quota::check) {
            return Err(used_up("tokens", wait));
        }
        if let Some(Err(wait)) = self.requests.as_ref().map(Quota::take) {
            return Err(used_up("requests", wait));
        }
        Ok(())
    }

    /// Charges a request's tokens. They may exceed what was left; the next request waits then.
    pub fn spend(&self, tokens: u64) {
        self.counted_tokens.inc_by(tokens);
        if let Some(quota) = &self.tokens {
            quota.spend(tokens);
        }
    }
}

/// A request's cache salt. It includes the key, so that no key's client can learn another's prompts from cache hits, and the
/// client's own salt. `None` if there is neither.
pub(crate) fn cache_salt(key: Option<&Key>, given: Option<&str>) -> Option<String> {
    if key.is_none() && given.is_none() {
        return None;
    }
    let mut hasher = blake3::Hasher::new_derive_key("genset cache_salt of a request, version 1");
    for part in [key.map(Key::name), given] {
        // Includes the length, so that no two pairs collide.
        let length = part.map_or(u64::MAX, |part| part.len() as u64);
        hasher.update(&length.to_le_bytes());
        hasher.update(part.unwrap_or_default().as_bytes());
    }
    Some(hasher.finalize().to_hex().to_string())
}

fn used_up(what: &str, wait: Duration) -> ApiError {
    let seconds = wait.as_secs() + 1;
    let message = format!(
        "This key's {what} of a minute are used up. Try again in {seconds} s, or ask the operator for a larger quota."
    );
    ApiError {
        code: Some("rate_limit_exceeded"),
        retry_after: Some(Duration::from_secs(seconds)),
        ..ApiError::new(StatusCode::TOO_MANY_REQUESTS, message)
    }
}

#[cfg(test)]
mod tests;
