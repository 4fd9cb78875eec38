//! The limits of `/v1/files` and `/v1/batches`. Each owner has its own, and no batch waits for another's.

use std::time::Duration;

use genset_frontend::BatchConfig;
use serde_json::Value;
use tempfile::TempDir;

use crate::access::{bearer, site_with_keys_and};
use crate::batches::{
    BOUNDARY, batch_as, batch_of, batch_that, begin, begin_as, ended, kept_in, line, lines, site,
    upload,
};
use crate::client::{request, soon};
use crate::script::Script;
use crate::support::{Site, echo, eventually};

/// The number of bytes on disk of each upload in progress.
fn uploading(folder: &TempDir) -> Vec<u64> {
    let entries = std::fs::read_dir(folder.path().join("files")).expect("a folder");
    entries
        .map(|entry| entry.expect("an entry"))
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(".tmp"))
        .map(|entry| entry.metadata().map_or(0, |metadata| metadata.len()))
        .collect()
}

/// The bytes of an upload without its last line.
fn begun_upload(content: &str) -> Vec<u8> {
    let mut bytes = upload("", content);
    let end = format!("\r\n--{BOUNDARY}--\r\n");
    bytes.truncate(bytes.len() - end.len());
    bytes
}

#[tokio::test]
async fn every_limit_is_told() {
    let folder = tempfile::tempdir().expect("a folder");
    let tight = kept_in(folder.path(), |batches| {
        batches.max_file_bytes = 1000;
        batches.max_files = 2;
        batches.max_total_bytes = 1500;
        batches.max_batches = 1;
    });
    let site = Site::with(tight, Script::silent(5)).await;
    let large = site.send(upload("", &"x".repeat(1001))).await;
    assert_eq!(large.status, 413, "{}", large.text());
    let id = begin(&site, &lines(&[line("a", "Hello")])).await;
    let batch = batch_that(&site, &id, |batch| batch["status"] == "in_progress").await;
    let file = batch["input_file_id"].as_str().expect("a file");
    let second = site
        .send(request("POST", "/v1/batches", "", batch_of(file)))
        .await;
    assert_eq!(second.status, 429, "{}", second.text());
    assert_eq!(site.send(upload("", &"x".repeat(1000))).await.status, 200);
    let third = site.send(upload("", "x")).await;
    assert_eq!(third.status, 400, "{}", third.text());
    assert!(third.text().contains("2 files"), "{}", third.text());
    site.send(request("POST", &format!("/v1/batches/{id}/cancel"), "", ""))
        .await;
    ended(&site, &id, "cancelled").await;
    site.send(request("DELETE", &format!("/v1/files/{file}"), "", ""))
        .await;
    let full = site.send(upload("", &"x".repeat(600))).await;
    assert_eq!(full.status, 400, "{}", full.text());
    assert!(
        full.text().contains("1600 of 1500 bytes"),
        "{}",
        full.text()
    );
    assert!(uploading(&folder).is_empty(), "what was refused is gone");
    site.close().await;
}

#[tokio::test]
async fn uploads_under_way_count_as_files() {
    let folder = tempfile::tempdir().expect("a folder");
    let tight = kept_in(folder.path(), |batches| batches.max_total_bytes = 1500);
    let site = Site::with(tight, echo()).await;
    let mut first = site.connect().await;
    first.send(begun_upload(&"x".repeat(1000))).await;
    eventually("the first is on the disk", || {
        uploading(&folder) == [1000_u64]
    })
    .await;
    let mut second = site.connect().await;
    second.send(begun_upload(&"x".repeat(600))).await;
    let refused = second.response().await;
    assert_eq!(refused.status, 400, "{}", refused.text());
    assert!(
        refused.text().contains("1600 of 1500 bytes"),
        "{}",
        refused.text()
    );
    drop(second);
    // An abandoned upload frees its room.
    drop(first);
    soon(async {
        while site.send(upload("", &"x".repeat(600))).await.status != 200 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    // A completed upload counts once.
    let last = site.send(upload("", &"x".repeat(900))).await;
    assert_eq!(last.status, 200, "{}", last.text());
    let full = site.send(upload("", "x")).await;
    assert_eq!(full.status, 400, "{}", full.text());
    assert!(
        full.text().contains("1501 of 1500 bytes"),
        "{}",
        full.text()
    );
    site.close().await;
}

#[tokio::test]
async fn an_upload_that_begins_while_another_has_the_last_place_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let one = kept_in(folder.path(), |batches| batches.max_files = 1);
    let site = Site::with(one, echo()).await;
    let mut first = site.connect().await;
    first.send(begun_upload("x")).await;
    eventually("the first is on the disk", || uploading(&folder) == [1_u64]).await;
    assert!(site.metric("genset_http_memory_used_bytes") > 0.0);
    let second = site.send(upload("", "x")).await;
    assert_eq!(second.status, 400, "{}", second.text());
    assert!(second.text().contains("1 files"), "{}", second.text());
    first.send(format!("\r\n--{BOUNDARY}--\r\n")).await;
    let kept = first.response().await;
    assert_eq!(kept.status, 200, "{}", kept.text());
    assert_eq!(site.metric("genset_http_memory_used_bytes"), 0.0);
    site.close().await;
}

#[tokio::test]
async fn a_batch_that_waits_for_a_quota_holds_up_no_other() {
    let folder = tempfile::tempdir().expect("a folder");
    let few = |batches: &mut BatchConfig| batches.concurrency = 2.try_into().expect("two");
    let keys = [
        ("poor", "sk-poor", "tokens_per_minute = 1"),
        ("rich", "sk-rich", ""),
    ];
    let (site, _keys) = site_with_keys_and(&keys, kept_in(folder.path(), few), echo()).await;
    let (poor, rich) = (bearer("sk-poor"), bearer("sk-rich"));
    let asked: Vec<Value> = (0..20)
        .map(|index| line(&format!("r{index}"), "Hello"))
        .collect();
    let waiting = begin_as(&site, &poor, &lines(&asked)).await;
    // The cost of the first answers exceeds the quota for many minutes.
    batch_as(&site, &poor, &waiting, |batch| {
        batch["request_counts"]["completed"] != 0
    })
    .await;
    let other = begin_as(&site, &rich, &lines(&[line("a", "Hello")])).await;
    batch_as(&site, &rich, &other, |batch| batch["status"] == "completed").await;
    let batch = batch_as(&site, &poor, &waiting, |_| true).await;
    assert_eq!(batch["status"], "in_progress", "{batch}");
    assert_eq!(batch["request_counts"]["failed"], 0, "{batch}");
    // Waiting batches end with the server.
    site.close().await;
}

#[tokio::test]
async fn a_custom_id_that_is_too_long_is_refused_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let site = site(&folder, echo()).await;
    let (longest, too_long) = ("a".repeat(512), "a".repeat(513));
    let input = lines(&[line(&longest, "Hello"), line(&too_long, "Hello")]);
    let id = begin(&site, &input).await;
    let batch = ended(&site, &id, "failed").await;
    let errors = batch["errors"]["data"].as_array().expect("errors");
    assert_eq!(errors.len(), 1, "{batch}");
    assert_eq!(errors[0]["code"], "invalid_custom_id", "{batch}");
    assert_eq!(errors[0]["param"], "custom_id", "{batch}");
    assert_eq!(errors[0]["line"], 2, "{batch}");
    site.close().await;
}
