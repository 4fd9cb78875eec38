//! Names: `namespace.component.endpoint`, and instance ids.

use std::fmt;
use std::str::FromStr;

use genset_backend_common::{EngineError, Role, error::At};
use serde::{Deserialize, Serialize};

/// Defaults for the parts that a `dyn://` name omits.
const DEFAULTS: [&str; 3] = ["genset", "backend", "generate"];

/// The maximum length of one part of a name, in bytes.
const MAX_PART_BYTES: usize = 63;

/// The full name of an endpoint. Instances of one endpoint are interchangeable.
///
/// # Examples
/// ```
/// use genset_runtime::EndpointName;
///
/// let name: EndpointName = "dyn://llama.backend.generate".parse()?;
/// assert_eq!(name.to_string(), "llama.backend.generate");
/// let short: EndpointName = "dyn://llama".parse()?;
/// assert_eq!(short, name);
/// # Ok::<(), genset_runtime::NameError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct EndpointName {
    /// A pipeline, usually a model.
    pub namespace: String,
    /// A load-balanced service of the pipeline: `backend`, `prefill`, `decode`.
    pub component: String,
    /// One function of the service: `generate`, `artifacts`.
    pub endpoint: String,
}

/// Why text is not a name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// More than three parts.
    #[error("{name:?} has more than three parts; write namespace.component.endpoint")]
    TooManyParts {
        /// The text.
        name: String,
    },
    /// A part is empty, too long or contains a character that is not allowed.
    #[error(
        "{part:?} is no part of a name: use 1 to {MAX_PART_BYTES} lower- or upper-case letters, digits, `-` and `_`"
    )]
    BadPart {
        /// The part.
        part: String,
    },
    /// Not an instance id.
    #[error(
        "{text:?} is no instance id: up to 14 hex digits, not 0 and below 2^53{}",
        in_hex(text)
    )]
    BadInstance {
        /// The text.
        text: String,
    },
}

impl From<NameError> for EngineError {
    fn from(error: NameError) -> Self {
        Self::invalid_argument(At::other("endpoint"), error)
    }
}

/// A hint for an id that was written in decimal: its hex form.
fn in_hex(text: &str) -> String {
    match text.parse() {
        Ok(id) if InstanceId::is_one(id) => format!("; in hex digits it is {}", InstanceId(id)),
        Ok(_) | Err(_) => String::new(),
    }
}

impl EndpointName {
    /// Builds a name from its parts.
    ///
    /// # Errors
    /// [`NameError::BadPart`].
    pub fn try_new(namespace: &str, component: &str, endpoint: &str) -> Result<Self, NameError> {
        Ok(Self {
            namespace: checked_part(namespace)?,
            component: checked_part(component)?,
            endpoint: checked_part(endpoint)?,
        })
    }

    /// The default component of instances that play `role`.
    #[must_use]
    pub const fn component_of(role: Role) -> &'static str {
        match role {
            Role::Aggregated => DEFAULTS[1],
            Role::Prefill | Role::Decode => role.name(),
        }
    }

    /// Another endpoint of the same component.
    ///
    /// # Errors
    /// [`NameError::BadPart`].
    pub fn sibling(&self, endpoint: &str) -> Result<Self, NameError> {
        Ok(Self {
            endpoint: checked_part(endpoint)?,
            ..self.clone()
        })
    }
}

impl Default for EndpointName {
    fn default() -> Self {
        let [namespace, component, endpoint] = DEFAULTS.map(str::to_owned);
        Self {
            namespace,
            component,
            endpoint,
        }
    }
}

/// Checks one part of a name.
pub(crate) fn checked_part(part: &str) -> Result<String, NameError> {
    let is_good = (1..=MAX_PART_BYTES).contains(&part.len())
        && part
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_');
    if is_good {
        Ok(part.to_owned())
    } else {
        Err(NameError::BadPart {
            part: part.to_owned(),
        })
    }
}

impl FromStr for EndpointName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        // Names that look like URLs may be written like URLs.
        let name = text
            .strip_prefix("dyn://")
            .map_or_else(|| text.to_owned(), |url| url.replace('/', "."));
        let mut given: Vec<&str> = if name.is_empty() {
            Vec::new()
        } else {
            name.split('.').collect()
        };
        given.extend(DEFAULTS.into_iter().skip(given.len()));
        match given[..] {
            [namespace, component, endpoint] => Self::try_new(namespace, component, endpoint),
            _ => Err(NameError::TooManyParts { name: name.clone() }),
        }
    }
}

