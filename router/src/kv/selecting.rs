//! [`Selecting`]: the layer for KV-aware selection.

use std::num::NonZeroU32;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};

use async_trait::async_trait;
use futures_core::Stream;
use genset_backend_common::kv::{hash_blocks, sequence_root};
use genset_backend_common::output::Output;
use genset_backend_common::{
    EngineError, GenerateRequest, ModelCard, OutputStream, RequestContext, context::Explanation,
};
use genset_runtime::discovery::InstanceRecord;
use genset_runtime::selection::{Candidate, LeastLoaded, Selector};
use genset_runtime::{GenerateClient, InstanceId, Runtime};
use parking_lot::Mutex;
use rand::SeedableRng;
use rand::rngs::StdRng;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::affinity::{Affinity, Key};
use super::assumed::Assumed;
use super::cost::{Weighed, Work};
use super::events::{self, Feed, Indexed};
use super::explain;
use super::fleet::{Place, Request, Sequence, Standing};
use super::metrics::{ModelMetrics, Reason, RouterMetrics};
use super::unweighed::Unweighed;
use crate::config::KvConfig;
use crate::index::Lookup;
use crate::route::{Route, Routed};

/// Chooses an instance by cached prefix and load.
pub(crate) struct Selecting {
    client: GenerateClient,
    config: KvConfig,
    block_size: NonZeroU32,
    /// The source of KV events; `None` if they are not followed.
    feed: Option<Arc<Feed>>,
    indexed: Arc<Indexed>,
    /// Assumed cache contents, if workers publish no events.
    assumed: Option<Arc<Mutex<Assumed>>>,
    affinity: Affinity,
    unweighed: Unweighed,
    metrics: ModelMetrics,
    fallback: LeastLoaded,
    turn: AtomicUsize,
    random: Mutex<StdRng>,
    /// The mean number of blocks of this router's requests: an estimate for other routers' requests.
    mean_blocks: Mutex<f64>,
    /// A pool of lookups, to reuse their memory.
    lookups: Mutex<Vec<Lookup>>,
    _tasks: [AbortOnDropHandle<()>; 2],
}

/// A request's routing wishes.
struct Asked {
    key: Option<Key>,
    /// The place that last served the key.
    favourite: Option<Place>,
    /// The rank that must serve it.
    rank: Option<u32>,
    /// Receives the explanation of the choice.
    explanation: Option<Explanation>,
}

/// The maximum number of pooled lookups.
const KEPT_LOOKUPS: usize = 64;

/// The weight of a new request in the mean number of blocks.
const MEAN_SHARE: f64 = 0.05;

impl Selecting {
    /// Creates the layer over the instances of `client`, which follows their loads. `feed` has the events of the same workers;
    /// metrics carry the label `pool`.
    pub(crate) fn new(
        runtime: &Runtime,
        card: &ModelCard,
        pool: &str,
        client: GenerateClient,
        feed: Feed,
        config: KvConfig,
        metrics: &RouterMetrics,
    ) -> Self {
        let metrics = metrics.of(pool);
        let indexed = Arc::new(Indexed::new(metrics.clone(), &config));
        let has_events = config.use_events && card.capabilities.kv_events && card.takes_tokens();
        let assumed = (!has_events).then(|| Arc::new(Mutex::new(Assumed::new(config.assumed_ttl))));
        let feed = has_events.then(|| Arc::new(feed));
        let (all, kept) = (Arc::clone(&indexed), assumed.clone());
        let follow = if let Some(feed) = feed.clone() {
            let task = move |record: &InstanceRecord| {
                let (feed, all) = (Arc::clone(&feed), Arc::clone(&all));
                events::follow(feed, all, record.instance, record.ranks())
            };
            client.for_each_instance(runtime, task)
        } else {
            let task = move |record: &InstanceRecord| {
                let present = Present::new(&all, kept.as_ref(), record);
                async move {
                    let _until_it_goes = present;
                    std::future::pending().await
                }
            };
            client.for_each_instance(runtime, task)
        };
        let sweep = Arc::clone(&indexed);
        let sweep = runtime.spawn(sweep.sweep());
        let seed = config.seed.unwrap_or_else(rand::random);
        Self {
            client,
            block_size: card.kv_block_size,
            feed,
            indexed,
            assumed,
            affinity: Affinity::new(config.max_affinity_keys),
            unweighed: Unweighed::default(),
            metrics,
            fallback: LeastLoaded::default(),
            turn: AtomicUsize::new(0),
            random: Mutex::new(StdRng::seed_from_u64(seed)),
            mean_blocks: Mutex::new(1.0),
            lookups: Mutex::default(),
            _tasks: [follow, sweep],
            config,
        }
    }

