//! [`HubError`]: why a model is not available, and what to do about it.

use std::path::PathBuf;

use crate::reference::{ModelRef, RepoId};

/// Why a model is not available. Each message says what to do next.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// It is not a valid model name.
    #[error(
        "{text:?} is no model of the hub; expected ORG/NAME, ORG/NAME:QUANTIZATION, hf://ORG/NAME@REVISION or \
         hf://ORG/NAME/FILE.gguf"
    )]
    BadReference {
        /// The text given.
        text: String,
    },
    /// One of the hub's environment variables has an invalid value.
    #[error("{variable} {problem}")]
    Settings {
        /// Its name.
        variable: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// The repository does not exist, or is private.
    #[error(
        "the hub has no model {repo}, or it is private: check its spelling at {endpoint}/{repo}; for a private one set HF_TOKEN to \
         a token that may read it"
    )]
    NotFound {
        /// The repository.
        repo: RepoId,
        /// The hub's address.
        endpoint: String,
    },
    /// The repository has no such branch, tag or commit.
    #[error(
        "the model {repo} has no revision {revision:?}; its branches and tags are at {endpoint}/{repo}/tree/main"
    )]
    NoRevision {
        /// The repository.
        repo: RepoId,
        /// The requested revision.
        revision: String,
        /// The hub's address.
        endpoint: String,
    },
    /// The owner grants access only on request.
    #[error("the model {repo} is gated: ask for access at {endpoint}/{repo}{}", if *.has_token {
        ", with the account of the token in use"
    } else {
        ", then set HF_TOKEN to a token of that account (huggingface.co/settings/tokens)"
    })]
    Gated {
        /// The repository.
        repo: RepoId,
        /// The hub's address.
        endpoint: String,
        /// Whether the request had a token.
        has_token: bool,
    },
    /// The hub does not accept the token.
    #[error(
        "the hub does not accept the token of HF_TOKEN, or of the token file: make another at huggingface.co/settings/tokens"
    )]
    BadToken,
    /// The repository has none of the required files.
    #[error("the model {model} has {problem}")]
    NoFile {
        /// The requested model.
        model: Box<ModelRef>,
        /// What is missing, and what there is.
        problem: String,
    },
    /// Downloads are disabled, and the cache does not have all files.
    #[error("{model} is not in the cache at {}, and HF_HUB_OFFLINE forbids downloads: run `genset pull {model}` without that variable", .cache.display())]
    Offline {
        /// The requested model.
        model: Box<ModelRef>,
        /// The cache.
        cache: PathBuf,
    },
    /// The hub asks for fewer requests.
    #[error("the hub asks for fewer requests{}; a token (HF_TOKEN) has a larger share", .after_s.map_or(String::new(), |s| format!(": try again in {s} s")))]
    TooMany {
        /// The hub's retry delay in seconds.
        after_s: Option<u64>,
    },
    /// The hub cannot be reached, or keeps breaking connections.
    #[error(
        "the hub at {endpoint} cannot be reached: {problem}; behind a proxy set HTTPS_PROXY, for a mirror HF_ENDPOINT"
    )]
    Unreachable {
        /// The hub's address.
        endpoint: String,
        /// The error of the last attempt.
        problem: String,
    },
    /// The hub sent an invalid response.
    #[error("the hub's answer makes no sense: {problem}")]
    BadAnswer {
        /// What is wrong with it.
        problem: String,
    },
    /// A file arrived twice with content that does not match the hub's hash.
    #[error(
        "{file} arrived with another hash than the hub names; nothing of it is kept, try again"
    )]
    WrongHash {
        /// The file in the repository.
        file: String,
    },
    /// The disk is too full.
    #[error(
        "there is no room for {needed} in {}, which has {free}: free some (`genset list`, `genset rm MODEL`), or set HF_HUB_CACHE",
        .cache.display()
    )]
    NoRoom {
        /// The size of what is still to be fetched, formatted for people.
        needed: String,
        /// The free space, formatted for people.
        free: String,
        /// The cache.
        cache: PathBuf,
    },
    /// The cache cannot be read or written.
    #[error("{}: {source}", .path.display())]
    Disk {
        /// The path.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
}

impl HubError {
    /// Whether a retry may succeed later without any change here: the hub is unreachable, or asks for fewer requests.
    #[must_use]
    pub fn is_passing(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::TooMany { .. })
    }

    pub(crate) fn bad_reference(text: &str) -> Self {
        Self::BadReference {
            text: text.chars().take(200).collect(),
        }
    }

    pub(crate) fn bad_answer(problem: impl Into<String>) -> Self {
        Self::BadAnswer {
            problem: problem.into(),
        }
    }

    pub(crate) fn disk(path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        |source| Self::Disk { path, source }
    }
}
