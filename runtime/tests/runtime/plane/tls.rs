//! TLS on the tcp plane: accepted certificates, refused certificates, and peers without TLS.

use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::{EngineError, ErrorKind, MetricsRegistry};
use genset_runtime::discovery::Address;
use genset_runtime::plane::{
    ClientCertificates, RequestPlane, Served, TcpConfig, WireConfig, WirePlane, WireTls,
};
use genset_runtime::{InstanceId, TlsIdentity};
use rcgen::{ExtendedKeyUsagePurpose, date_time_ymd};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::log::Log;
use super::scripted::{error, until_counted};
use super::suite::{Pair, count, erased, name, plane_suite};
use super::tcp::{OverTcp, process};
use crate::certificates::Authority;
use crate::plane::deaf;
use crate::support::{ctx, soon};

// With certificates of one authority.
plane_suite!(tls, {
    let authority = Authority::new();
    OverTcp(move || Some(authority.tls()))
});

impl Authority {
    /// The settings of a process in this authority's fleet.
    fn tls(&self) -> WireTls {
        self.tls_as(self.identity())
    }

    fn tls_as(&self, identity: TlsIdentity) -> WireTls {
        WireTls {
            identity: Some(identity),
            ..self.tls_of_a_stranger()
        }
    }

    /// The settings of a process without a certificate.
    fn tls_of_a_stranger(&self) -> WireTls {
        WireTls::new(&self.pem)
    }
}

/// A worker that counts, and its connection metrics.
struct Worker {
    plane: Arc<WirePlane>,
    metrics: MetricsRegistry,
    served: Served,
}

impl Worker {
    async fn start(tls: Option<WireTls>) -> Self {
        Self::with(tls, deaf()).await
    }

    async fn with(tls: Option<WireTls>, config: WireConfig) -> Self {
        let metrics = MetricsRegistry::default();
        let tcp = TcpConfig {
            tls,
            ..TcpConfig::default()
        };
        let plane = Arc::new(WirePlane::tcp(tcp, config, &metrics).unwrap());
        let endpoint = name("generate");
        let served = plane.serve(&endpoint, InstanceId(1), erased(count));
        let served = soon(served).await.unwrap();
        Self {
            plane,
            metrics,
            served,
        }
    }

    /// Calls it from a process with these certificates.
    async fn call(&self, tls: Option<WireTls>) -> Result<Vec<u32>, EngineError> {
        let tcp = TcpConfig {
            tls,
            ..TcpConfig::default()
        };
        let caller = WirePlane::tcp(tcp, deaf(), &MetricsRegistry::default());
        let pair = Pair::new(Arc::new(caller.unwrap()), self.plane.clone());
        pair.ask(&self.served, 3u32).await
    }

    /// Makes a call that is refused, and returns the error; the worker counted it under `reason`, if it could know one.
    async fn refuses(&self, tls: Option<WireTls>, reason: Option<&str>) -> String {
        let refused = error(self.call(tls).await);
        assert_eq!(refused.kind(), ErrorKind::CannotConnect, "{refused}");
        if let Some(reason) = reason {
            until_counted(&self.metrics, "refused", reason, 1).await;
        }
        refused.message().to_owned()
    }

    async fn dialled(&self) -> TcpStream {
        let dialled = TcpStream::connect(process(&self.served.address));
        soon(dialled).await.unwrap()
    }
}

fn says(message: &str, words: &[&str]) {
    for word in words {
        assert!(message.contains(word), "{word:?} is not in {message:?}");
    }
}

#[tokio::test]
async fn a_caller_without_a_certificate_is_refused() {
    let authority = Authority::new();
    let worker = Worker::start(Some(authority.tls())).await;
    let message = worker
        .refuses(Some(authority.tls_of_a_stranger()), Some("certificate"))
        .await;
    says(
        &message,
        &[
            "asks for a certificate",
            "--wire-tls-cert",
            "--wire-tls-key",
        ],
    );
    assert_eq!(worker.call(Some(authority.tls())).await.unwrap(), [0, 1, 2]);
}

#[tokio::test]
async fn a_caller_needs_no_certificate_where_none_is_asked_for() {
    let authority = Authority::new();
    let open = WireTls {
        client_certificates: ClientCertificates::NotAsked,
        ..authority.tls()
    };
    let worker = Worker::start(Some(open)).await;
    let got = worker.call(Some(authority.tls_of_a_stranger())).await;
    assert_eq!(got.unwrap(), [0, 1, 2]);
}

#[tokio::test]
async fn a_caller_that_another_authority_signed_is_refused() {
    let (ours, other) = (Authority::new(), Authority::new());
    let worker = Worker::start(Some(ours.tls())).await;
    let message = worker
        .refuses(Some(ours.tls_as(other.identity())), Some("certificate"))
        .await;
    says(
        &message,
        &[
            "refuses our certificate",
            "--wire-tls-cert",
            "--wire-tls-ca",
        ],
    );
}

