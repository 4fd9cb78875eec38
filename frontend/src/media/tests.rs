use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs as _};
use std::num::NonZeroUsize;
use std::sync::Barrier;
use std::time::Duration;

use futures_util::FutureExt as _;
use genset_backend_common::MetricsRegistry;
use genset_backend_common::request::PartPlace;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;
use crate::budget::MemoryBudget;
use crate::work::SHORT_WORK_BYTES;
use crate::work::tests::keep_busy;

/// Only to fail instead of hanging.
const PATIENCE: Duration = Duration::from_secs(60);

const GIF: &[u8] = b"GIF89a\x01\0\x01\0\0\0\0,";

fn here(_host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    Ok((Ipv4Addr::LOCALHOST, port).to_socket_addrs()?.collect())
}

/// Lets a lookup end.
static LOOKUP: Barrier = Barrier::new(2);

/// A lookup that blocks until it is released.
fn slow(_host: &str, _port: u16) -> io::Result<Vec<SocketAddr>> {
    LOOKUP.wait();
    Err(io::ErrorKind::NotFound.into())
}

/// A server with a different response for each path.
async fn server() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    #[expect(clippy::disallowed_methods, reason = "it ends with the test's runtime")]
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.unwrap());
            }
            let head = String::from_utf8(head).unwrap();
            let large = [GIF, &[0; SHORT_WORK_BYTES]].concat();
            let path = head.split(' ').nth(1).unwrap().to_owned();
            let (status, fields, body): (_, String, &[u8]) = match path.as_str() {
                "/cat" => ("200 OK", "content-type: image/gif\r\n".into(), GIF),
                "/large" => ("200 OK", "content-type: image/gif\r\n".into(), &large),
                "/moved" => ("302 Found", "location: /cat\r\n".into(), b""),
                "/inside" => (
                    "302 Found",
                    "location: http://inside.test/cat\r\n".into(),
                    b"",
                ),
                "/around" => ("302 Found", "location: /around\r\n".into(), b""),
                "/page" => ("200 OK", "content-type: text/html\r\n".into(), b"<html>"),
                "/lie" => ("200 OK", "content-type: image/gif\r\n".into(), b"<html>"),
                "/never" => std::future::pending().await,
                _ => ("404 Not Found", String::new(), b""),
            };
            let fields = format!("HTTP/1.1 {status}\r\nconnection: close\r\n{fields}\r\n");
            stream.write_all(fields.as_bytes()).await.unwrap();
            stream.write_all(body).await.unwrap();
        }
    });
    port
}

struct Asked {
    fetched: Result<String, ApiError>,
    held_bytes: usize,
}

fn fetcher(config: &MediaConfig, connect: Connect) -> Fetcher {
    Fetcher::with(config, connect, WorkThreads::new(NonZeroUsize::MIN))
}

async fn fetch(
    config: &MediaConfig,
    may_reach: fn(IpAddr) -> bool,
    url: &str,
    deadline: Option<Instant>,
) -> Asked {
    let fetcher = fetcher(config, Connect::new(here, may_reach));
    let (mut messages, media) = chat_about(url);
    let mut memory = MemoryBudget::new(1 << 20).share();
    let done = fetcher
        .fetch_all(&mut messages, &media, deadline, &mut memory)
        .await;
    Asked {
        fetched: done.map(|()| url_in(&messages).to_owned()),
        held_bytes: memory.bytes(),
    }
}

/// A chat with the image of this URL, and the image's place in it.
fn chat_about(url: &str) -> ([Value; 1], [ChatMedium; 1]) {
    let part = json!({"type": "image_url", "image_url": {"url": url}});
    let medium = ChatMedium {
        kind: MediaKind::Image,
        place: PartPlace {
            message: 0,
            part: 0,
        },
        at: "messages[0].content[0]".into(),
        bytes: 0,
        is_remote: true,
    };
    ([json!({"role": "user", "content": [part]})], [medium])
}

fn url_in(messages: &[Value; 1]) -> &str {
    messages[0]["content"][0]["image_url"]["url"]
        .as_str()
        .unwrap()
}

fn config(hosts: &[&str]) -> MediaConfig {
    MediaConfig {
        hosts: hosts.iter().map(|host| host.parse().unwrap()).collect(),
        max_bytes: 100,
        ..MediaConfig::default()
    }
}

#[tokio::test]
async fn an_image_of_an_allowed_host_becomes_a_data_url() {
    let port = server().await;
    let config = config(&[&format!("images.test:{port}")]);
    for path in ["cat", "moved"] {
        let url = format!("http://Images.test:{port}/{path}");
        let asked = fetch(&config, |_| true, &url, None).await;
        let expected = format!("data:image/gif;base64,{}", STANDARD.encode(GIF));
        assert_eq!(asked.held_bytes, expected.len());
        assert_eq!(asked.fetched.unwrap(), expected, "{path}");
    }
}

