//! `/v1/files` and `/v1/batches`: a batch is answered completely after any failure, and only its owner sees it.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::LLMEngine;
use genset_frontend::{BatchConfig, FrontendConfig, FrontendServer};
use genset_runtime::Runtime;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::access::{bearer, site_with_keys_and};
use crate::client::{Client, Response, request, soon};
use crate::script::Script;
use crate::support::{CHAT, Site, chat, config, echo, encode, eventually};

pub(crate) const BOUNDARY: &str = "a-boundary";

/// A config that keeps batches in `folder`.
pub(crate) fn kept_in(folder: &Path, change: impl FnOnce(&mut BatchConfig)) -> FrontendConfig {
    let mut batches = BatchConfig {
        folder: Some(folder.to_owned()),
        ..BatchConfig::default()
    };
    change(&mut batches);
    FrontendConfig {
        batches,
        ..config()
    }
}

pub(crate) async fn site(folder: &TempDir, engine: Arc<dyn LLMEngine>) -> Site {
    Site::with(kept_in(folder.path(), |_| {}), engine).await
}

fn part(head: &str, body: &str) -> String {
    format!("--{BOUNDARY}\r\ncontent-disposition: form-data; {head}\r\n\r\n{body}\r\n")
}

fn file_part(content: &str) -> String {
    part("name=\"file\"; filename=\"in.jsonl\"", content)
}

/// The bytes of an upload of these parts.
fn upload_of(headers: &str, parts: &[String]) -> Vec<u8> {
    let body = format!("{}--{BOUNDARY}--\r\n", parts.concat());
    let head = format!(
        "POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary={BOUNDARY}\r\n\
         {headers}content-length: {}\r\n\r\n",
        body.len()
    );
    (head + &body).into_bytes()
}

pub(crate) fn upload(headers: &str, content: &str) -> Vec<u8> {
    let purpose = part("name=\"purpose\"", "batch");
    upload_of(headers, &[purpose, file_part(content)])
}

/// A line with the message `text`.
pub(crate) fn line(custom_id: &str, text: &str) -> Value {
    let body = chat(text, json!({"max_tokens": 4}));
    json!({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body})
}

pub(crate) fn lines(lines: &[Value]) -> String {
    lines.iter().map(|line| format!("{line}\n")).collect()
}

pub(crate) fn batch_of(file: &str) -> String {
    batch_to(CHAT, file)
}

fn batch_to(endpoint: &str, file: &str) -> String {
    let batch = json!({"input_file_id": file, "endpoint": endpoint, "completion_window": "24h", "metadata": {"a": "b"}});
    batch.to_string()
}

/// Uploads requests and starts their batch. Returns its id.
pub(crate) async fn begin(site: &Site, content: &str) -> String {
    begin_as(site, "", content).await
}

/// Like [`begin`], with headers.
pub(crate) async fn begin_as(site: &Site, headers: &str, content: &str) -> String {
    begin_to(site, headers, CHAT, content).await
}

/// Like [`begin_as`], for requests to `endpoint`.
pub(crate) async fn begin_to(site: &Site, headers: &str, endpoint: &str, content: &str) -> String {
    let file = site.send(upload(headers, content)).await;
    assert_eq!(file.status, 200, "{}", file.text());
    let file = file.json()["id"].as_str().expect("an id").to_owned();
    let batch = site
        .send(request(
            "POST",
            "/v1/batches",
            headers,
            batch_to(endpoint, &file),
        ))
        .await;
    assert_eq!(batch.status, 200, "{}", batch.text());
    batch.json()["id"].as_str().expect("an id").to_owned()
}

/// Waits until `is_so` holds for the batch, and returns it.
pub(crate) async fn batch_that(site: &Site, id: &str, is_so: impl Fn(&Value) -> bool) -> Value {
    batch_as(site, "", id, is_so).await
}

