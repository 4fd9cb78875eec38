//! Attacks by peers: a caller with large headers, and a worker whose file never ends.
//!
//! # Source
//! `docs/wire-protocol.md`; this file implements only what an attacker needs.
#![expect(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "attackers wait in real time"
)]

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context as _;
use serde_json::Value;

use super::figures::Row;
use super::{Bench, Deed, Scene};
use crate::served::resident_bytes;

const HELLO: u8 = 0;
const REQUEST: u8 = 1;
const ITEM: u8 = 2;
const CREDIT: u8 = 6;
const PING: u8 = 7;
const PONG: u8 = 8;

const HEADER_BYTES: usize = 8 << 20;
const STREAMS: u32 = 40;
const ITEM_BYTES: usize = 1 << 20;
/// The lying worker stops after this many bytes.
const LIE_BYTES: u64 = 3 << 30;

fn frame(kind: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len() + 6).unwrap_or(u32::MAX);
    let mut frame = length.to_be_bytes().to_vec();
    frame.extend([kind, 0]);
    frame.extend(stream.to_be_bytes());
    frame.extend_from_slice(payload);
    frame
}

/// A value as MessagePack. Every JSON value has one.
fn message_pack(value: &Value) -> Vec<u8> {
    rmp_serde::to_vec(value).unwrap_or_default()
}

fn hello() -> Vec<u8> {
    let hello = serde_json::json!({"version": 1, "min_version": 1, "max_frame_bytes": 16 << 20, "has_secret": false});
    frame(HELLO, 0, &message_pack(&hello))
}

/// The record of an endpoint in a lease's file.
fn record<'a>(entries: &'a [(String, Value)], endpoint: &str) -> anyhow::Result<&'a Value> {
    let found = entries.iter().find(|(key, _)| key.contains(endpoint));
    let (_, record) = found.with_context(|| format!("no record of {endpoint}"))?;
    Ok(record)
}

/// A worker's lease file: its path and its entries.
fn lease(folder: &Path) -> anyhow::Result<(PathBuf, Vec<(String, Value)>)> {
    let mut paths = fs::read_dir(folder)?.filter_map(|entry| Some(entry.ok()?.path()));
    let path = paths.find(|path| path.extension().is_some_and(|it| it == "lease"));
    let path = path.context("the worker has no lease")?;
    let file = fs::read(&path)?;
    let mut lines = file.splitn(3, |byte| *byte == b'\n');
    let (_, list, mut values) = (lines.next(), lines.next(), lines.next().unwrap_or_default());
    let list: Vec<Value> = serde_json::from_slice(list.unwrap_or_default())?;
    let mut entries = Vec::new();
    for entry in list {
        let length = usize::try_from(entry["length"].as_u64().unwrap_or(0))?;
        let (value, rest) = values.split_at(length.min(values.len()));
        let key = entry["key"].as_str().unwrap_or_default().to_owned();
        entries.push((key, serde_json::from_slice(value)?));
        values = rest;
    }
    Ok((path, entries))
}

/// A caller opens streams with large headers and grants no credit.
pub(super) fn large_headers(bench: &Bench) -> anyhow::Result<Row> {
    let (frontend, worker) = bench.fleet(&["--token-delay-ms", "20"])?;
    let (_, entries) = lease(&bench.folder.join("discovery"))?;
    let record = record(&entries, "/generate/")?;
    let location = record["address"]["location"].as_str();
    let location = location.context("the record has no address")?;
    let address: SocketAddr = location.split('/').next().unwrap_or(location).parse()?;
    let request = request(&record["instance"]);
    let mut scene = Scene::of(worker);
    scene.frontend = Some(frontend);
    Ok(bench.measure(&mut scene, |scene| {
        let process = scene.target.id();
        let before = resident_bytes(process);
        // The size that one frame may grow to; the memory for all of them is judged below.
        let mut deed = Deed::new(HEADER_BYTES);
        let sent = open_streams(address, &request, &mut deed.answers);
        thread::sleep(Duration::from_secs(1));
        let held = resident_bytes(process).saturating_sub(before) / 1_000_000;
        deed.note = format!("{held} MB held of 336 MB sent");
        if held > 100 {
            deed.problem = Some("held".into());
        }
        drop(sent);
        deed
    }))
}

