//! API keys, origins, HTTPS.

use std::path::PathBuf;
use std::sync::Arc;

use genset_backend_common::LLMEngine;
use genset_frontend::FrontendConfig;
use genset_frontend::keys::KeyHash;
use serde_json::json;

use crate::client::request;
use crate::messages::VERSION;
use crate::support::{CHAT, MODEL, Site, chat, config, echo, pairs_worker_config};

/// A site with keys, and the folder of the key file.
pub(crate) async fn site_with_keys(
    entries: &[(&str, &str, &str)],
    engine: Arc<dyn LLMEngine>,
) -> (Site, tempfile::TempDir) {
    site_with_keys_and(entries, config(), engine).await
}

/// Like [`site_with_keys`], with a config.
pub(crate) async fn site_with_keys_and(
    entries: &[(&str, &str, &str)],
    config: FrontendConfig,
    engine: Arc<dyn LLMEngine>,
) -> (Site, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a folder");
    let path: PathBuf = folder.path().join("keys.toml");
    let entry = |(name, key, more): &(&str, &str, &str)| {
        format!(
            "[[key]]\nname = \"{name}\"\nhash = \"{}\"\n{more}\n",
            KeyHash::of(key)
        )
    };
    std::fs::write(&path, entries.iter().map(entry).collect::<String>()).expect("a file");
    let config = FrontendConfig {
        api_keys: Some(path),
        ..config
    };
    let site = Site::with_worker(config, pairs_worker_config(), engine);
    (site.await, folder)
}

pub(crate) fn bearer(key: &str) -> String {
    format!("authorization: Bearer {key}\r\n")
}

