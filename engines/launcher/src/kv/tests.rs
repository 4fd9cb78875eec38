mod route;
mod sglang;

use std::time::Duration;

use genset_backend_common::kv::{
    BlockHash, KvEventData, KvEventPublisher, KvEventSubscription, hash_blocks, salt_root,
};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};
use std::num::NonZeroU32;
use tokio::time::timeout;
use tokio_util::task::TaskTracker;
use zeromq::{PubSocket, RouterSocket, Socket as _, SocketRecv as _, SocketSend as _, ZmqMessage};

use super::batch::{Batch, Event};
use super::follow::Reader;
use super::*;
use crate::config::ServerInput;
use crate::extra::ExtraArgs;
use crate::key::ApiKey;
use crate::kind::ServerKind;
use crate::server::Server;

/// Only to fail instead of hanging.
const LONG: Duration = Duration::from_secs(120);
const SIZE: NonZeroU32 = NonZeroU32::new(32).unwrap();

fn tokens(from: u32, count: u32) -> Vec<u32> {
    (from..from + count).collect()
}

fn ours(salt: Option<&str>, tokens: &[u32]) -> Vec<BlockHash> {
    hash_blocks(salt.map(salt_root), tokens, SIZE)
}

/// A batch as vLLM 0.32.0 sends it.
fn batch(events: &[Value]) -> Vec<u8> {
    batch_of(0, events)
}

fn batch_of(rank: u32, events: &[Value]) -> Vec<u8> {
    rmp_serde::to_vec(&json!([1_795_363_300.57, events, rank])).unwrap()
}

const FIRST: u64 = 2_065_545_987_729_268_343;
const SECOND: u64 = 4_118_834_454_899_676_085;
const THIRD: u64 = 8_615_898_027_510_806_489;

fn stored(hashes: &[u64], parent: Option<u64>, tokens: &[u32]) -> Value {
    json!({"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
           "block_size": 32, "lora_id": null, "medium": "GPU", "lora_name": null,
           "extra_keys": vec![Value::Null; hashes.len()], "group_idx": 0, "kv_cache_spec_kind": "full_attention"})
}

fn removed(hash: u64) -> Value {
    json!({"type": "BlockRemoved", "block_hashes": [hash], "medium": "GPU", "group_idx": 0})
}

fn all(batches: &[Vec<u8>]) -> Vec<KvEventData> {
    all_of(Dialect::Vllm, batches)
}

fn all_of(dialect: Dialect, batches: &[Vec<u8>]) -> Vec<KvEventData> {
    let mut reader = Reader::new(dialect, 0, SIZE, Some(2048));
    let numbered = (0..).zip(batches);
    numbered
        .flat_map(|(number, payload)| reader.take(number, payload))
        .collect()
}

fn stored_event(parent: Option<BlockHash>, blocks: &[BlockHash]) -> KvEventData {
    KvEventData::Stored {
        parent,
        blocks: blocks.to_vec(),
    }
}

#[test]
fn what_vllm_was_recorded_to_send_is_told_in_our_hashes() {
    let prompt = tokens(300, 64);
    let whole = [prompt.clone(), tokens(700, 32)].concat();
    let hashes = ours(None, &whole);
    let changes = all(&[
        batch(&[stored(&[FIRST, SECOND], None, &prompt)]),
        // A block that was completed by generated tokens.
        batch(&[stored(&[THIRD], Some(SECOND), &tokens(700, 32))]),
        batch(&[
            removed(THIRD),
            removed(SECOND),
            stored(&[7], Some(FIRST), &tokens(1, 32)),
        ]),
        batch(&[
            json!({"type": "AllBlocksCleared"}),
            stored(&[FIRST], None, &tokens(300, 32)),
        ]),
    ]);
    let other = ours(None, &[tokens(300, 32), tokens(1, 32)].concat());
    let expected = [
        stored_event(None, &hashes[..2]),
        stored_event(Some(hashes[1]), &hashes[2..]),
        KvEventData::Removed {
            blocks: vec![hashes[2]],
        },
        KvEventData::Removed {
            blocks: vec![hashes[1]],
        },
        stored_event(Some(hashes[0]), &other[1..]),
        KvEventData::Cleared,
        stored_event(None, &hashes[..1]),
    ];
    assert_eq!(changes, expected);
}