fn request(instance: &Value) -> Vec<u8> {
    let head = serde_json::json!({
        "endpoint": "genset.backend.generate",
        "instance": instance,
        "credit": 0,
        "headers": {"x": "x".repeat(HEADER_BYTES)},
    });
    let body = serde_json::json!({
        "model": "tiny-chat",
        "input": {"tokens": [1, 2, 3]},
        "stop": {"max_tokens": 1000, "min_tokens": 0, "stop_token_ids": [], "eos_token_ids": [], "ignore_eos": true},
        "sampling": {},
        "output": {},
        "priority": 0,
        "resumed_tokens": 0,
    });
    [message_pack(&head), message_pack(&body)].concat()
}

/// Opens the streams; returns the connection to keep them open.
fn open_streams(
    address: SocketAddr,
    request: &[u8],
    answers: &mut Vec<String>,
) -> Option<TcpStream> {
    let mut connection = TcpStream::connect(address).ok()?;
    connection
        .set_write_timeout(Some(Duration::from_secs(20)))
        .ok()?;
    connection.write_all(&hello()).ok()?;
    let mut reply = [0; 256];
    let greeted = connection.read(&mut reply).ok()?;
    for stream in 1..=STREAMS {
        let is_sent = greeted > 0
            && connection
                .write_all(&frame(REQUEST, stream, request))
                .is_ok();
        answers.push(if is_sent { "sent" } else { "closed" }.into());
    }
    Some(connection)
}

/// A worker lists a file of 4 EB, and sends zeros to any peer that fetches it.
pub(super) fn endless_file(bench: &Bench) -> anyhow::Result<Row> {
    let (frontend, worker) = bench.fleet(&["--token-delay-ms", "20"])?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    listener.set_nonblocking(true)?;
    let (honest, entries) = lease(&bench.folder.join("discovery"))?;
    let lie = false_lease(&entries, listener.local_addr()?)?;
    let path = beside(&honest)?;
    let mut scene = Scene::of(frontend);
    scene.helper = Some(worker);
    Ok(bench.measure(&mut scene, |_| {
        // The cost of one honest file of a few megabytes.
        let mut deed = Deed::new(8 << 20);
        let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            scope.spawn(|| accept(&listener, &stop, &sent));
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_secs(8) {
                if let Err(error) = beat(&path, &lie) {
                    deed.problem = Some(error.to_string());
                }
                thread::sleep(Duration::from_millis(300));
            }
            drop(fs::remove_file(&path));
            stop.store(true, Ordering::Relaxed);
        });
        let megabytes = sent.into_inner() / 1_000_000;
        deed.note = format!("{megabytes} MB taken in 8 s");
        if megabytes > 200 {
            deed.problem = Some("it takes what it is sent".into());
        }
        deed
    }))
}

/// The path of another lease in the same folder.
fn beside(honest: &Path) -> anyhow::Result<PathBuf> {
    let stem = honest.file_stem().and_then(|stem| stem.to_str());
    let stem = stem.context("a lease without a name")?;
    let last = if stem.ends_with('0') { '1' } else { '0' };
    let other = format!("{}{last}.lease", &stem[..stem.len() - 1]);
    Ok(honest.with_file_name(other))
}

/// The honest worker's lease, rewritten as another instance of another model at another address.
fn false_lease(entries: &[(String, Value)], address: SocketAddr) -> anyhow::Result<Vec<u8>> {
    let (mut list, mut values) = (Vec::new(), Vec::new());
    for (key, record) in entries {
        let mut record = record.clone();
        let id = record["instance"].as_u64().context("no instance")?;
        let other = id ^ 1;
        let key = key.replace(&format!("{id:014x}"), &format!("{other:014x}"));
        record["instance"] = other.into();
        record["address"]["location"] = format!("{address}/{other:014x}").into();
        if let Some(card) = record.get_mut("card").filter(|card| card.is_object()) {
            card["name"] = "liar".into();
            for artifact in card["artifacts"].as_array_mut().into_iter().flatten() {
                artifact["size"] = (1_u64 << 62).into();
                artifact["blake3"] = "0".repeat(64).into();
            }
        }
        let value = serde_json::to_vec(&record)?;
        list.push(serde_json::json!({"key": key, "stamp": 1, "length": value.len()}));
        values.extend(value);
    }
    let list = serde_json::to_string(&list)?;
    let mut file = format!("genset-lease 1 {:020}\n{list}\n", 1).into_bytes();
    file.extend(values);
    Ok(file)
}

