//! The behaviour suite on TCP.

use std::sync::Arc;

use async_trait::async_trait;
use futures_util::StreamExt;
use genset_backend_common::{ErrorKind, MetricsRegistry};
use genset_runtime::discovery::Address;
use genset_runtime::plane::{RequestPlane, TcpConfig, WireConfig, WirePlane, WireTls};

use super::log::Log;
use super::scripted::error;
use super::suite::{Pair, PlaneKind, count, name, plane_suite, serve};
use crate::support::{soon, until};

plane_suite!(tcp, OverTcp(|| None));

/// Planes over TCP, each with the TLS settings that this returns.
pub(super) struct OverTcp<F: Fn() -> Option<WireTls>>(pub(super) F);

#[async_trait]
impl<F: Fn() -> Option<WireTls> + Send + Sync> PlaneKind for OverTcp<F> {
    async fn plane(&self, config: WireConfig, metrics: &MetricsRegistry) -> Arc<dyn RequestPlane> {
        let tcp = TcpConfig {
            tls: (self.0)(),
            ..TcpConfig::default()
        };
        Arc::new(WirePlane::tcp(tcp, config, metrics).unwrap())
    }

    async fn plane_at(
        &self,
        address: &Address,
        config: WireConfig,
    ) -> Option<Arc<dyn RequestPlane>> {
        let tcp = TcpConfig {
            listen: process(address).parse().unwrap(),
            tls: (self.0)(),
            ..TcpConfig::default()
        };
        let plane = WirePlane::tcp(tcp, config, &MetricsRegistry::default());
        Some(Arc::new(plane.unwrap()))
    }
}

/// The host and port in an address.
pub(super) fn process(address: &Address) -> &str {
    address.location.rsplit_once('/').unwrap().0
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_whose_runtime_has_ended_refuses_and_holds_up_no_other() {
    let pair = Pair::of(&OverTcp(|| None)).await;
    let served = pair.serve(count).await;
    let callee = Arc::clone(&pair.callee);
    let ended = tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(serve(&*callee, &name("generate"), 2, count))
    });
    let ended = ended.await.unwrap();
    let mut beside = pair.call::<u32, u32>(&served, 200).await.unwrap();
    let refused = error(pair.ask::<u32, u32>(&ended, 3).await);
    assert_eq!(refused.kind(), ErrorKind::EngineShutdown, "{refused}");
    for item in 0..200 {
        assert_eq!(soon(beside.next()).await.unwrap().unwrap(), item);
    }
}

#[tokio::test]
async fn that_a_worker_which_said_goodbye_cannot_be_reached_is_no_warning() {
    let log = Log::watched();
    let pair = Pair::of(&OverTcp(|| None)).await;
    let served = pair.serve(count).await;
    pair.count_to(&served, 3).await;
    let before = log.lines();
    soon(pair.callee.shutdown()).await;
    until(|| !pair.caller.is_reachable(&served.address)).await;
    let refused = error(pair.ask::<u32, u32>(&served, 3).await);
    assert_eq!(refused.kind(), ErrorKind::CannotConnect);
    assert!(refused.details().request_id.is_some());
    assert_eq!(log.lines(), before);
}
