//! What the process publishes beside its answers: metrics, KV events, load, and that it can go on no more.

mod metrics;

use std::sync::Arc;

use genset_backend_common::kv::{KvEventData, KvEventPublisher};
use genset_backend_common::{
    EngineError, ErrorKind, HealthReporter, Load, LoadPublisher, StartContext,
};
use parking_lot::Mutex;
use serde::Deserialize;

use crate::call::Call;
use crate::failure::ChildFailure;
use crate::link::Link;
use metrics::{Families, Published, Sample};

/// One item of the endpoint `events`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Event {
    Metrics(Vec<Sample>),
    Kv(KvEventData),
    Load(Load),
    Dead { reason: String },
}

/// Where events go, of one process after the other.
#[derive(Debug, Clone)]
pub(crate) struct Sinks {
    kv_events: KvEventPublisher,
    load: LoadPublisher,
    health: HealthReporter,
    metrics: Arc<Mutex<Families>>,
    /// Whether another process takes the place of one that is dead.
    is_mended: bool,
}

impl Sinks {
    pub(crate) fn new(ctx: &StartContext, is_mended: bool) -> Self {
        let metrics = Arc::default();
        let collector = Published::new(&metrics);
        ctx.metrics.register_collector(collector);
        Self {
            kv_events: ctx.kv_events.clone(),
            load: ctx.load.clone(),
            health: ctx.health.clone(),
            metrics,
            is_mended,
        }
    }

    /// The process is gone, and what it published with it.
    pub(crate) fn forget(&self) {
        self.kv_events.publish(KvEventData::Cleared);
        self.load.publish(Load::default());
        *self.metrics.lock() = Families::default();
    }

    /// Publishes what the call answers until it ends.
    pub(crate) async fn follow(self, mut events: Call, link: Arc<Link>) {
        loop {
            match events.item().await {
                Ok(Some(Event::Dead { reason })) if self.is_mended => {
                    link.report(ChildFailure::ReportedDead { reason });
                }
                Ok(Some(event)) => self.publish(event),
                Ok(None) => return,
                Err(error) => return log_end(&error),
            }
        }
    }

    fn publish(&self, event: Event) {
        match event {
            Event::Metrics(samples) => self.metrics.lock().extend(samples),
            Event::Kv(data) => {
                self.kv_events.publish(data);
            }
            Event::Load(load) => self.load.publish(load),
            Event::Dead { reason } => self.health.report_dead(reason),
        }
    }
}

fn log_end(error: &EngineError) {
    use ErrorKind::{Cancelled, Disconnected, EngineShutdown, NotFound, Unsupported};
    if matches!(error.kind(), Unsupported | NotFound) {
        tracing::debug!(%error, "the engine's process publishes nothing");
    } else if !matches!(error.kind(), EngineShutdown | Disconnected | Cancelled) {
        tracing::error!(%error, "the engine's process publishes no more");
    }
}

#[cfg(test)]
mod tests {
    use genset_backend_common::wire::{decode_payload, encode_payload};
    use serde_json::json;

    use super::*;

    fn publish(sinks: &Sinks, event: serde_json::Value) {
        sinks.publish(decode_payload(&encode_payload(&event).unwrap()).unwrap());
    }

    #[test]
    fn load_kv_events_and_death_reach_their_handles() {
        let ctx = StartContext::detached(1);
        let sinks = Sinks::new(&ctx, false);
        publish(&sinks, json!({"load": {"running_requests": 3}}));
        assert_eq!(ctx.load.subscribe().borrow().running_requests, 3);
        publish(
            &sinks,
            json!({"kv": {"stored": {"parent": null, "blocks": [5, 6]}}}),
        );
        assert_eq!(ctx.kv_events.subscribe().snapshot.blocks.len(), 2);
        publish(&sinks, json!({"dead": {"reason": "the device is lost"}}));
        assert_eq!(
            ctx.health.dead_reason().as_deref(),
            Some("the device is lost")
        );
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
}
