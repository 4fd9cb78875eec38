//! From a chat's messages to its prompt.

use std::sync::Arc;

use genset_backend_common::{
    GuidedDecoding, Input, RequestField, config::no_media, request::ChatInput,
};
use serde_json::{Map, Value, json};

use super::encode::Plain;
use super::{Job, Room, bind, bytes_to_work_on, refuse_token_options};
use crate::error::ApiError;
use crate::model::{ServedModel, TextFiles};
use crate::openai::{
    ChatMedium, ChatRequest, Hints, ToolChoice, ToolOptions, arguments_as_text, guided_bytes,
};
use crate::parsers::Splitting;
use crate::text::{TemplateError, TemplateInput};
use crate::turns::join;
use crate::work::{Owner, SHORT_WORK_BYTES, brief};

impl Job {
    /// Templates and tokenizes a chat, or writes it as a body if the model's engine reads bodies itself.
    ///
    /// # Errors
    /// A 400 if the model does not support the messages' media, an image cannot be fetched, the template refuses the messages
    /// or the model has none, the model does not support the requested tool calls, or the prompt exceeds the context.
    ///
    /// # Cancel safety
    /// If the future is dropped, work that has not started never starts, and running work stops soon.
    pub async fn chat(
        model: Arc<ServedModel>,
        mut request: ChatRequest,
        mut room: Room,
    ) -> Result<Self, ApiError> {
        if model.card.capabilities.whole_bodies {
            return Self::chat_body(model, request, room).await;
        }
        refuse_media(&model, &request.media)?;
        let (messages, media) = (&mut request.messages, &request.media);
        let fetching = model
            .media
            .fetch_all(messages, media, room.deadline, &mut room.memory);
        fetching.await?;
        let made = Self::make_chat(model, request, room).await;
        made.map_err(ApiError::in_chat)
    }

    async fn make_chat(
        model: Arc<ServedModel>,
        request: ChatRequest,
        room: Room,
    ) -> Result<Self, ApiError> {
        let ChatRequest {
            mut params,
            mut messages,
            media,
            tools,
            add_generation_prompt,
            mut template_args,
            reasoning_effort,
        } = request;
        let bound_bytes = params.guided.as_ref().map_or(0, |guided| guided.bytes);
        let bound = bind(&model, &mut params)?;
        // Only the engine knows where media go in a prompt, and how many tokens they take.
        let text = model.text.as_deref().filter(|_| media.is_empty());
        if let Some(effort) = reasoning_effort {
            add_reasoning_effort(text, effort, &mut template_args, &mut params.hints)?;
        }
        if text.is_none() {
            refuse_template_options(add_generation_prompt, &template_args)?;
        }
        if model.text.is_none() {
            refuse_token_options(&params)?;
        }
        if text.is_some() && model.parsers.are_harmony() {
            messages.iter_mut().for_each(name_thinking);
        }
        let chat = Chat {
            messages,
            has_media: !media.is_empty(),
            tools,
            add_generation_prompt,
            template_args,
            salt: room.salt,
        };
        let mut bytes = chat.bytes();
        let mut quick = None;
        if bytes < SHORT_WORK_BYTES && !chat.has_media {
            match brief(|| chat.quick_prompt(&model)).await {
                Err(TemplateError::OutOfFuel { .. } | TemplateError::TooLarge { .. }) => {
                    bytes = usize::MAX;
                }
                rendered => quick = rendered.ok().flatten(),
            }
        }
        let with_model = Arc::clone(&model);
        let bound_by = bound.as_ref().map(|(_, field)| Arc::clone(field));
        let work = move |owner: &Owner| {
            let _room = room.memory;
            chat.make(&with_model, quick, bound_by, owner)
        };
        let made = model.work.run(bytes, room.deadline, work).await?;
        // An answer that must call tools has no content to constrain.
        let (may_call_instead, bound, bound_bytes) = match made.guided {
            Some(guided) => (false, Some((guided, "tools".into())), 0),
            None => (
                bound.is_some() && made.splitting.is_some(),
                bound,
                bound_bytes,
            ),
        };
        let (guided, bound_by) = bound.unzip();
        Ok(Self {
            inputs: vec![made.input],
            model,
            params,
            splitting: made.splitting,
            guided: guided.map(Into::into),
            schema_bytes: made.schema_bytes + bound_bytes,
            may_call_instead,
            bound_by,
            continues_prompts: false,
            echoes: Vec::new(),
        })
    }
}