#[tokio::test]
async fn a_worker_that_another_authority_signed_is_not_spoken_to() {
    let (ours, other) = (Authority::new(), Authority::new());
    let worker = Worker::start(Some(other.tls())).await;
    let message = worker
        .refuses(Some(ours.tls()), Some("refused_by_peer"))
        .await;
    says(&message, &["signed by no authority", "--wire-tls-ca"]);
}

#[tokio::test]
async fn a_certificate_that_has_expired_is_refused_on_both_ends() {
    let authority = Authority::new();
    let expired = || {
        authority.signed("127.0.0.1", |params| {
            params.not_before = date_time_ymd(2020, 1, 1);
            params.not_after = date_time_ymd(2021, 1, 1);
        })
    };
    let worker = Worker::start(Some(authority.tls_as(expired()))).await;
    let message = worker
        .refuses(Some(authority.tls()), Some("refused_by_peer"))
        .await;
    says(&message, &["worker's", "has expired", "--wire-tls-cert"]);

    let worker = Worker::start(Some(authority.tls())).await;
    let message = worker
        .refuses(Some(authority.tls_as(expired())), Some("certificate"))
        .await;
    says(&message, &["CertificateExpired", "--wire-tls-cert"]);
}

#[tokio::test]
async fn a_certificate_for_servers_alone_is_none_of_a_caller() {
    let authority = Authority::new();
    let worker = Worker::start(Some(authority.tls())).await;
    let for_servers = authority.signed("127.0.0.1", |params| {
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    });
    let message = worker
        .refuses(Some(authority.tls_as(for_servers)), Some("certificate"))
        .await;
    says(&message, &["refuses our certificate"]);
}

#[tokio::test]
async fn a_worker_with_another_name_is_not_spoken_to() {
    let authority = Authority::new();
    let elsewhere = authority.signed("worker.example", |_| ());
    let worker = Worker::start(Some(authority.tls_as(elsewhere))).await;
    let message = worker
        .refuses(Some(authority.tls()), Some("refused_by_peer"))
        .await;
    says(
        &message,
        &[
            "worker.example",
            "not for 127.0.0.1",
            "--wire-tls-server-name",
        ],
    );
}

#[tokio::test]
async fn one_name_may_stand_for_all_workers() {
    let authority = Authority::new();
    let shared = authority.signed("genset.internal", |_| ());
    let named = |name: &str| WireTls {
        server_name: Some(name.into()),
        ..authority.tls_as(shared.clone())
    };
    let worker = Worker::start(Some(named("genset.internal"))).await;
    let got = worker.call(Some(named("genset.internal"))).await;
    assert_eq!(got.unwrap(), [0, 1, 2]);
    let message = worker.refuses(Some(named("other.internal")), None).await;
    says(&message, &["not for other.internal"]);
}

#[tokio::test]
async fn a_host_name_is_verified_as_it_is_advertised() {
    let authority = Authority::new();
    let tls = authority.tls_as(authority.signed("localhost", |_| ()));
    let tcp = TcpConfig {
        advertised_host: Some("localhost".into()),
        tls: Some(tls),
        ..TcpConfig::default()
    };
    let new = || {
        let metrics = MetricsRegistry::default();
        Arc::new(WirePlane::tcp(tcp.clone(), deaf(), &metrics).unwrap())
    };
    Pair::new(new(), new()).works().await;
}

#[tokio::test]
async fn a_caller_without_tls_is_told_that_it_is_spoken() {
    let authority = Authority::new();
    let worker = Worker::start(Some(authority.tls())).await;
    let message = worker.refuses(None, Some("plaintext")).await;
    says(&message, &["TLS is spoken here", "--wire-tls-ca"]);
}

#[tokio::test]
async fn a_worker_without_tls_is_not_spoken_to_in_the_clear() {
    let authority = Authority::new();
    let worker = Worker::start(None).await;
    let message = worker
        .refuses(Some(authority.tls()), Some("not_our_protocol"))
        .await;
    says(
        &message,
        &["TLS", "--wire-tls-cert", "without --wire-tls-ca"],
    );
    assert_eq!(worker.call(None).await.unwrap(), [0, 1, 2]);
}

