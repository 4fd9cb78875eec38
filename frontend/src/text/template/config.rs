//! The chat template in a model's `tokenizer_config.json`.

use serde::Deserialize;
use serde_json::Value;

use super::{ChatTemplate, TemplateError};

/// Why a `tokenizer_config.json` could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateSourceError {
    /// It is not JSON, or its chat template or tokens have an unknown form.
    #[error("cannot read the tokenizer configuration")]
    Malformed {
        /// What is wrong with it.
        #[source]
        source: serde_json::Error,
    },
}

/// The source of a model's chat template, with the tokens that it refers to.
///
/// # Examples
///
/// ```
/// use genset_frontend::text::TemplateSource;
///
/// let config = br#"{ "chat_template": "{{ bos_token }}", "bos_token": { "content": "<s>" } }"#;
/// let source = TemplateSource::from_tokenizer_config(config)?.expect("it has a chat template");
/// assert_eq!(source.bos_token.as_deref(), Some("<s>"));
/// let template = source.compile()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateSource {
    /// The template for all chats, or for those without tools if there is another template for tools.
    pub chat: String,
    /// The template for chats with tools.
    pub tool_use: Option<String>,
    /// The text of the token that begins a sequence.
    pub bos_token: Option<String>,
    /// The text of the token that ends a sequence.
    pub eos_token: Option<String>,
}

impl TemplateSource {
    /// Reads a `tokenizer_config.json`. Returns `None` if it has no chat template.
    ///
    /// # Errors
    ///
    /// [`TemplateSourceError`] if it cannot be read.
    pub fn from_tokenizer_config(json: &[u8]) -> Result<Option<Self>, TemplateSourceError> {
        let config = TokenizerConfig::parse(json)?;
        let (chat, tool_use) = match config.chat_template {
            None => return Ok(None),
            Some(Templates::One(source)) => (source, None),
            Some(Templates::Named(templates)) => pick(&templates),
        };
        Ok(Some(Self {
            chat,
            tool_use,
            bos_token: config.bos_token.map(Token::into_text),
            eos_token: config.eos_token.map(Token::into_text),
        }))
    }

    /// Combines a template from a separate file, `chat_template.jinja`, with the tokens of the `tokenizer_config.json` beside it.
    /// The file takes precedence over a template in the latter.
    ///
    /// # Errors
    ///
    /// [`TemplateSourceError::Malformed`] if the configuration cannot be read.
    pub fn from_jinja(
        chat: impl Into<String>,
        tokenizer_config: &[u8],
    ) -> Result<Self, TemplateSourceError> {
        let config = TokenizerConfig::parse(tokenizer_config)?;
        Ok(Self {
            chat: chat.into(),
            tool_use: None,
            bos_token: config.bos_token.map(Token::into_text),
            eos_token: config.eos_token.map(Token::into_text),
        })
    }

    /// Compiles the template, or both of them.
    ///
    /// # Errors
    ///
    /// [`TemplateError::Syntax`] if one of them is not valid.
    pub fn compile(&self) -> Result<ChatTemplate, TemplateError> {
        let (bos, eos) = (self.bos_token.as_deref(), self.eos_token.as_deref());
        let template = ChatTemplate::try_new(&self.chat, bos, eos)?;
        match &self.tool_use {
            Some(source) => template.try_with_tool_use(source),
            None => Ok(template),
        }
    }
}

#[derive(Deserialize)]
struct TokenizerConfig {
    chat_template: Option<Templates>,
    bos_token: Option<Token>,
    eos_token: Option<Token>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Token {
    Text(String),
    Added { content: String },
}

impl TokenizerConfig {
    fn parse(json: &[u8]) -> Result<Self, TemplateSourceError> {
        serde_json::from_slice(json).map_err(|source| TemplateSourceError::Malformed { source })
    }
}

impl Token {
    fn into_text(self) -> String {
        match self {
            Self::Text(text) | Self::Added { content: text } => text,
        }
    }
}

/// Picks the templates named `default` and `tool_use`; the others are for tasks that no API here has. Without a default,
/// chats are refused, and the model's other uses work, as in `transformers`.
fn pick(templates: &[NamedTemplate]) -> (String, Option<String>) {
    let find = |name| {
        let named = templates.iter().find(|template| template.name == name);
        named.map(|template| template.template.clone())
    };
    let default = find("default").unwrap_or_else(|| {
        let names = templates.iter().map(|template| template.name.as_str());
        let names = names.collect::<Vec<_>>().join(", ");
        let why = format!("none of the model's chat templates is named default, but: {names}");
        format!("{{{{ raise_exception({}) }}}}", Value::from(why))
    });
    (default, find("tool_use"))
}