#[tokio::test]
async fn a_large_image_becomes_a_data_url_on_a_work_thread() {
    let port = server().await;
    let config = MediaConfig {
        max_bytes: GIF.len() + SHORT_WORK_BYTES,
        ..config(&[&format!("images.test:{port}")])
    };
    let fetcher = fetcher(&config, Connect::new(here, |_| true));
    let metrics = MetricsRegistry::default();
    fetcher.0.work.register(&metrics);
    let (mut messages, media) = chat_about(&format!("http://images.test:{port}/large"));
    let mut memory = MemoryBudget::new(1 << 20).share();
    let (working, end) = keep_busy(&fetcher.0.work).await;
    let mut fetching = Box::pin(fetcher.fetch_all(&mut messages, &media, None, &mut memory));
    let waits_for_a_thread = "genset_frontend_long_work_waiting 1\n";
    let waits = async {
        while !metrics.encode().contains(waits_for_a_thread) {
            assert!((&mut fetching).now_or_never().is_none());
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, waits).await.unwrap();
    drop(end);
    working.await.unwrap();
    fetching.await.unwrap();
    assert_eq!(memory.bytes(), url_in(&messages).len());
}

#[tokio::test]
async fn what_is_not_fetched_is_refused_by_its_place() {
    let port = server().await;
    let allowed = config(&[&format!("images.test:{port}")]);
    let small = MediaConfig {
        max_bytes: GIF.len() - 1,
        ..allowed.clone()
    };
    let hasty = MediaConfig {
        timeout: Duration::from_millis(50),
        ..allowed.clone()
    };
    let none = config(&[]);
    let at = |path: &str| format!("http://images.test:{port}/{path}");
    for (config, url, problem) in [
        (&none, at("cat"), "--media-hosts"),
        (
            &allowed,
            format!("http://other.test:{port}/cat"),
            "other.test",
        ),
        (&allowed, "http://images.test/cat".into(), "images.test"),
        (
            &allowed,
            format!("http://images.test:{port}@inside.test/cat"),
            "expected a URL",
        ),
        (
            &allowed,
            format!("ftp://images.test:{port}/cat"),
            "expected a URL",
        ),
        (&allowed, at("inside"), "inside.test"),
        (&allowed, at("around"), "redirects more than 3 times"),
        (&allowed, at("gone"), "status 404"),
        (&allowed, at("page"), "no PNG"),
        (&allowed, at("lie"), "no PNG"),
        (&small, at("cat"), "--media-max-bytes"),
        (&hasty, at("never"), "within"),
    ] {
        let asked = fetch(config, |_| true, &url, None).await;
        let error = asked.fetched.unwrap_err();
        assert_eq!(error.param, Some("messages[0].content[0]".into()), "{url}");
        assert!(error.to_string().contains(problem), "{url}: {error}");
    }
    // As in production: every name resolves to this machine.
    let asked = fetch(&allowed, address::is_public, &at("cat"), None).await;
    let error = asked.fetched.unwrap_err();
    assert!(error.to_string().contains("no public address"), "{error}");
}

/// The image's host is not blamed for the request's deadline.
#[tokio::test]
async fn a_deadline_that_passes_during_a_fetch_is_told_as_everywhere() {
    let port = server().await;
    let config = config(&[&format!("images.test:{port}")]);
    let url = format!("http://images.test:{port}/never");
    let asked = fetch(&config, |_| true, &url, Some(Instant::now())).await;
    let error = asked.fetched.unwrap_err();
    assert_eq!(error.status, http::StatusCode::GATEWAY_TIMEOUT, "{error}");
    assert_eq!(error.param, None);
}

#[tokio::test]
async fn a_lookup_has_its_place_until_it_ends_though_nobody_waits() {
    let fetcher = fetcher(&config(&["images.test:80"]), Connect::new(slow, |_| true));
    let mut memory = MemoryBudget::new(1 << 20).share();
    let fetched = fetcher.fetch("http://images.test:80/cat", 100, &mut memory);
    assert!(fetched.now_or_never().is_none());
    let places = &fetcher.0.places;
    let free = places.available_permits();
    LOOKUP.wait();
    assert_eq!(free, FETCHES_AT_ONCE - 1);
    let freed = async {
        while places.available_permits() < FETCHES_AT_ONCE {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(PATIENCE, freed).await.unwrap();
}

#[test]
fn addresses_that_are_not_public_are_known() {
    for inside in [
        "0.0.0.0",
        "10.1.2.3",
        "100.64.0.1",
        "100.127.255.255",
        "127.0.0.1",
        "169.254.169.254",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.1.1",
        "192.0.0.8",
        "192.0.2.1",
        "198.18.0.1",
        "198.51.100.1",
        "203.0.113.1",
        "224.0.0.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "::127.0.0.1",
        "64:ff9b::a00:1",
        "2002:7f00:1::",
        "2001::1",
        "2001:db8::1",
        "fc00::1",
        "fd12::1",
        "fe80::1",
        "fec0::1",
        "ff02::1",
    ] {
        assert!(!address::is_public(inside.parse().unwrap()), "{inside}");
    }
    for outside in [
        "1.1.1.1",
        "8.8.8.8",
        "100.63.0.1",
        "100.128.0.1",
        "172.32.0.1",
        "192.0.1.1",
        "223.1.1.1",
        "2606:4700::1111",
        "2a00:1450::1",
        "::ffff:8.8.8.8",
        "64:ff9b::808:808",
        "2001:200::1",
    ] {
        assert!(address::is_public(outside.parse().unwrap()), "{outside}");
    }
}

#[test]
fn hosts_are_allowed_as_they_are_written() {
    let host = |text: &str| text.parse::<HostPattern>();
    let allows = |pattern: &str, name: &str, port| host(pattern).unwrap().allows(name, port, true);
    assert!(allows("example.org", "Example.ORG", 443));
    assert!(!allows("example.org", "example.org", 8443));
    assert!(allows("example.org:8443", "example.org", 8443));
    assert!(!allows("example.org", "a.example.org", 443));
    assert!(allows("*.example.org", "a.b.example.org", 443));
    for other in [
        "example.org",
        "badexample.org",
        ".example.org",
        "example.org.evil.test",
    ] {
        assert!(!allows("*.example.org", other, 443), "{other}");
    }
    for bad in [
        "",
        "*",
        "*.",
        "https://example.org",
        "example.org:x",
        "a b",
        "*.*.org",
    ] {
        assert!(host(bad).is_err(), "{bad}");
    }
}