    /// Returns the properties that selection needs; `None` when the prompt is not token ids here.
    fn read(&self, request: &GenerateRequest) -> Option<Request> {
        let tokens = request.tokens().ok()?;
        let root = sequence_root(request.cache_salt.as_deref(), request.adapter.as_deref());
        let blocks = if self.config.overlap_score_weight > 0.0 {
            hash_blocks(root, tokens, self.block_size)
        } else {
            Vec::new()
        };
        Some(Request {
            prompt_tokens: u32::try_from(tokens.len()).unwrap_or(u32::MAX),
            block_size: self.block_size.get(),
            blocks: blocks.into(),
        })
    }

    /// Chooses a candidate, and counts the request there.
    fn place(
        &self,
        asked: &Asked,
        request: &Request,
        lookup: &Lookup,
        candidates: &[Candidate],
    ) -> Option<(usize, Sequence)> {
        let mean_blocks = *self.mean_blocks.lock();
        let places = self.places(candidates, asked.rank);
        let favourite = (asked.favourite).and_then(|place| places.binary_search(&place).ok());
        let distrusted = self.distrusted(candidates);
        let mut weighed = Weighed::default();
        let choose = |standings: &mut [Standing]| {
            for (place, standing) in places.iter().zip(standings.iter_mut()) {
                if distrusted.binary_search(&place.instance).is_ok() {
                    standing.overlap_blocks = 0;
                }
            }
            let works = self.works(asked.rank, request, candidates, standings, mean_blocks);
            let KvConfig {
                overlap_score_weight,
                affinity_blocks,
                ..
            } = self.config;
            weighed = Weighed::new(works, overlap_score_weight, favourite, affinity_blocks);
            let turn = self.turn.fetch_add(1, Ordering::Relaxed);
            weighed.choose(self.config.temperature, turn, &mut *self.random.lock())
        };
        let fleet = &self.indexed.fleet;
        let (index, sequence) = fleet.place(&places, lookup.overlaps(), request, choose)?;
        self.metrics.chosen(weighed.reason(index));
        if let Some(explanation) = &asked.explanation {
            let pool = self.metrics.pool();
            explanation.add(explain::by_cost(pool, request, &places, &weighed, index));
        }
        // The candidates are ordered by id.
        let instance = sequence.place.instance;
        let owner = candidates.binary_search_by_key(&instance, |candidate| candidate.instance);
        Some((owner.ok()?, sequence))
    }

    /// Returns the work of each place, from the places' states; the places of a candidate follow one another.
    fn works(
        &self,
        named: Option<u32>,
        request: &Request,
        candidates: &[Candidate],
        standings: &[Standing],
        mean_blocks: f64,
    ) -> Vec<Work> {
        let mut works = Vec::with_capacity(standings.len());
        let mut rest = standings;
        let unweighed = self.unweighed.counts();
        for candidate in candidates {
            let ranks = self.ranks(candidate);
            let Some((its, later)) = rest.split_at_checked(ranks_to_choose(ranks, named).len())
            else {
                break;
            };
            rest = later;
            let ours = its.iter().map(|standing| standing.active_blocks).sum();
            let unweighed = unweighed.get(&candidate.instance).copied().unwrap_or(0);
            let others = others(candidate, unweighed, ours, mean_blocks) / f64::from(ranks);
            works.extend(its.iter().map(|standing| work(request, standing, others)));
        }
        works
    }

    /// Returns the instances whose index entries are too incomplete to trust.
    fn distrusted(&self, candidates: &[Candidate]) -> Vec<InstanceId> {
        if self.feed.is_none() {
            return Vec::new();
        }
        let published = candidates.iter().map(|it| (it.instance, it.kv_events));
        let lag = &self.indexed.lag;
        lag.look(published, || self.indexed.fleet.all_taken());
        lag.distrusted()
    }

