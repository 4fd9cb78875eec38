//! What the tests share: scripts, a vocabulary, and a reading of streams.

#![allow(dead_code, reason = "each test file uses a part")]

use futures_util::StreamExt;
use genset_backend_common::output::{self, Finish, Finished, OutputStream};
use genset_backend_common::{
    Capabilities, EngineConfig, EngineError, GenerateRequest, Input, LLMEngine, Output,
    RequestContext, StartContext, TokenId, async_trait,
};
use genset_engine_scripted::{Script, ScriptedEngine, Vocabulary};

pub(crate) fn script(text: &str) -> Script {
    text.parse().unwrap_or_else(|error| panic!("{error}"))
}

/// An engine that takes text, started.
pub(crate) async fn text_engine(replies: &str) -> ScriptedEngine {
    let engine = ScriptedEngine::from_script(script(replies));
    engine.start(StartContext::detached(1)).await.unwrap();
    engine
}

/// One token a byte.
pub(crate) struct Bytes;

impl Vocabulary for Bytes {
    fn size(&self) -> u32 {
        256
    }

    fn encode(&self, text: &str) -> Result<Vec<TokenId>, EngineError> {
        Ok(text.bytes().map(TokenId::from).collect())
    }

    fn decode(&self, tokens: &[TokenId]) -> Result<String, EngineError> {
        let bytes: Vec<u8> = tokens
            .iter()
            .filter_map(|token| u8::try_from(*token).ok())
            .collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// What a stream gave.
#[derive(Debug)]
pub(crate) struct Answer {
    /// The text of each item; of tokens, their bytes.
    pub(crate) chunks: Vec<String>,
    pub(crate) end: Result<Finished, EngineError>,
}

impl Answer {
    pub(crate) fn text(&self) -> String {
        self.chunks.concat()
    }

    pub(crate) fn finished(&self) -> &Finished {
        self.end.as_ref().unwrap()
    }
}

pub(crate) async fn read(mut outputs: OutputStream) -> Answer {
    let mut chunks = Vec::new();
    loop {
        match outputs.next().await.unwrap() {
            Ok(Output::Text(chunk)) => {
                assert_eq!(chunk.token_count, 1);
                chunks.push(chunk.text);
            }
            Ok(Output::Tokens(chunk)) => chunks.push(Bytes.decode(&chunk.token_ids).unwrap()),
            Ok(Output::Finished(finished)) => {
                let end = Ok(*finished);
                return Answer { chunks, end };
            }
            Ok(Output::Embeddings(_)) => panic!("embeddings"),
            Err(error) => {
                let end = Err(error);
                return Answer { chunks, end };
            }
        }
    }
}

/// The answer to a request, which must be accepted.
pub(crate) async fn answer(engine: &ScriptedEngine, request: GenerateRequest) -> Answer {
    let ctx = RequestContext::new("request-1");
    read(engine.generate(request, ctx).await.unwrap()).await
}

/// The answer to a text.
pub(crate) async fn say(engine: &ScriptedEngine, text: &str) -> Answer {
    answer(engine, GenerateRequest::from_text("m", text)).await
}

/// The text mode for whoever speaks in tokens: token 7 is the word " 7", there and back.
pub(crate) struct Spelled(ScriptedEngine);

/// Tokens are below this.
const SPELLED_VOCABULARY: u32 = 64;

impl Spelled {
    pub(crate) fn new() -> Self {
        let words: String = (1..40).map(|token| format!(" {token}")).collect();
        let reply = format!("[[reply]]\ntoken_ms = 1\ntext = '{words}'");
        Self(ScriptedEngine::from_script(script(&reply)))
    }
}

#[async_trait]
impl LLMEngine for Spelled {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let inner = self.0.start(ctx).await?;
        let tokens = Capabilities {
            inputs: Capabilities::tokens().inputs,
            ..inner.capabilities
        };
        Ok(EngineConfig::new("spelled", inner.context_length_tokens)
            .with_vocab_size(SPELLED_VOCABULARY)
            .with_capabilities(tokens))
    }

    async fn generate(
        &self,
        mut request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let words = |tokens: &[TokenId]| tokens.iter().map(|token| format!(" {token}")).collect();
        if let Ok(tokens) = request.tokens() {
            request.input = Input::Text(words(tokens));
        }
        let stop = std::mem::take(&mut request.stop);
        request.stop.max_tokens = stop.max_tokens;
        request.stop.min_tokens = stop.min_tokens;
        request.stop.ignore_eos = stop.ignore_eos;
        let mut words = self.0.generate(request, ctx.clone()).await?;
        Ok(output::stream(ctx, move |out| async move {
            let mut generated = 0;
            loop {
                match words.next().await.unwrap()? {
                    Output::Text(chunk) => {
                        let token = chunk.text.trim().parse().unwrap();
                        if stop.is_stop(token, generated) {
                            return Ok(Finish::stop_token(token));
                        }
                        out.token(token).await?;
                        generated += 1;
                    }
                    Output::Finished(finished) => {
                        return Ok(Finish {
                            reason: finished.reason,
                            ..Finish::stop().with_prompt_tokens(finished.usage.prompt_tokens)
                        });
                    }
                    other @ (Output::Tokens(_) | Output::Embeddings(_)) => panic!("{other:?}"),
                }
            }
        }))
    }

    async fn abort(&self, ctx: &RequestContext) {
        self.0.abort(ctx).await;
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        self.0.cleanup().await
    }
}
