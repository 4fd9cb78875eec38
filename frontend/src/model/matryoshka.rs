//! [`Matryoshka`]: the lengths to which a model's embeddings may be cut.

use serde::Deserialize;

/// The lengths to which a model's embeddings may be cut. Only embeddings of models trained for it keep their meaning. The
/// model's `config.json` says so: by `matryoshka_dimensions`, or `is_matryoshka` for any length.
///
/// # Source
/// Matryoshka Representation Learning, <https://arxiv.org/abs/2205.13147>
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Matryoshka {
    /// Only the full length.
    #[default]
    No,
    /// Any length.
    Any,
    /// These lengths.
    Lengths(Vec<u32>),
}

#[derive(Debug, Deserialize)]
struct Config {
    is_matryoshka: Option<bool>,
    matryoshka_dimensions: Option<Vec<u32>>,
}

impl Matryoshka {
    /// Reads a `config.json`.
    ///
    /// # Errors
    /// If it is not JSON, or a field has another type.
    pub fn from_config(json: &[u8]) -> Result<Self, serde_json::Error> {
        let config: Config = serde_json::from_slice(json)?;
        let lengths = config.matryoshka_dimensions.unwrap_or_default();
        Ok(if !lengths.is_empty() {
            Self::Lengths(lengths)
        } else if config.is_matryoshka == Some(true) {
            Self::Any
        } else {
            Self::No
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_goes_before_the_flag_and_silence_is_no() {
        let read = |json: &str| Matryoshka::from_config(json.as_bytes()).ok();
        assert_eq!(read("{}"), Some(Matryoshka::No));
        let nothing = r#"{"is_matryoshka": null, "matryoshka_dimensions": null}"#;
        assert_eq!(read(nothing), Some(Matryoshka::No));
        assert_eq!(read(r#"{"is_matryoshka": true}"#), Some(Matryoshka::Any));
        let both = r#"{"is_matryoshka": true, "matryoshka_dimensions": [64, 128]}"#;
        assert_eq!(read(both), Some(Matryoshka::Lengths(vec![64, 128])));
        assert_eq!(read(r#"{"is_matryoshka": 1}"#), None);
    }
}
