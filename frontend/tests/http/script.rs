//! A scripted engine.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use genset_backend_common::output::{
    self, Finish, OutputStream, OutputWriter, TokenChunk, TokenLogprob, TopLogprob,
};
use genset_backend_common::{
    Capabilities, EngineConfig, EngineError, GenerateRequest, LLMEngine, RequestContext,
    StartContext, async_trait,
    config::{GuidedKind, SamplingOption},
    context::TraceContext,
};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

type Ending = Pin<Box<dyn Future<Output = Result<Finish, EngineError>> + Send>>;
type Body = dyn Fn(GenerateRequest, OutputWriter) -> Ending + Send + Sync;

/// The engine. It counts the requests that it holds and records all requests.
pub(crate) struct Script {
    capabilities: Capabilities,
    body: Box<Body>,
    context_length_tokens: AtomicU32,
    knows_canary: AtomicBool,
    active: Arc<AtomicUsize>,
    requests: Mutex<Vec<GenerateRequest>>,
    ids: Mutex<Vec<String>>,
    traces: Mutex<Vec<Option<TraceContext>>>,
    refusal: Mutex<Option<EngineError>>,
}

/// A request in progress; dropped with its stream.
struct Held(Arc<AtomicUsize>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Script {
    /// An engine for the test model's vocabulary, with answers from `body`.
    pub(crate) fn new<F, Fut>(body: F) -> Arc<Self>
    where
        F: Fn(GenerateRequest, OutputWriter) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Finish, EngineError>> + Send + 'static,
    {
        Arc::new(Self {
            capabilities: Capabilities {
                priority: true,
                ..Capabilities::tokens().with_sampling(SamplingOption::ALL)
            },
            body: Box::new(move |request, out| Box::pin(body(request, out))),
            context_length_tokens: AtomicU32::new(2048),
            knows_canary: AtomicBool::new(false),
            active: Arc::default(),
            requests: Mutex::default(),
            ids: Mutex::default(),
            traces: Mutex::default(),
            refusal: Mutex::default(),
        })
    }

    /// An engine that answers with these tokens, as fast as they are taken.
    pub(crate) fn tokens(tokens: Vec<u32>) -> Arc<Self> {
        Self::ending(tokens, Ok(Finish::stop()))
    }

    /// An engine that fails after these tokens.
    pub(crate) fn failing(tokens: Vec<u32>, error: EngineError) -> Arc<Self> {
        Self::ending(tokens, Err(error))
    }

    fn ending(tokens: Vec<u32>, end: Result<Finish, EngineError>) -> Arc<Self> {
        Self::new(move |_, out| {
            let (tokens, end) = (tokens.clone(), end.clone());
            async move {
                for token in tokens {
                    out.token(token).await?;
                }
                end
            }
        })
    }

    /// An engine that answers with the tokens `first`, waits for a permit, and continues with the tokens `then`.
    pub(crate) fn gated(first: Vec<u32>, then: Vec<u32>) -> (Arc<Self>, Arc<Semaphore>) {
        let gate = Arc::new(Semaphore::new(0));
        let opened = Arc::clone(&gate);
        let engine = Self::new(move |_, out| {
            let (gate, first, then) = (Arc::clone(&opened), first.clone(), then.clone());
            async move {
                for token in first {
                    out.token(token).await?;
                }
                gate.acquire().await.expect("open").forget();
                for token in then {
                    out.token(token).await?;
                }
                Ok(Finish::stop())
            }
        });
        (engine, gate)
    }

    /// The same engine, declaring guided decoding by JSON schema. Its script is responsible for following the schema.
    pub(crate) fn declaring_guided(self: Arc<Self>) -> Arc<Self> {
        self.declaring(|can| can.guided.extend([GuidedKind::JsonSchema]))
    }

    /// The same engine, with further capabilities.
    pub(crate) fn declaring(self: Arc<Self>, declare: impl FnOnce(&mut Capabilities)) -> Arc<Self> {
        let mut engine = Arc::into_inner(self).expect("nobody else has it yet");
        declare(&mut engine.capabilities);
        Arc::new(engine)
    }

    /// An engine that answers with these tokens and their logprobs. The logprob of the token at position `k` is `-k/8`; the other
    /// candidates are the next ids, each half as probable.
    pub(crate) fn rated(tokens: Vec<u32>) -> Arc<Self> {
        let engine = Self::new(move |request, out| {
            let tokens = tokens.clone();
            async move {
                for (place, token) in (0_u8..).zip(tokens) {
                    let logprobs = request.output.logprobs.map(|top| rating(place, token, top));
                    out.tokens(TokenChunk {
                        token_ids: [token].into_iter().collect(),
                        logprobs: logprobs.into_iter().collect(),
                    })
                    .await?;
                }
                Ok(Finish::stop())
            }
        });
        engine.declaring(|can| can.max_logprobs = Some(5))
    }

    /// The number of requests in progress.
    pub(crate) fn active(&self) -> usize {
        self.active.load(Ordering::SeqCst)
    }

    /// The requests so far, except the canary.
    pub(crate) fn requests(&self) -> Vec<GenerateRequest> {
        self.requests.lock().clone()
    }

    /// Their ids.
    pub(crate) fn ids(&self) -> Vec<String> {
        self.ids.lock().clone()
    }

    /// Their traces.
    pub(crate) fn traces(&self) -> Vec<Option<TraceContext>> {
        self.traces.lock().clone()
    }

    /// An engine that answers with `token` without end, as fast as it is taken.
    pub(crate) fn endless(token: u32) -> Arc<Self> {
        let engine = Self::new(move |_, out| async move {
            loop {
                out.token(token).await?;
            }
        });
        engine.widen();
        engine
    }

    /// Gives the engine a context that no test fills.
    pub(crate) fn widen(&self) {
        self.context_length_tokens.store(u32::MAX, Ordering::SeqCst);
    }

    /// An engine that answers with `token` and never sends anything else.
    pub(crate) fn silent(token: u32) -> Arc<Self> {
        Self::new(move |_, out| async move {
            out.token(token).await?;
            std::future::pending().await
        })
    }

    /// Refuses every request with `error` from now on; `None` ends that.
    pub(crate) fn refuse(&self, error: Option<EngineError>) {
        *self.refusal.lock() = error;
    }
}

fn rating(place: u8, token: u32, top: u32) -> TokenLogprob {
    let logprob = -f32::from(place) / 8.0;
    let candidate = |rank: u32| TopLogprob {
        token_id: (token + rank) % 2048,
        logprob: logprob - std::f32::consts::LN_2 * rank as f32,
    };
    TokenLogprob {
        logprob,
        top: (0..top).map(candidate).collect(),
    }
}

#[async_trait]
impl LLMEngine for Script {
    async fn start(&self, _ctx: StartContext) -> Result<EngineConfig, EngineError> {
        Ok(
            EngineConfig::new("script", self.context_length_tokens.load(Ordering::SeqCst))
                .with_vocab_size(2048)
                .with_capabilities(self.capabilities.clone()),
        )
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        if !self.knows_canary.swap(true, Ordering::SeqCst) {
            return Ok(output::stream(ctx, |_| async move { Ok(Finish::length()) }));
        }
        self.requests.lock().push(request.clone());
        self.ids.lock().push(ctx.id().to_owned());
        self.traces.lock().push(ctx.trace().cloned());
        if let Some(error) = self.refusal.lock().clone() {
            return Err(error);
        }
        self.active.fetch_add(1, Ordering::SeqCst);
        let held = Held(Arc::clone(&self.active));
        Ok(output::stream(ctx, |out| {
            let answer = (self.body)(request, out);
            async move {
                let _held = held;
                answer.await
            }
        }))
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        Ok(())
    }
}
