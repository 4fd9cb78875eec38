//! TensorRT-LLM's events, as its route gives them.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use super::*;
use crate::kv::route::RouteReader;

fn told(number: u64, window: u32, data: &Value) -> Value {
    json!({"event_id": number, "data": data, "window_size": window})
}

fn blocks(parent: Option<u64>, blocks: &[(u64, &[u32])]) -> Value {
    let token = |id: &u32| json!({"type": "unique_token", "token_id": id, "token_extra_id": 0});
    let block = |(hash, ids): &(u64, &[u32])| {
        let tokens: Vec<Value> = ids.iter().map(token).collect();
        json!({"type": "stored_block", "block_hash": hash, "tokens": tokens, "cache_level": 0, "priority": 35})
    };
    let blocks: Vec<Value> = blocks.iter().map(block).collect();
    json!({"type": "stored", "parent_hash": parent, "blocks": blocks})
}

fn gone(hashes: &[u64]) -> Value {
    json!({"type": "removed", "block_hashes": hashes})
}

fn take(reader: &mut RouteReader, events: &[Value]) -> Vec<KvEventData> {
    reader.take(&serde_json::to_vec(events).unwrap()).unwrap()
}

#[test]
fn what_trtllm_gives_is_told_in_our_hashes() {
    let prompt = tokens(300, 96);
    let hashes = ours(None, &prompt);
    let mut reader = RouteReader::new(SIZE, 2048);
    let created = json!({"type": "created", "num_blocks_per_cache_level": [100, 0]});
    // The last block is partly filled.
    let first = [
        (FIRST, &prompt[..32]),
        (SECOND, &prompt[32..64]),
        (7, &prompt[64..80]),
    ];
    let events = [
        told(0, 1024, &created),
        told(1, 1024, &blocks(None, &first)),
    ];
    let expected = [stored_event(None, &hashes[..2])];
    assert_eq!(take(&mut reader, &events), expected);
    assert_eq!(take(&mut reader, &[]), []);

    let events = [
        told(2, 1024, &gone(&[7])),
        told(3, 1024, &blocks(Some(SECOND), &[(THIRD, &prompt[64..])])),
        // Of layers that see less.
        told(4, 128, &gone(&[FIRST, SECOND, THIRD])),
        told(5, 1024, &gone(&[THIRD])),
    ];
    let expected = [
        stored_event(Some(hashes[1]), &hashes[2..]),
        KvEventData::Removed {
            blocks: vec![hashes[2]],
        },
    ];
    assert_eq!(take(&mut reader, &events), expected);
}

#[test]
fn a_gap_in_the_numbers_leaves_nothing_known() {
    let prompt = tokens(300, 32);
    let mut reader = RouteReader::new(SIZE, 2048);
    let stored = blocks(None, &[(FIRST, &prompt[..])]);
    // What was before the first poll is not missed.
    assert_eq!(take(&mut reader, &[told(5, 1024, &stored)]).len(), 1);
    let events = [told(7, 1024, &gone(&[FIRST]))];
    assert_eq!(take(&mut reader, &events), [KvEventData::Cleared]);
    assert!(reader.take(b"{}").is_err());
}

/// Answers one request with `events`, and all others with an error.
async fn serve(listener: TcpListener, events: Value) {
    let mut answers = vec![(200, events.to_string())];
    loop {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut head = [0; 4096];
        let length = stream.read(&mut head).await.unwrap();
        assert!(head[..length].starts_with(b"POST /kv_cache_events "));
        let (status, body) = answers.pop().unwrap_or((500, String::new()));
        let length = body.len();
        let answer = format!("HTTP/1.1 {status} X\r\ncontent-length: {length}\r\n\r\n{body}");
        stream.write_all(answer.as_bytes()).await.unwrap();
    }
}

#[tokio::test]
async fn a_route_is_polled_and_a_failed_poll_leaves_nothing_known() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let prompt = tokens(300, 32);
    let events = json!([told(0, 1024, &blocks(None, &[(FIRST, &prompt[..])]))]);
    let mut serving = JoinSet::new();
    serving.spawn(serve(listener, events));
    let publisher = KvEventPublisher::new();
    let mut changes = publisher.subscribe();
    let follower = KvFollower {
        feed: KvFeed::Route,
        rank: 0,
        clears: Clears::new(publisher.clone()),
        publisher,
        block_size: SIZE,
        total_blocks: None,
    };
    let (key, tasks) = (ApiKey::random(), TaskTracker::new());
    let server = Arc::new(Server::new(Dialect::Trtllm, port, &key, tasks.clone()));
    tasks.spawn(follower.run(Arc::clone(&server)));
    let expected = stored_event(None, &ours(None, &prompt));
    assert_eq!(next(&mut changes).await, expected);
    assert_eq!(next(&mut changes).await, KvEventData::Cleared);
    end(&server, &tasks).await;
}

#[test]
fn trtllm_has_events_if_its_settings_keep_them() {
    let size = |settings: &str| {
        let config = config(Some(settings));
        let feed = KvFeed::of(&config, Dialect::Trtllm, None);
        let size = trtllm_event_blocks(&config);
        assert_eq!(feed.is_some(), size.is_some(), "{settings}");
        size.map(NonZeroU32::get)
    };
    let kept = "kv_cache_config: {event_buffer_max_size: 1024";
    assert_eq!(size(&format!("{kept}}}")), Some(32));
    assert_eq!(size(&format!("{kept}, tokens_per_block: 64}}")), Some(64));
    assert_eq!(size(&format!("{kept}, enable_block_reuse: false}}")), None);
    assert_eq!(size("kv_cache_config: {event_buffer_max_size: 0}"), None);
    assert_eq!(size("dtype: half"), None);
}
