//! [`TextFiles`]: tokenizer, chat template and other text settings from a model's files.

use std::sync::Arc;

use genset_backend_common::{
    EngineError, TokenId, card::TemplateParsers, error::At, request::Shared,
};
use serde::Deserialize;

use super::{Infill, Matryoshka, embed_prompt};
use crate::text::{ChatTemplate, TemplateSource, TextTokenizer};

/// The fuel (instructions) of a chat template that is rendered on an async thread.
const QUICK_FUEL: u64 = 50_000;

/// Tokenizer, chat template and other text settings from a model's files.
#[derive(Debug)]
pub struct TextFiles {
    /// Converts text to tokens and back.
    pub tokenizer: Arc<TextTokenizer>,
    /// Renders messages to text; `None` if the model has no chat template.
    pub template: Option<ChatTemplate>,
    /// The same with the fuel and memory for a few milliseconds, to render on an async thread.
    pub quick_template: Option<ChatTemplate>,
    /// The parsers of tool calls that may fit, by the chat template.
    pub likely_tool_parsers: Vec<&'static str>,
    /// The tokens that end a sequence.
    pub eos_token_ids: Shared<Vec<TokenId>>,
    /// The lengths to which its embeddings may be cut.
    pub matryoshka: Matryoshka,
    /// The prefix of every text to embed; empty for most models.
    pub embed_prompt: String,
    /// The prompt format for fill-in-the-middle; `None` if the model does not support it.
    pub infill: Option<&'static Infill>,
}

/// The relevant fields of `generation_config.json` and `config.json`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct TokenConfig {
    eos_token_id: Option<OneOrMany>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(i64),
    Many(Vec<i64>),
}

impl OneOrMany {
    /// The ids. A negative one stands for none, as in `transformers`.
    fn token_ids(self) -> Vec<TokenId> {
        let ids = match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        };
        let token_ids = ids.into_iter().map(TokenId::try_from);
        token_ids.filter_map(Result::ok).collect()
    }
}

impl TextFiles {
    /// Reads a model's files; `file` returns them by name. The tokenizer caches at most `tokenizer_cache_bytes` of
    /// known prompts and words.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the invalid file.
    pub fn read(
        file: impl Fn(&str) -> Option<Vec<u8>>,
        tokenizer_cache_bytes: usize,
    ) -> Result<Self, EngineError> {
        let required = |name: &'static str| {
            file(name).ok_or_else(|| {
                EngineError::invalid_argument(
                    At::other(name),
                    "the model's workers publish no such file",
                )
            })
        };
        let tokenizer = TextTokenizer::from_bytes(&required("tokenizer.json")?)
            .map_err(|error| bad_file("tokenizer.json", error))?
            .with_cache(tokenizer_cache_bytes);
        let tokenizer_config = required("tokenizer_config.json")?;
        let (template_file, source) = templates(&file, &tokenizer_config)?;
        let template = source.as_ref().map(TemplateSource::compile).transpose();
        let template = template.map_err(|error| bad_file(template_file, error))?;
        let mut eos_token_ids = Vec::new();
        for name in ["generation_config.json", "config.json"] {
            let Some(content) = file(name) else { continue };
            let config: TokenConfig =
                serde_json::from_slice(&content).map_err(|error| bad_file(name, error))?;
            eos_token_ids = config
                .eos_token_id
                .map_or_else(Vec::new, OneOrMany::token_ids);
            if !eos_token_ids.is_empty() {
                break;
            }
        }
        if eos_token_ids.is_empty() {
            let eos = source
                .as_ref()
                .and_then(|source| source.eos_token.as_deref());
            eos_token_ids.extend(eos.and_then(|eos| tokenizer.token_id(eos)));
        }
        let matryoshka = file("config.json").map(|json| Matryoshka::from_config(&json));
        let matryoshka = matryoshka.transpose();
        let matryoshka = matryoshka.map_err(|error| bad_file("config.json", error))?;
        let prompts = "config_sentence_transformers.json";
        let embed_prompt = file(prompts).map(|json| embed_prompt::from_config(&json));
        let embed_prompt = embed_prompt.transpose();
        let embed_prompt = embed_prompt.map_err(|error| bad_file(prompts, error))?;
        let shown = source.as_ref().map(|source| {
            let tool_use = source.tool_use.as_deref().unwrap_or_default();
            TemplateParsers::of(&[source.chat.as_str(), tool_use].join("\n"))
        });
        Ok(Self {
            embed_prompt: embed_prompt.unwrap_or_default(),
            infill: Infill::of(&tokenizer),
            tokenizer: Arc::new(tokenizer),
            quick_template: template
                .clone()
                .map(|template| template.into_quick(QUICK_FUEL)),
            template,
            likely_tool_parsers: shown.unwrap_or_default().likely_tools,
            eos_token_ids: eos_token_ids.into(),
            matryoshka: matryoshka.unwrap_or_default(),
        })
    }
}

