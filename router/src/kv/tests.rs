//! The whole layer, in one process: workers made of a few handlers, and real discovery, request plane and clients.

mod affinity;
mod choice;
mod counts;
mod events;
mod ranks;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::{StreamExt, stream};
use genset_backend_common::context::Explanation;
use genset_backend_common::kv::{BlockHash, KvEventData, KvEventPublisher, hash_blocks};
use genset_backend_common::output::{self, Finish};
use genset_backend_common::ports::Generate;
use genset_backend_common::{
    EngineConfig, EngineError, GenerateRequest, ModelCard, Output, OutputStream, RequestContext,
    TokenId, handles::Load,
};
use genset_runtime::plane::{Handler, ResponseStream};
use genset_runtime::{
    EndpointName, InstanceId, KvItem, ModelDirectory, Runtime, Serving, endpoints,
};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::watch;

use crate::config::{KvConfig, RouterConfig, RouterMode};

const PATIENCE: Duration = Duration::from_secs(120);

/// A worker as clients see it: it stores every prompt it receives, and answers when allowed.
struct Fake {
    kv: KvEventPublisher,
    load: watch::Sender<Load>,
    /// Items to publish instead of the real ones, once.
    items: Mutex<Vec<KvItem>>,
    /// The length of answers in tokens; no answer while `None`.
    may_answer: watch::Sender<Option<u32>>,
    asked: Mutex<Vec<Vec<TokenId>>>,
    /// The rank that each request named.
    ranks: Mutex<Vec<Option<u32>>>,
}

/// An endpoint of a worker.
struct Part<A>(Arc<Fake>, A);

#[async_trait]
impl<A, Req, Resp> Handler<Req, Resp> for Part<A>
where
    A: Fn(&Fake, Req, RequestContext) -> ResponseStream<Resp> + Send + Sync + 'static,
    Req: Send + 'static,
    Resp: Send + 'static,
{
    async fn handle(
        &self,
        request: Req,
        ctx: RequestContext,
    ) -> Result<ResponseStream<Resp>, EngineError> {
        Ok((self.1)(&self.0, request, ctx))
    }
}

fn blocks_of(tokens: &[TokenId]) -> Vec<BlockHash> {
    let size = EngineConfig::new("m", 1).kv_block_size;
    let size = size.unwrap_or(genset_backend_common::card::DEFAULT_KV_BLOCK_SIZE);
    hash_blocks(None, tokens, size)
}

impl Fake {
    fn generate(&self, request: GenerateRequest, ctx: RequestContext) -> ResponseStream<Output> {
        let tokens = request.tokens().unwrap_or_default().to_vec();
        let blocks = blocks_of(&tokens);
        let kv = match request.data_parallel_rank {
            Some(rank) => self.kv.of_rank(rank),
            None => self.kv.clone(),
        };
        self.ranks.lock().push(request.data_parallel_rank);
        let held = kv.subscribe().snapshot.blocks;
        let is_held = |block: &&BlockHash| held.iter().any(|stored| stored.hash == **block);
        let cached = blocks.iter().take_while(is_held).count() * 16;
        kv.publish(KvEventData::Stored {
            parent: None,
            blocks,
        });
        self.asked.lock().push(tokens);
        let mut may = self.may_answer.subscribe();
        let ctx = ctx.with_prompt_tokens(request.prompt_tokens().unwrap_or_default());
        Box::pin(output::stream(ctx, |out| async move {
            let count = may
                .wait_for(Option::is_some)
                .await
                .map_or(Some(0), |count| *count);
            for token in 0..count.unwrap_or_default() {
                out.token(token).await?;
            }
            Ok(Finish::length().with_cached_tokens(u32::try_from(cached).unwrap()))
        }))
    }

    fn events(&self) -> ResponseStream<KvItem> {
        let scripted = std::mem::take(&mut *self.items.lock());
        if !scripted.is_empty() {
            return Box::pin(stream::iter(scripted.into_iter().map(Ok)));
        }
        items_of(&self.kv)
    }