/// The parts of a chat's prompt.
struct Chat {
    messages: Vec<Value>,
    /// Whether the messages have media: the engine then makes the prompt.
    has_media: bool,
    tools: ToolOptions,
    add_generation_prompt: bool,
    template_args: Map<String, Value>,
    /// The salt of the request's room.
    salt: Option<String>,
}

/// The prepared prompt.
struct Made {
    input: Input,
    splitting: Option<Splitting>,
    /// The constraint that the tools put on the answer.
    guided: Option<GuidedDecoding>,
    /// The approximate memory of both.
    schema_bytes: usize,
}

impl Chat {
    /// The approximate bytes to process, or any number that is too large for an async thread.
    fn bytes(&self) -> usize {
        let values = self.messages.iter().chain(&self.tools.tools);
        bytes_to_work_on(values.chain(self.template_args.values()))
    }

    /// The prompt, if the template renders it within a few milliseconds.
    fn quick_prompt(&self, model: &ServedModel) -> Result<Option<String>, TemplateError> {
        let quick = model.text.as_ref();
        let quick = quick.and_then(|text| text.quick_template.as_ref());
        let render = |template: &crate::text::ChatTemplate| {
            let rendered = || template.render(&self.input());
            model.timings.quick_template(rendered)
        };
        quick.map(render).transpose()
    }

    fn make(
        mut self,
        model: &ServedModel,
        quick: Option<String>,
        bound_by: Option<Arc<str>>,
        owner: &Owner,
    ) -> Result<Made, ApiError> {
        let likely = model.text.as_ref().map(|text| &*text.likely_tool_parsers);
        let likely = likely.unwrap_or_default();
        let (mut splitting, guided) =
            Splitting::plan(&model.card, model.parsers, likely, &self.tools)?;
        let schema_bytes = splitting.as_ref().map_or(0, Splitting::schema_bytes)
            + guided.as_ref().map_or(0, guided_bytes);
        match (bound_by, &self.tools.choice) {
            (None, _) | (Some(_), ToolChoice::Required | ToolChoice::Named(_)) => {}
            // An answer that is constrained from its first token has no markup to look for.
            (Some(_), ToolChoice::None) => splitting = None,
            (Some(field), ToolChoice::Auto) => self.refuse_bound_content(model, &field)?,
        }
        if let (true, Some(text)) = (self.has_media, &model.text) {
            let mut prompt = self.prompt_of_texts(text);
            // The engine's own template would refuse them too.
            if let Some(Err(TemplateError::Raised { .. })) = prompt
                && lead_with_instructions(&mut self.messages)
            {
                prompt = self.prompt_of_texts(text);
            }
            if let (Some(Ok(prompt)), Some(splitting)) = (prompt, &mut splitting) {
                splitting.see_prompt(&prompt);
            }
        }
        if self.has_media {
            // In OpenAI's API they are text.
            arguments_as_text(&mut self.messages);
        }
        let Some(text) = model.text.as_ref().filter(|_| !self.has_media) else {
            let tools = self.tools.into_offered();
            let messages = self.messages;
            return Ok(Made {
                input: Input::Chat(ChatInput { messages, tools }.into()),
                splitting,
                guided,
                schema_bytes,
            });
        };
        let prompt = match quick {
            Some(prompt) => prompt,
            None => (model.timings).template(|| self.render(text, &model.card.name))?,
        };
        if let Some(splitting) = &mut splitting {
            splitting.see_prompt(&prompt);
        }
        let plain = Plain {
            for_answer: true,
            text: &prompt,
            add_special: false,
            salt: self.salt.as_deref(),
            param: &RequestField::Prompt.into(),
        };
        let tokens = model.timings.tokenize(|| plain.encode(model, text, owner));
        Ok(Made {
            input: Input::Tokens(tokens?.into()),
            splitting,
            guided,
            schema_bytes,
        })
    }

    /// Content can only be constrained if the tokens before it are known, because the constrained tokens continue them.
    fn refuse_bound_content(&self, model: &ServedModel, field: &str) -> Result<(), ApiError> {
        let why = if model.text.is_none() || self.has_media {
            "this model's engine makes the prompt itself, so an answer bound to a format cannot call tools"
        } else if model.parsers.are_harmony() {
            "this model writes in channels, so an answer bound to a format cannot call tools"
        } else {
            return Ok(());
        };
        let why = format!("{why}; leave out one of them, or send \"tool_choice\": \"none\"");
        Err(ApiError::unsupported(field.to_owned(), why))
    }

