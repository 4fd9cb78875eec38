//! The whole layer, in one process: workers that are a few handlers, and real discovery, plane and clients.

mod counts;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::{StreamExt, stream};
use genset_backend_common::kv::{
    BlockHash, KvEvent, KvEventData, KvEventPublisher, KvSnapshot, StoredBlock, Xxh3BlockHasher,
    hash_blocks,
};
use genset_backend_common::output::{self, Finish};
use genset_backend_common::ports::Generate;
use genset_backend_common::{
    EngineConfig, EngineError, GenerateRequest, ModelCard, OutputStream, RequestContext, TokenId,
    context::Explanation, handles::Load,
};
use genset_runtime::plane::{Handler, ResponseStream};
use genset_runtime::{
    EndpointName, InstanceId, KvItem, ModelDirectory, Runtime, Serving, endpoints,
};
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::config::{KvConfig, RouterConfig, RouterMode};

const PATIENCE: Duration = Duration::from_secs(120);

/// A worker as clients see it: it stores every prompt it gets, and answers when it may.
struct Fake {
    kv: KvEventPublisher,
    load: watch::Sender<Load>,
    /// Items in place of those that would be published, once.
    items: Mutex<Vec<KvItem>>,
    /// How many tokens an answer has; none comes while it is `None`.
    may_answer: watch::Sender<Option<u32>>,
    asked: Mutex<Vec<Vec<TokenId>>>,
    /// The rank that each request named.
    ranks: Mutex<Vec<Option<u32>>>,
}

struct Part<T>(Arc<Fake>, std::marker::PhantomData<T>);
struct Generates;
struct Events;
struct Loads;

fn part<T>(fake: &Arc<Fake>) -> Arc<Part<T>> {
    Arc::new(Part(Arc::clone(fake), std::marker::PhantomData))
}

fn blocks_of(tokens: &[TokenId]) -> Vec<BlockHash> {
    let size = EngineConfig::new("m", 1).kv_block_size;
    let size = size.unwrap_or(genset_backend_common::card::DEFAULT_KV_BLOCK_SIZE);
    hash_blocks(&Xxh3BlockHasher::new(), None, tokens, size)
}