/// Like [`batch_that`], with headers.
pub(crate) async fn batch_as(
    site: &Site,
    headers: &str,
    id: &str,
    is_so: impl Fn(&Value) -> bool,
) -> Value {
    let mut client = Client::connect(site.server.address()).await;
    soon(async {
        loop {
            client
                .send(request("GET", &format!("/v1/batches/{id}"), headers, ""))
                .await;
            let batch = client.response().await.json();
            if is_so(&batch) {
                return batch;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
}

pub(crate) async fn ended(site: &Site, id: &str, status: &str) -> Value {
    let ends = ["completed", "failed", "expired", "cancelled"];
    let has_ended = |batch: &Value| ends.iter().any(|end| batch["status"] == *end);
    let batch = batch_that(site, id, has_ended).await;
    assert_eq!(batch["status"], status, "{batch}");
    batch
}

/// The lines of a file.
pub(crate) async fn content(site: &Site, id: &Value) -> Vec<Value> {
    let id = id.as_str().expect("a file");
    let response = site.get(&format!("/v1/files/{id}/content")).await;
    assert_eq!(response.status, 200, "{}", response.text());
    let length = response.header("content-length").expect("its length");
    assert_eq!(length, response.body.len().to_string());
    let text = response.text();
    text.lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect()
}

#[tokio::test]
async fn every_request_is_answered_in_the_order_of_the_input() {
    let folder = tempfile::tempdir().expect("a folder");
    let site = site(&folder, echo()).await;
    let mut bad = line("c", "Hello");
    bad["body"]["model"] = "nobody".into();
    let asked: Vec<Value> = (0..40)
        .map(|index| line(&format!("r{index}"), "Hello there"))
        .collect();
    let input = format!("{}\n\n{bad}\n", lines(&asked));
    let id = begin(&site, &input).await;
    let batch = ended(&site, &id, "completed").await;
    let counts = json!({"total": 41, "completed": 40, "failed": 1});
    assert_eq!(batch["request_counts"], counts);
    assert_eq!(batch["metadata"], json!({"a": "b"}));
    let output = content(&site, &batch["output_file_id"]).await;
    let names: Vec<&str> = output
        .iter()
        .filter_map(|line| line["custom_id"].as_str())
        .collect();
    let expected: Vec<&str> = asked
        .iter()
        .filter_map(|line| line["custom_id"].as_str())
        .collect();
    assert_eq!(names, expected);
    for line in &output {
        assert_eq!(line["response"]["status_code"], 200, "{line}");
        assert_eq!(
            line["response"]["body"]["object"], "chat.completion",
            "{line}"
        );
        assert_eq!(line["error"], Value::Null);
    }
    let errors = content(&site, &batch["error_file_id"]).await;
    assert_eq!(errors.len(), 1);
    assert_eq!(errors[0]["response"]["status_code"], 404, "{}", errors[0]);
    let files = site.get("/v1/files?limit=2").await.json();
    assert_eq!(files["has_more"], true, "{files}");
    let output = site
        .get("/v1/files?purpose=batch_output&order=asc")
        .await
        .json();
    assert_eq!(output["data"].as_array().map(Vec::len), Some(2), "{output}");
    let input = batch["input_file_id"].as_str().expect("a file");
    let deleted = site
        .send(request("DELETE", &format!("/v1/files/{input}"), "", ""))
        .await;
    assert_eq!(deleted.json()["deleted"], true, "{}", deleted.text());
    assert_eq!(site.get(&format!("/v1/files/{input}")).await.status, 404);
    assert_eq!(site.get("/v1/batches").await.json()["data"][0]["id"], id);
    site.close().await;
    // Only files with a record remain.
    let mut left: Vec<String> = ["files", "batches"]
        .iter()
        .flat_map(|part| std::fs::read_dir(folder.path().join(part)).expect("a folder"))
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .to_string_lossy()
                .into_owned()
        })
        .collect();
    left.sort();
    let stem = id.trim_start_matches("batch_");
    let expected = [
        format!("{id}.json"),
        format!("file-{stem}-errors"),
        format!("file-{stem}-errors.json"),
        format!("file-{stem}-output"),
        format!("file-{stem}-output.json"),
    ];
    assert_eq!(left, expected);
}

#[tokio::test]
async fn a_restart_asks_nothing_twice_that_was_answered() {
    let folder = tempfile::tempdir().expect("a folder");
    let (engine, gate) = Script::gated(Vec::new(), encode("It is."));
    gate.add_permits(3);
    let one = |batches: &mut BatchConfig| batches.concurrency = 1.try_into().expect("one");
    let site = Site::with(kept_in(folder.path(), one), engine.clone()).await;
    let asked: Vec<Value> = (0..6)
        .map(|index| line(&format!("r{index}"), "Hello"))
        .collect();
    let id = begin(&site, &lines(&asked)).await;
    batch_that(&site, &id, |batch| {
        batch["request_counts"]["completed"] == 3
    })
    .await;
    // The fourth is in progress, and is aborted.
    site.abort().await;
    let seen = engine.requests().len();
    assert!((3..=4).contains(&seen), "{seen}");

    gate.add_permits(100);
    let site = Site::with(kept_in(folder.path(), one), engine.clone()).await;
    let batch = ended(&site, &id, "completed").await;
    assert_eq!(
        batch["request_counts"],
        json!({"total": 6, "completed": 6, "failed": 0})
    );
    assert_eq!(batch["error_file_id"], Value::Null);
    assert_eq!(content(&site, &batch["output_file_id"]).await.len(), 6);
    // One of them is the new worker's canary.
    assert_eq!(engine.requests().len() - seen, 3 + 1);
    site.close().await;
}

#[tokio::test]
async fn an_input_that_is_none_fails_with_its_lines() {
    let folder = tempfile::tempdir().expect("a folder");
    let few = |batches: &mut BatchConfig| batches.max_requests = 5;
    let site = Site::with(kept_in(folder.path(), few), echo()).await;
    let mut elsewhere = line("b", "Hello");
    elsewhere["url"] = "/v1/embeddings".into();
    let mut streamed = line("c", "Hello");
    streamed["body"]["stream"] = true.into();
    let input = format!(
        "not JSON\n{elsewhere}\n{streamed}\n{}",
        lines(&[line("d", "x"), line("d", "y")])
    );
    let id = begin(&site, &input).await;
    let batch = ended(&site, &id, "failed").await;
    let errors = batch["errors"]["data"].as_array().expect("errors");
    let found: Vec<(&str, u64)> = errors
        .iter()
        .map(|error| {
            (
                error["code"].as_str().expect("a code"),
                error["line"].as_u64().expect("a line"),
            )
        })
        .collect();
    let expected = [
        ("invalid_json_line", 1),
        ("mismatched_url", 2),
        ("invalid_request", 3),
        ("duplicate_custom_id", 5),
    ];
    assert_eq!(found, expected);
    let many: Vec<Value> = (0..6).map(|index| line(&format!("{index}"), "x")).collect();
    for (input, code) in [("\n\n", "empty_file"), (&lines(&many), "invalid_file")] {
        let id = begin(&site, input).await;
        let batch = ended(&site, &id, "failed").await;
        assert_eq!(batch["errors"]["data"][0]["code"], code, "{batch}");
        assert!(
            !batch
                .to_string()
                .contains(&*folder.path().to_string_lossy()),
            "{batch}"
        );
    }
    site.close().await;
}

#[tokio::test]
async fn a_batch_that_is_cancelled_keeps_what_was_answered() {
    let folder = tempfile::tempdir().expect("a folder");
    let (engine, gate) = Script::gated(Vec::new(), encode("It is."));
    gate.add_permits(2);
    let site = site(&folder, engine.clone()).await;
    let asked: Vec<Value> = (0..5)
        .map(|index| line(&format!("r{index}"), "Hello"))
        .collect();
    let id = begin(&site, &lines(&asked)).await;
    let batch = batch_that(&site, &id, |batch| {
        batch["request_counts"]["completed"] == 2
    })
    .await;
    let input = batch["input_file_id"].as_str().expect("a file");
    let deleted = site
        .send(request("DELETE", &format!("/v1/files/{input}"), "", ""))
        .await;
    assert_eq!(deleted.status, 409, "{}", deleted.text());
    let path = format!("/v1/batches/{id}/cancel");
    let cancelled = site.send(request("POST", &path, "", "")).await;
    assert_eq!(cancelled.status, 200, "{}", cancelled.text());
    let batch = ended(&site, &id, "cancelled").await;
    assert_eq!(content(&site, &batch["output_file_id"]).await.len(), 2);
    assert_eq!(batch["error_file_id"], Value::Null);
    assert_eq!(site.send(request("POST", &path, "", "")).await.status, 409);
    // The requests in progress ended with it.
    site.idle().await;
    assert_eq!(engine.active(), 0);
    site.close().await;
}

#[tokio::test]
async fn what_is_not_answered_in_time_is_an_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let site1 = site(&folder, Script::silent(5)).await;
    let id = begin(&site1, &lines(&[line("a", "Hello"), line("b", "Hello")])).await;
    batch_that(&site1, &id, |batch| batch["status"] == "in_progress").await;
    site1.abort().await;
    // A day later.
    let path = folder.path().join("batches").join(format!("{id}.json"));
    let mut record: Value =
        serde_json::from_slice(&std::fs::read(&path).expect("a record")).expect("JSON");
    record["expires_at"] = 1.into();
    std::fs::write(&path, record.to_string()).expect("a record");
    let site = site(&folder, Script::silent(5)).await;
    let batch = ended(&site, &id, "expired").await;
    assert_eq!(batch["output_file_id"], Value::Null);
    assert_eq!(
        batch["request_counts"],
        json!({"total": 2, "completed": 0, "failed": 2})
    );
    let errors = content(&site, &batch["error_file_id"]).await;
    assert_eq!(errors.len(), 2);
    for (line, name) in errors.iter().zip(["a", "b"]) {
        assert_eq!(line["custom_id"], name);
        assert_eq!(line["error"]["code"], "batch_expired", "{line}");
    }
    site.close().await;
}

#[tokio::test]
async fn files_and_batches_are_their_owners() {
    let folder = tempfile::tempdir().expect("a folder");
    let kept = kept_in(folder.path(), |_| {});
    let keys = [("a", "sk-a", ""), ("b", "sk-b", "")];
    let (site, _keys) = site_with_keys_and(&keys, kept, echo()).await;
    let (a, b) = (bearer("sk-a"), bearer("sk-b"));
    let ask = async |method: &str, path: &str, headers: &str, body: &str| -> Response {
        site.send(request(method, path, headers, body)).await
    };
    assert_eq!(site.send(upload("", "{}")).await.status, 401);
    let file = site
        .send(upload(&a, &lines(&[line("x", "Hello")])))
        .await
        .json();
    let file = file["id"].as_str().expect("an id");
    let stolen = ask("POST", "/v1/batches", &b, &batch_of(file)).await;
    let (status, param, ..) = stolen.refusal();
    assert_eq!((status, param.as_deref()), (404, Some("input_file_id")));
    let batch = ask("POST", "/v1/batches", &a, &batch_of(file)).await.json();
    let id = batch["id"].as_str().expect("an id");
    for path in [
        format!("/v1/files/{file}"),
        format!("/v1/files/{file}/content"),
        format!("/v1/batches/{id}"),
    ] {
        assert_eq!(ask("GET", &path, &b, "").await.status, 404, "{path}");
        assert_eq!(ask("GET", &path, &a, "").await.status, 200, "{path}");
    }
    let path = format!("/v1/batches/{id}/cancel");
    assert_eq!(ask("POST", &path, &b, "").await.status, 404);
    assert_eq!(
        ask("DELETE", &format!("/v1/files/{file}"), &b, "")
            .await
            .status,
        404
    );
    for path in ["/v1/files", "/v1/batches"] {
        assert_eq!(
            ask("GET", path, &b, "").await.json()["data"],
            json!([]),
            "{path}"
        );
    }
    let tokens = || site.metric("genset_http_key_tokens_total{key=\"a\"}");
    eventually("its requests belong to the key", || tokens() > 0.0).await;
    site.close().await;
}

#[tokio::test]
async fn an_upload_that_is_none_is_refused_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let site = site(&folder, echo()).await;
    let purpose = || part("name=\"purpose\"", "batch");
    let file = || file_part("{}");
    let other = |name: &str, value: &str| part(&format!("name=\"{name}\""), value);
    let endless = format!("--{BOUNDARY}\r\nx: {}", "a".repeat(4 << 20));
    for (parts, param) in [
        (vec![purpose()], Some("file")),
        (vec![file()], Some("purpose")),
        (
            vec![other("purpose", "assistants"), file()],
            Some("purpose"),
        ),
        (
            vec![other("purpose", &"b".repeat(1000)), file()],
            Some("purpose"),
        ),
        (vec![purpose(), file(), file()], Some("file")),
        (vec![other("tpyo", "1"), file()], Some("tpyo")),
        (
            vec![purpose(), other("expires_after[seconds]", "5"), file()],
            Some("expires_after[seconds]"),
        ),
        (
            vec![purpose(), other("expires_after[anchor]", "now"), file()],
            Some("expires_after[anchor]"),
        ),
        (
            vec![part("name=\"file\"; filename=\"\"", "{}")],
            Some("file"),
        ),
        (vec![endless], None),
    ] {
        let response = site.send(upload_of("", &parts)).await;
        let (status, named, _, message) = response.refusal();
        assert_eq!((status, named.as_deref()), (400, param), "{message}");
    }
    let broken = site.send(request("POST", "/v1/files", "", "{}")).await;
    assert_eq!(broken.refusal().1.as_deref(), Some("content-type"));
    // The order of the parts does not matter, nor does a name that points elsewhere.
    let named = part("name=\"file\"; filename=\"../../etc/passwd\"", "{}");
    let response = site.send(upload_of("", &[named, purpose()])).await;
    assert_eq!(response.json()["filename"], "../../etc/passwd");
    let encoded = part("name=\"file\"; filename*=UTF-8''%E2%82%AC+1.jsonl", "{}");
    let response = site.send(upload_of("", &[purpose(), encoded])).await;
    assert_eq!(response.json()["filename"], "€+1.jsonl");
    let quoted = part(r#"name="file"; filename="\"; filename*=UTF-8''a""#, "{}");
    let response = site.send(upload_of("", &[purpose(), quoted])).await;
    assert_eq!(response.json()["filename"], "\"; filename*=UTF-8''a");
    site.is_well().await;
    site.close().await;
}

#[tokio::test]
async fn a_folder_has_one_server_and_a_disk_that_takes_nothing_is_told() {
    let folder = tempfile::tempdir().expect("a folder");
    let site = site(&folder, echo()).await;
    let runtime = Runtime::in_process();
    let second = FrontendServer::bind(&runtime, kept_in(folder.path(), |_| {})).await;
    let error = second.expect_err("it is taken").to_string();
    assert!(error.contains("another server has it"), "{error}");
    soon(runtime.shutdown()).await;
    std::fs::remove_dir_all(folder.path().join("files")).expect("a folder");
    let response = site.send(upload("", "{}")).await;
    assert_eq!(response.status, 507, "{}", response.text());
    site.close().await;
}

#[tokio::test]
async fn without_a_folder_it_says_how_to_have_one() {
    let site = Site::start(echo()).await;
    let batch = batch_of("file-0");
    for (method, path, body) in [
        ("GET", "/v1/files", ""),
        ("GET", "/v1/files/file-0", ""),
        ("GET", "/v1/batches/batch_0", ""),
        ("POST", "/v1/batches", &*batch),
    ] {
        let response = site.send(request(method, path, "", body)).await;
        let (status, _, code, message) = response.refusal();
        assert_eq!(
            (status, code.as_deref()),
            (404, Some("no_batch_folder")),
            "{path}"
        );
        assert!(message.contains("--batch-folder"), "{message}");
    }
    site.close().await;
}
