//! [`Hints`]: fields of a request that have no effect on its answer here. They are accepted, and their names are reported.
//!
//! Fields that would change an answer's meaning are not hints: unless supported, they are refused by name.

use crate::error::ApiError;

/// The hints of one request, in the order in which they were read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hints {
    hints: Vec<Hint>,
    /// Whether to refuse hints that ask for something.
    is_strict: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Hint {
    field: String,
    /// Why it has no effect, if a strict server refuses it.
    refusal: Option<&'static str>,
}

impl Hints {
    /// Records a field that no server refuses.
    pub(crate) fn ignore(&mut self, field: impl Into<String>) {
        let (field, refusal) = (field.into(), None);
        self.hints.push(Hint { field, refusal });
    }

    /// Records a field that a strict server refuses, and `why`: refuses it at once, or in [`checked`](Self::checked).
    ///
    /// # Errors
    /// A 400 that names the field if the server is known to be strict.
    pub(crate) fn accept(
        &mut self,
        field: impl Into<String>,
        why: &'static str,
    ) -> Result<(), ApiError> {
        let field = field.into();
        if self.is_strict {
            return Err(ApiError::unsupported(field, why));
        }
        let refusal = Some(why);
        self.hints.push(Hint { field, refusal });
        Ok(())
    }

    /// Applies the server's strictness.
    ///
    /// # Errors
    /// A 400 that names the first field that a strict server refuses.
    pub(crate) fn checked(self, is_strict: bool) -> Result<Self, ApiError> {
        let refused = self
            .hints
            .iter()
            .find_map(|hint| Some((&hint.field, hint.refusal?)));
        match refused.filter(|_| is_strict) {
            Some((field, why)) => Err(ApiError::unsupported(field.clone(), why)),
            None => Ok(Self { is_strict, ..self }),
        }
    }

    /// Puts `others` before its own hints.
    pub(crate) fn behind(&mut self, others: Self) {
        let own = std::mem::replace(&mut self.hints, others.hints);
        self.hints.extend(own);
    }

    /// The names of the fields.
    pub(crate) fn fields(&self) -> impl Iterator<Item = &str> {
        self.hints.iter().map(|hint| hint.field.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_strict_server_refuses_what_asks_for_something() {
        let mut hints = Hints::default();
        hints.ignore("user");
        let mut strict = hints.clone().checked(true).unwrap();
        let refused = strict.accept("verbosity", "why").unwrap_err();
        assert_eq!(refused.param, Some("verbosity".into()));
        hints.accept("verbosity", "why").unwrap();
        let refused = hints.clone().checked(true).unwrap_err();
        assert_eq!(refused.param, Some("verbosity".into()));
        let mut all = hints.checked(false).unwrap();
        all.behind(strict);
        assert_eq!(
            all.fields().collect::<Vec<_>>(),
            ["user", "user", "verbosity"]
        );
    }
}
