//! The text that a checkpoint puts before every text to embed.

use std::collections::BTreeMap;

use serde::Deserialize;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Config {
    prompts: Option<BTreeMap<String, Option<String>>>,
    default_prompt_name: Option<String>,
}

/// The default prompt of a `config_sentence_transformers.json`, which `encode` prepends to a text if its caller names no
/// prompt. Empty if there is none.
///
/// # Errors
/// If it is not JSON, a field has another type, or the default names a prompt that is not listed.
///
/// # Source
/// `SentenceTransformer.encode` of `sentence-transformers`.
pub(super) fn from_config(json: &[u8]) -> Result<String, serde_json::Error> {
    use serde::de::Error;
    let config: Config = serde_json::from_slice(json)?;
    let Some(name) = config.default_prompt_name else {
        return Ok(String::new());
    };
    let mut prompts = config.prompts.unwrap_or_default();
    let prompt = prompts.remove(&name).ok_or_else(|| {
        let problem = format!(
            "default_prompt_name is {name:?}, which is none of prompts; list it or set null"
        );
        serde_json::Error::custom(problem)
    })?;
    Ok(prompt.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_alone_is_put_before_texts() {
        let read = |json: &str| from_config(json.as_bytes()).map_err(|error| error.to_string());
        assert_eq!(read("{}").unwrap(), "");
        assert_eq!(read(r#"{"prompts": null}"#).unwrap(), "");
        let listed = r#"{"prompts": {"query": "query: "}, "default_prompt_name": null, "similarity_fn_name": "cosine"}"#;
        assert_eq!(read(listed).unwrap(), "");
        let default = r#"{"prompts": {"query": "query: "}, "default_prompt_name": "query"}"#;
        assert_eq!(read(default).unwrap(), "query: ");
        let empty = r#"{"prompts": {"query": "query: ", "document": null}, "default_prompt_name": "document"}"#;
        assert_eq!(read(empty).unwrap(), "");
        let unlisted = read(r#"{"default_prompt_name": "query"}"#).unwrap_err();
        assert!(
            unlisted.contains("default_prompt_name") && unlisted.contains("set null"),
            "{unlisted}"
        );
    }
}