#[tokio::test]
async fn other_protocols_are_told_nothing() {
    let authority = Authority::new();
    let worker = Worker::start(Some(authority.tls())).await;
    let strangers: [&[u8]; 3] = [b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n", &[0; 16]];
    for (times, bytes) in (1..).zip(strangers) {
        let mut stranger = worker.dialled().await;
        stranger.write_all(bytes).await.unwrap();
        let mut told = Vec::new();
        // A reset is an end as well.
        let _ = soon(stranger.read_to_end(&mut told)).await;
        assert!(told.is_empty());
        until_counted(&worker.metrics, "refused", "not_our_protocol", times).await;
    }
}

#[tokio::test]
async fn a_scanner_is_counted_and_logged_once() {
    let log = Log::watched();
    let authority = Authority::new();
    let worker = Worker::start(Some(authority.tls())).await;
    let before = log.lines();
    for _ in 0..20 {
        drop(worker.dialled().await);
    }
    until_counted(&worker.metrics, "refused", "closed", 20).await;
    assert_eq!(log.lines() - before, 1);
}

/// Connections whose handshakes stop at different points.
async fn slow_callers(worker: &Worker) -> Vec<TcpStream> {
    let mut slow = Vec::new();
    for bytes in [&[][..], &[22], &[22, 3, 1, 2, 0, 1], &[0], &[0, 0, 0, 60]] {
        let mut stream = worker.dialled().await;
        stream.write_all(bytes).await.unwrap();
        slow.push(stream);
    }
    slow
}

#[tokio::test]
async fn handshakes_that_take_their_time_hold_up_nobody() {
    let authority = Authority::new();
    let patient = WireConfig {
        connect_timeout: Duration::from_secs(3600),
        ..deaf()
    };
    let worker = Worker::with(Some(authority.tls()), patient).await;
    let _slow = slow_callers(&worker).await;
    assert_eq!(worker.call(Some(authority.tls())).await.unwrap(), [0, 1, 2]);
}

/// A connection that is refused for lack of room is told so after its handshake.
#[tokio::test]
async fn handshakes_of_the_refused_take_no_more_places_than_others() {
    let authority = Authority::new();
    let full = WireConfig {
        max_connections: 1,
        max_strangers: 1,
        connect_timeout: Duration::from_secs(3600),
        ..deaf()
    };
    let worker = Worker::with(Some(authority.tls()), full).await;
    let tcp = TcpConfig {
        tls: Some(authority.tls()),
        ..TcpConfig::default()
    };
    let caller = WirePlane::tcp(tcp, deaf(), &MetricsRegistry::default());
    let pair = Pair {
        caller: Arc::new(caller.unwrap()),
        callee: worker.plane.clone(),
    };
    let got: Vec<u32> = pair.ask(&worker.served, 1u32).await.unwrap();
    assert_eq!(got, [0]);
    let mut first = worker.dialled().await;
    let _second = worker.dialled().await;
    let ended = soon(first.read(&mut [0; 64])).await;
    assert!(matches!(ended, Ok(0) | Err(_)), "{ended:?}");
}

#[tokio::test]
async fn handshakes_that_take_too_long_are_given_up() {
    let authority = Authority::new();
    let impatient = WireConfig {
        connect_timeout: Duration::from_millis(200),
        ..deaf()
    };
    let worker = Worker::with(Some(authority.tls()), impatient).await;
    for mut stream in slow_callers(&worker).await {
        let ended = soon(stream.read(&mut [0; 64])).await;
        assert!(matches!(ended, Ok(0) | Err(_)), "{ended:?}");
    }
    until_counted(&worker.metrics, "refused", "timeout", 5).await;
}

#[tokio::test]
async fn a_worker_that_never_answers_the_handshake_is_given_up() {
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = Address {
        plane: "tcp".into(),
        location: format!("{}/00000000000001", silent.local_addr().unwrap()),
    };
    let tcp = TcpConfig {
        tls: Some(Authority::new().tls()),
        ..TcpConfig::default()
    };
    let impatient = WireConfig {
        connect_timeout: Duration::from_millis(100),
        ..deaf()
    };
    let caller = WirePlane::tcp(tcp, impatient, &MetricsRegistry::default());
    let pair = Pair::calling(Arc::new(caller.unwrap()));
    let refused = error(pair.call_at::<u32, u32>(&address, 1, ctx()).await);
    assert_eq!(refused.kind(), ErrorKind::CannotConnect, "{refused}");
    says(refused.message(), &["did not answer in time"]);
}

#[tokio::test]
async fn only_who_has_a_certificate_can_serve() {
    let tcp = TcpConfig {
        tls: Some(Authority::new().tls_of_a_stranger()),
        ..TcpConfig::default()
    };
    let plane = WirePlane::tcp(tcp, deaf(), &MetricsRegistry::default()).unwrap();
    let endpoint = name("generate");
    let refused = soon(plane.serve(&endpoint, InstanceId(1), erased(count))).await;
    let refused = error(refused);
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
    says(refused.message(), &["--wire-tls-cert", "--wire-tls-key"]);
}