/// Returns the model's chat templates, and the name of the file with the one for all chats.
///
/// # Source
/// `from_pretrained` of tokenizers and of processors in `transformers`.
fn templates(
    file: &impl Fn(&str) -> Option<Vec<u8>>,
    tokenizer_config: &[u8],
) -> Result<(&'static str, Option<TemplateSource>), EngineError> {
    const CONFIG: &str = "tokenizer_config.json";
    const JINJA: &str = "chat_template.jinja";
    // In older checkouts, with the key of a `tokenizer_config.json`.
    const JSON: &str = "chat_template.json";
    const TOOL_USE: &str = "additional_chat_templates/tool_use.jinja";
    let text = |name: &'static str| {
        let text = file(name).map(String::from_utf8).transpose();
        text.map_err(|error| bad_file(name, error))
    };
    let own = match (text(JINJA)?, file(JSON)) {
        (Some(chat), _) => Some((JINJA, chat, None)),
        (None, Some(json)) => {
            let own = TemplateSource::from_tokenizer_config(&json);
            let own = own.map_err(|error| bad_file(JSON, error))?;
            own.map(|own| (JSON, own.chat, own.tool_use))
        }
        (None, None) => None,
    };
    let (name, source) = match own {
        Some((name, chat, tool_use)) => {
            let source = TemplateSource::from_jinja(chat, tokenizer_config);
            let source = source.map(|source| TemplateSource { tool_use, ..source });
            (name, source.map(Some))
        }
        None => (
            CONFIG,
            TemplateSource::from_tokenizer_config(tokenizer_config),
        ),
    };
    let mut source = source.map_err(|error| bad_file(CONFIG, error))?;
    if let (Some(source), Some(tool_use)) = (&mut source, text(TOOL_USE)?) {
        ChatTemplate::try_new(&tool_use, None, None).map_err(|error| bad_file(TOOL_USE, error))?;
        source.tool_use = Some(tool_use);
    }
    Ok((name, source))
}

fn bad_file(name: &str, error: impl std::error::Error + Send + Sync + 'static) -> EngineError {
    EngineError::invalid_argument(At::other(name), &error).with_source(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: (&str, &str) = (
        "tokenizer_config.json",
        r#"{"chat_template": "config", "bos_token": "<s>"}"#,
    );
    const JSON: (&str, &str) = ("chat_template.json", r#"{"chat_template": "json"}"#);
    const JINJA: (&str, &str) = ("chat_template.jinja", "jinja");
    const TOOL_USE: (&str, &str) = ("additional_chat_templates/tool_use.jinja", "tools");

    fn read(files: &[(&str, &str)]) -> Result<(&'static str, Option<TemplateSource>), EngineError> {
        let file = |name: &str| {
            let mut files = files.iter();
            let found = files.find(|(known, _)| *known == name);
            found.map(|(_, content)| content.as_bytes().to_vec())
        };
        templates(&file, &file(CONFIG.0).unwrap())
    }

    #[test]
    fn a_chat_template_in_a_file_goes_before_that_of_the_config() {
        for (files, name, chat, tool_use) in [
            (&[CONFIG][..], CONFIG.0, "config", None),
            (&[CONFIG, JSON], JSON.0, "json", None),
            (&[CONFIG, JSON, JINJA], JINJA.0, "jinja", None),
            (&[CONFIG, JINJA, TOOL_USE], JINJA.0, "jinja", Some("tools")),
            (&[CONFIG, TOOL_USE], CONFIG.0, "config", Some("tools")),
            (&[CONFIG, (JSON.0, "{}")], CONFIG.0, "config", None),
        ] {
            let (found, source) = read(files).unwrap();
            let source = source.unwrap();
            assert_eq!(found, name, "{files:?}");
            assert_eq!(source.chat, chat, "{files:?}");
            assert_eq!(source.tool_use.as_deref(), tool_use, "{files:?}");
            assert_eq!(source.bos_token.as_deref(), Some("<s>"), "{files:?}");
        }
        assert_eq!(read(&[(CONFIG.0, "{}")]).unwrap().1, None);
    }

    #[test]
    fn a_bad_chat_template_is_named() {
        for bad in [(JSON.0, "{"), (TOOL_USE.0, "{% if")] {
            let error = read(&[CONFIG, bad]).unwrap_err();
            assert_eq!(error.at().map(|at| at.name()), Some(bad.0));
        }
    }
}
