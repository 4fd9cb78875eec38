//! The engine thread with a fake model. It stores tokens in place of keys and values, so anything written to the wrong block
//! shows in the answer.

mod adapters;
mod conformance;
mod fake;
mod faults;
mod pressure;
mod speculation;

use futures_util::StreamExt;
use futures_util::future::join_all;
use genset_backend_common::output::Finished;
use genset_backend_common::{
    CancelReason, EngineError, ErrorKind, FinishReason, GenerateRequest, LLMEngine, Output,
    OutputStream, RequestContext, StartContext, TokenId,
};

use self::fake::{Fake, answer_from, answer_to};
use super::CandleEngine;

/// A started engine and its handles.
struct Live {
    engine: CandleEngine,
    start: StartContext,
}

impl Live {
    async fn start(fake: Fake) -> Self {
        let engine = fake.engine();
        let start = StartContext::detached(1);
        engine.start(start.clone()).await.unwrap();
        Self { engine, start }
    }

    async fn send(&self, request: GenerateRequest) -> Result<OutputStream, EngineError> {
        self.engine
            .generate(request, RequestContext::new("r"))
            .await
    }

    async fn answer(
        &self,
        request: GenerateRequest,
    ) -> Result<(Vec<TokenId>, Finished), EngineError> {
        read(self.send(request).await?).await
    }

    /// The ends of forty answers at once, all of which are those of a model with this [memory](Fake::memory).
    async fn crowd(&self, what: &str, memory: Option<usize>, max_tokens: u32) -> Vec<Finished> {
        let asked = (0..40).map(|number| async move {
            let prompt = prompt(number);
            let (tokens, finished) = self.answer(request(&prompt, max_tokens)).await.unwrap();
            let expected = answer_from(&prompt, usize::try_from(max_tokens).unwrap(), memory);
            assert_eq!(tokens, expected, "{what}, request {number}");
            assert_eq!(finished.reason, FinishReason::Length);
            finished
        });
        join_all(asked).await
    }

    fn metric(&self, name: &str) -> u32 {
        let text = self.start.metrics.encode();
        let value = text.lines().find_map(|line| line.strip_prefix(name));
        value.unwrap().trim().parse().unwrap()
    }

    /// Waits until no request holds anything.
    async fn idle(&self) {
        let mut load = self.start.load.subscribe();
        let is_idle = load.wait_for(|load| {
            load.running_requests + load.waiting_requests == 0 && load.kv_used_blocks == 0
        });
        in_time(is_idle).await.unwrap();
    }
}

/// A generous limit, which only a hang exceeds.
async fn in_time<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(std::time::Duration::from_secs(60), future)
        .await
        .expect("it hangs")
}

async fn read(mut outputs: OutputStream) -> Result<(Vec<TokenId>, Finished), EngineError> {
    let mut tokens = Vec::new();
    while let Some(item) = in_time(outputs.next()).await {
        match item? {
            Output::Tokens(chunk) => tokens.extend(chunk.token_ids),
            Output::Finished(finished) => {
                tokens.extend(finished.last.token_ids.iter());
                return Ok((tokens, *finished));
            }
            Output::Text(_) | Output::Embeddings(_) | Output::Scores(_) => panic!("tokens only"),
        }
    }
    panic!("no terminal");
}

/// Prompts that share their prefixes.
fn prompt(number: u32) -> Vec<TokenId> {
    (0..10)
        .map(|place| number % 3 * 100 + place)
        .chain((0..number % 7).map(|place| number * 10 + place))
        .collect()
}

fn request(prompt: &[TokenId], max_tokens: u32) -> GenerateRequest {
    let mut request = GenerateRequest::from_tokens("fake", prompt.to_vec());
    request.stop.max_tokens = Some(max_tokens);
    request
}

