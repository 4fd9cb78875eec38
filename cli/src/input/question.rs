//! A request from this process to a model, through the frontend's pipeline and without HTTP.

use std::sync::Arc;

use genset_backend_common::card::EndpointType;
use genset_backend_common::output::Usage;
use genset_backend_common::{EngineError, ErrorKind, GenerateRequest, RequestContext};
use genset_frontend::answer::Answer;
use genset_frontend::markup::{Message, Splitter};
use genset_frontend::model::{Models, ServedModel};
use genset_frontend::openai::{ChatRequest, CompletionRequest, ParamLimits};
use genset_frontend::pipeline::{Job, Room};
use genset_frontend::{ApiError, FrontendConfig, MemoryBudget};
use serde_json::{Map, Value, json};

/// The default of `max_tokens` for a base model: many never end by themselves.
pub(super) const CONTINUATION_TOKENS: u32 = 256;

/// Request fields that users cannot set: the asker sets them, or the answer would be more than a text.
pub(super) const OWN_FIELDS: [&str; 8] = [
    "model",
    "messages",
    "stream",
    "stream_options",
    "n",
    "tools",
    "tool_choice",
    "logprobs",
];

/// Asks one model.
#[derive(Debug, Clone)]
pub(super) struct Asker {
    model: Arc<ServedModel>,
    /// Whether the answer repeats the whole prompt, including the end-of-sequence tokens that its template inserts.
    echoes_prompt: bool,
}

/// A complete answer.
#[derive(Debug)]
pub(super) struct Answered {
    pub(super) text: String,
    pub(super) usage: Usage,
}

impl Asker {
    pub(super) fn new(model: Arc<ServedModel>, echoes_prompt: bool) -> Self {
        Self {
            model,
            echoes_prompt,
        }
    }

    pub(super) fn model_name(&self) -> &str {
        &self.model.card.name
    }

    pub(super) fn set_model(&mut self, model: Arc<ServedModel>) {
        self.model = model;
    }

    /// Takes the model that is served under this name now. A model asks only workers with its card, and others may have replaced
    /// them.
    pub(super) fn keep_up(&mut self, models: &Models) {
        if let Some(model) = models.get(self.model_name()) {
            self.model = model;
        }
    }

    /// Whether the model's engine parses request bodies itself.
    pub(super) fn reads_bodies(&self) -> bool {
        self.model.card.capabilities.whole_bodies
    }

    /// Checks whether a conversation with these fields of a chat request is valid. An engine that reads bodies checks them
    /// itself.
    ///
    /// # Errors
    /// `InvalidArgument`, which names the field.
    pub(super) fn check(
        &self,
        messages: &[Value],
        fields: &Map<String, Value>,
    ) -> Result<(), EngineError> {
        if self.reads_bodies() {
            return Ok(());
        }
        let mut messages = messages.to_vec();
        messages.push(json!({"role": "user", "content": "?"}));
        let request = self.request(&messages, fields);
        request.map(drop).map_err(to_engine_error)
    }

    /// Asks a single question, and waits for the complete answer. `fields` are additional fields of a chat request.
    ///
    /// # Errors
    /// The error of the request.
    ///
    /// # Cancel safety
    /// The request is cancelled when the future is dropped.
    pub(super) async fn ask(
        &self,
        ctx: &RequestContext,
        question: &str,
        fields: &Map<String, Value>,
    ) -> Result<Answered, EngineError> {
        let messages = [json!({"role": "user", "content": question})];
        let mut answer = self.begin(ctx, &messages, fields).await?;
        let mut message = Message::default();
        loop {
            if let Some(end) = answer.next_deltas(|delta| message.add(delta)).await? {
                return Ok(Answered {
                    text: message.content,
                    usage: end.usage,
                });
            }
        }
    }

    /// Asks, and returns the answer when it begins.
    ///
    /// # Errors
    /// The error of the request, if it fails before its answer.
    ///
    /// # Cancel safety
    /// As [`Asker::ask`].
    pub(super) async fn begin(
        &self,
        ctx: &RequestContext,
        messages: &[Value],
        fields: &Map<String, Value>,
    ) -> Result<Answer, EngineError> {
        if self.reads_bodies() {
            return self.begin_with_body(ctx, messages, fields).await;
        }
        let job = self.job(messages, fields).await.map_err(to_engine_error)?;
        let mut answers = job.answers(ctx).await.map_err(to_engine_error)?;
        answers.begin().await?;
        answers
            .next()
            .ok_or_else(|| EngineError::internal("the request had no answer"))
    }

