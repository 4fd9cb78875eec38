mod answered;
mod asked;

use genset_backend_common::{GuidedDecoding, config::SamplingOption, request::ChatInput};
use serde_json::{Value, json};

use super::*;
use crate::config::ServerInput;
use crate::extra::ExtraArgs;
use crate::kind::ServerKind;

fn api(dialect: Dialect) -> Arc<dyn Api> {
    let input = if dialect == Dialect::LlamaCppPython {
        ServerInput::Text
    } else {
        ServerInput::Tokens { vocab_size: None }
    };
    of(&LauncherConfig::new(dialect.kind(), "/m", input), dialect).unwrap()
}

fn request() -> GenerateRequest {
    GenerateRequest::from_tokens("m", vec![1, 2])
}

fn body(dialect: Dialect, request: &GenerateRequest) -> Value {
    let call = api(dialect).call(request, Some(5)).unwrap();
    serde_json::from_slice(&call.body).unwrap()
}

const OF_TOKENS: [Dialect; 4] = [
    Dialect::Vllm,
    Dialect::Trtllm,
    Dialect::Sglang,
    Dialect::LlamaServer,
];