/// Bytes as encoded in MessagePack.
struct Digest(&'static [u8]);

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self.0)
    }
}

#[test]
fn arrays_and_digests_are_read_as_maps_and_numbers_are() {
    let prompt = tokens(300, 32);
    let as_array = json!([
        "BlockStored",
        [FIRST],
        null,
        prompt,
        32,
        null,
        "GPU",
        null,
        [null],
        0,
        "full_attention",
        null,
        null,
        "of a later version"
    ]);
    let as_map = stored(&[FIRST], None, &prompt);
    let shortest = json!(["BlockStored", [FIRST], null, prompt, 32, null]);
    for event in [as_map, as_array, shortest] {
        let changes = all(&[batch(&[event]), batch(&[json!(["BlockRemoved", [FIRST]])])]);
        assert_eq!(changes.len(), 2, "{changes:?}");
        assert_eq!(changes[0], stored_event(None, &ours(None, &prompt)));
    }
    let digest = || Digest(&[7; 32]);
    let none = Option::<u32>::None;
    let stored = ("BlockStored", (digest(),), none, &prompt, 32, none, "GPU");
    let removed = ("BlockRemoved", (digest(),), "GPU");
    let payload = rmp_serde::to_vec(&(1.5, (stored, removed, ("AllBlocksCleared",)))).unwrap();
    assert_eq!(all(&[payload]).len(), 3);
    // SGLang's numbers are signed.
    let signed = batch(&[json!(["BlockRemoved", [-1]]), json!({"type": "Renamed"})]);
    assert_eq!(
        Batch::read(&signed).unwrap().events.pop(),
        Some(Event::Other("Renamed".into()))
    );
}

#[test]
fn blocks_that_cannot_be_hashed_as_ours_are_left_out_and_so_is_what_follows_them() {
    let prompt = tokens(300, 32);
    let plain = stored(&[FIRST], None, &prompt);
    let with = |field: &str, value: Value| {
        let mut event = plain.clone();
        event[field] = value;
        event
    };
    for odd in [
        with("medium", json!("CPU")),
        with("locality", json!("REMOTE")),
        with("group_idx", json!(1)),
        with("kv_cache_spec_kind", json!("sliding_window")),
        with("block_size", json!(16)),
        with("token_ids", json!([1, 2])),
        with("lora_name", json!("adapter")),
        with("extra_keys", json!([[["image", 3]]])),
        with("parent_block_hash", json!(99)),
    ] {
        let after = stored(&[SECOND], Some(FIRST), &tokens(1, 32));
        let changes = all(&[batch(&[odd.clone(), after, removed(FIRST)])]);
        assert_eq!(changes, [], "{odd}");
    }
    let salted = with("extra_keys", json!([["tenant"]]));
    assert_eq!(
        all(&[batch(&[salted])]),
        [stored_event(None, &ours(Some("tenant"), &prompt))]
    );
    // The offloaded copy still exists.
    let mut offloaded = removed(FIRST);
    offloaded["medium"] = json!("CPU");
    assert_eq!(all(&[batch(&[plain, offloaded])]).len(), 1);
}

