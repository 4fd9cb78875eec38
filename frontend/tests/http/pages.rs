//! What web pages may do on a server without keys, by the headers that browsers send. `cargo xtask test browser` tests it in a
//! real browser.

use genset_frontend::FrontendConfig;
use serde_json::json;

use crate::access::site_with_keys;
use crate::client::Response;
use crate::support::{CHAT, Site, chat, config, echo};

/// The bytes of a request with these headers, each a whole line, and no others.
fn bytes(method: &str, path: &str, headers: &[&str], body: &str) -> String {
    let headers: String = headers.iter().map(|line| format!("{line}\r\n")).collect();
    let length = body.len();
    format!("{method} {path} HTTP/1.1\r\n{headers}content-length: {length}\r\n\r\n{body}")
}

async fn post(site: &Site, headers: &[&str]) -> Response {
    let body = chat("Hello", json!({"max_tokens": 2})).to_string();
    site.send(bytes("POST", CHAT, headers, &body)).await
}

async fn get(site: &Site, path: &str, headers: &[&str]) -> Response {
    site.send(bytes("GET", path, headers, "")).await
}

async fn listing(origins: &[&str], hosts: &[&str]) -> Site {
    let config = FrontendConfig {
        cors_origins: origins
            .iter()
            .map(|it| it.parse().expect("an origin"))
            .collect(),
        allowed_hosts: hosts.iter().map(|it| it.parse().expect("a host")).collect(),
        ..config()
    };
    Site::with(config, echo()).await
}

const JSON: &str = "content-type: application/json";
const TEXT: &str = "content-type: text/plain";
const FORM: &str = "content-type: application/x-www-form-urlencoded";
const LOCAL: &str = "host: localhost:8080";
const OWN: &str = "origin: http://localhost:8080";
const CROSS: &str = "sec-fetch-site: cross-site";
const SAME: &str = "sec-fetch-site: same-origin";

fn is_refused(response: &Response, status: u16, code: Option<&str>, says: &str) {
    let (given, _, given_code, message) = response.refusal();
    assert_eq!((given, given_code.as_deref()), (status, code), "{message}");
    assert!(message.contains(says), "{message}");
}

/// Programs send none of a browser's headers: they are served with any content type.
#[tokio::test]
async fn programs_are_served_whatever_they_send() {
    let site = listing(&[], &[]).await;
    for headers in [
        &[LOCAL, FORM][..],
        &[LOCAL, TEXT],
        &[LOCAL, JSON],
        &[LOCAL],
        &["host: 127.0.0.1"],
        &["host: 192.0.2.7:80"],
        &["host: genset.localhost."],
        &[],
    ] {
        let response = post(&site, headers).await;
        assert_eq!(response.status, 200, "{headers:?} {}", response.text());
    }
    let old = "GET /ready HTTP/1.0\r\n\r\n";
    assert_eq!(site.send(old).await.status, 200, "HTTP/1.0 has no Host");
    site.close().await;
}

/// A page that uses DNS rebinding reveals its own name in `Host`, on every route.
#[tokio::test]
async fn a_rebound_name_reaches_nothing() {
    let site = listing(&[], &[]).await;
    let rebound = "host: evil.example:8080";
    let origin = "origin: http://evil.example:8080";
    for headers in [
        &[rebound, JSON][..],
        &[rebound, JSON, origin],
        &[rebound, JSON, SAME],
    ] {
        let response = post(&site, headers).await;
        is_refused(&response, 403, Some("host_not_allowed"), "--allowed-hosts");
    }
    for path in [
        "/v1/models",
        "/metrics",
        "/ready",
        "/docs",
        "/live",
        "/nowhere",
    ] {
        let response = get(&site, path, &[rebound]).await;
        is_refused(&response, 403, Some("host_not_allowed"), "\"evil.example\"");
    }
    let two = get(&site, "/ready", &[LOCAL, rebound]).await;
    assert_eq!(two.status, 403, "each is looked at");
    let whole = "GET http://evil.example/ready HTTP/1.1\r\nhost: localhost\r\n\r\n";
    assert_eq!(site.send(whole).await.status, 403);
    let long = format!("host: {}", "a".repeat(10_000));
    assert!(get(&site, "/ready", &[&long]).await.text().len() < 1000);
    let message = site
        .send(bytes("POST", "/v1/messages", &[rebound, JSON], "{}"))
        .await;
    assert_eq!(message.json()["error"]["type"], "permission_error");
    site.close().await;

    let site = listing(&[], &["gpu.example"]).await;
    for (host, status) in [
        ("GPU.example.:80", 200),
        ("localhost", 200),
        ("b.example", 403),
    ] {
        let response = get(&site, "/ready", &[&format!("host: {host}")]).await;
        assert_eq!(response.status, status, "{host}");
    }
    site.close().await;
    let site = listing(&[], &["*"]).await;
    assert_eq!(get(&site, "/ready", &[rebound]).await.status, 200);
    site.close().await;
}