    /// Returns the number of ranks tracked for a candidate.
    fn ranks(&self, candidate: &Candidate) -> u32 {
        match &self.feed {
            Some(feed) => feed.places(candidate.ranks),
            None => candidate.ranks,
        }
    }

    /// Returns the places where a request may run, in order.
    fn places(&self, candidates: &[Candidate], named: Option<u32>) -> Vec<Place> {
        let mut places = Vec::with_capacity(candidates.len());
        for candidate in candidates {
            let instance = candidate.instance;
            let ranks = ranks_to_choose(self.ranks(candidate), named);
            places.extend(ranks.map(|rank| Place { instance, rank }));
        }
        places
    }

    /// Looks up the prompt's blocks, after dropping expired assumptions.
    fn look_up(&self, request: &Request) -> Lookup {
        self.expire();
        let mut lookup = self.lookups.lock().pop().unwrap_or_default();
        self.indexed.reader.find(&request.blocks, &mut lookup);
        lookup
    }

    /// Drops expired assumptions.
    fn expire(&self) {
        let Some(assumed) = &self.assumed else { return };
        let mut assumed = assumed.lock();
        if assumed.is_due(Instant::now()) {
            assumed.expire(&mut self.indexed.writer.lock());
            drop(assumed);
            self.metrics.index_holds(self.indexed.reader.held_blocks());
        }
    }

    /// Returns a lookup to the pool.
    fn keep(&self, lookup: Lookup) {
        let mut lookups = self.lookups.lock();
        if lookups.len() < KEPT_LOOKUPS {
            lookups.push(lookup);
        }
    }

    /// Returns whether KV blocks can guide the choice; not if workers publish no events and report no KV blocks.
    fn has_blocks(&self, candidates: &[Candidate]) -> bool {
        self.assumed.is_none()
            || !self.config.use_events
            || candidates
                .iter()
                .any(|candidate| candidate.kv_total_blocks > 0)
    }

    /// Chooses by request count alone. Prefers the favourite if its excess requests cost at most the affinity allowance.
    fn fall_back(&self, asked: &Asked, candidates: &[Candidate]) -> Option<usize> {
        let requests = |candidate: &Candidate| u64::try_from(candidate.load).unwrap_or(u64::MAX);
        let least = candidates.iter().map(requests).min()?;
        let favourite = asked.favourite.map(|place| place.instance);
        let is_favourite = |candidate: &Candidate| Some(candidate.instance) == favourite;
        let favourite = candidates.iter().position(is_favourite).filter(|index| {
            let more = candidates.get(*index).map_or(0, requests) - least;
            as_f64(more) * *self.mean_blocks.lock() <= f64::from(self.config.affinity_blocks)
        });
        let (index, reason) = match favourite {
            Some(index) => (index, Reason::Affinity),
            None => (self.fallback.select(candidates)?, Reason::Fallback),
        };
        self.metrics.chosen(reason);
        if let Some(explanation) = &asked.explanation {
            let pool = self.metrics.pool();
            explanation.add(explain::by_requests(pool, reason, candidates, index));
        }
        Some(index)
    }

    /// Routes a request whose prompt is not token ids here.
    async fn route_by_load(
        &self,
        asked: &Asked,
        request: GenerateRequest,
        ctx: RequestContext,
        left_out: &[InstanceId],
    ) -> Result<Routed, EngineError> {
        let mut counted = None;
        let mut choose = |_: &mut GenerateRequest, candidates: &[Candidate]| {
            let index = self.fall_back(asked, candidates)?;
            counted = Some(self.unweighed.enter(candidates.get(index)?.instance));
            Some(index)
        };
        let routed = (self.client).route_by(&mut choose, request, ctx, left_out);
        let mut routed = routed.await?;
        self.took(asked, &routed);
        if let Some(counted) = counted {
            routed.outputs = counted.until_end_of(routed.outputs);
        }
        Ok(routed)
    }

    /// Returns a request's routing wishes.
    fn asked(&self, request: &GenerateRequest, ctx: &RequestContext) -> Asked {
        let has_affinity = self.config.affinity_blocks > 0;
        let key = (self.affinity.key(request, ctx)).filter(|_| has_affinity);
        Asked {
            key,
            favourite: key.and_then(|key| self.affinity.last(key)),
            rank: request.data_parallel_rank,
            explanation: ctx.explanation().cloned(),
        }
    }