    fn render(&mut self, text: &TextFiles, model: &str) -> Result<String, ApiError> {
        let Some(template) = &text.template else {
            let why = format!("the model '{model}' has no chat template; use /v1/completions");
            return Err(ApiError::unsupported("messages", why));
        };
        let mut rendered = template.render(&self.input());
        // Some templates raise an exception for any system message but the first.
        if let Err(TemplateError::Raised { .. }) = rendered
            && lead_with_instructions(&mut self.messages)
        {
            rendered = template.render(&self.input());
        }
        // Most templates take the arguments of calls as objects; some concatenate them as text.
        if let Err(TemplateError::Render { .. }) = rendered
            && arguments_as_text(&mut self.messages)
        {
            rendered = template.render(&self.input());
        }
        rendered.map_err(|error| refused_by_template(&error))
    }

    /// The prompt without its media: it ends like the engine's, if the model's own template determines that. `None` without a
    /// template.
    fn prompt_of_texts(&self, text: &TextFiles) -> Option<Result<String, TemplateError>> {
        let texts = |message: &Value| {
            let fields = message.as_object()?.iter();
            let fields = fields.map(|(name, value)| {
                let parts = value.as_array().filter(|_| name == "content");
                let value = parts.map_or_else(
                    || value.clone(),
                    |parts| {
                        let texts = parts.iter().filter_map(|part| part["text"].as_str());
                        texts.collect::<String>().into()
                    },
                );
                (name.clone(), value)
            });
            Some(Value::Object(fields.collect()))
        };
        let messages: Option<Vec<_>> = self.messages.iter().map(texts).collect();
        let input = TemplateInput {
            messages: &messages?,
            ..self.input()
        };
        Some(text.template.as_ref()?.render(&input))
    }

    fn input(&self) -> TemplateInput<'_> {
        TemplateInput {
            messages: &self.messages,
            tools: Some(self.tools.offered()),
            add_generation_prompt: self.add_generation_prompt,
            extra: &self.template_args,
        }
    }
}

/// Joins all system messages to one at the beginning. Returns whether there was one behind the first message.
fn lead_with_instructions(messages: &mut Vec<Value>) -> bool {
    let is_system = |message: &Value| message["role"] == "system" && message["content"].is_string();
    if !messages.iter().skip(1).any(is_system) {
        return false;
    }
    let all = std::mem::take(messages).into_iter();
    let (instructions, others): (Vec<Value>, Vec<Value>) = all.partition(is_system);
    let mut joined = String::new();
    for message in &instructions {
        join(&mut joined, message["content"].as_str().unwrap_or_default());
    }
    messages.push(json!({"role": "system", "content": joined}));
    messages.extend(others);
    true
}

/// The name of the field and of the template's variable.
pub(crate) const REASONING_EFFORT: &str = "reasoning_effort";

/// Copies an assistant message's reasoning to the name that the template of gpt-oss uses, except next to both calls and
/// content, where the template refuses it.
fn name_thinking(message: &mut Value) {
    let Value::Object(message) = message else {
        return;
    };
    let has_calls = message
        .get("tool_calls")
        .and_then(Value::as_array)
        .is_some_and(|calls| !calls.is_empty());
    let has_content = message.get("content").is_some_and(|content| content != "");
    if has_calls && has_content {
        return;
    }
    if let Some(thoughts) = message.get("reasoning_content").cloned() {
        message.entry("thinking").or_insert(thoughts);
    }
}

/// Effort is a variable of the template, if it has one; otherwise a hint.
fn add_reasoning_effort(
    text: Option<&TextFiles>,
    effort: String,
    template_args: &mut Map<String, Value>,
    hints: &mut Hints,
) -> Result<(), ApiError> {
    const NAME: &str = REASONING_EFFORT;
    let template = text.and_then(|text| text.template.as_ref());
    if !template.is_some_and(|template| template.reads(NAME)) {
        let why = "this model's chat template has no such setting; leave the field out";
        return hints.accept(NAME, why);
    }
    // Explicit template arguments take precedence.
    template_args
        .entry(NAME)
        .or_insert_with(|| Value::String(effort));
    Ok(())
}

/// Refuses media that the model's engine does not declare, naming their position in the request.
fn refuse_media(model: &ServedModel, media: &[ChatMedium]) -> Result<(), ApiError> {
    let declared = &model.card.capabilities.media;
    match media.iter().find(|medium| !declared.contains(&medium.kind)) {
        None => Ok(()),
        Some(medium) => Err(ApiError::unsupported(
            medium.at.clone(),
            no_media(&model.card.name, medium.kind),
        )),
    }
}

/// An engine that applies its own template cannot take options for ours.
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
