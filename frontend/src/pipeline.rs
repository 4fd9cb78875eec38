//! From a checked request to running answers: template, tokenize, generate. HTTP and the text chat both use it.

mod embedding;
mod timings;
mod tokens;

use std::sync::Arc;

use genset_backend_common::{
    ChatInput, EngineError, GenerateRequest, GuidedDecoding, Input, RequestContext, TokenId,
};
use serde_json::{Map, Value};

pub use embedding::{EmbedJob, Embedded};
pub use timings::PromptTimings;
pub(crate) use tokens::no_tokenizer;
pub use tokens::{detokenize, token_strings, tokenize_prompt};

use crate::answer::Answer;
use crate::error::ApiError;
use crate::model::{ServedModel, TextFiles};
use crate::openai::{ChatRequest, CommonParams, CompletionRequest, Prompt, arguments_as_text};
use crate::parsers::Splitting;
use crate::text::{EncodedPrompt, TemplateError, TemplateInput};

/// Prompts longer than this many bytes are tokenized on a thread of their own, so that they delay nobody else's tokens:
/// about the text an async thread tokenizes in a few milliseconds.
const LONG_PROMPT_BYTES: usize = 16 << 10;

/// The work of one request: its prompts, ready for the engine.
#[derive(Debug)]
pub struct Job {
    model: Arc<ServedModel>,
    params: CommonParams,
    inputs: Vec<Input>,
    /// How the answers are taken apart; `None` where all of their text is content.
    splitting: Option<Splitting>,
    guided: Option<GuidedDecoding>,
    /// The client's field that asks for `guided`.
    bound_by: Option<Arc<str>>,
    /// What the answers to each input begin with, if with their prompts.
    echoes: Vec<Arc<str>>,
}

impl Job {
    /// Templates and tokenizes a chat.
    ///
    /// # Errors
    /// A 400 when the template refuses the messages or the model has none, or when the model cannot call tools as asked.
    pub async fn chat(model: Arc<ServedModel>, request: ChatRequest) -> Result<Self, ApiError> {
        let ChatRequest {
            mut params,
            mut messages,
            tools,
            add_generation_prompt,
            mut template_args,
            reasoning_effort,
        } = request;
        let (mut splitting, mut guided) = Splitting::plan(&model.card, model.parsers, &tools)?;
        let mut bound_by = guided.as_ref().map(|_| "tools".into());
        if let Some((format, field)) = bind(&model, &mut params)? {
            // It is bound from its first token: there is no markup to look for.
            (splitting, guided, bound_by) = (None, Some(format), Some(field));
        }
        if let Some(effort) = reasoning_effort {
            add_reasoning_effort(&model, effort, &mut template_args)?;
        }
        if model.text.is_none() {
            refuse_template_options(add_generation_prompt, &template_args)?;
            refuse_token_options(&params)?;
            let tools = tools.offered().to_vec();
            return Ok(Self {
                model,
                params,
                inputs: vec![Input::Chat(ChatInput { messages, tools })],
                splitting,
                guided,
                bound_by,
                echoes: Vec::new(),
            });
        }
        let texts = messages.iter().chain(tools.offered());
        let mut bytes = texts.map(text_bytes).sum();
        let with_model = Arc::clone(&model);
        let mut quick = None;
        if bytes < LONG_PROMPT_BYTES
            && let Some(template) = with_model
                .text
                .as_ref()
                .and_then(|text| text.quick_template.as_ref())
        {
            let input = TemplateInput {
                messages: &messages,
                tools: Some(tools.offered()),
                add_generation_prompt,
                extra: &template_args,
            };
            match with_model
                .timings
                .quick_template(|| template.render(&input))
            {
                Err(TemplateError::OutOfFuel { .. }) => bytes = usize::MAX,
                rendered => quick = rendered.ok(),
            }
        }
        let prepared = off_async_threads(bytes, move || {
            let Some(text) = &with_model.text else {
                return Ok((Vec::new(), splitting));
            };
            let mut chat = Chat {
                messages: &mut messages,
                tools: tools.offered(),
                add_generation_prompt,
                template_args: &template_args,
            };
            let timings = &with_model.timings;
            let prompt = match quick {
                Some(prompt) => prompt,
                None => timings.template(|| chat.render(text, &with_model.card.name))?,
            };
            if let Some(splitting) = &mut splitting {
                splitting.see_prompt(&prompt);
            }
            let tokens = timings.tokenize(|| encode(text, &prompt, false, "messages"))?;
            Ok((tokens, splitting))
        });
        let (tokens, splitting) = prepared.await?;
        Ok(Self {
            inputs: vec![Input::Tokens(tokens)],
            model,
            params,
            splitting,
            guided,
            bound_by,
            echoes: Vec::new(),
        })
    }