#[tokio::test]
async fn without_a_key_only_the_servers_state_is_shown() {
    let (site, _folder) = site_with_keys(&[("a", "sk-a", "")], echo()).await;
    for path in [
        "/live",
        "/ready",
        "/health",
        "/metrics",
        "/openapi.json",
        "/docs",
    ] {
        assert_eq!(site.get(path).await.status, 200, "{path}");
    }
    let body = chat("Hello", json!({})).to_string();
    for (method, path) in [
        ("POST", CHAT),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/rerank"),
        ("POST", "/rerank"),
        ("POST", "/v1/score"),
        ("POST", "/tokenize"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/tiny"),
        ("GET", "/v1/responses/resp_0"),
    ] {
        for headers in [
            String::new(),
            bearer("sk-b"),
            "authorization: sk-a\r\n".into(),
        ] {
            let response = site.send(request(method, path, &headers, &body)).await;
            let (status, _, code, message) = response.refusal();
            assert_eq!(status, 401, "{method} {path}: {message}");
            assert_eq!(code.as_deref(), Some("invalid_api_key"));
            assert!(response.header("x-request-id").is_some());
        }
    }
    for (method, path, headers) in [("POST", "/v1/messages", ""), ("GET", "/v1/models", VERSION)] {
        let refused = site.send(request(method, path, headers, "{}")).await;
        assert_eq!(refused.status, 401, "{path}");
        let id = refused.header("request-id").expect("an id");
        assert_eq!(refused.json()["request_id"], id);
        assert_eq!(refused.json()["error"]["type"], "authentication_error");
    }
    for headers in [bearer("sk-a"), "x-api-key: sk-a\r\n".into()] {
        let response = site.send(request("POST", CHAT, &headers, &body)).await;
        assert_eq!(response.status, 200, "{}", response.text());
        let models = site.send(request("GET", "/v1/models", &headers, "")).await;
        assert_eq!(models.status, 200);
        let model = request("GET", "/v1/models/tiny", &headers, "");
        let model = site.send(model).await.json();
        assert_eq!(model["id"], MODEL);
        assert!(model.get("genset").is_none(), "no instances: {model}");
    }
    site.idle().await;
    // Who sends requests, and how many, is only for those who run the server.
    let public = site.get("/metrics").await.text();
    assert!(!public.contains("key="), "{public}");
    assert!(public.ends_with("# EOF\n"), "{public}");
    let metrics = site.runtime.metrics().encode();
    assert!(
        metrics.contains("genset_http_key_requests_total{key=\"a\"} 2"),
        "{metrics}"
    );
    assert!(
        metrics.contains(
            "genset_http_failures_total{endpoint=\"unauthorized\",kind=\"unauthorized\"} 35"
        ),
        "{metrics}"
    );
    site.close().await;
}

#[tokio::test]
async fn a_quota_that_is_used_up_says_when_to_come_back() {
    let entries = [
        ("a", "sk-a", "requests_per_minute = 1"),
        ("b", "sk-b", "tokens_per_minute = 1"),
    ];
    let (site, _folder) = site_with_keys(&entries, echo()).await;
    let body = chat("Hello", json!({})).to_string();
    for key in ["sk-a", "sk-b"] {
        let send = async || site.send(request("POST", CHAT, &bearer(key), &body)).await;
        assert_eq!(send().await.status, 200, "{key}");
        let response = send().await;
        let (status, _, code, message) = response.refusal();
        assert_eq!(status, 429, "{key}: {message}");
        assert_eq!(code.as_deref(), Some("rate_limit_exceeded"));
        let after: u64 = response
            .header("retry-after")
            .expect("when")
            .parse()
            .expect("seconds");
        assert!(after > 0);
    }
    site.idle().await;
    let metrics = site.runtime.metrics().encode();
    // The alert GensetOverloaded subtracts the second from the first.
    for refusals in [
        "genset_http_requests_total{endpoint=\"chat_completions\",status=\"429\"} 2",
        "genset_http_failures_total{endpoint=\"chat_completions\",kind=\"quota\"} 2",
        // Callers that send too many are visible.
        "genset_http_key_requests_total{key=\"a\"} 2",
        "genset_http_key_requests_total{key=\"b\"} 2",
    ] {
        assert!(metrics.contains(refusals), "{metrics}");
    }
    site.close().await;
}

#[tokio::test]
async fn responses_are_their_askers_own() {
    let (site, _folder) = site_with_keys(&[("a", "sk-a", ""), ("b", "sk-b", "")], echo()).await;
    let body = json!({"model": MODEL, "input": "Hello"}).to_string();
    let response = site
        .send(request("POST", "/v1/responses", &bearer("sk-a"), body))
        .await;
    let id = response.json()["id"].as_str().expect("an id").to_owned();
    let path = format!("/v1/responses/{id}");
    let items = format!("{path}/input_items");
    let next = json!({"model": MODEL, "input": "And?", "previous_response_id": id}).to_string();
    for (key, status, status_of_next) in [("sk-b", 404, 400), ("sk-a", 200, 200)] {
        for path in [&path, &items] {
            let response = site.send(request("GET", path, &bearer(key), "")).await;
            assert_eq!(response.status, status, "{key} {path}");
        }
        let response = site
            .send(request("POST", "/v1/responses", &bearer(key), &next))
            .await;
        assert_eq!(response.status, status_of_next, "{key}");
        let response = site.send(request("DELETE", &path, &bearer(key), "")).await;
        assert_eq!(response.status, status, "{key}");
    }
    site.close().await;
}

#[tokio::test]
async fn pages_of_other_origins_ask_if_they_may() {
    let preflight = |origin: &str| {
        let headers = format!(
            "origin: {origin}\r\naccess-control-request-method: POST\r\n\
             access-control-request-headers: authorization,content-type\r\n"
        );
        request("OPTIONS", CHAT, &headers, "")
    };
    let cases = [
        ("https://a.example", Some("https://a.example")),
        ("*", Some("*")),
        ("", None),
    ];
    for (allowed, expected) in cases {
        let cors_origins = match allowed {
            "" => Vec::new(),
            origin => vec![origin.parse().expect("an origin")],
        };
        let site = Site::with(
            FrontendConfig {
                cors_origins,
                ..config()
            },
            echo(),
        )
        .await;
        let mut client = site.connect().await;
        client.send(preflight("https://a.example")).await;
        let response = client.response_to("OPTIONS").await.expect("an answer");
        assert_eq!(response.header("access-control-allow-origin"), expected);
        assert!(response.header("x-request-id").is_some());
        if expected.is_some() {
            let headers = response.header("access-control-allow-headers");
            assert_eq!(headers, Some("authorization,content-type"));
            assert_eq!(response.header("access-control-max-age"), Some("7200"));
        }
        client.send(preflight("https://b.example")).await;
        let response = client.response_to("OPTIONS").await.expect("an answer");
        let of_others = response.header("access-control-allow-origin");
        assert_eq!(of_others, expected.filter(|origin| *origin == "*"));
        site.close().await;
    }
}

#[cfg(feature = "tls")]
#[tokio::test]
async fn https_is_spoken_with_the_certificate_given() {
    use crate::client::get;
    use genset_frontend::FrontendTls;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;
    use tokio_rustls::TlsConnector;
    use tokio_rustls::rustls::crypto::ring;
    use tokio_rustls::rustls::pki_types::ServerName;
    use tokio_rustls::rustls::{ClientConfig, RootCertStore};

    let made = rcgen::generate_simple_self_signed(["localhost".into()]).expect("a certificate");
    let tls = FrontendTls {
        certificate_pem: made.cert.pem(),
        key_pem: made.signing_key.serialize_pem(),
    };
    let config = FrontendConfig {
        tls: Some(tls),
        ..config()
    };
    let site = Site::with(config, echo()).await;
    let mut roots = RootCertStore::empty();
    roots.add(made.cert.der().clone()).expect("a root");
    let client = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let connector = TlsConnector::from(Arc::new(client));
    let stream = TcpStream::connect(site.server.address())
        .await
        .expect("it listens");
    let name = ServerName::try_from("localhost").expect("a name");
    let mut stream = connector.connect(name, stream).await.expect("it greets");
    let body = chat("Hello", json!({"stream": true})).to_string();
    let headers = "connection: close\r\n";
    stream
        .write_all(&request("POST", CHAT, headers, body))
        .await
        .expect("it takes");
    let mut answer = String::new();
    // The connection may end without a TLS close.
    drop(stream.read_to_string(&mut answer).await);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.contains("[DONE]"), "{answer}");

    // A client that speaks plain HTTP is disconnected, and so is a silent one.
    let mut plain = TcpStream::connect(site.server.address())
        .await
        .expect("it listens");
    plain.write_all(&get("/live")).await.expect("it takes");
    let mut answer = Vec::new();
    drop(plain.read_to_end(&mut answer).await);
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
    let silent = TcpStream::connect(site.server.address())
        .await
        .expect("it listens");
    site.close().await;
    drop(silent);
}

