//! Adapters while the engine serves: which adapter answers, what requests hold, and what remains in the prefix cache.

use genset_backend_common::EngineControls;
use genset_backend_common::controls::Adapter;

use super::*;

fn adapter(name: &str, source: &str) -> Adapter {
    Adapter {
        name: name.into(),
        source: source.into(),
    }
}

fn under(name: &str, prompt: &[TokenId], max_tokens: u32) -> GenerateRequest {
    let mut request = request(prompt, max_tokens);
    request.adapter = Some(name.into());
    request
}

impl Live {
    async fn load(&self, name: &str, source: &str) -> Result<(), EngineError> {
        in_time(self.engine.load_adapter(adapter(name, source))).await
    }

    async fn tokens(&self, request: GenerateRequest) -> Vec<TokenId> {
        self.answer(request).await.unwrap().0
    }
}

#[tokio::test]
async fn each_request_is_answered_by_its_own_adapter_beside_the_others() {
    let live = Live::start(Fake::default()).await;
    live.load("a", "1").await.unwrap();
    live.load("b", "2").await.unwrap();
    let prompt: Vec<TokenId> = (0..20).collect();
    let requests = || {
        [
            under("a", &prompt, 10),
            request(&prompt, 10),
            under("b", &prompt, 10),
        ]
    };
    let mut alone = Vec::new();
    for request in requests() {
        alone.push(live.tokens(request).await);
    }
    assert_eq!(alone[1], answer_to(&prompt, 10));
    assert!(alone[0] != alone[1] && alone[1] != alone[2] && alone[0] != alone[2]);
    let together = futures_util::future::join_all(requests().map(|request| live.tokens(request)));
    assert_eq!(together.await, alone);
    live.engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn prompts_are_cached_for_each_adapter_apart() {
    let live = Live::start(Fake::default()).await;
    live.load("a", "1").await.unwrap();
    live.load("b", "2").await.unwrap();
    let prompt: Vec<TokenId> = (0..40).collect();
    let all = || {
        [
            under("a", &prompt, 1),
            under("b", &prompt, 1),
            request(&prompt, 1),
        ]
    };
    for cached in [0, 32] {
        for request in all() {
            let (_, finished) = live.answer(request).await.unwrap();
            assert_eq!(finished.usage.cached_tokens, Some(cached));
        }
    }
    live.engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn an_adapter_has_nothing_of_an_earlier_one_of_its_name() {
    let live = Live::start(Fake::default()).await;
    let prompt: Vec<TokenId> = (0..40).collect();
    live.load("a", "1").await.unwrap();
    let first = live.tokens(under("a", &prompt, 10)).await;
    live.engine.unload_adapter("a").await.unwrap();
    live.load("a", "2").await.unwrap();
    let (second, finished) = live.answer(under("a", &prompt, 10)).await.unwrap();
    assert_eq!(finished.usage.cached_tokens, Some(0));
    assert_ne!(first, second);
    // It is the same under a name that was never used.
    live.load("b", "2").await.unwrap();
    assert_eq!(live.tokens(under("b", &prompt, 10)).await, second);
    live.engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn a_request_keeps_its_adapter_and_its_memory_until_it_ends() {
    let live = Live::start(Fake::default()).await;
    // It takes 6 of the 8 tiles.
    live.load("a", "5").await.unwrap();
    let prompt: Vec<TokenId> = (0..20).collect();
    // More than fits the mailbox of a reader that does not read.
    let whole = live.tokens(under("a", &prompt, 200)).await;
    let running = live.send(under("a", &prompt, 200)).await.unwrap();
    live.engine.unload_adapter("a").await.unwrap();
    let error = live.send(under("a", &prompt, 1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert_eq!(error.at().map(|at| at.name()), Some("adapter"));
    let error = live.load("b", "5").await.unwrap_err();
    assert!(error.message().contains("--adapter-memory"), "{error}");
    assert_eq!(read(running).await.unwrap().0, whole);
    live.idle().await;
    // Another step releases it.
    live.tokens(request(&prompt, 1)).await;
    live.load("b", "5").await.unwrap();
    live.engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn what_cannot_be_loaded_is_refused_by_name_and_not_listed() {
    let live = Live::start(Fake::default()).await;
    let refused = async |name: &str, source: &str, kind, at: &str| {
        let error = live.load(name, source).await.unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert_eq!(error.at().map(|at| at.name()), Some(at), "{error}");
    };
    use ErrorKind::{InvalidArgument, NotFound};
    refused("a", "nowhere", NotFound, "adapter").await;
    refused("a", "99", InvalidArgument, "adapter").await;
    let long = "a".repeat(10_000);
    for name in ["", " ", "a\nb", "a\0", &long] {
        refused(name, "1", InvalidArgument, "adapter.name").await;
    }
    refused("a", "", InvalidArgument, "adapter.source").await;
    assert!(live.engine.adapters().await.unwrap().is_empty());
    live.load("a", "1").await.unwrap();
    refused("a", "1", InvalidArgument, "adapter.name").await;
    live.load("b", "1").await.unwrap();
    live.load("c", "1").await.unwrap();
    refused("d", "1", InvalidArgument, "--max-adapters").await;
    let listed = live.engine.adapters().await.unwrap();
    assert_eq!(
        listed,
        [adapter("a", "1"), adapter("b", "1"), adapter("c", "1")]
    );
    let error = live.engine.unload_adapter("d").await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    live.engine.cleanup().await.unwrap();
}

#[tokio::test]
async fn names_beyond_those_that_are_remembered_have_blocks_of_their_own() {
    let live = Live::start(Fake::default()).await;
    for number in 0..1025 {
        let name = format!("a{number}");
        live.load(&name, "1").await.unwrap();
        live.engine.unload_adapter(&name).await.unwrap();
    }
    let prompt: Vec<TokenId> = (0..40).collect();
    for source in ["1", "2"] {
        live.load("another", source).await.unwrap();
        let (_, finished) = live.answer(under("another", &prompt, 1)).await.unwrap();
        assert_eq!(finished.usage.cached_tokens, Some(0));
        live.engine.unload_adapter("another").await.unwrap();
    }
    live.engine.cleanup().await.unwrap();
}