    /// Records that an instance serves the key and chooses the rank itself.
    fn took(&self, asked: &Asked, routed: &Routed) {
        if let Some(instance) = routed.holder.id() {
            self.serves(asked, any_rank(instance));
        }
    }

    /// Records where the request's key is served.
    fn serves(&self, asked: &Asked, place: Place) {
        if let Some(key) = asked.key {
            self.affinity.serves(key, place);
        }
    }

    /// Records that the prompt went to `place`: updates the mean request size and the assumed cache.
    fn placed(&self, request: &Request, place: Place) {
        let blocks = f64::from(request.prompt_tokens.div_ceil(request.block_size));
        let mut mean = self.mean_blocks.lock();
        *mean += (blocks - *mean) * MEAN_SHARE;
        drop(mean);
        let Some(assumed) = &self.assumed else { return };
        let mut assumed = assumed.lock();
        let Some(target) = self.indexed.fleet.target_of(place) else {
            return;
        };
        let index = &mut self.indexed.writer.lock();
        assumed.routed(index, target, &request.blocks);
        self.metrics.index_holds(self.indexed.reader.held_blocks());
    }
}

/// Returns those of a candidate's ranks that a request may choose: each, or only the named one.
fn ranks_to_choose(ranks: u32, named: Option<u32>) -> Range<u32> {
    match named {
        Some(rank) if rank < ranks => rank..rank + 1,
        // An engine without the named rank refuses the request.
        Some(_) | None => 0..ranks,
    }
}

/// Returns the place of an instance whose engine chooses the rank.
fn any_rank(instance: InstanceId) -> Place {
    Place { instance, rank: 0 }
}

/// Estimates the blocks of other routers' sequences at a candidate and of its `unweighed` requests, where this router's sequences
/// have `ours`: from the used blocks that the candidate reports, or from the requests if their blocks are not in the report yet.
fn others(candidate: &Candidate, unweighed: usize, ours: u64, mean_blocks: f64) -> f64 {
    let requests = candidate.others.saturating_add(unweighed);
    if requests == 0 {
        return 0.0;
    }
    let requests = u64::try_from(requests).unwrap_or(u64::MAX);
    let told = as_f64(candidate.kv_used_blocks) - as_f64(ours);
    told.max(as_f64(requests) * mean_blocks)
}

/// Returns a place's work with the request, given the blocks of other routers' sequences.
fn work(request: &Request, standing: &Standing, others: f64) -> Work {
    let block_size = f64::from(request.block_size);
    let waiting = as_f64(standing.prefill_tokens) / block_size;
    let ours = as_f64(standing.active_blocks);
    let new = (request.prompt_blocks()).saturating_sub(standing.shared_blocks);
    Work {
        prefill_blocks: waiting + f64::from(request.prompt_tokens) / block_size,
        overlap_blocks: standing.overlap_blocks,
        active_blocks: ours + others + as_f64(new),
    }
}

/// Converts exactly below 2^32; larger counts saturate.
fn as_f64(count: u64) -> f64 {
    u32::try_from(count).map_or(f64::from(u32::MAX), f64::from)
}

