//! Answers to chats with images and sounds.

use genset_backend_common::{
    ErrorKind, FinishReason, GenerateRequest, LLMEngine, RequestContext, StartContext,
    request::{ChatInput, MediaKind},
};
use genset_engine_launcher::LauncherEngine;
use serde_json::json;

use crate::support::{Reports, answer, config, started};

/// Two GIFs of one pixel.
const PIXELS: [&str; 2] = [
    "data:image/gif;base64,R0lGODlhAQABAAAAACw=",
    "data:image/gif;base64,R0lGODlhAQABAAAAACw7",
];

fn seen(url: &str) -> GenerateRequest {
    let image = json!({"type": "image_url", "image_url": {"url": url}});
    let sound = json!({"type": "input_audio", "input_audio": {"data": "UklGRgAAAABXQVZFZm10IA==", "format": "wav"}});
    let text = json!({"type": "text", "text": "what is it"});
    let mut request = GenerateRequest::from_chat(
        "m",
        ChatInput {
            messages: vec![json!({"role": "user", "content": [text, image, sound]})],
            tools: vec![],
        },
    );
    request.stop.max_tokens = Some(6);
    request.sampling.temperature = Some(0.0);
    request
}

/// The server builds the prompt: three words, an image and a sound.
#[tokio::test]
async fn images_and_audio_reach_the_server_as_they_came() {
    for (api, flag) in [("vllm", "-"), ("sglang", "-"), ("sglang", "--incremental")] {
        let mut reports = Reports::listen().await;
        let mut config = config(api, &[&reports.flag(), flag]);
        config.media = MediaKind::ALL.into();
        let engine = LauncherEngine::new(config);
        let declared = engine.start(StartContext::detached(1)).await.unwrap();
        assert_eq!(declared.capabilities.media, MediaKind::ALL.into());
        declared.validate().unwrap();
        let mut answers = Vec::new();
        for url in PIXELS {
            let request = seen(url);
            declared.check(&request).unwrap();
            let sent = serde_json::to_value(&request).unwrap();
            let answer = answer(&engine, request).await;
            let report = reports.next("request").await;
            assert_eq!(report["path"], "/v1/chat/completions");
            assert_eq!(
                report["body"]["messages"],
                sent["input"]["chat"]["messages"]
            );
            let finished = answer.finished();
            assert_eq!(finished.reason, FinishReason::Length, "{api}");
            let usage = &finished.usage;
            assert_eq!(
                (usage.prompt_tokens, usage.completion_tokens),
                (3 + 4 + 2, 6),
                "{api}"
            );
            assert_eq!(answer.tokens.len(), if api == "vllm" { 6 } else { 0 });
            answers.push((answer.tokens, answer.text));
        }
        assert_ne!(answers[0], answers[1], "{api}: other bytes, another answer");
        engine.cleanup().await.unwrap();
    }
}

#[tokio::test]
async fn what_a_server_does_not_give_beside_media_is_refused_by_name() {
    let with_logprobs = || {
        let mut request = seen(PIXELS[0]);
        request.output.logprobs = Some(2);
        request
    };
    let of = |api: &str| {
        let mut config = config(api, &[]);
        config.media = MediaKind::ALL.into();
        started(config)
    };
    let engine = of("vllm").await;
    let rated = answer(&engine, with_logprobs()).await;
    assert_eq!(rated.tokens.len(), 6);
    engine.cleanup().await.unwrap();
    let engine = of("sglang").await;
    let refused = engine.generate(with_logprobs(), RequestContext::new("r"));
    let error = refused.await.map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert_eq!(error.at().map(|at| at.name()), Some("logprobs"));
    engine.cleanup().await.unwrap();
    let mut deaf = config("trtllm", &[]);
    deaf.media = [MediaKind::Image].into();
    let error = deaf.validate().unwrap_err();
    assert_eq!(error.at().map(|at| at.name()), Some("--media"));
}
