//! The behaviour suite on NATS, and tests of NATS: servers that die, lose messages and require credentials.

mod child;
mod losses;
mod security;
mod server;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use genset_backend_common::{ErrorKind, MetricsRegistry};
use genset_runtime::discovery::Address;
use genset_runtime::plane::{NatsConfig, RequestPlane, WireConfig, WirePlane};

pub(crate) use self::server::NatsServer;
use super::suite::border::deaf;
use super::suite::{Pair, PlaneKind, count, items, name, plane_suite, serve};
use crate::support::{ctx, soon};

plane_suite!(nats, OverNats(NatsServer::start().await));

struct OverNats(NatsServer);

#[async_trait]
impl PlaneKind for OverNats {
    async fn plane(&self, config: WireConfig, metrics: &MetricsRegistry) -> Arc<dyn RequestPlane> {
        Arc::new(WirePlane::nats(self.0.config(), config, metrics).unwrap())
    }

    /// Process names are unique, so addresses do not come back.
    async fn plane_at(
        &self,
        _address: &Address,
        _config: WireConfig,
    ) -> Option<Arc<dyn RequestPlane>> {
        None
    }
}

fn pair(server: &NatsServer, config: WireConfig) -> Pair {
    Pair {
        caller: Arc::new(server.plane(config.clone())),
        callee: Arc::new(server.plane(config)),
    }
}

/// With these time limits, only a message from NATS can end the wait.
#[tokio::test]
async fn a_process_that_was_never_there_is_known_at_once() {
    let server = NatsServer::start().await;
    let config = WireConfig {
        connect_timeout: 10 * crate::support::PATIENCE,
        ..deaf()
    };
    let pair = pair(&server, config);
    let address = Address {
        plane: "nats".into(),
        location: format!("{}/00000000000001", "0f".repeat(16)),
    };
    let error = pair.call_at::<u32, u32>(&address, 1, ctx()).await;
    let error = error.err().expect("nobody is there");
    assert_eq!(error.kind(), ErrorKind::CannotConnect);
    assert!(error.message().contains("not there"), "{error}");
}

#[tokio::test]
async fn two_workers_on_one_server_answer_as_themselves() {
    let server = NatsServer::start().await;
    let pair = pair(&server, deaf());
    let other = server.plane(deaf());
    let endpoint = name("generate");
    // Even the same instance id: the process is part of the address.
    let one = serve(&*pair.callee, &endpoint, 1, |(): (), _ctx| async {
        items(["one"].map(str::to_owned))
    });
    let two = serve(&other, &endpoint, 1, |(): (), _ctx| async {
        items(["two"].map(str::to_owned))
    });
    let (one, two) = tokio::join!(one, two);
    for (served, expected) in [(&one, "one"), (&two, "two"), (&one, "one")] {
        let got: Vec<String> = pair.ask(served, ()).await.unwrap();
        assert_eq!(got, [expected]);
    }
}

#[tokio::test]
async fn no_message_is_larger_than_the_server_allows() {
    let server = NatsServer::start_with("max_payload: 1024\n").await;
    // A larger message would end this connection.
    let pair = pair(&server, deaf());
    let served = pair
        .serve(|text: String, _ctx| async move { items([text.clone(), text]) })
        .await;
    let text: String = ('a'..='z').cycle().take(3 << 20).collect();
    let got: Vec<String> = pair.ask(&served, text.clone()).await.unwrap();
    assert!(got == [text.clone(), text]);
}

/// Thousands of windows of data: without the window, the subscription would overflow. The outbox is always full,
/// so the callee repeatedly stops reading requests. It must still receive the caller's acknowledgements, or both
/// would deadlock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_smallest_window_carries_any_amount() {
    let server = NatsServer::start().await;
    let small = || {
        let nats = NatsConfig {
            max_message_bytes: 1024,
            window_messages: 4,
            ..server.config()
        };
        let wire = WireConfig {
            max_outbox_bytes: 1,
            ..deaf()
        };
        Arc::new(WirePlane::nats(nats, wire, &MetricsRegistry::default()).unwrap())
    };
    let pair = Pair::new(small(), small());
    let served = pair
        .serve(|parts: u32, _ctx| async move {
            items((0..parts).map(|part| (part, "x".repeat(16 << 10))))
        })
        .await;
    let got: Vec<(u32, String)> = pair.ask(&served, 500u32).await.unwrap();
    assert!(got.iter().map(|(part, _)| *part).eq(0..500));
    assert!(got.iter().all(|(_, text)| text.len() == 16 << 10));
}

#[tokio::test]
async fn without_a_server_serving_says_so_and_works_once_there_is_one() {
    let mut server = NatsServer::start().await;
    server.kill();
    let pair = pair(&server, deaf());
    let handler = super::suite::erased(count);
    let endpoint = name("generate");
    let serving = pair
        .callee
        .serve(&endpoint, genset_runtime::InstanceId(1), handler);
    let error = soon(serving).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.message().contains(&server.address()), "{error}");
    server.restart().await;
    pair.works().await;
}

/// The client tries the servers in any order, hence several times.
#[tokio::test]
async fn a_server_that_hangs_leaves_time_for_the_next() {
    let server = NatsServer::start().await;
    // The system accepts connections, and nobody answers.
    let hung = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let config = NatsConfig {
        servers: vec![
            format!("nats://{}", hung.local_addr().unwrap()),
            format!("nats://{}", server.address()),
        ],
        connect_timeout: Duration::from_secs(1),
        ..server.config()
    };
    let wire = WireConfig {
        connect_timeout: config.connect_timeout,
        ..deaf()
    };
    let plane = || Arc::new(server::plane(config.clone(), wire.clone()));
    for _ in 0..5 {
        soon(Pair::new(plane(), plane()).works()).await;
    }
}
