//! Shared by the tests: scripts, a vocabulary, and a reader of streams.

#![allow(dead_code, reason = "each test file uses a part")]

use futures_util::StreamExt;
use genset_backend_common::output::{Finished, OutputStream};
use genset_backend_common::{
    EngineError, GenerateRequest, LLMEngine, Output, RequestContext, StartContext, TokenId,
};
use genset_engine_scripted::{Script, ScriptedEngine, Vocabulary};

pub(crate) fn script(text: &str) -> Script {
    text.parse().unwrap_or_else(|error| panic!("{error}"))
}

/// A started engine that takes text.
pub(crate) async fn text_engine(replies: &str) -> ScriptedEngine {
    let engine = ScriptedEngine::from_script(script(replies));
    engine.start(StartContext::detached(1)).await.unwrap();
    engine
}

/// One token per byte.
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

/// What a stream yielded.
#[derive(Debug)]
pub(crate) struct Answer {
    /// The text of each item; for tokens, their bytes.
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
            Ok(Output::Embeddings(_) | Output::Scores(_)) => panic!("embeddings"),
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
