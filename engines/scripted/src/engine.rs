//! [`ScriptedEngine`]: finds the reply for a request and plays it.

use std::path::PathBuf;
use std::sync::Arc;

use genset_backend_common::output::OutputStream;
use genset_backend_common::{
    EngineConfig, EngineError, EngineState, FinishReason, GenerateRequest, LLMEngine,
    RequestContext, StartContext, async_trait, config::InputKind,
};

use crate::ScriptedArgs;
use crate::mode::Mode;
use crate::play::Performance;
use crate::replies::Replies;
use crate::script::{Fault, Pace, Script, Values};
use crate::vocabulary::Vocabulary;

/// The default name of the engine and of its model.
const NAME: &str = "scripted";

/// Marks the Worker's probe. It matches no reply and uses none up.
const PROBE: &str = "genset-scripted-probe";

/// An engine that plays a script. The [crate's documentation](crate) has an example.
///
/// A request that matches no reply fails with `InvalidArgument`. The error names the field, but does not show its text.
#[derive(Debug)]
pub struct ScriptedEngine {
    source: Source,
    mode: Mode,
    replies: EngineState<Replies>,
}

#[derive(Debug)]
enum Source {
    File(PathBuf),
    Script(Arc<Script>),
}

impl ScriptedEngine {
    /// Creates an engine; `start` reads the script.
    #[must_use]
    pub fn from_args(args: &ScriptedArgs) -> Self {
        Self::new(Source::File(args.script.clone()))
    }

    /// Creates an engine for a parsed script.
    #[must_use]
    pub fn from_script(script: impl Into<Arc<Script>>) -> Self {
        Self::new(Source::Script(script.into()))
    }

    fn new(source: Source) -> Self {
        Self {
            source,
            mode: Mode::Text,
            replies: EngineState::new(),
        }
    }

    /// Makes the engine take and return token ids instead of text. `context_length_tokens` limits prompt and answer together.
    #[must_use]
    pub fn with_vocabulary(
        mut self,
        vocabulary: Arc<dyn Vocabulary>,
        context_length_tokens: u32,
    ) -> Self {
        self.mode = Mode::Tokens {
            vocabulary,
            context_length_tokens,
        };
        self
    }

    fn load(&self) -> Result<Replies, EngineError> {
        let script = match &self.source {
            Source::File(path) => Arc::new(Script::load(path)?),
            Source::Script(script) => Arc::clone(script),
        };
        self.mode.check(&script)?;
        Ok(Replies::new(script))
    }

    fn config(&self, script: &Script) -> EngineConfig {
        let mut can = self.mode.capabilities();
        // The script's author declares which grammars the replies follow; nothing is enforced here.
        can.guided.clone_from(&script.guided);
        let mut config = EngineConfig::new(NAME, self.mode.context_length_tokens())
            .with_vocab_size(self.mode.vocab_size())
            .with_capabilities(can);
        config.canary = Some(Box::new(probe(&config)));
        config
    }

    /// Answers the Worker's probe: the engine is alive, whatever the script says.
    fn answer_probe(&self, request: GenerateRequest) -> Result<Performance, EngineError> {
        Ok(Performance {
            pieces: self.mode.pieces(vec!["ok".into()])?,
            pace: Pace::default(),
            fault: None,
            finish_reason: FinishReason::Stop,
            max_tokens: request.stop.max_tokens.unwrap_or(1),
            stop: request.stop,
            ratings: None,
        })
    }

    /// Returns what is played for a request, and tells its context the prompt's token count.
    fn answer(
        &self,
        replies: &Replies,
        request: GenerateRequest,
        ctx: &RequestContext,
    ) -> Result<Performance, EngineError> {
        let conversation = self.mode.read(&request, replies.script())?;
        let prompt_tokens = request.prompt_tokens().unwrap_or(conversation.words);
        let room = self.mode.room(prompt_tokens)?;
        let reply = replies.choose(&conversation)?;
        let fault = match &reply.fault {
            Some(Fault::Refuse(error)) => return Err(error.to_error(ctx)),
            Some(Fault::Break(fault)) => Some(fault.clone()),
            None => None,
        };
        let values = Values {
            last_user: &conversation.last_user,
            request_id: ctx.id(),
            message_count: conversation.message_count,
        };
        let performance = Performance {
            pieces: self.mode.pieces_of(&reply.body, &values)?,
            pace: reply.pace,
            fault,
            finish_reason: reply.finish_reason,
            max_tokens: request.stop.max_tokens_within(room),
            ratings: self.mode.ratings(reply, request.output.logprobs)?,
            stop: request.stop,
        };
        // Keeps the usage right if the Worker ends the request: nobody else counts a text prompt.
        ctx.tell_prompt_tokens(prompt_tokens);
        Ok(performance)
    }
}

/// The request that the Worker sends to check that the engine answers.
fn probe(config: &EngineConfig) -> GenerateRequest {
    let mut request = if config.capabilities.inputs.contains(&InputKind::Tokens) {
        GenerateRequest::from_tokens(config.model.clone(), vec![0])
    } else {
        GenerateRequest::from_text(config.model.clone(), "ping")
    };
    request.stop.max_tokens = Some(1);
    request.annotations.insert(PROBE.into(), true.into());
    request
}

#[async_trait]
impl LLMEngine for ScriptedEngine {
    async fn start(&self, _ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let start = async {
            let replies = self.load()?;
            let config = self.config(replies.script());
            Ok((replies, config))
        };
        self.replies.start(start).await
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let replies = self.replies.get()?;
        if request.annotations.contains_key(PROBE) {
            return Ok(self.answer_probe(request)?.stream(ctx));
        }
        Ok(self.answer(&replies, request, &ctx)?.stream(ctx))
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        drop(self.replies.take());
        Ok(())
    }
}
