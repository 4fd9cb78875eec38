//! [`Matryoshka`]: the lengths a model's embeddings may be cut to.

use serde::Deserialize;

/// The lengths a model's embeddings may be cut to. Only models trained for it keep their meaning when cut, and only the
/// model's `config.json` says so: by `matryoshka_dimensions`, or `is_matryoshka` for any length.
///
/// # Source
/// Matryoshka Representation Learning, <https://arxiv.org/abs/2205.13147>
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Matryoshka {
    /// To none but the whole.
    #[default]
    No,
    /// To any.
    Any,
    /// To these.
    Lengths(Vec<u32>),
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Config {
    is_matryoshka: bool,
    matryoshka_dimensions: Vec<u32>,
}

impl Matryoshka {
    /// Reads a `config.json`.
    ///
    /// # Errors
    /// When it is not JSON, or the fields have other types.
    pub fn from_config(json: &[u8]) -> Result<Self, serde_json::Error> {
        let config: Config = serde_json::from_slice(json)?;
        Ok(if !config.matryoshka_dimensions.is_empty() {
            Self::Lengths(config.matryoshka_dimensions)
        } else if config.is_matryoshka {
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
        assert_eq!(read(r#"{"is_matryoshka": true}"#), Some(Matryoshka::Any));
        let both = r#"{"is_matryoshka": true, "matryoshka_dimensions": [64, 128]}"#;
        assert_eq!(read(both), Some(Matryoshka::Lengths(vec![64, 128])));
        assert_eq!(read(r#"{"is_matryoshka": 1}"#), None);
    }
}