impl fmt::Display for EndpointName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.namespace, self.component, self.endpoint)
    }
}

/// The workers that a client asks.
///
/// # Examples
/// ```
/// use genset_runtime::{EndpointName, WorkerScope};
///
/// assert_eq!("dyn://llama".parse(), Ok(WorkerScope::Namespace("llama".into())));
/// let name: EndpointName = "llama.decode.generate".parse()?;
/// assert_eq!("dyn://llama.decode".parse(), Ok(WorkerScope::Endpoint(name)));
/// # Ok::<(), genset_runtime::NameError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkerScope {
    /// Those of a namespace, in any component: also of a model whose prefill and decode are apart.
    Namespace(String),
    /// Those of one endpoint.
    Endpoint(EndpointName),
}

impl FromStr for WorkerScope {
    type Err = NameError;

    /// Parses what [`EndpointName`] does; a first part alone is a namespace.
    fn from_str(text: &str) -> Result<Self, NameError> {
        let name: EndpointName = text.parse()?;
        let parts = text.strip_prefix("dyn://").unwrap_or(text);
        Ok(match parts.is_empty() || parts.contains(['.', '/']) {
            true => Self::Endpoint(name),
            false => Self::Namespace(name.namespace),
        })
    }
}

impl fmt::Display for WorkerScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Namespace(namespace) => f.write_str(namespace),
            Self::Endpoint(name) => name.fmt(f),
        }
    }
}

/// One process's service of one endpoint. Random, and below 2^53 so that every JSON parser keeps it exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct InstanceId(pub u64);

impl InstanceId {
    /// The first id that is too large.
    pub const LIMIT: u64 = 1 << 53;

    /// A random id, never 0.
    #[must_use]
    pub fn random() -> Self {
        Self(rand::random_range(1..Self::LIMIT))
    }

    fn is_one(id: u64) -> bool {
        (1..Self::LIMIT).contains(&id)
    }
}

impl FromStr for InstanceId {
    type Err = NameError;

    /// Parses the output of `Display`: hex digits.
    fn from_str(text: &str) -> Result<Self, NameError> {
        match u64::from_str_radix(text, 16) {
            Ok(id) if Self::is_one(id) => Ok(Self(id)),
            Ok(_) | Err(_) => Err(NameError::BadInstance {
                text: text.to_owned(),
            }),
        }
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:014x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_parts_take_defaults() {
        for (text, full) in [
            ("dyn://", "genset.backend.generate"),
            ("dyn://m", "m.backend.generate"),
            ("m.prefill", "m.prefill.generate"),
            ("a.b.c", "a.b.c"),
            ("dyn://a/b/c", "a.b.c"),
            ("dyn://a/b", "a.b.generate"),
        ] {
            assert_eq!(text.parse::<EndpointName>().unwrap().to_string(), full);
        }
    }

    #[test]
    fn a_first_part_alone_is_the_scope_of_a_namespace() {
        for (text, shown) in [
            ("dyn://m", "m"),
            ("m", "m"),
            ("dyn://m.prefill", "m.prefill.generate"),
            ("dyn://a/b/c", "a.b.c"),
            ("", "genset.backend.generate"),
        ] {
            let scope: WorkerScope = text.parse().unwrap();
            assert_eq!(scope.to_string(), shown);
            assert_eq!(shown.parse(), Ok(scope));
        }
        "dyn://é".parse::<WorkerScope>().unwrap_err();
    }

    #[test]
    fn bad_names_are_refused() {
        for text in [
            "a.b.c.d",
            "a..c",
            "a b",
            "é",
            "a/b",
            "dyn://a/b/c/d",
            "dyn://a//c",
            &"x".repeat(64),
        ] {
            text.parse::<EndpointName>().unwrap_err();
        }
    }

    #[test]
    fn ids_are_exact_in_json() {
        for _ in 0..1000 {
            let InstanceId(id) = InstanceId::random();
            assert!(id > 0 && id < InstanceId::LIMIT);
            assert_eq!(InstanceId(id).to_string().parse(), Ok(InstanceId(id)));
        }
        for text in ["", "x", "0", "20000000000000"] {
            text.parse::<InstanceId>().unwrap_err();
        }
        let decimal = "667985562206542".parse::<InstanceId>().unwrap_err();
        let hint = "; in hex digits it is 025f878226814e";
        assert!(decimal.to_string().ends_with(hint), "{decimal}");
    }
}