#[async_trait]
impl Route for Selecting {
    async fn route(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
        left_out: &[InstanceId],
    ) -> Result<Routed, EngineError> {
        let begun = Instant::now();
        let asked = self.asked(&request, &ctx);
        let Some(read) = self.read(&request) else {
            return self.route_by_load(&asked, request, ctx, left_out).await;
        };
        let lookup = self.look_up(&read);
        let mut sequence = None;
        let mut is_first = true;
        let mut choose = |request: &mut GenerateRequest, candidates: &[Candidate]| {
            // The instance that refused no longer has the request.
            sequence = None;
            request.data_parallel_rank = asked.rank;
            if !self.has_blocks(candidates) {
                return self.fall_back(&asked, candidates);
            }
            let (index, placed) = self.place(&asked, &read, &lookup, candidates)?;
            if self.ranks(candidates.get(index)?) > 1 {
                request.data_parallel_rank = asked.rank.or(Some(placed.place.rank));
            }
            sequence = Some(placed);
            if std::mem::take(&mut is_first) {
                self.metrics.decided_in(begun.elapsed().as_secs_f64());
            }
            Some(index)
        };
        let routed = self
            .client
            .route_by(&mut choose, request, ctx, left_out)
            .await;
        self.keep(lookup);
        let routed = routed?;
        let Some(sequence) = sequence else {
            self.took(&asked, &routed);
            return Ok(routed);
        };
        self.serves(&asked, sequence.place);
        self.placed(&read, sequence.place);
        Ok(Routed {
            outputs: OutputStream::from_raw(Box::pin(Placed {
                outputs: routed.outputs,
                sequence: Some(sequence),
                block_size: read.block_size,
                tokens: read.prompt_tokens % read.block_size,
                is_prefilled: false,
                metrics: self.metrics.clone(),
            })),
            ..routed
        })
    }

    fn cached_tokens(&self, request: &GenerateRequest) -> u32 {
        let Some(read) = self.read(request) else {
            return 0;
        };
        let lookup = self.look_up(&read);
        let distrusted = match &self.feed {
            Some(_) => self.indexed.lag.distrusted(),
            None => Vec::new(),
        };
        let adapter = request.adapter.as_deref();
        let most = (self.indexed.fleet).most_cached(lookup.overlaps(), |instance| {
            distrusted.binary_search(&instance).is_err() && self.client.may_take(instance, adapter)
        });
        self.keep(lookup);
        most.saturating_mul(read.block_size)
    }
}

/// An answer whose request is counted at its instance until it ends.
struct Placed {
    outputs: OutputStream,
    sequence: Option<Sequence>,
    block_size: u32,
    /// Tokens in the last block.
    tokens: u32,
    is_prefilled: bool,
    metrics: ModelMetrics,
}

impl Placed {
    fn see(&mut self, output: &Output) {
        let Some(sequence) = &mut self.sequence else {
            return;
        };
        if !std::mem::replace(&mut self.is_prefilled, true) {
            sequence.prefilled();
        }
        self.tokens = self.tokens.saturating_add(output.token_count());
        let blocks = self.tokens / self.block_size;
        if blocks > 0 {
            self.tokens %= self.block_size;
            sequence.grow(u64::from(blocks));
        }
        if let Output::Finished(finished) = output {
            let predicted = u64::from(sequence.overlap_blocks) * u64::from(self.block_size);
            if let Some(actual) = finished.usage.cached_tokens {
                self.metrics.ended(predicted, u64::from(actual));
            }
            self.sequence = None;
        }
    }
}

impl Stream for Placed {
    type Item = Result<Output, EngineError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let item = Pin::new(&mut self.outputs).poll_next(cx);
        match &item {
            Poll::Ready(Some(Ok(output))) => self.see(output),
            Poll::Ready(Some(Err(_)) | None) => self.sequence = None,
            Poll::Pending => {}
        }
        item
    }
}

/// An instance that publishes no events; dropping it removes its places.
struct Present {
    indexed: Arc<Indexed>,
    assumed: Option<Arc<Mutex<Assumed>>>,
    places: Vec<Place>,
}

impl Present {
    fn new(
        indexed: &Arc<Indexed>,
        assumed: Option<&Arc<Mutex<Assumed>>>,
        record: &InstanceRecord,
    ) -> Self {
        let instance = record.instance;
        let places: Vec<Place> = (0..record.ranks())
            .map(|rank| Place { instance, rank })
            .collect();
        for place in &places {
            let target = indexed.fleet.new_target();
            indexed.fleet.set_target(*place, target);
        }
        Self {
            indexed: Arc::clone(indexed),
            assumed: assumed.cloned(),
            places,
        }
    }
}

impl Drop for Present {
    fn drop(&mut self) {
        // Under the lock: a concurrent request is recorded before this or not at all.
        let mut assumed = self.assumed.as_ref().map(|assumed| assumed.lock());
        for place in &self.places {
            if let Some(target) = self.indexed.fleet.remove(*place) {
                if let Some(assumed) = &mut assumed {
                    assumed.forget(target);
                }
                self.indexed.discard(target);
            }
        }
    }
}
