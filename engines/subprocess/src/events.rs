//! What the process publishes besides its answers: metrics, KV events, load, engine steps, and the death of its engine.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use genset_backend_common::kv::{KvEventData, KvEventPublisher};
use genset_backend_common::{
    EngineConfig, EngineError, ErrorKind, HealthReporter, StartContext,
    handles::{Load, LoadPublisher},
    series::{MetricSample, PublishedMetrics},
};
use genset_wire::{PayloadError, decode_payload};
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::call::Call;
use crate::failure::ChildFailure;
use crate::link::Link;

/// One item of the endpoint `events`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Event {
    Metrics(Vec<MetricSample>),
    Kv(KvEventData),
    KvRank { rank: u32, data: KvEventData },
    Load(Load),
    Step,
    Dead { reason: String },
}

/// Where events are published, for all processes of the engine in turn.
#[derive(Debug, Clone)]
pub(crate) struct Sinks {
    kv_events: KvEventPublisher,
    load: LoadPublisher,
    health: HealthReporter,
    metrics: PublishedMetrics,
    /// Whether the dropped events of an undeclared rank were logged.
    has_odd_rank: Arc<AtomicBool>,
    /// Whether a dead process is restarted.
    is_mended: bool,
}

impl Sinks {
    pub(crate) fn new(ctx: &StartContext, is_mended: bool) -> Self {
        Self {
            kv_events: ctx.kv_events.clone(),
            load: ctx.load.clone(),
            health: ctx.health.clone(),
            metrics: PublishedMetrics::register(&ctx.metrics),
            has_odd_rank: Arc::default(),
            is_mended,
        }
    }

    /// Announces the ranks that a process declares with `kv_ranks`.
    pub(crate) fn know_ranks(&self, declared: &EngineConfig) {
        if declared.capabilities.kv_ranks {
            for rank in 0..declared.data_parallel_size {
                drop(self.kv_events.of_rank(rank));
            }
        }
    }

    /// Discards everything that the process published; the process is gone.
    pub(crate) fn forget(&self) {
        self.kv_events.publish(KvEventData::Cleared);
        self.load.publish(Load::default());
        self.metrics.clear();
    }

    /// Publishes the call's items until it ends.
    pub(crate) async fn follow(self, mut events: Call, link: Arc<Link>) {
        let mut is_warned = false;
        let ended = loop {
            match events.undecoded().await {
                Ok(Some(item)) => match decode_payload(&item) {
                    Ok(Event::Dead { reason }) if self.is_mended => {
                        link.report(ChildFailure::ReportedDead { reason });
                    }
                    // `forget` may have run already, and these events describe a process that is gone. The reason of its death
                    // still counts.
                    Ok(
                        Event::Metrics(_)
                        | Event::Kv(_)
                        | Event::KvRank { .. }
                        | Event::Load(_)
                        | Event::Step,
                    ) if link.is_dead() => {}
                    Ok(event) => self.publish(event),
                    Err(error) => {
                        warn_unread(&error, &mut is_warned);
                        self.make_good(&item, &link);
                    }
                },
                Ok(None) => break None,
                Err(error) => break Some(error),
            }
        };
        let is_early = ended.as_ref().is_none_or(log_end);
        // The process is still alive, so nobody else calls `forget`, and its last values would stay.
        if is_early && !link.is_dead() {
            self.forget();
        }
    }

    /// Handles an event that cannot be decoded: blocks that it may have removed must not stay, and a death must not be missed.
    fn make_good(&self, item: &[u8], link: &Link) {
        let Ok(named) = decode_payload::<BTreeMap<String, IgnoredAny>>(item) else {
            return;
        };
        let is = |name: &str| named.contains_key(name);
        if is("kv") || is("kv_rank") {
            self.kv_events.publish(KvEventData::Cleared);
        } else if is("dead") {
            let reason = "it did not say why in a way that can be read".to_owned();
            match self.is_mended {
                true => link.report(ChildFailure::ReportedDead { reason }),
                false => self.health.report_dead(reason),
            }
        }
    }

