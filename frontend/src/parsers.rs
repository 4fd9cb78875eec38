//! The parsers of an answer: chosen for a model, then for a request.

use std::collections::BTreeSet;
use std::sync::Arc;

use genset_backend_common::{
    EngineError, GuidedDecoding, ModelCard, TokenId, config::GuidedKind, spelling::none_of,
};
use serde_json::Value;

use crate::error::ApiError;
use crate::markup::Splitter;
use crate::openai::{ToolChoice, ToolOptions};
use crate::reasoning::ReasoningDialect;
use crate::text::TextTokenizer;
use crate::tools::{ToolDialect, ToolSchemas, forced};

/// The name for no parser.
const NONE: &str = "none";

/// The name that counts as none given.
const AUTO: &str = "auto";

/// Parsers by name, as configured by an operator. An absent name, or `auto`, defaults to the model card's; `none` disables the
/// parser.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ParserNames {
    /// A [`ToolDialect`].
    pub tool: Option<String>,
    /// A [`ReasoningDialect`].
    pub reasoning: Option<String>,
}

impl ParserNames {
    /// Checks that these parsers exist.
    ///
    /// # Errors
    /// `InvalidArgument` that names the field and lists the valid names.
    pub fn check(&self) -> Result<(), EngineError> {
        Parsers::of(self.tool.as_deref(), self.reasoning.as_deref()).map(drop)
    }
}

/// The parsers of a model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Parsers {
    /// The dialect of its tool calls.
    pub tool: Option<ToolDialect>,
    /// The dialect of its reasoning.
    pub reasoning: Option<ReasoningDialect>,
}

impl Parsers {
    /// Chooses the parsers for the model with this card; `names` override the card's.
    ///
    /// # Errors
    /// `InvalidArgument` that names the field and lists the valid names.
    pub fn choose(card: &ModelCard, names: &ParserNames) -> Result<Self, EngineError> {
        let given = |name: &Option<String>| name.clone().filter(|name| name != AUTO);
        let tool = given(&names.tool).or_else(|| given(&card.tool_parser));
        let reasoning = given(&names.reasoning).or_else(|| given(&card.reasoning_parser));
        Self::of(tool.as_deref(), reasoning.as_deref())
    }

    /// Whether the model writes harmony channels.
    pub(crate) fn are_harmony(self) -> bool {
        self.tool.is_some_and(ToolDialect::is_harmony)
            || self.reasoning.is_some_and(ReasoningDialect::is_harmony)
    }

    fn of(tool: Option<&str>, reasoning: Option<&str>) -> Result<Self, EngineError> {
        let is_some = |name: &&str| ![NONE, AUTO].contains(name);
        let find_tool = |name| {
            let names = ToolDialect::all().iter().map(|dialect| dialect.name());
            ToolDialect::find(name).ok_or_else(|| unknown("tool_parser", name, names))
        };
        let find_reasoning = |name| {
            let names = ReasoningDialect::all().iter().map(|dialect| dialect.name());
            ReasoningDialect::find(name).ok_or_else(|| unknown("reasoning_parser", name, names))
        };
        Ok(Self {
            tool: tool.filter(is_some).map(find_tool).transpose()?,
            reasoning: reasoning.filter(is_some).map(find_reasoning).transpose()?,
        })
    }
}

fn unknown<'a>(
    field: &'static str,
    name: &str,
    names: impl Iterator<Item = &'a str>,
) -> EngineError {
    EngineError::invalid_argument(field, none_of(name, names.chain([NONE])))
}

/// How the answers to one request are split.
#[derive(Debug, Clone)]
pub(crate) struct Splitting {
    parsers: Parsers,
    mode: Mode,
    tools: Arc<ToolSchemas>,
    max_calls: u32,
    /// The names of custom tools.
    custom: Option<Arc<BTreeSet<String>>>,
    /// The names of the tools that may be called, if not all.
    allowed: Option<Arc<BTreeSet<String>>>,
    /// The end of the prompt, if known.
    prompt_end: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Mode {
    /// By the model's own markup.
    Markup { has_tools: bool },
    /// The whole answer is a list of calls.
    Calls,
    /// The whole answer is this tool's arguments.
    Arguments(String),
    /// The answer is objects of the API.
    Objects,
}

/// The length in bytes of the longest marker and some white space.
const PROMPT_END_BYTES: usize = 128;

impl Splitting {
    /// Plans how answers to a request with these tools are split, if at all, and how they are constrained. `likely` are the
    /// parsers of tool calls that may fit a model without one.
    ///
    /// # Errors
    /// A 400 that names `tools` or `tool_choice` if the model does not support them.
    pub(crate) fn plan(
        card: &ModelCard,
        parsers: Parsers,
        likely: &[&str],
        options: &ToolOptions,
    ) -> Result<(Option<Self>, Option<GuidedDecoding>), ApiError> {
        let (mode, guided) = match &options.choice {
            ToolChoice::None => (Mode::Markup { has_tools: false }, None),
            ToolChoice::Auto => {
                if parsers.tool.is_none() {
                    return Err(no_parser(&card.name, likely));
                }
                (Mode::Markup { has_tools: true }, None)
            }
            ToolChoice::Required => {
                require_guided(card)?;
                let tools = options.tools.iter().filter(|tool| options.may_call(tool));
                let schema = forced::calls_schema(tools, options.is_parallel);
                (Mode::Calls, Some(GuidedDecoding::JsonSchema(schema)))
            }
            ToolChoice::Named(name) => {
                require_guided(card)?;
                let mut tools = options.tools.iter();
                let tool = tools.find(|tool| tool["function"]["name"] == *name);
                let schema = forced::arguments_schema(tool.unwrap_or(&Value::Null));
                let mode = Mode::Arguments(name.clone());
                (mode, Some(GuidedDecoding::JsonSchema(schema)))
            }
        };
        let harmony = parsers.tool.filter(|tool| tool.is_harmony());
        let has_markup = parsers.reasoning.is_some() || harmony.is_some();
        if mode == (Mode::Markup { has_tools: false }) && !has_markup {
            return Ok((None, None));
        }
        let splitting = Self {
            parsers,
            mode,
            tools: Arc::new(ToolSchemas::new(options.offered())),
            max_calls: max_calls(options),
            custom: options.custom.clone(),
            allowed: options.allowed.clone(),
            prompt_end: None,
        };
        Ok((Some(splitting), guided))
    }

