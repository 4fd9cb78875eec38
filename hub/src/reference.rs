//! [`ModelRef`]: a parsed name of a model on the hub.

use std::fmt;
use std::str::FromStr;

use crate::error::HubError;

/// The longest name of an owner, of a model, or of a revision, in bytes.
const MAX_PART_BYTES: usize = 96;

/// A repository: `OWNER/NAME`. Both parts are safe file names.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RepoId {
    owner: String,
    name: String,
}

impl RepoId {
    /// The owner.
    #[must_use]
    pub fn owner(&self) -> &str {
        &self.owner
    }

    /// The name without the owner.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Display for RepoId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.name)
    }
}

impl FromStr for RepoId {
    type Err = HubError;

    fn from_str(text: &str) -> Result<Self, HubError> {
        let parts = text.split_once('/');
        let parts = parts.filter(|(owner, name)| is_part(owner) && is_part(name));
        let (owner, name) = parts.ok_or_else(|| HubError::bad_reference(text))?;
        Ok(Self {
            owner: owner.into(),
            name: name.into(),
        })
    }
}

/// A model on the hub.
///
/// # Examples
/// ```
/// use genset_hub::ModelRef;
///
/// let model: ModelRef = "Qwen/Qwen3-0.6B-GGUF:Q8_0".parse()?;
/// assert_eq!(model.repo.to_string(), "Qwen/Qwen3-0.6B-GGUF");
/// assert_eq!(model.quantization.as_deref(), Some("Q8_0"));
///
/// let model: ModelRef = "hf://Qwen/Qwen3-0.6B@main".parse()?;
/// assert_eq!(model.revision.as_deref(), Some("main"));
/// # Ok::<(), genset_hub::HubError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelRef {
    /// The repository.
    pub repo: RepoId,
    /// A branch, tag or commit; `None` for `main`.
    pub revision: Option<String>,
    /// A GGUF file of the repository, instead of an engine's default.
    pub file: Option<String>,
    /// The quantization of the GGUF file to choose, such as `Q4_K_M`.
    pub quantization: Option<String>,
}

impl ModelRef {
    /// The requested revision.
    #[must_use]
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or("main")
    }

    /// Whether it asks for a GGUF file.
    #[must_use]
    pub fn names_gguf(&self) -> bool {
        self.file.is_some() || self.quantization.is_some()
    }
}

impl fmt::Display for ModelRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.repo)?;
        if let Some(revision) = &self.revision {
            write!(f, "@{revision}")?;
        }
        if let Some(file) = &self.file {
            write!(f, "/{file}")?;
        }
        if let Some(quantization) = &self.quantization {
            write!(f, ":{quantization}")?;
        }
        Ok(())
    }
}

impl FromStr for ModelRef {
    type Err = HubError;

    fn from_str(text: &str) -> Result<Self, HubError> {
        let bad = || HubError::bad_reference(text);
        let rest = text.strip_prefix("hf://").unwrap_or(text);
        let (rest, quantization) = match rest.rsplit_once(':') {
            Some((rest, quantization)) if is_part(quantization) => (rest, Some(quantization)),
            Some(_) => return Err(bad()),
            None => (rest, None),
        };
        let (owner, rest) = rest.split_once('/').ok_or_else(bad)?;
        let (name, file) = match rest.split_once('/') {
            Some((name, file)) => (name, Some(file)),
            None => (rest, None),
        };
        let (name, revision) = match name.split_once('@') {
            Some((name, revision)) if is_part(revision) => (name, Some(revision)),
            Some(_) => return Err(bad()),
            None => (name, None),
        };
        let is_gguf = |file: &str| file.to_ascii_lowercase().ends_with(".gguf");
        let is_good = file.is_none_or(|file| is_gguf(file) && is_safe_path(file));
        if !is_good || (file.is_some() && quantization.is_some()) {
            return Err(bad());
        }
        Ok(Self {
            repo: format!("{owner}/{name}").parse().map_err(|_| bad())?,
            revision: revision.map(Into::into),
            file: file.map(Into::into),
            quantization: quantization.map(Into::into),
        })
    }
}

/// Whether it is a valid name on the hub, without special meaning in a file system or URL.
fn is_part(text: &str) -> bool {
    let is_sign = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    let ends_well = |edge: Option<&u8>| edge.is_some_and(|edge| !b"-.".contains(edge));
    let bytes = text.as_bytes();
    bytes.len() <= MAX_PART_BYTES
        && text.bytes().all(is_sign)
        && ends_well(bytes.first())
        && ends_well(bytes.last())
        && !text.contains("..")
        // The separator of owner and name in the cache.
        && !text.contains("--")
}

/// Whether a repository's path stays below the folder to which it is written, and a terminal that shows it only displays it.
pub(crate) fn is_safe_path(path: &str) -> bool {
    path.len() <= 512
        && path.chars().all(|sign| !sign.is_control() && sign != '\\')
        && path
            .split('/')
            .all(|part| !matches!(part, "" | "." | "..") && part.len() <= 255)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_people_write_is_read_and_shown_again() {
        for (text, expected) in [
            ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
            ("hf://Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
            ("hf://a/b@v1.0", "a/b@v1.0"),
            ("a/b@0123abc", "a/b@0123abc"),
            ("hf://a/b/c.gguf", "a/b/c.gguf"),
            ("hf://a/b@main/UD/c.GGUF", "a/b@main/UD/c.GGUF"),
            ("a/b:Q4_K_M", "a/b:Q4_K_M"),
            ("a/b@v1:IQ4_XS", "a/b@v1:IQ4_XS"),
        ] {
            let read: ModelRef = text.parse().unwrap();
            assert_eq!(read.to_string(), expected);
        }
    }

    #[test]
    fn what_could_leave_the_cache_or_is_none_is_refused() {
        for text in [
            "",
            "a",
            "a/",
            "/a",
            "/a/b",
            "./a",
            "../a",
            "a/..",
            "a/b/c",
            "a/b/../c.gguf",
            "a//b",
            "hf://",
            "hf://a",
            "a/b@",
            "a/b@../x",
            "a/b:",
            "a/b:../x",
            "a/b/c.gguf:Q4",
            "a/b c",
            "a/b\n",
            "-a/b",
            "a/b--c",
            "é/b",
            "https://a/b",
            "a/b@x/c",
            "a/b/\u{1b}[2Jc.gguf",
            "a/b/\u{9b}2Jc.gguf",
            "a/b/\u{7f}c.gguf",
        ] {
            assert!(text.parse::<ModelRef>().is_err(), "{text:?}");
        }
    }
}