    /// Tokenizes the prompts of a completion request.
    ///
    /// # Errors
    /// A 400 when a prompt is of a kind the model does not take.
    pub async fn completion(
        model: Arc<ServedModel>,
        request: CompletionRequest,
    ) -> Result<Self, ApiError> {
        let CompletionRequest {
            mut params,
            prompts,
            echo,
            suffix,
        } = request;
        let (guided, bound_by) = bind(&model, &mut params)?.unzip();
        let mut inputs = Vec::with_capacity(prompts.len());
        let mut echoes = Vec::new();
        for prompt in prompts {
            if echo {
                echoes.push(shown(&prompt, &model)?);
            }
            let prompt = match &suffix {
                Some(suffix) => between(prompt, suffix, &model)?,
                None => prompt,
            };
            inputs.push(input(prompt, &params, &model).await?);
        }
        Ok(Self {
            model,
            params,
            inputs,
            splitting: None,
            guided,
            bound_by,
            echoes,
        })
    }

    /// The parameters shared by all answers.
    #[must_use]
    pub fn params(&self) -> &CommonParams {
        &self.params
    }

    /// As [`Self::answers`], with the first [begun](begin).
    ///
    /// # Errors
    /// As both.
    ///
    /// # Cancel safety
    /// Dropping the future or an answer cancels it.
    pub async fn start(self, ctx: &RequestContext) -> Result<Vec<Answer>, EngineError> {
        let mut answers = self.answers(ctx)?;
        begin(&mut answers).await?;
        Ok(answers)
    }

    /// Readies the answers, prompt by prompt. Each starts as it is read; its place in the list is its index in the response.
    ///
    /// The answers of one request must not wait for each other: were all started before any is read, a request with more
    /// answers than the engine has places would wait for itself.
    ///
    /// # Errors
    /// What any of the requests is refused with by the model's card.
    pub fn answers(self, ctx: &RequestContext) -> Result<Vec<Answer>, EngineError> {
        let count = self.inputs.len() * usize::try_from(self.params.n).unwrap_or(1);
        let mut answers = Vec::with_capacity(count);
        for (prompt, input) in self.inputs.iter().enumerate() {
            for choice in 0..self.params.n {
                let request = self.request(input.clone(), choice);
                self.model.card.check(&request)?;
                let ctx = if count == 1 {
                    ctx.child()
                } else {
                    ctx.sibling(answers.len())
                };
                let answer = self.ready(request, ctx, choice == 0);
                answers.push(match self.echoes.get(prompt) {
                    Some(prompt) => answer.with_echo(Arc::clone(prompt)),
                    None => answer,
                });
            }
        }
        Ok(answers)
    }

    fn ready(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
        is_first_choice: bool,
    ) -> Answer {
        let engine = Arc::clone(&self.model.engine);
        let prompt_tokens = request.prompt_tokens().unwrap_or(0);
        let bound_by = self.bound_by.clone();
        let starting = Box::pin(async move {
            let started = engine.generate(request, ctx).await;
            started.map_err(|error| as_the_client_calls_it(error, bound_by.as_deref()))
        });
        let tokenizer = self
            .model
            .text
            .as_ref()
            .map(|text| Arc::clone(&text.tokenizer));
        let stops = Arc::clone(&self.params.stop_strings);
        let mut answer = Answer::starting(starting, tokenizer, stops, prompt_tokens);
        if let Some(splitting) = &self.splitting {
            let markers = self.model.text.as_ref();
            let markers = markers.map(|text| splitting.special_tokens(&text.tokenizer));
            answer = answer.with_splitter(splitting.splitter(), markers.unwrap_or_default());
        }
        if let (Some(logprobs), Some(text)) = (&self.params.logprobs, &self.model.text) {
            answer = answer.with_logprobs(Arc::clone(&text.tokenizer), logprobs.top);
        }
        if is_first_choice {
            answer
        } else {
            answer.sharing_prompt()
        }
    }

