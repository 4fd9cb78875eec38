//! A request of this process's own to a model: on the frontend's pipeline, without HTTP.

use std::sync::Arc;

use genset_backend_common::output::Usage;
use genset_backend_common::{EngineError, ErrorKind, RequestContext};
use genset_frontend::answer::Answer;
use genset_frontend::model::ServedModel;
use genset_frontend::openai::{ChatRequest, CompletionRequest, ParamLimits};
use genset_frontend::pipeline::{Job, Room};
use genset_frontend::{ApiError, FrontendConfig, MemoryBudget};
use serde_json::{Map, Value, json};

/// Tokens with which a base model goes on at most, unless `max_tokens` says otherwise: many never end by themselves.
pub(super) const CONTINUATION_TOKENS: u32 = 256;

/// The fields of a request that nobody else sets: they are the asker's own, or their answer would be more than a text.
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
#[derive(Debug)]
pub(super) struct Asker {
    model: Arc<ServedModel>,
    /// Whether the answer is to be the whole prompt, past the end-of-sequence tokens that its template puts in.
    echoes_prompt: bool,
}

/// A whole answer.
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

    /// Whether a conversation with these fields of a chat request could be asked.
    ///
    /// # Errors
    /// `InvalidArgument`, which names the field.
    pub(super) fn check(
        &self,
        messages: &[Value],
        fields: &Map<String, Value>,
    ) -> Result<(), EngineError> {
        let mut messages = messages.to_vec();
        messages.push(json!({"role": "user", "content": "?"}));
        let request = self.request(&messages, fields);
        request.map(drop).map_err(to_engine_error)
    }

    /// Asks a question by itself, and waits for its whole answer. `fields` are further ones of a chat request.
    ///
    /// # Errors
    /// What the request failed with.
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
        let mut text = String::new();
        loop {
            if let Some(end) = answer.next_text(&mut text).await? {
                let usage = end.usage;
                return Ok(Answered { text, usage });
            }
        }
    }

    /// Asks, and returns the answer as it begins.
    ///
    /// # Errors
    /// What the request failed with before its answer.
    ///
    /// # Cancel safety
    /// As [`Asker::ask`].
    pub(super) async fn begin(
        &self,
        ctx: &RequestContext,
        messages: &[Value],
        fields: &Map<String, Value>,
    ) -> Result<Answer, EngineError> {
        let job = self.job(messages, fields).await.map_err(to_engine_error)?;
        let mut answers = job.answers(ctx).await.map_err(to_engine_error)?;
        answers.begin().await?;
        answers
            .next()
            .ok_or_else(|| EngineError::internal("the request had no answer"))
    }

    /// Whether the model goes on from the text in place of answering it: a base model, which has no chat template.
    pub(super) fn goes_on(&self) -> bool {
        let text = self.model.text.as_ref();
        self.model.card.takes_tokens() && text.is_some_and(|text| text.template.is_none())
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

    /// All that was written so far as a prompt.
    fn continuation(
        &self,
        messages: &[Value],
        fields: &Map<String, Value>,
    ) -> Result<CompletionRequest, ApiError> {
        let mut body = Map::from_iter([("max_tokens".into(), CONTINUATION_TOKENS.into())]);
        body.extend(fields.clone());
        if let Some(tokens) = body.remove("max_completion_tokens") {
            body.insert("max_tokens".into(), tokens);
        }
        body.insert("model".into(), self.model_name().into());
        body.insert("prompt".into(), text_of(messages).into());
        CompletionRequest::parse(
            Value::Object(body).to_string().as_bytes(),
            &ParamLimits::from(&FrontendConfig::default()),
        )
    }

    fn request(
        &self,
        messages: &[Value],
        fields: &Map<String, Value>,
    ) -> Result<ChatRequest, ApiError> {
        let mut body = fields.clone();
        body.insert("model".into(), self.model_name().into());
        body.insert("messages".into(), messages.into());
        if self.echoes_prompt {
            body.insert("ignore_eos".into(), true.into());
        }
        ChatRequest::parse(
            Value::Object(body).to_string().as_bytes(),
            &ParamLimits::from(&FrontendConfig::default()),
        )
    }
}

/// The text of a conversation, one message a line.
fn text_of(messages: &[Value]) -> String {
    let contents = messages
        .iter()
        .filter_map(|message| message["content"].as_str());
    contents.collect::<Vec<_>>().join("\n")
}

fn to_engine_error(error: ApiError) -> EngineError {
    let kind = error.cause.unwrap_or(ErrorKind::InvalidArgument);
    EngineError::new(kind, error.to_string())
}
