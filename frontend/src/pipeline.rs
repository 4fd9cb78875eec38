//! From a checked request to running answers: template, tokenize, generate. HTTP and the text chat both use it.

use std::sync::Arc;

use genset_backend_common::{
    ChatInput, EngineError, GenerateRequest, Input, RequestContext, TokenId,
};
use serde_json::{Map, Value};

use crate::answer::Answer;
use crate::error::ApiError;
use crate::model::{ServedModel, TextFiles};
use crate::openai::{ChatRequest, CommonParams, CompletionRequest, Prompt};
use crate::text::{TemplateError, TemplateInput};

/// Prompts longer than this many bytes are tokenized on a thread of their own, so that they delay nobody else's tokens:
/// about the text an async thread tokenizes in a few milliseconds.
const LONG_PROMPT_BYTES: usize = 16 << 10;

/// The work of one request: its prompts, ready for the engine.
#[derive(Debug)]
pub struct Job {
    model: Arc<ServedModel>,
    params: CommonParams,
    inputs: Vec<Input>,
}

impl Job {
    /// Templates and tokenizes a chat.
    ///
    /// # Errors
    /// A 400 when the template refuses the messages or the model has none.
    pub async fn chat(model: Arc<ServedModel>, request: ChatRequest) -> Result<Self, ApiError> {
        let ChatRequest {
            params,
            messages,
            add_generation_prompt,
            template_args,
        } = request;
        let bytes = messages.iter().map(message_bytes).sum();
        if model.text.is_none() {
            refuse_template_options(add_generation_prompt, &template_args)?;
            refuse_token_options(&params)?;
            let inputs = vec![Input::Chat(ChatInput {
                messages,
                tools: Vec::new(),
            })];
            return Ok(Self {
                model,
                params,
                inputs,
            });
        }
        let with_model = Arc::clone(&model);
        let tokens = off_async_threads(bytes, move || {
            let Some(text) = &with_model.text else {
                return Ok(Vec::new());
            };
            let input = TemplateInput {
                messages: &messages,
                tools: None,
                add_generation_prompt,
                extra: &template_args,
            };
            let prompt = render(text, &with_model.card.name, &input)?;
            tokenize(text, &prompt, false, "messages")
        });
        Ok(Self {
            inputs: vec![Input::Tokens(tokens.await?)],
            model,
            params,
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
        let CompletionRequest { params, prompts } = request;
        let mut inputs = Vec::with_capacity(prompts.len());
        for prompt in prompts {
            inputs.push(match (prompt, &model.text) {
                (Prompt::Tokens(tokens), Some(_)) => Input::Tokens(tokens),
                (Prompt::Tokens(_), None) => {
                    return Err(ApiError::unsupported(
                        "prompt",
                        "this model takes text, not token ids",
                    ));
                }
                (Prompt::Text(text), None) => {
                    refuse_token_options(&params)?;
                    Input::Text(text)
                }
                (Prompt::Text(text), Some(_)) => {
                    let with_model = Arc::clone(&model);
                    let tokens = off_async_threads(text.len(), move || match &with_model.text {
                        Some(files) => tokenize(files, &text, true, "prompt"),
                        None => Ok(Vec::new()),
                    });
                    Input::Tokens(tokens.await?)
                }
            });
        }
        Ok(Self {
            model,
            params,
            inputs,
        })
    }

    /// The parameters shared by all answers.
    #[must_use]
    pub fn params(&self) -> &CommonParams {
        &self.params
    }

    /// Starts the first answer and readies the others, prompt by prompt; those start as they are read. An answer's place in
    /// the list is its index in the response.
    ///
    /// The answers of one request must not wait for each other: were all started before any is read, a request with more
    /// answers than the engine has places would wait for itself.
    ///
    /// # Errors
    /// What any of the requests is refused with by the model's card, or the first by its engine.
    ///
    /// # Cancel safety
    /// Dropping the future or an answer cancels it.
    pub async fn start(self, ctx: &RequestContext) -> Result<Vec<Answer>, EngineError> {
        let count = self.inputs.len() * usize::try_from(self.params.n).unwrap_or(1);
        let mut answers = Vec::with_capacity(count);
        for input in &self.inputs {
            for choice in 0..self.params.n {
                let request = self.request(input.clone(), choice);
                self.model.card.check(&request)?;
                let ctx = if count == 1 {
                    ctx.child()
                } else {
                    ctx.sibling(answers.len())
                };
                answers.push(self.ready(request, ctx, choice == 0));
            }
        }
        if let Some(first) = answers.first_mut() {
            first.started().await?;
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
        let starting = Box::pin(async move { engine.generate(request, ctx).await });
        let tokenizer = self
            .model
            .text
            .as_ref()
            .map(|text| Arc::clone(&text.tokenizer));
        let stops = Arc::clone(&self.params.stop_strings);
        let answer = Answer::starting(starting, tokenizer, stops, prompt_tokens);
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
        request.priority = params.priority;
        request.annotations.clone_from(&params.annotations);
        request
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

fn message_bytes(message: &Value) -> usize {
    message["content"].as_str().map_or(0, str::len)
}

/// Runs `work` here when it is short, else on a thread for blocking work.
async fn off_async_threads<T: Send + 'static>(
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

fn render(text: &TextFiles, model: &str, input: &TemplateInput<'_>) -> Result<String, ApiError> {
    let Some(template) = &text.template else {
        let why = format!("the model '{model}' has no chat template; use /v1/completions");
        return Err(ApiError::unsupported("messages", why));
    };
    template.render(input).map_err(|error| match error {
        TemplateError::Raised { message } => ApiError::invalid(
            "messages",
            format!("the model's chat template says: {message}"),
        ),
        other @ (TemplateError::Syntax { .. }
        | TemplateError::OutOfFuel { .. }
        | TemplateError::Render { .. }) => ApiError::invalid(
            "messages",
            format!("the model's chat template cannot render them: {other}"),
        ),
    })
}

fn tokenize(
    text: &TextFiles,
    prompt: &str,
    add_special: bool,
    field: &str,
) -> Result<Vec<TokenId>, ApiError> {
    text.tokenizer
        .encode(prompt, add_special)
        .map_err(|error| ApiError::invalid(field, format!("cannot be tokenized: {error}")))
}