    fn request(&self, input: Input, choice: u32) -> GenerateRequest {
        let params = &self.params;
        let mut request = GenerateRequest::from_tokens(self.model.card.name.clone(), Vec::new());
        request.input = input;
        request.stop = params.stop.clone();
        if let Some(text) = &self.model.text {
            request.stop.eos_token_ids.clone_from(&text.eos_token_ids);
        }
        request.sampling = params.sampling.clone();
        // Each choice has a seed of its own, or they would all be the same.
        request.sampling.seed = params
            .sampling
            .seed
            .map(|seed| seed.wrapping_add(u64::from(choice)));
        request.output.logprobs = params.logprobs.map(|logprobs| logprobs.top);
        request.guided.clone_from(&self.guided);
        request.priority = params.priority;
        request.annotations.clone_from(&params.annotations);
        request
    }
}

/// Starts the first answer, so that what the engine refuses is known before anything is sent.
///
/// # Errors
/// The engine's refusal.
///
/// # Cancel safety
/// The answer is still starting when the future is dropped.
pub async fn begin(answers: &mut [Answer]) -> Result<(), EngineError> {
    match answers.first_mut() {
        Some(first) => first.started().await,
        None => Ok(()),
    }
}

/// Checks what the model must be able to do beside generating, and takes out what binds the answers.
fn bind(
    model: &ServedModel,
    params: &mut CommonParams,
) -> Result<Option<(GuidedDecoding, Arc<str>)>, ApiError> {
    let can = &model.card.capabilities;
    if let Some(logprobs) = &params.logprobs {
        // Text that an engine makes by itself comes without.
        logprobs.check(can.max_logprobs.filter(|_| model.text.is_some()))?;
    }
    let guided = params.guided.take();
    let checked = guided.map(|guided| {
        let field = guided.field.as_str().into();
        Ok((guided.check(&can.guided)?, field))
    });
    checked.transpose()
}

/// What engines call the fields that bind an answer.
const BINDING_FIELDS: [&str; 4] = [
    "response_format",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
];

/// The error of an engine with the name of the client's own field, where it is about what binds the answer.
fn as_the_client_calls_it(error: EngineError, bound_by: Option<&str>) -> EngineError {
    let details = error.details();
    let (Some(theirs), Some(ours)) = (details.field.as_deref(), bound_by) else {
        return error;
    };
    if theirs == ours || !BINDING_FIELDS.contains(&theirs) {
        return error;
    }
    let message = match error.message().strip_prefix(theirs) {
        Some(rest) => format!("{ours}{rest}"),
        None => error.message().to_owned(),
    };
    EngineError::new(error.kind(), message)
        .with_details(details.clone())
        .with_field(ours)
        .with_source(error)
}

/// A completion's prompt as the engine takes it.
async fn input(
    prompt: Prompt,
    params: &CommonParams,
    model: &Arc<ServedModel>,
) -> Result<Input, ApiError> {
    match (prompt, &model.text) {
        (Prompt::Tokens(tokens), Some(_)) => Ok(Input::Tokens(tokens)),
        (Prompt::Tokens(_), None) => {
            let why = "this model takes text, not token ids";
            Err(ApiError::unsupported("prompt", why))
        }
        (Prompt::Text(text), None) => {
            refuse_token_options(params)?;
            Ok(Input::Text(text))
        }
        (Prompt::Text(text), Some(_)) => {
            let with_model = Arc::clone(model);
            let tokens = off_async_threads(text.len(), move || match &with_model.text {
                Some(files) => with_model
                    .timings
                    .tokenize(|| encode(files, &text, true, "prompt")),
                None => Ok(Vec::new()),
            });
            Ok(Input::Tokens(tokens.await?))
        }
    }
}

/// The prompt whose answer stands between `prompt` and `suffix`.
fn between(prompt: Prompt, suffix: &str, model: &ServedModel) -> Result<Prompt, ApiError> {
    let infill = model.text.as_ref().and_then(|text| text.infill);
    let Some(infill) = infill else {
        let why = "this model's tokenizer has no tokens that ask for text between two others; leave the field out";
        return Err(ApiError::unsupported("suffix", why));
    };
    match prompt {
        Prompt::Text(text) => Ok(Prompt::Text(infill.prompt(&text, suffix))),
        Prompt::Tokens(_) => {
            let problem = "expected a text, not token ids, beside a 'suffix'";
            Err(ApiError::invalid("prompt", problem))
        }
    }
}

/// Effort is a variable of the template, where it has one.
fn add_reasoning_effort(
    model: &ServedModel,
    effort: String,
    template_args: &mut Map<String, Value>,
) -> Result<(), ApiError> {
    const NAME: &str = "reasoning_effort";
    let template = model.text.as_ref().and_then(|text| text.template.as_ref());
    if !template.is_some_and(|template| template.reads(NAME)) {
        let why = "this model's chat template has no such setting; leave the field out";
        return Err(ApiError::unsupported(NAME, why));
    }
    // The template's own arguments are closer to it.
    template_args
        .entry(NAME)
        .or_insert_with(|| Value::String(effort));
    Ok(())
}

