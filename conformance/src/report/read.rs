//! Reads reports: those of this version, and those of versions before it, so that `diff` has something to compare with.

use super::{Report, SCHEMA};

/// Versions that are read as they are: what came after them has a default.
const EARLIER: &[&str] = &["genset-conformance/1", "genset-conformance/2"];

/// Why a text is no report.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadReportError {
    /// It is not JSON, or lacks what a report has.
    #[error("is no report: {source}")]
    Malformed {
        /// What is wrong with it.
        #[from]
        source: serde_json::Error,
    },
    /// It says that it has a form which this build does not know.
    #[error("has the schema {found:?}; this build reads {SCHEMA:?} and earlier ones")]
    Version {
        /// The version it names.
        found: String,
    },
}

impl Report {
    /// Reads [`Report::to_json`]'s text, of this version or an earlier one. The report has this version.
    ///
    /// # Errors
    /// When the text is no report, or one of a later version.
    ///
    /// # Examples
    /// ```
    /// use genset_conformance::{ReadReportError, Report};
    ///
    /// let later = Report::from_json(r#"{ "schema": "genset-conformance/99" }"#);
    /// assert!(matches!(later, Err(ReadReportError::Version { .. })));
    /// ```
    pub fn from_json(text: &str) -> Result<Self, ReadReportError> {
        /// The one field that every version has.
        #[derive(serde::Deserialize)]
        struct Versioned {
            schema: String,
        }
        let Versioned { schema } = serde_json::from_str(text)?;
        if schema != SCHEMA && !EARLIER.contains(&schema.as_str()) {
            return Err(ReadReportError::Version { found: schema });
        }
        let mut report: Self = serde_json::from_str(text)?;
        SCHEMA.clone_into(&mut report.schema);
        Ok(report)
    }
}
