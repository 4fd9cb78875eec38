//! The right to use `control`, which the right to call does not include.

use std::sync::Arc;

use futures_util::TryStreamExt;
use genset_backend_common::{EngineError, ErrorKind, MetricsRegistry};
use genset_runtime::plane::{ResponseStream, TcpConfig, WireConfig, WirePlane, WireSecret};

use super::suite::{Pair, count, name, serve};
use crate::plane::deaf;
use crate::support::{ctx, soon};

fn plane(host: &str, secret: Option<&str>) -> Arc<WirePlane> {
    let tcp = TcpConfig {
        listen: format!("{host}:0").parse().unwrap(),
        advertised_host: Some("127.0.0.1".into()),
        ..TcpConfig::default()
    };
    let config = WireConfig {
        control_secret: secret.map(|text| WireSecret::try_new(text.as_bytes()).unwrap()),
        ..deaf()
    };
    Arc::new(WirePlane::tcp(tcp, config, &MetricsRegistry::default()).unwrap())
}

/// The responses of a worker at `host` with `theirs` to a caller with `ours`: from `control`, and from another endpoint.
async fn asks(
    host: &str,
    theirs: Option<&str>,
    ours: Option<&str>,
) -> [Result<Vec<u32>, EngineError>; 2] {
    let pair = Pair::new(plane("127.0.0.1", ours), plane(host, theirs));
    let mut answers = Vec::new();
    for endpoint in ["control", "generate"] {
        let endpoint = name(endpoint);
        let served = serve(&*pair.callee, &endpoint, 1, count).await;
        let call =
            genset_runtime::plane::call(&*pair.caller, &served.address, &endpoint, 3u32, ctx());
        let items: Result<ResponseStream<u32>, EngineError> = soon(call).await;
        let answer = match items {
            Ok(items) => soon(items.try_collect()).await,
            Err(error) => Err(error),
        };
        answers.push(answer);
    }
    answers.try_into().unwrap()
}

#[tokio::test]
async fn control_is_for_loopback_or_for_who_knows_its_secret() {
    const SECRET: Option<&str> = Some("correct horse battery staple");
    const OTHER: Option<&str> = Some("wrong horse battery staple");
    for (host, theirs, ours, refused) in [
        ("127.0.0.1", None, None, None),
        ("127.0.0.1", None, SECRET, None),
        ("127.0.0.1", SECRET, SECRET, None),
        ("127.0.0.1", SECRET, None, Some(ErrorKind::InvalidArgument)),
        ("127.0.0.1", SECRET, OTHER, Some(ErrorKind::InvalidArgument)),
        ("0.0.0.0", None, None, Some(ErrorKind::Unsupported)),
        ("0.0.0.0", None, SECRET, Some(ErrorKind::Unsupported)),
        ("0.0.0.0", SECRET, SECRET, None),
        ("0.0.0.0", SECRET, OTHER, Some(ErrorKind::InvalidArgument)),
    ] {
        let [control, generate] = asks(host, theirs, ours).await;
        assert_eq!(generate.unwrap(), [0, 1, 2]);
        match refused {
            None => assert_eq!(control.unwrap(), [0, 1, 2]),
            Some(kind) => {
                let error = control.unwrap_err();
                assert_eq!(error.kind(), kind, "{host} {theirs:?} {ours:?}: {error}");
                assert!(error.message().contains("--control-secret-file"), "{error}");
            }
        }
    }
}