/// A prompt as its echo shows it: token ids with all special tokens.
fn shown(prompt: &Prompt, model: &ServedModel) -> Result<Arc<str>, ApiError> {
    match (prompt, &model.text) {
        (Prompt::Text(text), _) => Ok(text.as_str().into()),
        (Prompt::Tokens(tokens), Some(text)) => match text.tokenizer.decode_all(tokens, false) {
            Ok(text) => Ok(text.into()),
            Err(error) => Err(ApiError::invalid(
                "prompt",
                format!("cannot be shown as text: {error}"),
            )),
        },
        (Prompt::Tokens(_), None) => Ok(Arc::default()),
    }
}

/// An engine that templates by itself takes no options for ours.
fn refuse_template_options(
    add_generation_prompt: bool,
    template_args: &Map<String, Value>,
) -> Result<(), ApiError> {
    let why = "this model's engine applies a chat template of its own";
    if !template_args.is_empty() {
        return Err(ApiError::unsupported("chat_template_kwargs", why));
    }
    if !add_generation_prompt {
        return Err(ApiError::unsupported("add_generation_prompt", why));
    }
    Ok(())
}

/// An engine that tokenizes by itself counts and knows tokens of its own.
fn refuse_token_options(params: &CommonParams) -> Result<(), ApiError> {
    let why = "this model's engine takes text, not tokens";
    if !params.stop.stop_token_ids.is_empty() {
        return Err(ApiError::unsupported("stop_token_ids", why));
    }
    if params.stop.min_tokens > 0 {
        return Err(ApiError::unsupported("min_tokens", why));
    }
    Ok(())
}

/// The bytes of text in a message or a tool.
fn text_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(text_bytes).sum(),
        Value::Object(fields) => fields
            .iter()
            .map(|(name, value)| name.len() + text_bytes(value))
            .sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    }
}

/// Runs `work` here when it is short, else on a thread for blocking work.
pub(crate) async fn off_async_threads<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if bytes < LONG_PROMPT_BYTES {
        return work();
    }
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| {
            Err(EngineError::internal("preparing the prompt failed")
                .with_source(error)
                .into())
        })
}

/// What a chat's prompt is made of.
struct Chat<'a> {
    messages: &'a mut [Value],
    tools: &'a [Value],
    add_generation_prompt: bool,
    template_args: &'a Map<String, Value>,
}

impl Chat<'_> {
    fn render(&mut self, text: &TextFiles, model: &str) -> Result<String, ApiError> {
        let Some(template) = &text.template else {
            let why = format!("the model '{model}' has no chat template; use /v1/completions");
            return Err(ApiError::unsupported("messages", why));
        };
        let rendered = match template.render(&self.input()) {
            // Most templates take the arguments of calls as objects; some join them to their text.
            Err(TemplateError::Render { .. }) if arguments_as_text(self.messages) => {
                template.render(&self.input())
            }
            rendered => rendered,
        };
        rendered.map_err(|error| refused_by_template(&error))
    }

    fn input(&self) -> TemplateInput<'_> {
        TemplateInput {
            messages: self.messages,
            tools: Some(self.tools),
            add_generation_prompt: self.add_generation_prompt,
            extra: self.template_args,
        }
    }
}

fn refused_by_template(error: &TemplateError) -> ApiError {
    match error {
        TemplateError::Raised { message } => ApiError::invalid(
            "messages",
            format!("the model's chat template says: {message}"),
        ),
        other @ (TemplateError::Syntax { .. }
        | TemplateError::OutOfFuel { .. }
        | TemplateError::TooLarge { .. }
        | TemplateError::Render { .. }) => ApiError::invalid(
            "messages",
            format!("the model's chat template cannot render them: {other}"),
        ),
    }
}

fn tokenize(
    text: &TextFiles,
    prompt: &str,
    add_special: bool,
    field: &str,
) -> Result<Vec<TokenId>, ApiError> {
    encode(text, prompt, add_special, field).map(|prompt| prompt.ids)
}

fn encode(
    text: &TextFiles,
    prompt: &str,
    add_special: bool,
    field: &str,
) -> Result<EncodedPrompt, ApiError> {
    text.tokenizer
        .encode_prompt(prompt, add_special)
        .map_err(|error| ApiError::invalid(field, format!("cannot be tokenized: {error}")))
}