    fn loads(&self) -> ResponseStream<Load> {
        Box::pin(stream::unfold(
            (self.load.subscribe(), true),
            |(mut load, is_first)| async move {
                if !is_first {
                    load.changed().await.ok()?;
                }
                let now = *load.borrow_and_update();
                Some((Ok(now), (load, false)))
            },
        ))
    }
}

fn items_of(kv: &KvEventPublisher) -> ResponseStream<KvItem> {
    let mut subscription = kv.subscribe();
    let snapshot = std::mem::take(&mut subscription.snapshot);
    let changes = stream::unfold(subscription, |mut subscription| async move {
        let event = subscription.next().await.ok()?;
        Some((Ok(KvItem::Change(event)), subscription))
    });
    Box::pin(stream::iter([Ok(KvItem::Snapshot(snapshot))]).chain(changes))
}

fn name() -> EndpointName {
    EndpointName::default()
}

/// A worker, listed until dropped.
struct Worker {
    fake: Arc<Fake>,
    _servings: Vec<Serving>,
}

impl Worker {
    fn asked(&self) -> usize {
        self.fake.asked.lock().len()
    }

    fn load(&self, load: Load) {
        self.fake.load.send_replace(load);
    }
}

struct Site {
    runtime: Runtime,
    card: ModelCard,
}

impl Site {
    fn new(has_events: bool) -> Self {
        let mut config = EngineConfig::new("m", 1 << 20);
        config.capabilities.kv_events = has_events;
        Self {
            runtime: Runtime::in_process(),
            card: ModelCard::from_config(&config),
        }
    }

    async fn worker(&self, id: u64, items: Vec<KvItem>) -> Worker {
        let fake = Arc::new(Fake {
            kv: KvEventPublisher::new(),
            load: watch::Sender::new(Load::default()),
            items: Mutex::new(items),
            may_answer: watch::Sender::new(Some(1)),
            asked: Mutex::default(),
            ranks: Mutex::default(),
        });
        for rank in 0..self.card.data_parallel_size {
            drop(fake.kv.of_rank(rank));
        }
        let id = InstanceId(id);
        let at = |endpoint: &str| self.runtime.endpoint(name().sibling(endpoint).unwrap());
        let generate = Arc::new(Part(fake.clone(), Fake::generate));
        let events = |fake: &Fake, (): (), _: RequestContext| fake.events();
        let events = Arc::new(Part(fake.clone(), events));
        let load = |fake: &Fake, (): (), _: RequestContext| fake.loads();
        let load = Arc::new(Part(fake.clone(), load));
        let of_rank = |fake: &Fake, rank: u32, _: RequestContext| items_of(&fake.kv.of_rank(rank));
        let rank_events = Arc::new(Part(fake.clone(), of_rank));
        let servings = vec![
            at(endpoints::KV_RANK_EVENTS)
                .serve_as(id, rank_events)
                .await
                .unwrap(),
            at(endpoints::KV_EVENTS).serve_as(id, events).await.unwrap(),
            at(endpoints::LOAD).serve_as(id, load).await.unwrap(),
            self.runtime
                .endpoint(name())
                .serve_as(id, generate)
                .await
                .unwrap(),
        ];
        let (last, beside) = servings.split_last().unwrap();
        for serving in beside {
            serving.list(None).await.unwrap();
        }
        last.list(Some(self.card.clone())).await.unwrap();
        Worker {
            fake,
            _servings: servings,
        }
    }

    /// Starts workers with the ids from 1.
    async fn workers<const N: usize>(&self) -> [Worker; N] {
        let mut workers = Vec::new();
        for id in (1..).take(N) {
            workers.push(self.worker(id, vec![]).await);
        }
        workers.try_into().ok().unwrap()
    }

