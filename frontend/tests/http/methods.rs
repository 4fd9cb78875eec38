//! Every method on every kind of route.

use crate::apis::routes;
use crate::client::request;
use crate::support::{CHAT, COMPLETIONS, Site, echo};

const METHODS: [&str; 9] = [
    "GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "BREW",
];

#[tokio::test]
async fn each_is_answered_or_told_which_there_are() {
    let site = Site::start(echo()).await;
    let mut met = Vec::new();
    for (path, allowed) in [
        (CHAT, &["POST"][..]),
        (COMPLETIONS, &["POST"]),
        ("/v1/embeddings", &["POST"]),
        ("/v1/rerank", &["POST"]),
        ("/v2/rerank", &["POST"]),
        ("/rerank", &["POST"]),
        ("/v1/score", &["POST"]),
        ("/score", &["POST"]),
        ("/v1/responses", &["POST"]),
        ("/v1/responses/input_tokens", &["POST"]),
        ("/v1/responses/resp_0", &["GET", "HEAD", "DELETE"]),
        ("/v1/responses/resp_0/cancel", &["POST"]),
        ("/v1/responses/resp_0/input_items", &["GET", "HEAD"]),
        ("/v1/files", &["GET", "HEAD", "POST"]),
        ("/v1/files/file-0", &["GET", "HEAD", "DELETE"]),
        ("/v1/files/file-0/content", &["GET", "HEAD"]),
        ("/v1/batches", &["GET", "HEAD", "POST"]),
        ("/v1/batches/batch_0", &["GET", "HEAD"]),
        ("/v1/batches/batch_0/cancel", &["POST"]),
        ("/v1/messages", &["POST"]),
        ("/v1/messages/count_tokens", &["POST"]),
        ("/v1/models", &["GET", "HEAD"]),
        ("/v1/models/tiny", &["GET", "HEAD"]),
        ("/tokenize", &["POST"]),
        ("/detokenize", &["POST"]),
        ("/live", &["GET", "HEAD"]),
        ("/ready", &["GET", "HEAD"]),
        ("/health", &["GET", "HEAD"]),
        ("/metrics", &["GET", "HEAD"]),
        ("/openapi.json", &["GET", "HEAD"]),
        ("/docs", &["GET", "HEAD"]),
    ] {
        let ids = ["resp_0", "file-0", "batch_0", "tiny"];
        met.push(
            ids.iter()
                .fold(path.to_owned(), |path, id| path.replace(id, "{id}")),
        );
        for method in METHODS.iter().filter(|method| !allowed.contains(method)) {
            let mut client = site.connect().await;
            client.send(request(method, path, "", "")).await;
            let response = client.response_to(method).await.expect("an answer");
            let expected = if *method == "OPTIONS" { 204 } else { 405 };
            assert_eq!(response.status, expected, "{method} {path}");
            let allow = response.header("allow").expect("a list of methods");
            let allow: Vec<&str> = allow.split(',').map(str::trim).collect();
            assert_eq!(allow, allowed, "{method} {path}");
            assert!(response.header("x-request-id").is_some());
            if matches!(*method, "HEAD" | "OPTIONS") {
                assert!(response.body.is_empty());
            } else {
                let (_, param, code, message) = response.refusal();
                assert!(message.contains(method), "{message}");
                assert_eq!((param, code), (None, None));
            }
        }
    }
    let mut routes = routes();
    routes.sort_unstable();
    met.sort_unstable();
    assert_eq!(met, routes, "no route is left out");
    site.close().await;
}

/// A HEAD has the headers of a GET and no body; the connection stays open.
#[tokio::test]
async fn a_head_is_a_get_without_its_body() {
    let site = Site::start(echo()).await;
    for path in [
        "/v1/models",
        "/v1/models/tiny",
        "/health",
        "/live",
        "/openapi.json",
        "/docs",
        "/v1/nothing",
    ] {
        let got = site.get(path).await;
        let mut client = site.connect().await;
        for _ in 0..2 {
            client.send(request("HEAD", path, "", "")).await;
            let head = client.response_to("HEAD").await.expect("an answer");
            assert_eq!((head.status, head.body.len()), (got.status, 0), "{path}");
            assert_eq!(head.header("content-type"), got.header("content-type"));
            let length = head
                .header("content-length")
                .and_then(|length| length.parse().ok());
            if got.status == 200 {
                assert_eq!(length, Some(got.body.len()), "{path}");
            }
        }
    }
    site.close().await;
}