#[tokio::test]
async fn pages_of_other_origins_reach_nothing() {
    let site = listing(&[], &[]).await;
    let other = "origin: https://evil.example";
    let neighbour = "origin: http://localhost:3000";
    for headers in [
        &[LOCAL, TEXT, other, CROSS][..],
        &[LOCAL, JSON, other, CROSS],
        &[LOCAL, TEXT, other],
        &[LOCAL, JSON, neighbour, "sec-fetch-site: same-site"],
        &[LOCAL, JSON, neighbour],
        &[LOCAL, JSON, "origin: null"],
        &[
            LOCAL,
            FORM,
            "origin: null",
            CROSS,
            "sec-fetch-mode: navigate",
            "sec-fetch-dest: document",
        ],
        &[LOCAL, TEXT, CROSS],
    ] {
        let response = post(&site, headers).await;
        is_refused(&response, 403, Some("origin_not_allowed"), "--cors-origins");
    }
    for path in ["/v1/models", "/metrics", "/ready"] {
        for headers in [
            &[LOCAL, CROSS][..],
            &[LOCAL, other],
            &[LOCAL, "sec-fetch-site: same-site"],
        ] {
            let response = get(&site, path, headers).await;
            is_refused(&response, 403, Some("origin_not_allowed"), "--cors-origins");
        }
    }
    // A user follows a link, as opposed to a frame in another page.
    for (destination, status) in [("document", 200), ("iframe", 403)] {
        let destination = format!("sec-fetch-dest: {destination}");
        let visit = [LOCAL, CROSS, "sec-fetch-mode: navigate", &destination];
        assert_eq!(get(&site, "/docs", &visit).await.status, status);
    }
    site.close().await;
}

/// The server's own pages work, and those of listed origins. They must send JSON, which no form can.
#[tokio::test]
async fn own_and_listed_pages_are_served() {
    let listed = "origin: https://app.example";
    let extension = "origin: chrome-extension://abc";
    let site = listing(&["https://app.example", "chrome-extension://abc"], &[]).await;
    for page in [
        &[OWN, SAME][..],
        &[OWN],
        &[SAME],
        &["origin: https://behind.proxy.example", SAME],
        &[listed, CROSS],
        &[listed],
        &[extension, "sec-fetch-site: none"],
    ] {
        for (kind, status) in [
            (JSON, 200),
            ("content-type: Application/JSON; charset=utf-8", 200),
            (TEXT, 415),
            (FORM, 415),
            ("content-type: text/plain; a=application/json", 415),
        ] {
            let headers = [&[LOCAL, kind], page].concat();
            let response = post(&site, &headers).await;
            assert_eq!(response.status, status, "{headers:?} {}", response.text());
        }
        let headers = [&[LOCAL], page].concat();
        assert_eq!(post(&site, &headers).await.status, 415, "no type: {page:?}");
        assert_eq!(
            get(&site, "/v1/models", &headers).await.status,
            200,
            "{page:?}"
        );
    }
    let refused = post(&site, &[LOCAL, TEXT, listed]).await;
    let allowed = refused.header("access-control-allow-origin");
    assert_eq!(
        allowed,
        Some("https://app.example"),
        "the page can read why"
    );
    site.close().await;
    let site = listing(&["*"], &[]).await;
    let response = post(&site, &[LOCAL, JSON, "origin: https://any.example", CROSS]).await;
    assert_eq!(response.status, 200);
    assert_eq!(get(&site, "/v1/models", &[LOCAL, CROSS]).await.status, 200);
    site.close().await;
}

/// A page has no key, so with keys the server's name is up to the operator.
#[tokio::test]
async fn with_keys_names_and_pages_are_not_looked_at() {
    let (site, _folder) = site_with_keys(&[("a", "sk-a", "")], echo()).await;
    let page = [
        "host: api.example",
        TEXT,
        "origin: https://evil.example",
        CROSS,
    ];
    assert_eq!(post(&site, &page).await.status, 401);
    let with_key = [&page[..], &["authorization: Bearer sk-a"]].concat();
    assert_eq!(post(&site, &with_key).await.status, 200);
    site.close().await;
}
