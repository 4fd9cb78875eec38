//! Request bodies of every API: parsed, or refused as the client's fault.

use genset_frontend::anthropic::MessagesRequest;
use genset_frontend::openai::{
    ChatRequest, CompletionRequest, DetokenizeRequest, EmbeddingRequest, ParamLimits,
    RerankRequest, RerankedDocuments, ScoreRequest, TokenizeRequest,
};
use genset_frontend::responses::ResponsesRequest;
use genset_frontend::{ApiError, FrontendConfig};

fn limits() -> ParamLimits {
    ParamLimits::from(&FrontendConfig::default())
}

/// Whatever a body says, it is the client's fault if it cannot be read, and the client is told why.
pub(crate) fn judged<T>(read: Result<T, ApiError>) -> Option<T> {
    read.inspect_err(|error| {
        assert!(error.status.is_client_error(), "{error:?}");
        assert!(!error.to_string().is_empty());
    })
    .ok()
}

/// `/v1/chat/completions`.
pub fn chat(body: &[u8]) {
    judged(ChatRequest::parse(body, &limits()));
}

/// `/v1/completions`.
pub fn completions(body: &[u8]) {
    judged(CompletionRequest::parse(body, &limits()));
}

/// `/v1/embeddings`.
pub fn embeddings(body: &[u8]) {
    judged(EmbeddingRequest::parse(
        body,
        FrontendConfig::default().max_embedding_inputs,
    ));
}

/// `/v1/rerank` and `/v1/score`. A valid request's response has no more bytes than estimated.
pub fn scores(body: &[u8]) {
    let most = FrontendConfig::default().max_score_pairs;
    judged(ScoreRequest::parse(body, most));
    if let Some(request) = judged(RerankRequest::parse(body, most)) {
        let scores = vec![-1.0e-30; request.pairs.second().texts().len()];
        let ranked = RerankedDocuments::of(&request, &scores, u32::MAX);
        assert!(ranked.json("", "").len() <= ranked.json_bytes());
    }
}

/// `/v1/messages` and `/v1/messages/count_tokens`.
pub fn messages(body: &[u8]) {
    judged(MessagesRequest::parse(body, &limits()));
    judged(MessagesRequest::parse_to_count(body, &limits()));
}

/// `/v1/responses` and `/v1/responses/input_tokens`.
pub fn responses(body: &[u8]) {
    judged(ResponsesRequest::parse(body, &|_| None));
    judged(ResponsesRequest::parse_to_count(body, &|_| None));
}

/// `/tokenize` and `/detokenize`.
pub fn tokenize(body: &[u8]) {
    judged(TokenizeRequest::parse(body, &limits()));
    judged(DetokenizeRequest::parse(body));
}