#[test]
fn a_block_that_vllm_has_twice_is_there_until_both_are_gone() {
    let prompt = tokens(300, 64);
    let hashes = ours(None, &prompt);
    let changes = all(&[
        batch(&[stored(&[FIRST], None, &prompt[..32])]),
        // From a request that was computed at the same time.
        batch(&[stored(&[FIRST], None, &prompt[..32]), removed(FIRST)]),
        batch(&[stored(&[SECOND], Some(FIRST), &prompt[32..])]),
        batch(&[removed(FIRST), removed(FIRST)]),
        // Both are cleared.
        batch(&[
            stored(&[FIRST], None, &prompt[..32]),
            stored(&[FIRST], None, &prompt[..32]),
            json!({"type": "AllBlocksCleared"}),
            stored(&[FIRST], None, &prompt[..32]),
            removed(FIRST),
        ]),
    ]);
    let (first, gone) = (stored_event(None, &hashes[..1]), vec![hashes[0]]);
    let gone = KvEventData::Removed { blocks: gone };
    let expected = [
        first.clone(),
        stored_event(Some(hashes[0]), &hashes[1..]),
        gone.clone(),
        first.clone(),
        KvEventData::Cleared,
        first,
        gone,
    ];
    assert_eq!(changes, expected);
}

#[test]
fn a_server_with_more_blocks_than_it_has_is_not_believed() {
    let mut reader = Reader::new(Dialect::Vllm, 0, SIZE, Some(1));
    let payload = batch(&[stored(&[FIRST, SECOND], None, &tokens(300, 64))]);
    let expected = stored_event(None, &ours(None, &tokens(300, 32)));
    assert_eq!(reader.take(0, &payload), [expected]);
}

#[test]
fn batches_that_are_lost_or_broken_leave_nothing_known() {
    let mut reader = Reader::new(Dialect::Vllm, 0, SIZE, None);
    let first = batch(&[stored(&[FIRST], None, &tokens(300, 32))]);
    let second = batch(&[stored(&[SECOND], Some(FIRST), &tokens(1, 32))]);
    assert_eq!(reader.take(0, &first).len(), 1);
    assert_eq!(reader.take(0, &first), [], "it came twice");
    assert_eq!(reader.take(4, &second), [KvEventData::Cleared]);
    assert_eq!(reader.take(1, &second), [], "it came late");
    for broken in [
        &b"\xc1"[..],
        b"",
        &rmp_serde::to_vec(&json!([1.0, [{"block_hashes": [true]}]])).unwrap(),
        &batch_of(1, &[]),
    ] {
        let next = reader.next;
        assert_eq!(reader.take(next, broken), [KvEventData::Cleared]);
    }
    let next = reader.next;
    assert_eq!(reader.take(next, &first).len(), 1);
}

#[test]
fn blocks_behind_those_that_others_cleared_are_left_out() {
    let mut reader = Reader::new(Dialect::Vllm, 0, SIZE, None);
    let first = batch(&[stored(&[FIRST], None, &tokens(300, 32))]);
    let second = batch(&[stored(&[SECOND], Some(FIRST), &tokens(1, 32))]);
    reader.forget(0);
    assert_eq!(reader.take(0, &first).len(), 1);
    reader.forget(1);
    assert_eq!(reader.take(1, &second), [], "its parent is gone");
    assert_eq!(reader.take(2, &batch(&[removed(FIRST)])), [], "it is gone");
    assert_eq!(reader.take(3, &first).len(), 1);
    reader.forget(1);
    assert_eq!(reader.take(4, &second).len(), 1);
}

fn config(settings: Option<&str>) -> LauncherConfig {
    let input = ServerInput::Tokens { vocab_size: None };
    let mut config = LauncherConfig::new(ServerKind::Vllm, "/m", input);
    config.extra = settings.map(ExtraArgs::in_test);
    config
}