    async fn begin_with_body(
        &self,
        ctx: &RequestContext,
        messages: &[Value],
        fields: &Map<String, Value>,
    ) -> Result<Answer, EngineError> {
        let mut body = match self.goes_on() {
            true => self.continuation_body(messages, fields),
            false => self.chat_body(messages, fields),
        };
        body.insert("stream".into(), true.into());
        let body = Value::Object(body).to_string();
        let request = GenerateRequest::from_text(self.model_name(), body);
        let answered = self.model.engine.generate(request, ctx.child()).await?;
        let answer = Answer::new(answered, None, Arc::default(), 0);
        Ok(answer.with_splitter(Splitter::of_objects(), Arc::default()))
    }

    /// As [`goes_on`].
    pub(super) fn goes_on(&self) -> bool {
        goes_on(&self.model)
    }

    async fn job(&self, messages: &[Value], fields: &Map<String, Value>) -> Result<Job, ApiError> {
        let request = self.request(messages, fields)?;
        // One person's own memory needs no budget.
        let room = Room {
            deadline: None,
            memory: MemoryBudget::new(usize::MAX).share(),
            salt: None,
        };
        if self.goes_on() {
            let request = self.continuation(messages, fields)?;
            return Job::completion(Arc::clone(&self.model), request, room).await;
        }
        Job::chat(Arc::clone(&self.model), request, room).await
    }

    fn continuation(
        &self,
        messages: &[Value],
        fields: &Map<String, Value>,
    ) -> Result<CompletionRequest, ApiError> {
        let body = self.continuation_body(messages, fields);
        CompletionRequest::parse(
            Value::Object(body).to_string().as_bytes(),
            &ParamLimits::from(&FrontendConfig::default()),
        )
    }

    /// The conversation so far, as a prompt.
    fn continuation_body(
        &self,
        messages: &[Value],
        fields: &Map<String, Value>,
    ) -> Map<String, Value> {
        let mut body = Map::from_iter([("max_tokens".into(), CONTINUATION_TOKENS.into())]);
        body.extend(fields.clone());
        if let Some(tokens) = body.remove("max_completion_tokens") {
            body.insert("max_tokens".into(), tokens);
        }
        body.insert("model".into(), self.model_name().into());
        body.insert("prompt".into(), text_of(messages).into());
        body
    }

    fn request(
        &self,
        messages: &[Value],
        fields: &Map<String, Value>,
    ) -> Result<ChatRequest, ApiError> {
        let mut body = self.chat_body(messages, fields);
        if self.echoes_prompt {
            body.insert("ignore_eos".into(), true.into());
        }
        ChatRequest::parse(
            Value::Object(body).to_string().as_bytes(),
            &ParamLimits::from(&FrontendConfig::default()),
        )
    }

    fn chat_body(&self, messages: &[Value], fields: &Map<String, Value>) -> Map<String, Value> {
        let mut body = fields.clone();
        body.insert("model".into(), self.model_name().into());
        body.insert("messages".into(), messages.into());
        body
    }
}

/// Whether a model continues the text instead of answering it: a base model without a chat template, or a model whose engine reads
/// only completions.
pub(super) fn goes_on(model: &ServedModel) -> bool {
    let card = &model.card;
    if card.capabilities.whole_bodies {
        return !card.endpoint_types.contains(&EndpointType::Chat);
    }
    let text = model.text.as_ref();
    card.takes_tokens() && text.is_some_and(|text| text.template.is_none())
}

/// The text of a conversation, one message per line.
fn text_of(messages: &[Value]) -> String {
    let contents = messages
        .iter()
        .filter_map(|message| message["content"].as_str());
    contents.collect::<Vec<_>>().join("\n")
}

fn to_engine_error(error: ApiError) -> EngineError {
    error.log(None);
    let kind = error.cause.unwrap_or(ErrorKind::InvalidArgument);
    EngineError::new(kind, error.to_string())
}
