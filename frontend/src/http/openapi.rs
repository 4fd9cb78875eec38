//! `/openapi.json`: every route and its fields, with the limits of this server's config.
//!
//! The document is written by hand, as the request parsers are. Tests keep them in step: they send what the document allows, and
//! what it forbids, to a running server.

use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::future::{Ready, ready};
use http::header;
use serde_json::{Value, json};

use crate::config::FrontendConfig;
use crate::responses::HOSTED;

/// The document. A string that begins with `$` is replaced by a value that only a running server knows.
const TEMPLATE: &str = include_str!("openapi.json");

/// Returns the handler that serves the document of a server with this config.
pub(super) fn serve(
    config: &FrontendConfig,
) -> impl FnOnce() -> Ready<Response> + Clone + Send + Sync + 'static {
    let document = document(config);
    move || ready(([(header::CONTENT_TYPE, "application/json")], document).into_response())
}

pub(super) fn document(config: &FrontendConfig) -> Bytes {
    let document = serde_json::from_str(TEMPLATE).map(|mut document| {
        fill(&mut document, config);
        document.to_string()
    });
    debug_assert!(document.is_ok(), "the document is JSON");
    Bytes::from(document.unwrap_or_default())
}

fn fill(value: &mut Value, config: &FrontendConfig) {
    match value {
        Value::String(text) => {
            let name = text.strip_prefix('$');
            if let Some(known) = name.and_then(|name| known(name, config)) {
                *value = known;
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| fill(item, config)),
        Value::Object(fields) => fields.values_mut().for_each(|field| fill(field, config)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

fn known(name: &str, config: &FrontendConfig) -> Option<Value> {
    Some(match name {
        "version" => env!("CARGO_PKG_VERSION").into(),
        "max_choices" => config.max_choices.into(),
        "max_stop_strings" => config.max_stop_strings.into(),
        "max_stop_bytes" => config.max_stop_bytes.into(),
        "max_logit_bias" => config.max_logit_bias.into(),
        "max_prompts" => config.max_prompts.into(),
        "max_embedding_inputs" => config.max_embedding_inputs.into(),
        "max_score_pairs" => config.max_score_pairs.into(),
        "max_tools" => config.max_tools.into(),
        "hosted_tools" => HOSTED.into(),
        "verbosity" => hint(config, &["medium"]),
        "service_tier" => hint(config, &["auto", "default"]),
        "message_tier" => hint(config, &["auto", "standard_only"]),
        "speed" => hint(config, &["standard"]),
        _ => return None,
    })
}

/// A string without an effect; a strict server accepts only those in `neutral`.
fn hint(config: &FrontendConfig, neutral: &[&str]) -> Value {
    if !config.strict_parameters {
        return json!({"type": ["string", "null"]});
    }
    let mut values: Vec<Value> = neutral.iter().map(|&value| value.into()).collect();
    values.push(Value::Null);
    json!({"enum": values})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_those_of_the_config() {
        let config = FrontendConfig {
            max_choices: 3,
            max_tools: 7,
            ..FrontendConfig::default()
        };
        let document = document(&config);
        let document: Value = serde_json::from_slice(&document).unwrap();
        let schemas = &document["components"]["schemas"];
        assert_eq!(schemas["Choices"]["maximum"], 3);
        assert_eq!(schemas["Tools"]["maxItems"], 7);
        assert_eq!(schemas["ServiceTier"]["type"], json!(["string", "null"]));
        let text = document.to_string();
        assert!(!text.contains("\"$m"), "a limit without a value");
        assert!(!text.contains("\"$version\""));
        assert!(text.contains("{\"enum\":[\"code_interpreter\",\"image_generation\","));
    }
}