#[test]
fn only_a_server_that_can_publish_to_us_alone_is_told_to() {
    let source = |config: &LauncherConfig, dialect| KvSource::for_server(config, dialect).unwrap();
    let vllm = source(&config(None), Dialect::Vllm).unwrap();
    let [flag, value] = vllm.args();
    let value: Value = serde_json::from_str(&value).unwrap();
    assert_eq!(flag, "--kv-events-config");
    assert_eq!(value["publisher"], "zmq");
    let path = value["endpoint"].as_str().unwrap().strip_prefix("ipc://");
    let folder = std::path::Path::new(path.unwrap()).parent().unwrap();
    let mode = std::fs::metadata(folder).unwrap().permissions();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode) & 0o077, 0);
    assert!(!vllm.is_bound(0));
    // The lock keeps others from removing it.
    assert!(lock_folder(folder).is_none());
    assert!(source(&config(Some("{\"dtype\": \"half\"}")), Dialect::Vllm).is_some());
    assert!(source(&config(None), Dialect::Trtllm).is_none());
    for own in [
        "{\"kv_events_config\": {\"publisher\": \"zmq\"}}",
        "{\"enable_prefix_caching\": false}",
        "{\"no-enable-prefix-caching\": true}",
    ] {
        assert!(source(&config(Some(own)), Dialect::Vllm).is_none(), "{own}");
    }
}

/// A publisher like vLLM's: it sends some batches, and replays all of them on request.
struct Publisher {
    events: PubSocket,
    replay: RouterSocket,
    batches: Vec<Vec<u8>>,
}

impl Publisher {
    async fn bind(source: &KvSource, rank: u32) -> Self {
        let (mut events, mut replay) = (PubSocket::new(), RouterSocket::new());
        events.bind(&source.events(rank)).await.unwrap();
        replay.bind(&source.replay(rank)).await.unwrap();
        let batches = Vec::new();
        Self {
            events,
            replay,
            batches,
        }
    }

    /// Stores a batch, and sends it unless it must be lost.
    async fn publish(&mut self, payload: Vec<u8>, is_lost: bool) {
        let number = u64::try_from(self.batches.len()).unwrap();
        self.batches.push(payload.clone());
        if !is_lost {
            let message = message(vec![vec![], number.to_be_bytes().to_vec(), payload]);
            self.events.send(message).await.unwrap();
        }
    }

    /// Answers a replay request.
    async fn answer(&mut self) {
        let asked = self.replay.recv().await.unwrap().into_vec();
        let start = u64::from_be_bytes(asked[2].as_ref().try_into().unwrap());
        let kept = (0..)
            .zip(&self.batches)
            .filter(|(number, _)| *number >= start);
        let kept: Vec<_> = kept
            .map(|(number, payload)| (number, payload.clone()))
            .collect();
        for (number, payload) in kept.into_iter().chain([(u64::MAX, vec![])]) {
            let parts = vec![
                asked[0].to_vec(),
                vec![],
                vec![],
                number.to_be_bytes().to_vec(),
                payload,
            ];
            self.replay.send(message(parts)).await.unwrap();
        }
    }
}

fn message(parts: Vec<Vec<u8>>) -> ZmqMessage {
    let parts: Vec<bytes::Bytes> = parts.into_iter().map(Into::into).collect();
    ZmqMessage::try_from(parts).unwrap()
}

async fn next(changes: &mut KvEventSubscription) -> KvEventData {
    timeout(LONG, changes.next()).await.unwrap().unwrap().data
}

/// Follows a rank of a server.
fn followed(
    source: &Arc<KvSource>,
    rank: u32,
    publisher: KvEventPublisher,
) -> (KvEventSubscription, Arc<Server>, TaskTracker) {
    let follower = KvFollower {
        feed: KvFeed::Sockets(Arc::clone(source)),
        rank,
        clears: Clears::new(publisher.clone()),
        publisher,
        block_size: SIZE,
        total_blocks: None,
    };
    let changes = follower.publisher.subscribe();
    let tasks = TaskTracker::new();
    let key = ApiKey::random();
    let server = Arc::new(Server::new(Dialect::Vllm, 1, &key, tasks.clone()));
    tasks.spawn(follower.run(Arc::clone(&server)));
    (changes, server, tasks)
}

/// Ends a server; returns once nobody follows it any more.
async fn end(server: &Server, tasks: &TaskTracker) {
    server.fail(EngineError::engine_shutdown("it is over"));
    tasks.close();
    timeout(LONG, tasks.wait()).await.unwrap();
}