    /// Splits the answers of an engine that writes the API's own objects, for a request with these tools.
    pub(crate) fn of_objects(options: &ToolOptions) -> Self {
        Self {
            parsers: Parsers::default(),
            mode: Mode::Objects,
            tools: Arc::default(),
            max_calls: max_calls(options),
            custom: options.custom.clone(),
            // The engine does not see the others.
            allowed: None,
            prompt_end: None,
        }
    }

    /// The approximate memory of the tools' schemas.
    pub(crate) fn schema_bytes(&self) -> usize {
        self.tools.bytes()
    }

    /// Passes in the prompt, whose end may begin the model's reasoning.
    pub(crate) fn see_prompt(&mut self, prompt: &str) {
        let from = prompt.len().saturating_sub(PROMPT_END_BYTES);
        let from = prompt.ceil_char_boundary(from);
        self.prompt_end = prompt.get(from..).map(str::to_owned);
    }

    /// A splitter for one answer.
    pub(crate) fn splitter(&self) -> Splitter {
        let ids = self.parsers.tool.map(ToolDialect::id_style);
        let tools = Arc::clone(&self.tools);
        let (reasoning, tools) = match &self.mode {
            Mode::Objects => {
                return Splitter::of_objects()
                    .with_max_calls(self.max_calls)
                    .with_custom(self.custom.clone());
            }
            Mode::Calls => (None, Some(forced::calls_parser(tools))),
            Mode::Arguments(name) => (None, Some(forced::arguments_parser(name.clone()))),
            Mode::Markup { has_tools } => {
                let tool = self.parsers.tool.filter(|_| *has_tools);
                let is_harmony =
                    |tool: Option<ToolDialect>| tool.is_some_and(ToolDialect::is_harmony);
                let reasoning = match self.parsers.reasoning {
                    // Harmony has one parser for all of it.
                    _ if is_harmony(tool) => None,
                    None if is_harmony(self.parsers.tool) => {
                        Some(ToolDialect::harmony_without_tools())
                    }
                    Some(dialect) => dialect
                        .parser(self.prompt_end.as_deref(), *has_tools)
                        .or_else(|| Some(ToolDialect::harmony_without_tools())),
                    None => None,
                };
                (reasoning, tool.map(|dialect| dialect.parser(tools)))
            }
        };
        Splitter::new(reasoning, tools, ids.unwrap_or_default())
            .with_max_calls(self.max_calls)
            .with_custom(self.custom.clone())
            .with_allowed(self.allowed.clone())
    }

    /// The special tokens in the markup.
    pub(crate) fn special_tokens(&self, tokenizer: &TextTokenizer) -> Arc<[TokenId]> {
        if !matches!(self.mode, Mode::Markup { .. }) {
            return Arc::default();
        }
        let tool = self.parsers.tool.map(ToolDialect::tokens);
        let reasoning = self.parsers.reasoning.map(ReasoningDialect::markers);
        let markers = tool.into_iter().chain(reasoning).flatten();
        let harmony = self
            .parsers
            .reasoning
            .filter(|dialect| dialect.is_harmony());
        let harmony = harmony.and_then(|_| ToolDialect::find("harmony"));
        let markers = markers.chain(harmony.map(ToolDialect::tokens).into_iter().flatten());
        let mut tokens: Vec<TokenId> = markers
            .flat_map(parts)
            .filter_map(|part| tokenizer.token_id(part))
            .filter(|token| tokenizer.is_special(*token))
            .collect();
        tokens.sort_unstable();
        tokens.dedup();
        tokens.into()
    }
}

/// Returns a marker and the tags in it: a marker may be several tokens, or a token and a word.
fn parts(marker: &'static str) -> impl Iterator<Item = &'static str> {
    let tags = marker.split_inclusive('>');
    let tags = tags.filter_map(|tag| tag.find('<').and_then(|at| tag.get(at..)));
    [marker].into_iter().chain(tags)
}

fn max_calls(options: &ToolOptions) -> u32 {
    if options.is_parallel { u32::MAX } else { 1 }
}

fn no_parser(model: &str, likely: &[&str]) -> ApiError {
    let likely = match likely {
        [] => String::new(),
        names => format!(" (its chat template has marks of {})", names.join(", ")),
    };
    let problem = format!(
        "no parser of tool calls is set for the model '{model}': name one as tool_parser in the model's card, or to the \
         server by --tool-parser{likely}; or send \"tool_choice\": \"none\""
    );
    ApiError::unsupported("tools", problem)
}

fn require_guided(card: &ModelCard) -> Result<(), ApiError> {
    if card.capabilities.guided.contains(&GuidedKind::JsonSchema) {
        return Ok(());
    }
    let problem = "this model's engine has no guided decoding to make a call certain; only \"auto\" and \"none\" are available";
    Err(ApiError::unsupported("tool_choice", problem))
}
