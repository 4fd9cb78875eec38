//! A conversation: turns on the frontend's pipeline, without HTTP.

use std::sync::Arc;

use genset_backend_common::{CancelReason, EngineError, ErrorKind, RequestContext};
use genset_frontend::model::ServedModel;
use genset_frontend::openai::{ChatRequest, RequestLimits};
use genset_frontend::pipeline::Job;
use genset_frontend::{ApiError, FrontendConfig};
use genset_runtime::Signals;
use serde_json::{Value, json};

use super::print;

/// How a turn ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// The answer came to its end.
    Answered,
    /// The person stopped it with Ctrl-C.
    Stopped,
    /// The process was told to end.
    Terminated,
}

/// A conversation with one model.
#[derive(Debug)]
pub(super) struct Chat {
    model: Arc<ServedModel>,
    /// Whether the answer is to be the whole prompt, past the end-of-sequence tokens that its template puts in.
    echoes_prompt: bool,
    system: Option<String>,
    messages: Vec<Value>,
    turns: u64,
}

impl Chat {
    pub(super) fn new(model: Arc<ServedModel>, echoes_prompt: bool) -> Self {
        Self {
            model,
            echoes_prompt,
            system: None,
            messages: Vec::new(),
            turns: 0,
        }
    }

    pub(super) fn model_name(&self) -> &str {
        &self.model.card.name
    }

    /// Forgets the conversation; the system prompt stays.
    pub(super) fn clear(&mut self) {
        self.messages.clear();
    }

    /// Sets the system prompt, or removes it, and forgets the conversation.
    pub(super) fn set_system(&mut self, system: Option<String>) {
        self.system = system;
        self.clear();
    }

    /// Asks, and prints the answer as it comes. A failed turn is not kept; of a stopped one, what was shown is.
    ///
    /// # Errors
    /// What the request failed with.
    pub(super) async fn ask(
        &mut self,
        text: &str,
        signals: &mut Signals,
    ) -> Result<Turn, EngineError> {
        self.messages.push(json!({"role": "user", "content": text}));
        let asked = self.stream_answer(signals).await;
        match &asked {
            Ok((answer, _)) => self
                .messages
                .push(json!({"role": "assistant", "content": answer})),
            Err(_) => drop(self.messages.pop()),
        }
        asked.map(|(_, turn)| turn)
    }

    async fn stream_answer(
        &mut self,
        signals: &mut Signals,
    ) -> Result<(String, Turn), EngineError> {
        self.turns += 1;
        let ctx = RequestContext::new(format!("chat-{}", self.turns));
        let job = self.job().await.map_err(to_engine_error)?;
        let mut answers = job.start(&ctx).await?;
        let Some(mut answer) = answers.pop() else {
            return Err(EngineError::internal("the request had no answer"));
        };
        let (mut text, mut piece) = (String::new(), String::new());
        loop {
            let end = tokio::select! {
                biased;
                signal = signals.next() => {
                    ctx.cancel(CancelReason::Client);
                    let turn = if signal == "SIGINT" { Turn::Stopped } else { Turn::Terminated };
                    return Ok((text, turn));
                }
                end = answer.next_text(&mut piece) => end?,
            };
            print(&piece);
            text.push_str(&piece);
            piece.clear();
            if end.is_some() {
                return Ok((text, Turn::Answered));
            }
        }
    }

    async fn job(&self) -> Result<Job, ApiError> {
        let mut request = self.request()?;
        if self.echoes_prompt {
            // The whole prompt, and then no more: the echo would begin again.
            let counted = Job::chat(Arc::clone(&self.model), request.clone()).await?;
            let tokens = counted.prompt().map_or(0, <[_]>::len);
            request.params.stop.max_tokens = u32::try_from(tokens).ok().filter(|count| *count > 0);
        }
        Job::chat(Arc::clone(&self.model), request).await
    }

    fn request(&self) -> Result<ChatRequest, ApiError> {
        let system = self
            .system
            .iter()
            .map(|text| json!({"role": "system", "content": text}));
        let messages: Vec<Value> = system.chain(self.messages.iter().cloned()).collect();
        let body = json!({"model": self.model_name(), "messages": messages, "ignore_eos": self.echoes_prompt});
        ChatRequest::parse(
            body.to_string().as_bytes(),
            &RequestLimits::from(&FrontendConfig::default()),
        )
    }
}

fn to_engine_error(error: ApiError) -> EngineError {
    EngineError::new(ErrorKind::InvalidArgument, error.message)
}
