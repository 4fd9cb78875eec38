//! [`Param`]: the position in a client's request that an error is about, before an API gives it its own name.

use std::borrow::Cow;

use genset_backend_common::{RequestField, error::At};

/// The position in a client's request that an error is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Param {
    /// A field that engines know too. Each API names it in its own way.
    Request(RequestField),
    /// A path in the chat that a request was converted to. Each API names it in its own way.
    Chat(String),
    /// A path in the request itself, as the client spells it.
    Path(String),
}

/// Returns an API's name for a position: one function per API.
pub type ParamName = fn(&Param) -> Cow<'_, str>;

impl Param {
    /// The name unless an API has another one.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Request(field) => field.name(),
            Self::Chat(path) | Self::Path(path) => path,
        }
    }

    /// [`Self::name`], as a [`ParamName`].
    pub(crate) fn plain(&self) -> Cow<'_, str> {
        Cow::Borrowed(self.name())
    }
}

impl From<RequestField> for Param {
    fn from(field: RequestField) -> Self {
        Self::Request(field)
    }
}

impl From<&str> for Param {
    fn from(path: &str) -> Self {
        Self::Path(path.to_owned())
    }
}

impl From<String> for Param {
    fn from(path: String) -> Self {
        Self::Path(path)
    }
}

impl From<&At> for Param {
    fn from(at: &At) -> Self {
        match at {
            At::Request(field) => Self::Request(*field),
            At::Setting(name) | At::Other(name) => Self::Chat(name.clone()),
        }
    }
}
