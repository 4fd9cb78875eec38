//! Answers that another instance began, continued by stand-in servers as longer prompts.

use genset_backend_common::{FinishReason, GenerateRequest, LLMEngine, StartContext};
use genset_engine_launcher::LauncherEngine;
use serde_json::json;

use crate::support::{OF_TOKENS, Reports, answer, config, request};

const PROMPT: [u32; 4] = [5, 6, 7, 8];

/// The request that continues after the first tokens of an answer.
fn resumed(given: &[u32], max_tokens: u32) -> GenerateRequest {
    let mut request = request(&[&PROMPT[..], given].concat(), max_tokens);
    request.resumed_tokens = u32::try_from(given.len()).unwrap();
    request
}

#[tokio::test]
async fn every_api_goes_on_behind_the_tokens_of_another_instance() {
    for api in OF_TOKENS {
        let mut reports = Reports::listen().await;
        let engine = LauncherEngine::new(config(api, &[&reports.flag()]));
        let declared = engine.start(StartContext::detached(1)).await.unwrap();
        let can = &declared.capabilities;
        assert!(can.resume_as_prompt && !can.resume, "{api}");
        let whole = answer(&engine, request(&PROMPT, 6)).await.tokens;
        reports.next("request").await;

        let mut resumed = resumed(&whole[..2], 4);
        resumed.stop.min_tokens = 3;
        declared.check(&resumed).unwrap();
        let rest = answer(&engine, resumed).await;
        assert_eq!(rest.tokens, whole[2..], "{api}");
        let finished = rest.finished();
        assert_eq!(finished.reason, FinishReason::Length, "{api}");
        let usage = &finished.usage;
        // The router subtracts the resumed tokens from one and adds them to the other.
        assert_eq!(
            (usage.prompt_tokens, usage.completion_tokens),
            (6, 4),
            "{api}"
        );
        let sent = reports.next("request").await;
        let field = if api == "sglang" {
            "input_ids"
        } else {
            "prompt"
        };
        let prompt = [&PROMPT[..], &whole[..2]].concat();
        assert_eq!(sent["body"][field], json!(prompt), "{api}");
        engine.cleanup().await.unwrap();
    }
}
