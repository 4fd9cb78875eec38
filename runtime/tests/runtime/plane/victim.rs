//! [`Victim`]: a worker under attack, and an honest caller that must not notice.

use std::sync::Arc;

use futures_util::{StreamExt, stream};
use genset_backend_common::{MetricsRegistry, RequestContext};
use genset_runtime::plane::{ResponseStream, Served, WireConfig};
use tokio::sync::Notify;

use super::scripted::{Peer, until_counted};
use super::suite::{Pair, border::deaf, count, name, serve, sevens, streaming};
use super::tcp::process;
use crate::support::{ctx, over_tcp, soon};

/// A worker, and an honest caller with a stream that stays open.
pub(super) struct Victim {
    pub(super) pair: Pair,
    pub(super) metrics: MetricsRegistry,
    /// Serves `generate`: the numbers below a number.
    pub(super) counting: Served,
    /// Serves `hang`: one item and no more; and `wait`: one item per notification.
    _served: Vec<Served>,
    go_on: Arc<Notify>,
    open: ResponseStream<u32>,
}

impl Victim {
    pub(super) async fn start(config: WireConfig) -> Self {
        let metrics = MetricsRegistry::default();
        let callee = over_tcp(config.clone(), &metrics);
        // The honest caller is patient: only its callee ends its connection.
        let patient = WireConfig {
            secret: config.secret,
            ..deaf()
        };
        let caller = over_tcp(patient, &MetricsRegistry::default());
        let pair = Pair { caller, callee };
        let counting = pair.serve(count).await;
        let hanging = |(): (), _ctx: RequestContext| {
            streaming(stream::iter([Ok(0u32)]).chain(stream::pending()))
        };
        let hanging = serve(&*pair.callee, &name("hang"), 1, hanging).await;
        let go_on = Arc::new(Notify::new());
        let told = Arc::clone(&go_on);
        let waiting = move |(): (), _ctx: RequestContext| sevens(&told);
        let wait = name("wait");
        let waiting = serve(&*pair.callee, &wait, 1, waiting).await;
        let open = genset_runtime::plane::call(&*pair.caller, &waiting.address, &wait, (), ctx());
        let mut open: ResponseStream<u32> = soon(open).await.unwrap();
        assert_eq!(soon(open.next()).await.unwrap().unwrap(), 0);
        Self {
            pair,
            metrics,
            counting,
            _served: vec![hanging, waiting],
            go_on,
            open,
        }
    }

    /// Such a worker, and a peer that greeted it.
    pub(super) async fn and_peer(config: WireConfig) -> (Self, Peer) {
        let victim = Self::start(config).await;
        let peer = Peer::greeted_by(victim.process()).await;
        (victim, peer)
    }

    pub(super) fn process(&self) -> &str {
        process(&self.counting.address)
    }

    /// The honest caller's stream continues, and it can open others.
    pub(super) async fn is_well(&mut self) {
        self.go_on.notify_one();
        assert_eq!(soon(self.open.next()).await.unwrap().unwrap(), 7);
        self.pair.count_to(&self.counting, 3).await;
    }

    pub(super) async fn counts(&self, name: &str, reason: &str, times: u64) {
        until_counted(&self.metrics, name, reason, times).await;
    }
}