    fn publish(&self, event: Event) {
        match event {
            Event::Metrics(samples) => self.metrics.publish(samples),
            Event::Kv(data) => {
                self.kv_events.publish(data);
            }
            Event::KvRank { rank, data } => self.publish_of_rank(rank, data),
            Event::Load(load) => self.load.publish(load),
            Event::Step => self.health.report_step(),
            Event::Dead { reason } => self.health.report_dead(reason),
        }
    }

    fn publish_of_rank(&self, rank: u32, data: KvEventData) {
        match self.kv_events.known_rank(rank) {
            Some(cache) => drop(cache.publish(data)),
            None if self.has_odd_rank.swap(true, Ordering::Relaxed) => {}
            None => tracing::warn!(
                rank,
                "the engine's process publishes KV events of a rank that it did not declare (kv_ranks, data_parallel_size); they are dropped"
            ),
        }
    }
}

/// Logs how the stream ended. Returns whether that was too early: the process has the endpoint, and nobody stopped it.
fn log_end(error: &EngineError) -> bool {
    use ErrorKind::{Cancelled, Disconnected, EngineShutdown, NotFound, Unsupported};
    if matches!(error.kind(), Unsupported | NotFound) {
        tracing::debug!(%error, "the engine's process publishes nothing");
        return false;
    }
    let is_early = !matches!(error.kind(), EngineShutdown | Disconnected | Cancelled);
    if is_early {
        tracing::error!(%error, "the engine's process no longer publishes");
    }
    is_early
}