    async fn router(&self, kv: KvConfig) -> Router {
        let config = RouterConfig {
            mode: RouterMode::Kv,
            kv,
            ..RouterConfig::default()
        };
        let directory = ModelDirectory::follow(&self.runtime);
        let mut live = directory.subscribe();
        let live = live
            .wait_for(|models| models.contains_key("m"))
            .await
            .unwrap();
        let model = live["m"].clone();
        drop(live);
        let layers = crate::Layers::register(self.runtime.metrics(), config);
        let generate = crate::connect(&directory, &model, &layers, PATIENCE).await;
        Router {
            generate: generate.unwrap(),
            runtime: self.runtime.clone(),
            _directory: directory,
        }
    }
}

/// Returns workers with the ids from 1, and a router that has their snapshots.
async fn routed<const N: usize>() -> ([Worker; N], Router) {
    let site = Site::new(true);
    let workers = site.workers().await;
    let router = site.router(KvConfig::default()).await;
    let count = u32::try_from(N).unwrap();
    router.until_snapshots(f64::from(count)).await;
    (workers, router)
}

struct Router {
    generate: Arc<dyn Generate>,
    runtime: Runtime,
    _directory: ModelDirectory,
}

impl Router {
    async fn begin(&self, tokens: &[TokenId]) -> OutputStream {
        let request = GenerateRequest::from_tokens("m", tokens.to_vec());
        self.generate
            .generate(request, RequestContext::new("r"))
            .await
            .unwrap()
    }

    async fn ask(&self, tokens: &[TokenId]) {
        read(self.begin(tokens).await).await;
    }

    /// Begins a request, and returns its routing explanation.
    async fn explained(&self, tokens: &[TokenId]) -> (OutputStream, Value) {
        let request = GenerateRequest::from_tokens("m", tokens.to_vec());
        let explanation = Explanation::default();
        let ctx = RequestContext::new("r").with_explanation(explanation.clone());
        let outputs = self.generate.generate(request, ctx).await.unwrap();
        let mut decisions = explanation.decisions();
        assert_eq!(decisions.len(), 1, "{decisions:?}");
        (outputs, decisions.remove(0))
    }

    async fn begin_for(&self, key: &str, tokens: &[TokenId]) -> OutputStream {
        let request = GenerateRequest::from_tokens("m", tokens.to_vec());
        let ctx = RequestContext::new("r").with_affinity(key);
        self.generate.generate(request, ctx).await.unwrap()
    }

    /// Returns the sum of a metric's samples with this label.
    fn metric(&self, name: &str, label: &str) -> f64 {
        let text = self.runtime.metrics().encode();
        let samples = text
            .lines()
            .filter(|line| line.starts_with(name) && line.contains(label));
        samples
            .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
            .sum()
    }

    async fn until(&self, name: &str, label: &str, is: impl Fn(f64) -> bool) {
        eventually(|| is(self.metric(name, label)), name).await;
    }

    /// Waits until the index has this many blocks.
    async fn until_blocks(&self, count: f64) {
        self.until(BLOCKS, "", |blocks| blocks == count).await;
    }

    /// Waits until this many snapshots were taken.
    async fn until_snapshots(&self, count: f64) {
        self.until(SNAPSHOTS, "", |taken| taken == count).await;
    }
}

async fn read(mut outputs: OutputStream) {
    while let Some(output) = outputs.next().await {
        output.unwrap();
    }
}

async fn eventually(is: impl Fn() -> bool, what: &str) {
    let look = async {
        while !is() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(PATIENCE, look)
        .await
        .unwrap_or_else(|_| panic!("never: {what}"));
}

const BLOCKS: &str = "genset_router_index_blocks";

const SNAPSHOTS: &str = "genset_router_snapshots_total";

const CHOICES: &str = "genset_router_choices_total";

const ODD_EVENTS: &str = "genset_router_odd_events_total";

fn prompt(seed: u32, tokens: u32) -> Vec<TokenId> {
    (0..tokens)
        .map(|token| token.wrapping_mul(31).wrapping_add(seed * 1000))
        .collect()
}

/// Returns a prompt of 22.5 blocks whose first 20 are those of `prompt(1, 320)`.
fn longer() -> Vec<TokenId> {
    let mut longer = prompt(1, 320);
    longer.extend(prompt(2, 40));
    longer
}