fn beat(path: &Path, lease: &[u8]) -> io::Result<()> {
    if !path.exists() {
        let temporary = path.with_extension("part");
        fs::write(&temporary, lease)?;
        fs::rename(temporary, path)?;
    }
    fs::File::options()
        .write(true)
        .open(path)?
        .set_modified(SystemTime::now())
}

fn accept(listener: &TcpListener, stop: &AtomicBool, sent: &AtomicU64) {
    thread::scope(|scope| {
        while !stop.load(Ordering::Relaxed) {
            match listener.accept() {
                Ok((connection, _)) => {
                    scope.spawn(|| drop(lie(connection, stop, sent)));
                }
                Err(_) => thread::sleep(Duration::from_millis(10)),
            }
        }
    });
}

/// Greets, answers pings, and sends zeros to any peer that asks for an artifact, as far as there is credit.
fn lie(mut connection: TcpStream, stop: &AtomicBool, sent: &AtomicU64) -> io::Result<()> {
    connection.set_nonblocking(false)?;
    connection.set_read_timeout(Some(Duration::from_millis(1)))?;
    connection.set_write_timeout(Some(Duration::from_secs(2)))?;
    let mut item = vec![0xc6, 0, 0x10, 0, 0];
    item.resize(5 + ITEM_BYTES, 0);
    let (mut received, mut piece) = (Vec::new(), vec![0; 1 << 16]);
    let mut asked: Option<(u32, u64)> = None;
    while !stop.load(Ordering::Relaxed) {
        match connection.read(&mut piece) {
            Ok(0) => return Ok(()),
            Ok(count) => received.extend_from_slice(&piece[..count]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        while let Some((kind, stream, payload)) = take_frame(&mut received) {
            match kind {
                HELLO => connection.write_all(&hello())?,
                PING => connection.write_all(&frame(PONG, 0, &payload))?,
                REQUEST if contains(&payload, b".artifacts") => asked = Some((stream, 64)),
                CREDIT => {
                    let more = payload.last().copied().map_or(0, u64::from);
                    asked = asked.map(|(stream, credit)| (stream, credit + more));
                }
                _ => {}
            }
        }
        if let Some((stream, credit)) = &mut asked
            && *credit > 0
            && sent.load(Ordering::Relaxed) < LIE_BYTES
        {
            connection.write_all(&frame(ITEM, *stream, &item))?;
            sent.fetch_add(item.len() as u64, Ordering::Relaxed);
            *credit -= 1;
        }
    }
    Ok(())
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// Removes the first complete frame from `received`; returns its kind, stream and payload.
fn take_frame(received: &mut Vec<u8>) -> Option<(u8, u32, Vec<u8>)> {
    let length = u32::from_be_bytes(*received.first_chunk::<4>()?);
    let end = 4 + usize::try_from(length).ok()?;
    let frame = received.get(..end)?.to_vec();
    received.drain(..end);
    let stream = u32::from_be_bytes(*frame.get(6..)?.first_chunk::<4>()?);
    Some((*frame.get(4)?, stream, frame.get(10..)?.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_read_as_they_are_written() {
        let mut received = [frame(PING, 0, b"abc"), frame(REQUEST, 7, b"")].concat();
        let cut = received.split_off(20);
        assert_eq!(take_frame(&mut received), Some((PING, 0, b"abc".to_vec())));
        assert_eq!(take_frame(&mut received), None);
        received.extend(cut);
        assert_eq!(take_frame(&mut received), Some((REQUEST, 7, Vec::new())));
    }

    #[test]
    fn a_false_lease_is_consistent_in_itself() {
        let record = serde_json::json!({
            "instance": 42,
            "address": {"plane": "tcp", "location": "127.0.0.1:1"},
            "card": {"name": "honest", "artifacts": [{"name": "tokenizer.json", "size": 1, "blake3": "ab"}]},
        });
        let entries = [(
            format!("genset/v1/instances/a/b/generate/{:014x}", 42),
            record,
        )];
        let address = "127.0.0.1:9".parse().unwrap();
        let lease_file = false_lease(&entries, address).unwrap();
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("1.lease"), lease_file).unwrap();
        let (_, read) = lease(folder.path()).unwrap();
        let (key, read) = &read[0];
        assert!(key.ends_with("000002b"), "{key}");
        assert_eq!(read["instance"], 43);
        assert_eq!(read["address"]["location"], "127.0.0.1:9/0000000000002b");
        assert_eq!(read["card"]["artifacts"][0]["size"], 1_u64 << 62);
    }
}