#[tokio::test]
async fn an_answer_is_the_models_and_its_usage_is_right() {
    let live = Live::start(Fake::default()).await;
    let prompt: Vec<TokenId> = (0..40).collect();
    for cached in [0, 32] {
        let (tokens, finished) = live.answer(request(&prompt, 10)).await.unwrap();
        assert_eq!(tokens, answer_to(&prompt, 10));
        assert_eq!(finished.reason, FinishReason::Length);
        let usage = finished.usage;
        assert_eq!(
            (
                usage.prompt_tokens,
                usage.completion_tokens,
                usage.cached_tokens
            ),
            (40, 10, Some(cached))
        );
    }
    assert!(live.start.health.steps() >= 20);
    live.engine.cleanup().await.unwrap();
}

/// The model's ends count even if the request does not list them, or ignores them: they end guided text.
#[tokio::test]
async fn a_guided_answer_is_as_long_as_it_is_to_be_at_least() {
    let live = Live::start(Fake::default()).await;
    for (ends, ignore_eos) in [(Vec::<TokenId>::new(), false), (vec![2, 0], true)] {
        let mut guided = request(&[1, 2, 3], 40);
        let digits = genset_backend_common::GuidedDecoding::Regex("[0-9]{1,99}".into());
        guided.guided = Some(digits.into());
        // A model that tries to end at once.
        guided.sampling.logit_bias = [(2, 100.0), (0, 100.0)].into();
        guided.stop.min_tokens = 12;
        (guided.stop.eos_token_ids, guided.stop.ignore_eos) = (ends.into(), ignore_eos);
        let (tokens, finished) = live.answer(guided).await.unwrap();
        assert_eq!((tokens.len(), finished.reason), (12, FinishReason::Stop));
    }
}

/// The kit refuses such requests itself, before the engine sees them.
#[tokio::test]
async fn bad_requests_are_refused_before_any_token() {
    let live = Live::start(Fake::default()).await;
    let mut many = request(&[1], 1);
    many.output.logprobs = Some(21);
    for (bad, kind) in [
        (request(&[], 1), ErrorKind::InvalidArgument),
        (request(&[TokenId::MAX], 1), ErrorKind::InvalidArgument),
        (request(&[1], 0), ErrorKind::InvalidArgument),
        (many, ErrorKind::InvalidArgument),
        (request(&[5; 2048], 1), ErrorKind::ContextLengthExceeded),
    ] {
        assert_eq!(live.send(bad).await.map(drop).unwrap_err().kind(), kind);
    }
}

#[tokio::test]
async fn dropped_and_aborted_requests_free_what_they_hold() {
    let live = Live::start(Fake::default()).await;
    let mut outputs = live.send(request(&[1; 50], 1000)).await.unwrap();
    assert!(matches!(
        in_time(outputs.next()).await,
        Some(Ok(Output::Tokens(_)))
    ));
    drop(outputs);
    live.idle().await;
    // Neither read nor dropped: the hint makes the thread look.
    let ctx = RequestContext::new("aborted");
    let unread = live
        .engine
        .generate(request(&[1; 50], 1000), ctx.clone())
        .await
        .unwrap();
    ctx.cancel(CancelReason::Client);
    live.engine.abort(&ctx).await;
    live.idle().await;
    drop(unread);
}

#[tokio::test]
async fn an_engine_that_is_not_there_refuses() {
    let live = Live::start(Fake::default()).await;
    let outputs = live.send(request(&[1], 1_000_000)).await.unwrap();
    live.engine.cleanup().await.unwrap();
    live.engine.cleanup().await.unwrap();
    assert_eq!(
        read(outputs).await.unwrap_err().kind(),
        ErrorKind::EngineShutdown
    );
    assert_eq!(
        live.send(request(&[1], 1))
            .await
            .map(drop)
            .unwrap_err()
            .kind(),
        ErrorKind::EngineShutdown
    );
}

#[tokio::test]
async fn an_engine_dropped_without_cleanup_ends_its_requests() {
    let live = Live::start(Fake::default()).await;
    let outputs = live.send(request(&[1], 1_000_000)).await.unwrap();
    drop(live);
    assert!(read(outputs).await.unwrap_err().policy().is_retryable);
}
