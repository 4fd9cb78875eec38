//! The web pages: who may load them, and their headers for browsers. `cargo xtask test browser` uses them in a browser.

use genset_frontend::FrontendConfig;

use crate::access::site_with_keys;
use crate::client::request;
use crate::support::{Site, config, echo};

const FILES: [(&str, &str); 4] = [
    ("/", "text/html"),
    ("/dashboard", "text/html"),
    ("/ui/chat.js", "text/javascript"),
    ("/ui/style.css", "text/css"),
];

#[tokio::test]
async fn pages_come_with_a_strict_policy() {
    let site = Site::start(echo()).await;
    for (path, kind) in FILES {
        let response = site.get(path).await;
        assert_eq!(response.status, 200, "{path}");
        let header = |name| response.header(name).expect("a header");
        assert!(header("content-type").starts_with(kind), "{path}");
        let policy = header("content-security-policy");
        assert!(policy.starts_with("default-src 'none'"), "{policy}");
        assert!(!policy.contains("unsafe"), "{policy}");
        assert_eq!(header("x-content-type-options"), "nosniff");
        let mut client = site.connect().await;
        client.send(request("HEAD", path, "", "")).await;
        let head = client.response_to("HEAD").await.expect("an answer");
        assert_eq!((head.status, head.body.len()), (200, 0));
        let post = site.send(request("POST", path, "", "{}")).await;
        assert_eq!(post.status, 405);
    }
    assert_eq!(site.get("/ui/nothing.js").await.status, 404);
    assert_eq!(site.get("/ui/../Cargo.toml").await.status, 404);
    let rebound = "GET / HTTP/1.1\r\nhost: evil.example\r\n\r\n";
    assert_eq!(site.send(rebound).await.status, 403);
    site.close().await;
}

/// They contain nothing that a key protects; without them nobody could enter one.
#[tokio::test]
async fn pages_need_no_key() {
    let (site, _folder) = site_with_keys(&[("a", "sk-a", "")], echo()).await;
    for (path, _) in FILES {
        assert_eq!(site.get(path).await.status, 200, "{path}");
    }
    site.close().await;
}

#[tokio::test]
async fn a_server_may_have_none() {
    let config = FrontendConfig {
        ui: false,
        ..config()
    };
    let site = Site::with(config, echo()).await;
    for (path, _) in FILES {
        let (status, _, code, _) = site.get(path).await.refusal();
        assert_eq!(
            (status, code.as_deref()),
            (404, Some("unknown_url")),
            "{path}"
        );
    }
    assert_eq!(site.get("/docs").await.status, 200);
    site.close().await;
}