fn warn_unread(error: &PayloadError, is_warned: &mut bool) {
    if std::mem::replace(is_warned, true) {
        return;
    }
    let cause = error.detail();
    tracing::warn!(
        %error,
        cause,
        "the engine's process publishes an event that cannot be read; it is dropped, and so are others like it"
    );
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use genset_wire::{Frame, FrameKind, RequestHead, encode_payload};
    use serde_json::json;

    use super::*;

    fn publish(sinks: &Sinks, event: serde_json::Value) {
        sinks.publish(decode_payload(&encode_payload(&event).unwrap()).unwrap());
    }

    #[test]
    fn load_kv_events_steps_and_death_reach_their_handles() {
        let ctx = StartContext::detached(1);
        let sinks = Sinks::new(&ctx, false);
        publish(&sinks, json!({"load": {"running_requests": 3}}));
        assert_eq!(ctx.load.subscribe().borrow().running_requests, 3);
        publish(
            &sinks,
            json!({"kv": {"stored": {"parent": null, "blocks": [5, 6]}}}),
        );
        assert_eq!(ctx.kv_events.subscribe().snapshot.blocks.len(), 2);
        publish(&sinks, json!("step"));
        assert_eq!(ctx.health.steps(), 1);
        publish(&sinks, json!({"dead": {"reason": "the device is lost"}}));
        assert_eq!(
            ctx.health.dead_reason().as_deref(),
            Some("the device is lost")
        );
    }

    #[test]
    fn events_of_a_rank_that_was_declared_reach_its_cache_and_no_others_do() {
        let ctx = StartContext::detached(1);
        let sinks = Sinks::new(&ctx, true);
        let stored = |rank, blocks: &[u64]| {
            let data = json!({"stored": {"parent": null, "blocks": blocks}});
            publish(&sinks, json!({"kv_rank": {"rank": rank, "data": data}}));
        };
        stored(0, &[5]);
        let mut declared = EngineConfig::new("m", 16);
        declared.data_parallel_size = 2;
        sinks.know_ranks(&declared);
        assert!(
            ctx.kv_events.known_rank(0).is_none(),
            "kv_ranks is not declared"
        );
        declared.capabilities.kv_ranks = true;
        sinks.know_ranks(&declared);
        stored(1, &[5, 6]);
        stored(2, &[7]);
        let blocks = |cache: &KvEventPublisher| cache.subscribe().snapshot.blocks.len();
        let ranks = [0, 1].map(|rank| blocks(&ctx.kv_events.known_rank(rank).unwrap()));
        assert_eq!((ranks, blocks(&ctx.kv_events)), ([0, 2], 2));
        assert!(ctx.kv_events.known_rank(2).is_none());
        sinks.forget();
        assert_eq!(blocks(&ctx.kv_events.known_rank(1).unwrap()), 0);
    }

    #[test]
    fn what_a_process_published_goes_with_it() {
        let ctx = StartContext::detached(1);
        let sinks = Sinks::new(&ctx, true);
        publish(&sinks, json!({"load": {"running_requests": 3}}));
        publish(
            &sinks,
            json!({"kv": {"stored": {"parent": null, "blocks": [5, 6]}}}),
        );
        let gauge = json!({"name": "my_queue", "kind": "gauge", "value": 4.0});
        publish(&sinks, json!({"metrics": [gauge]}));
        assert!(ctx.metrics.encode().contains("my_queue 4.0"));
        sinks.forget();
        assert_eq!(*ctx.load.subscribe().borrow(), Load::default());
        assert!(ctx.kv_events.subscribe().snapshot.blocks.is_empty());
        assert!(!ctx.metrics.encode().contains("my_queue"));
    }

    #[tokio::test]
    async fn an_event_that_cannot_be_read_is_dropped_alone() {
        let ctx = StartContext::detached(1);
        let load = ctx.load.subscribe();
        let link = Arc::new(Link::new());
        let call = link.call(RequestHead::default(), &(), 16).await.unwrap();
        let send = |kind, payload: serde_json::Value| {
            let payload = encode_payload(&payload).unwrap().into();
            let stream = 1;
            link.arrived(Frame {
                kind,
                stream,
                payload,
            })
            .unwrap();
        };
        let follow = Sinks::new(&ctx, false).follow(call, Arc::clone(&link));
        let mut follow = std::pin::pin!(follow);
        let gauge = json!({"name": "my_queue", "kind": "gauge", "labels": {"rank": 0}});
        let stored = json!({"parent": null, "blocks": [7]});
        send(FrameKind::Item, json!({"kv": {"stored": stored}}));
        send(FrameKind::Item, json!({"metrics": [gauge]}));
        send(FrameKind::Item, json!({"load": {"running_requests": 3}}));
        assert!(follow.as_mut().now_or_never().is_none());
        assert_eq!(load.borrow().running_requests, 3);
        let blocks = || ctx.kv_events.subscribe().snapshot.blocks.len();
        assert_eq!(blocks(), 1);
        // The event may have removed the block.
        send(
            FrameKind::Item,
            json!({"kv": {"removed": {"blocks": ["seven"]}}}),
        );
        assert!(follow.as_mut().now_or_never().is_none());
        assert_eq!((blocks(), ctx.health.dead_reason()), (0, None));
        send(FrameKind::Item, json!({"dead": {"reason": 7}}));
        assert!(follow.as_mut().now_or_never().is_none());
        assert!(ctx.health.dead_reason().is_some());
        // The process is alive, but publishes nothing more.
        send(FrameKind::End, json!(null));
        assert!(follow.now_or_never().is_some());
        assert_eq!(*load.borrow(), Load::default());
    }

    #[tokio::test]
    async fn what_a_process_that_is_gone_published_last_is_not_there_again() {
        let ctx = StartContext::detached(1);
        let link = Arc::new(Link::new());
        let call = link.call(RequestHead::default(), &(), 16).await.unwrap();
        let sinks = Sinks::new(&ctx, true);
        let follow = sinks.clone().follow(call, Arc::clone(&link));
        let stored = json!({"kv": {"stored": {"parent": null, "blocks": [5]}}});
        link.arrived(Frame {
            kind: FrameKind::Item,
            stream: 1,
            payload: encode_payload(&stored).unwrap().into(),
        })
        .unwrap();
        link.fail(EngineError::new(
            ErrorKind::Disconnected,
            "the process is gone",
        ));
        sinks.forget();
        assert!(follow.now_or_never().is_some());
        assert!(ctx.kv_events.subscribe().snapshot.blocks.is_empty());
    }
}