#[tokio::test]
async fn what_cannot_be_used_is_refused_before_the_server_listens() {
    use genset_frontend::{FrontendServer, FrontendTls};
    use genset_runtime::Runtime;

    let keys = FrontendConfig {
        api_keys: Some("/nowhere/keys.toml".into()),
        ..config()
    };
    let tls = FrontendConfig {
        tls: Some(FrontendTls {
            certificate_pem: "no certificate".into(),
            key_pem: String::new(),
        }),
        ..config()
    };
    for (config, says) in [(keys, "/nowhere/keys.toml"), (tls, "tls")] {
        let error = FrontendServer::bind(&Runtime::in_process(), config).await;
        let error = error.expect_err("it is refused").to_string();
        assert!(error.contains(says), "{error}");
    }
}

/// As where a variable lost the line breaks. The library's error has every byte of the key as a number.
#[cfg(feature = "tls")]
#[tokio::test]
async fn a_key_without_line_breaks_is_in_no_error() {
    use genset_frontend::{FrontendServer, FrontendTls};
    use genset_runtime::Runtime;

    let made = rcgen::generate_simple_self_signed(["localhost".into()]).expect("a certificate");
    let key = made.signing_key.serialize_pem().replace('\n', "");
    for (certificate_pem, says) in [
        (made.cert.pem(), "--http-tls-key: holds no private key"),
        (key.clone(), "--http-tls-cert: holds no certificate"),
    ] {
        let tls = FrontendTls {
            certificate_pem,
            key_pem: key.clone(),
        };
        let config = FrontendConfig {
            tls: Some(tls),
            ..config()
        };
        let error = FrontendServer::bind(&Runtime::in_process(), config).await;
        let error = error.expect_err("it is refused").to_string();
        assert!(error.contains(says) && !error.contains('['), "{error}");
    }
}