#[async_trait]
impl Handler<GenerateRequest, genset_backend_common::Output> for Part<Generates> {
    async fn handle(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<ResponseStream<genset_backend_common::Output>, EngineError> {
        let tokens = request.tokens()?.to_vec();
        let blocks = blocks_of(&tokens);
        let kv = match request.data_parallel_rank {
            Some(rank) => self.0.kv.of_rank(rank),
            None => self.0.kv.clone(),
        };
        self.0.ranks.lock().push(request.data_parallel_rank);
        let held = kv.subscribe().snapshot.blocks;
        let is_held = |block: &&BlockHash| held.iter().any(|stored| stored.hash == **block);
        let cached = blocks.iter().take_while(is_held).count() * 16;
        kv.publish(KvEventData::Stored {
            parent: None,
            blocks,
        });
        self.0.asked.lock().push(tokens);
        let mut may = self.0.may_answer.subscribe();
        let ctx = ctx.with_prompt_tokens(request.prompt_tokens().unwrap_or_default());
        let outputs = output::stream(ctx, |out| async move {
            let count = may
                .wait_for(Option::is_some)
                .await
                .map_or(Some(0), |count| *count);
            for token in 0..count.unwrap_or_default() {
                out.token(token).await?;
            }
            Ok(Finish::length().with_cached_tokens(u32::try_from(cached).unwrap()))
        });
        Ok(Box::pin(outputs))
    }
}

#[async_trait]
impl Handler<(), KvItem> for Part<Events> {
    async fn handle(
        &self,
        (): (),
        _ctx: RequestContext,
    ) -> Result<ResponseStream<KvItem>, EngineError> {
        let scripted = std::mem::take(&mut *self.0.items.lock());
        if !scripted.is_empty() {
            return Ok(Box::pin(stream::iter(scripted.into_iter().map(Ok))));
        }
        Ok(items_of(&self.0.kv))
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

#[async_trait]
impl Handler<u32, KvItem> for Part<Events> {
    async fn handle(
        &self,
        rank: u32,
        _ctx: RequestContext,
    ) -> Result<ResponseStream<KvItem>, EngineError> {
        Ok(items_of(&self.0.kv.of_rank(rank)))
    }
}

#[async_trait]
impl Handler<(), Load> for Part<Loads> {
    async fn handle(
        &self,
        (): (),
        _ctx: RequestContext,
    ) -> Result<ResponseStream<Load>, EngineError> {
        let loads = stream::unfold(
            (self.0.load.subscribe(), true),
            |(mut load, is_first)| async move {
                if !is_first {
                    load.changed().await.ok()?;
                }
                let now = *load.borrow_and_update();
                Some((Ok(now), (load, false)))
            },
        );
        Ok(Box::pin(loads))
    }
}

fn name() -> EndpointName {
    EndpointName::default()
}

/// A worker, listed until it is dropped.
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
        let generate: Arc<dyn Handler<GenerateRequest, genset_backend_common::Output>> =
            part::<Generates>(&fake);
        let events: Arc<dyn Handler<(), KvItem>> = part::<Events>(&fake);
        let load: Arc<dyn Handler<(), Load>> = part::<Loads>(&fake);
        let rank_events: Arc<dyn Handler<u32, KvItem>> = part::<Events>(&fake);
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

    /// One of the requests of `key`.
    async fn begin_for(&self, key: &str, tokens: &[TokenId]) -> OutputStream {
        let request = GenerateRequest::from_tokens("m", tokens.to_vec());
        let ctx = RequestContext::new("r").with_affinity(key);
        self.generate.generate(request, ctx).await.unwrap()
    }

    /// The sum of a metric's samples with this label.
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

fn prompt(seed: u32, tokens: u32) -> Vec<TokenId> {
    (0..tokens)
        .map(|token| token.wrapping_mul(31).wrapping_add(seed * 1000))
        .collect()
}

#[tokio::test(start_paused = true)]
async fn a_prompt_goes_where_it_is_cached_and_others_by_turns() {
    let site = Site::new(true);
    let workers = [
        site.worker(1, vec![]).await,
        site.worker(2, vec![]).await,
        site.worker(3, vec![]).await,
    ];
    let router = site.router(KvConfig::default()).await;
    router
        .until("genset_router_snapshots_total", "", |count| count == 3.0)
        .await;
    for seed in 1..=3 {
        router.ask(&prompt(seed, 320)).await;
    }
    assert!(workers.iter().all(|worker| worker.asked() == 1));
    router.until(BLOCKS, "", |blocks| blocks == 60.0).await;
    for round in 1..=4 {
        for seed in 1..=3 {
            let mut longer = prompt(seed, 320);
            longer.extend(prompt(seed + 10 + round, 40));
            router.ask(&longer).await;
        }
    }
    for worker in &workers {
        let asked = worker.fake.asked.lock();
        assert!(asked.len() == 5 && asked.iter().all(|tokens| tokens[..320] == asked[0]));
    }
    assert_eq!(
        router.metric("genset_router_choices_total", "overlap"),
        12.0
    );
    let (predicted, actual) = (
        router.metric("genset_router_predicted_cached_tokens_total", ""),
        router.metric("genset_router_actual_cached_tokens_total", ""),
    );
    assert_eq!((predicted, actual), (12.0 * 320.0, 12.0 * 320.0));
    assert!(router.metric("genset_router_decision_seconds_count", "") >= 15.0);
}

#[tokio::test(start_paused = true)]
async fn requests_that_come_together_go_to_different_workers() {
    let site = Site::new(true);
    let workers = [site.worker(1, vec![]).await, site.worker(2, vec![]).await];
    for worker in &workers {
        worker.fake.may_answer.send_replace(None);
    }
    let router = site.router(KvConfig::default()).await;
    router
        .until("genset_router_snapshots_total", "", |count| count == 2.0)
        .await;
    let mut open = Vec::new();
    for seed in 0..8 {
        open.push(router.begin(&prompt(seed, 100)).await);
    }
    assert_eq!(workers.each_ref().map(Worker::asked), [4, 4]);
    // Whoever is busy with long prompts gets none, until those have ended.
    let long = router.begin(&prompt(50, 10_000)).await;
    let before = workers.each_ref().map(Worker::asked);
    let busy = usize::from(before[1] == 5);
    for seed in 60..70 {
        open.push(router.begin(&prompt(seed, 100)).await);
    }
    assert_eq!(workers[busy].asked(), 5);
    assert_eq!(workers[1 - busy].asked(), 14);
    drop((open, long));
    for seed in 80..84 {
        drop(router.begin(&prompt(seed, 100)).await);
    }
    assert_eq!(workers[busy].asked(), 7);
}

#[tokio::test(start_paused = true)]
async fn what_others_ask_of_a_worker_counts() {
    let site = Site::new(true);
    let workers = [site.worker(1, vec![]).await, site.worker(2, vec![]).await];
    workers[0].load(Load {
        running_requests: 5,
        kv_used_blocks: 500,
        kv_total_blocks: 1000,
        ..Load::default()
    });
    let router = site.router(KvConfig::default()).await;
    router
        .until("genset_router_snapshots_total", "", |count| count == 2.0)
        .await;
    // The load's stream has been asked for by then, and says so at once; one request may still come before it.
    let ask = async |seed| {
        for seed in seed..seed + 6 {
            router.ask(&prompt(seed, 64)).await;
        }
    };
    ask(0).await;
    let before = workers[0].asked();
    ask(10).await;
    assert_eq!(workers[0].asked(), before);
    workers[0].load(Load::default());
    eventually_asked(&router, &workers[0], before).await;
}

/// New prompts reach the worker again.
async fn eventually_asked(router: &Router, worker: &Worker, before: usize) {
    for seed in 100..1000 {
        router.ask(&prompt(seed, 64)).await;
        if worker.asked() > before {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("it is asked no more");
}

#[tokio::test(start_paused = true)]
async fn a_worker_takes_its_entries_along_and_comes_back_with_its_snapshot() {
    let site = Site::new(true);
    let first = site.worker(1, vec![]).await;
    let router = site.router(KvConfig::default()).await;
    router
        .until("genset_router_snapshots_total", "", |count| count == 1.0)
        .await;
    router.ask(&prompt(1, 160)).await;
    router.until(BLOCKS, "", |blocks| blocks == 10.0).await;
    let second = site.worker(2, vec![]).await;
    router
        .until("genset_router_snapshots_total", "", |count| count == 2.0)
        .await;
    drop(first);
    router.until(BLOCKS, "", |blocks| blocks == 0.0).await;
    router.ask(&prompt(1, 160)).await;
    assert_eq!(second.asked(), 1);
    router.until(BLOCKS, "", |blocks| blocks == 10.0).await;
    // A frontend that starts now knows what the worker has.
    let other = site.router(KvConfig::default()).await;
    let third = site.worker(3, vec![]).await;
    other
        .until("genset_router_snapshots_total", "", |count| count >= 5.0)
        .await;
    for _ in 0..6 {
        other.ask(&prompt(1, 160)).await;
    }
    assert_eq!((second.asked(), third.asked()), (7, 0));
}

#[tokio::test(start_paused = true)]
async fn gaps_and_nonsense_are_counted_and_harm_nobody_else() {
    let site = Site::new(true);
    let honest = site.worker(1, vec![]).await;
    let real = blocks_of(&prompt(1, 160));
    let stored = |id, parent: Option<u64>, blocks: Vec<BlockHash>| {
        let parent = parent.map(BlockHash);
        KvItem::Change(KvEvent {
            id,
            data: KvEventData::Stored { parent, blocks },
        })
    };
    let nonsense = vec![
        KvItem::Snapshot(KvSnapshot {
            last_event_id: 7,
            blocks: vec![
                StoredBlock {
                    hash: BlockHash(5),
                    parent: Some(BlockHash(6)),
                },
                StoredBlock {
                    hash: BlockHash(6),
                    parent: Some(BlockHash(5)),
                },
            ],
        }),
        stored(8, Some(99), vec![BlockHash(100), BlockHash(100)]),
        KvItem::Change(KvEvent {
            id: 9,
            data: KvEventData::Removed {
                blocks: vec![BlockHash(12345)],
            },
        }),
        // Another's blocks, out of place.
        stored(10, Some(100), real[3..].to_vec()),
        stored(12, None, vec![BlockHash(1)]),
    ];
    let router = site.router(KvConfig::default()).await;
    router
        .until("genset_router_snapshots_total", "", |count| count == 1.0)
        .await;
    router.ask(&prompt(1, 160)).await;
    router.until(BLOCKS, "", |blocks| blocks == 10.0).await;
    let liar = site.worker(2, nonsense).await;
    for (reason, count) in [("other_parent", 2.0), ("not_held", 1.0), ("gap", 1.0)] {
        let reason = format!("reason=\"{reason}\"");
        router
            .until("genset_router_odd_events_total", &reason, |seen| {
                seen >= count
            })
            .await;
    }
    // After the gap it begins anew, honestly.
    router
        .until("genset_router_snapshots_total", "", |count| count == 3.0)
        .await;
    for _ in 0..5 {
        router.ask(&prompt(1, 160)).await;
    }
    assert_eq!((honest.asked(), liar.asked()), (6, 0));
    router.until(BLOCKS, "", |blocks| blocks == 10.0).await;
}

#[tokio::test(start_paused = true)]
async fn endless_blocks_of_one_worker_take_no_room_from_others() {
    let site = Site::new(true);
    let honest = site.worker(1, vec![]).await;
    let kv = KvConfig {
        max_worker_blocks: NonZeroU32::new(1000).unwrap(),
        ..KvConfig::default()
    };
    let router = site.router(kv).await;
    router
        .until("genset_router_snapshots_total", "", |count| count == 1.0)
        .await;
    router.ask(&prompt(1, 320)).await;
    router.until(BLOCKS, "", |blocks| blocks == 20.0).await;
    let snapshot = KvSnapshot {
        last_event_id: 0,
        blocks: Vec::new(),
    };
    let blocks = |event: u64| (1..=200).map(move |block| BlockHash(event << 32 | block));
    let stored = |event| {
        KvItem::Change(KvEvent {
            id: event,
            data: KvEventData::Stored {
                parent: None,
                blocks: blocks(event).collect(),
            },
        })
    };
    // A hundred thousand blocks; then it takes back what was never in the index, and says nothing more.
    let removed = KvItem::Change(KvEvent {
        id: 501,
        data: KvEventData::Removed {
            blocks: blocks(500).collect(),
        },
    });
    let endless = [KvItem::Snapshot(snapshot)].into_iter();
    let endless = endless.chain((1..=500).map(stored)).chain([removed]);
    let _liar = site.worker(2, endless.collect()).await;
    let too_many = "reason=\"too_many\"";
    router
        .until("genset_router_odd_events_total", too_many, |count| {
            count == 495.0
        })
        .await;
    assert_eq!(router.metric(BLOCKS, ""), 1020.0);
    assert_eq!(
        router.metric("genset_router_odd_events_total", "not_held"),
        0.0
    );
    // The other's prompts are kept in mind as ever.
    for _ in 0..6 {
        router.ask(&prompt(1, 320)).await;
    }
    assert_eq!(honest.asked(), 7);
}

#[tokio::test(start_paused = true)]
async fn without_events_what_was_routed_is_assumed_to_be_cached() {
    for use_events in [true, false] {
        let site = Site::new(false);
        let workers = [site.worker(1, vec![]).await, site.worker(2, vec![]).await];
        for worker in &workers {
            worker.load(Load {
                kv_total_blocks: if use_events { 100 } else { 0 },
                ..Load::default()
            });
        }
        let kv = KvConfig {
            use_events,
            ..KvConfig::default()
        };
        let router = site.router(kv).await;
        // Until the loads are known it goes by requests.
        let label = "reason=\"load\"";
        for seed in 1000..2000 {
            router.ask(&prompt(seed, 32)).await;
            if router.metric("genset_router_choices_total", label) > 0.0 {
                break;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // Others get a turn: the workers become known.
        tokio::time::sleep(Duration::from_millis(5)).await;
        let before = workers.each_ref().map(Worker::asked);
        for _ in 0..6 {
            router.ask(&prompt(1, 320)).await;
        }
        let after = workers.each_ref().map(Worker::asked);
        let gained = [after[0] - before[0], after[1] - before[1]];
        assert!(gained == [6, 0] || gained == [0, 6], "{gained:?}");
        tokio::time::advance(Duration::from_secs(121)).await;
        router.ask(&prompt(2, 16)).await;
        assert_eq!(router.metric(BLOCKS, ""), 1.0);
    }
}

#[tokio::test(start_paused = true)]
async fn workers_without_kv_blocks_are_chosen_by_their_requests() {
    let site = Site::new(false);
    let workers = [site.worker(1, vec![]).await, site.worker(2, vec![]).await];
    let router = site.router(KvConfig::default()).await;
    for _ in 0..6 {
        router.ask(&prompt(1, 320)).await;
    }
    assert_eq!(workers.each_ref().map(Worker::asked), [3, 3]);
    assert_eq!(
        router.metric("genset_router_choices_total", "fallback"),
        6.0
    );
}

#[tokio::test(start_paused = true)]
async fn with_a_weight_of_zero_nobody_looks_at_caches() {
    let site = Site::new(true);
    let workers = [site.worker(1, vec![]).await, site.worker(2, vec![]).await];
    let kv = KvConfig {
        overlap_score_weight: 0.0,
        ..KvConfig::default()
    };
    let router = site.router(kv).await;
    for _ in 0..6 {
        router.ask(&prompt(1, 320)).await;
    }
    assert_eq!(workers.each_ref().map(Worker::asked), [3, 3]);
}

/// New prompts, which nobody has cached.
#[tokio::test(start_paused = true)]
async fn a_key_stays_where_it_was_served_as_long_as_that_costs_little() {
    let site = Site::new(true);
    let workers = [
        site.worker(1, vec![]).await,
        site.worker(2, vec![]).await,
        site.worker(3, vec![]).await,
    ];
    let router = site.router(KvConfig::default()).await;
    router
        .until("genset_router_snapshots_total", "", |count| count == 3.0)
        .await;
    for seed in 0..7 {
        read(router.begin_for("me", &prompt(seed, 64)).await).await;
    }
    let served = workers.each_ref().map(Worker::asked);
    let mine = served.iter().position(|asked| *asked == 7).unwrap();
    assert_eq!(
        router.metric("genset_router_choices_total", "affinity"),
        6.0
    );
    // Two long prompts wait there: 2 * 20 blocks are more than 32.
    workers[mine].fake.may_answer.send_replace(None);
    let waiting = [
        router.begin_for("me", &prompt(50, 160)).await,
        router.begin_for("me", &prompt(51, 160)).await,
    ];
    assert_eq!(workers[mine].asked(), 9);
    read(router.begin_for("me", &prompt(52, 64)).await).await;
    assert_eq!(workers[mine].asked(), 9);
    // It lives elsewhere now.
    drop(waiting);
    read(router.begin_for("me", &prompt(53, 64)).await).await;
    assert_eq!(workers[mine].asked(), 9);
    // Whoever has no key takes turns.
    workers[mine].fake.may_answer.send_replace(Some(1));
    for seed in 100..109 {
        router.ask(&prompt(seed, 64)).await;
    }
    assert!(workers.iter().all(|worker| worker.asked() >= 3));
}

#[tokio::test(start_paused = true)]
async fn a_key_stays_where_it_was_served_without_kv_blocks_too() {
    for (affinity_blocks, expected) in [(32, [0, 6]), (0, [3, 3])] {
        let site = Site::new(false);
        let workers = [site.worker(1, vec![]).await, site.worker(2, vec![]).await];
        let kv = KvConfig {
            affinity_blocks,
            ..KvConfig::default()
        };
        let router = site.router(kv).await;
        for seed in 0..6 {
            read(router.begin_for("me", &prompt(seed, 64)).await).await;
        }
        let mut asked = workers.each_ref().map(Worker::asked);
        asked.sort_unstable();
        assert_eq!(asked, expected);
    }
}

#[tokio::test(start_paused = true)]
async fn a_decision_is_explained_when_asked() {
    let site = Site::new(true);
    let workers = [site.worker(1, vec![]).await, site.worker(2, vec![]).await];
    let router = site.router(KvConfig::default()).await;
    router
        .until("genset_router_snapshots_total", "", |count| count == 2.0)
        .await;
    router.ask(&prompt(1, 320)).await;
    router.until(BLOCKS, "", |blocks| blocks == 20.0).await;
    let holder = 1 + workers[1].asked() as u64;
    let explanation = Explanation::default();
    let ctx = RequestContext::new("r").with_explanation(explanation.clone());
    let mut longer = prompt(1, 320);
    longer.extend(prompt(2, 40));
    let request = GenerateRequest::from_tokens("m", longer);
    read(router.generate.generate(request, ctx).await.unwrap()).await;
    let [decision] = &explanation.decisions()[..] else {
        panic!("{explanation:?}")
    };
    let other = InstanceId(3 - holder).to_string();
    let holder = InstanceId(holder).to_string();
    assert_eq!(decision["instance"], holder);
    assert_eq!(
        (&decision["reason"], &decision["mode"]),
        (&"overlap".into(), &"kv".into())
    );
    assert_eq!(
        (&decision["prompt_blocks"], &decision["block_size"]),
        (&23.into(), &16.into())
    );
    let candidates = serde_json::json!([
        {"instance": holder, "cost": 25.5, "overlap_blocks": 20, "prefill_blocks": 22.5, "active_blocks": 23.0},
        {"instance": other, "cost": 45.5, "overlap_blocks": 0, "prefill_blocks": 22.5, "active_blocks": 23.0},
    ]);
    assert_eq!(decision["candidates"], candidates);
}

#[tokio::test(start_paused = true)]
async fn ranks_are_targets_of_their_own_and_a_named_one_is_honoured() {
    for use_events in [true, false] {
        let mut site = Site::new(true);
        site.card.data_parallel_size = 2;
        site.card.capabilities.kv_ranks = true;
        let worker = site.worker(1, vec![]).await;
        let kv = KvConfig {
            use_events,
            ..KvConfig::default()
        };
        let router = site.router(kv).await;
        if use_events {
            router
                .until("genset_router_snapshots_total", "", |count| count == 2.0)
                .await;
        } else {
            // Others get a turn: the worker becomes known.
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        for seed in 1..=2 {
            router.ask(&prompt(seed, 320)).await;
        }
        router.until(BLOCKS, "", |blocks| blocks == 40.0).await;
        let ranks = worker.fake.ranks.lock().clone();
        assert!([Some(0), Some(1)].iter().all(|rank| ranks.contains(rank)));
        for _ in 0..3 {
            router.ask(&prompt(1, 320)).await;
        }
        let mut request = GenerateRequest::from_tokens("m", prompt(1, 320));
        let other = 1 - ranks[0].unwrap();
        request.data_parallel_rank = Some(other);
        let ctx = RequestContext::new("r");
        read(
            router
                .generate
                .generate(request.clone(), ctx)
                .await
                .unwrap(),
        )
        .await;
        let expected = [ranks[0], ranks[0], ranks[0], Some(other)];
        assert_eq!(worker.fake.ranks.lock()[2..], expected);
        // One that is not there is the engine's to refuse.
        request.data_parallel_rank = Some(7);
        let ctx = RequestContext::new("r");
        read(router.generate.generate(request, ctx).await.unwrap()).await;
        assert_eq!(worker.fake.ranks.lock().last(), Some(&Some(7)));
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_tells_no_ranks_apart_chooses_among_them() {
    let mut site = Site::new(true);
    site.card.data_parallel_size = 2;
    let worker = site.worker(1, vec![]).await;
    let router = site.router(KvConfig::default()).await;
    router
        .until("genset_router_snapshots_total", "", |count| count == 1.0)
        .await;
    router.ask(&prompt(1, 320)).await;
    assert_eq!(worker.fake.ranks.lock()[..], [None]);
}
