//! Reads reports, for comparison by `diff`.

use super::{Report, SCHEMA};

/// Why a text is not a report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadReportError {
    /// It is not JSON, or fields are missing.
    #[error("is no report: {source}")]
    Malformed {
        /// The problem.
        #[from]
        source: serde_json::Error,
    },
    /// It has a version that this build does not know.
    #[error("has the schema {found:?}; this build reads {SCHEMA:?}")]
    Version {
        /// The version.
        found: String,
    },
}

impl Report {
    /// Reads [`Report::to_json`]'s text.
    ///
    /// # Errors
    /// Fails if the text is not a report, or has another version.
    ///
    /// # Examples
    /// ```
    /// use genset_conformance::{ReadReportError, Report};
    ///
    /// let another = Report::from_json(r#"{ "schema": "genset-conformance/99" }"#);
    /// assert!(matches!(another, Err(ReadReportError::Version { .. })));
    /// ```
    pub fn from_json(text: &str) -> Result<Self, ReadReportError> {
        /// The one field that every version has.
        #[derive(serde::Deserialize)]
        struct Versioned {
            schema: String,
        }
        let Versioned { schema } = serde_json::from_str(text)?;
        if schema != SCHEMA {
            return Err(ReadReportError::Version { found: schema });
        }
        Ok(serde_json::from_str(text)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_is_no_report_of_this_version_is_refused() {
        for (text, problem) in [
            ("report", "is no report: expected value"),
            ("{}", "is no report: missing field `schema`"),
            (
                r#"{ "schema": "genset-conformance/4" }"#,
                "is no report: missing field",
            ),
            (
                r#"{ "schema": "genset-conformance/3" }"#,
                "has the schema \"genset-conformance/3\"; this build reads \"genset-conformance/4\"",
            ),
        ] {
            let error = Report::from_json(text).unwrap_err().to_string();
            assert!(error.starts_with(problem), "{text}: {error}");
        }
    }
}