fn vllm_source() -> Arc<KvSource> {
    let source = KvSource::for_server(&config(None), Dialect::Vllm);
    source.unwrap().unwrap()
}

#[tokio::test]
async fn an_answer_that_comes_too_late_is_none_to_the_next_question() {
    let source = vllm_source();
    let mut publisher = Publisher::bind(&source, 0).await;
    let (_changes, server, tasks) = followed(&source, 0, KvEventPublisher::new());
    let mut askers = Vec::new();
    for _ in 0..2 {
        let asked = timeout(LONG, publisher.replay.recv()).await;
        askers.push(asked.unwrap().unwrap().into_vec()[0].clone());
    }
    assert_ne!(askers[0], askers[1]);
    end(&server, &tasks).await;
}

#[tokio::test]
async fn what_was_missed_is_asked_for_and_the_end_of_the_server_clears_its_cache() {
    let source = vllm_source();
    let mut publisher = Publisher::bind(&source, 0).await;
    assert!(source.is_bound(0) && !source.is_bound(1));
    let hashes = ours(None, &tokens(300, 96));
    publisher
        .publish(batch(&[stored(&[FIRST], None, &tokens(300, 32))]), true)
        .await;
    let (mut changes, server, tasks) = followed(&source, 0, KvEventPublisher::new());

    // The batches from before the follower connected.
    timeout(LONG, publisher.answer()).await.unwrap();
    assert_eq!(next(&mut changes).await, stored_event(None, &hashes[..1]));
    // A lost batch is noticed when the next one arrives.
    let second = batch(&[stored(&[SECOND], Some(FIRST), &tokens(332, 32))]);
    publisher.publish(second, true).await;
    let third = batch(&[stored(&[THIRD], Some(SECOND), &tokens(364, 32))]);
    publisher.publish(third, false).await;
    timeout(LONG, publisher.answer()).await.unwrap();
    assert_eq!(
        next(&mut changes).await,
        stored_event(Some(hashes[0]), &hashes[1..2])
    );
    assert_eq!(
        next(&mut changes).await,
        stored_event(Some(hashes[1]), &hashes[2..])
    );
    // The last batch is lost, and no later one shows it: the follower asks after a silence.
    publisher.publish(batch(&[removed(THIRD)]), true).await;
    let removed = KvEventData::Removed {
        blocks: vec![hashes[2]],
    };
    timeout(LONG, publisher.answer()).await.unwrap();
    assert_eq!(next(&mut changes).await, removed);

    end(&server, &tasks).await;
    assert_eq!(next(&mut changes).await, KvEventData::Cleared);
}

#[tokio::test]
async fn each_rank_is_followed_at_sockets_of_its_own() {
    let source = vllm_source();
    // Named as vLLM does.
    let (events, replay) = (source.events(0), source.replay(0));
    assert!(events.ends_with("/inproc-events") && replay.ends_with("/inproc-replay"));
    assert_eq!(source.events(1), format!("{events}_dp1"));
    assert_eq!(source.replay(1), format!("{replay}_dp1"));
    let whole = KvEventPublisher::new();
    let mut followers = Vec::new();
    for rank in [0, 1] {
        let mut publisher = Publisher::bind(&source, rank).await;
        let prompt = tokens(300, 32 * (rank + 1));
        let hashes = [FIRST, SECOND];
        let hashes = &hashes[..prompt.len() / 32];
        let batch = batch_of(rank, &[stored(hashes, None, &prompt)]);
        publisher.publish(batch, true).await;
        let (mut changes, server, tasks) = followed(&source, rank, whole.of_rank(rank));
        timeout(LONG, publisher.answer()).await.unwrap();
        let expected = stored_event(None, &ours(None, &prompt));
        assert_eq!(next(&mut changes).await, expected);
        followers.push((server, tasks));
    }
    assert_eq!(whole.subscribe().snapshot.blocks.len(), 2);
    for (server, tasks) in &followers {
        end(server, tasks).await;
    }
    assert!(whole.subscribe().snapshot.blocks.is_empty());
}
