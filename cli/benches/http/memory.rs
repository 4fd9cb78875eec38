//! The memory of an open stream: 4,096 slow streams in one process.

use std::io;

use rustix::process::{Resource, getrlimit, setrlimit};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::server::Server;
use crate::support::load::{PATIENCE, request};
use crate::support::round;

const STREAMS: usize = 4096;

/// Events of each stream before the measurement, so that it is in progress.
const EVENTS: usize = 4;

/// Files that a process needs in addition to its sockets.
const OTHER_FILES: u64 = 256;

pub(crate) async fn measure() -> io::Result<Value> {
    allow_files(STREAMS as u64 + OTHER_FILES)?;
    let places = STREAMS.to_string();
    let flags = [
        "--token-delay-ms",
        "1000",
        "--max-running-requests",
        &places,
    ];
    let server = Server::start(&flags).await?;
    let idle = server.genset.memory_mib("VmRSS")?;
    let (under_way, mut waiting) = mpsc::channel(STREAMS);
    let mut streams = JoinSet::new();
    for _ in 0..STREAMS {
        // One after another, so that the kernel's queue of new connections does not overflow.
        let mut connection = TcpStream::connect(server.address).await?;
        connection.write_all(&request(20_000)).await?;
        streams.spawn(follow(connection, under_way.clone()));
    }
    drop(under_way);
    for _ in 0..STREAMS {
        let next = tokio::time::timeout(2 * PATIENCE, waiting.recv()).await?;
        next.ok_or_else(|| io::Error::other("a stream ended early"))?;
    }
    let open = server.genset.memory_mib("VmRSS")?;
    let peak = server.genset.memory_mib("VmHWM")?;
    streams.shutdown().await;
    server.end().await?;
    Ok(json!({
        "streams": STREAMS,
        "idle_rss_mib": idle,
        "open_rss_mib": open,
        "peak_rss_mib": peak,
        "kib_per_stream": round((open - idle) * 1024.0 / STREAMS as f64, 10.0),
    }))
}

/// Reads one stream until it is cancelled; notifies when it is in progress.
async fn follow(mut connection: TcpStream, under_way: mpsc::Sender<()>) -> io::Result<()> {
    let (mut buffer, mut events, mut last) = ([0; 1024], 0, 0);
    loop {
        let read = connection.read(&mut buffer).await?;
        if read == 0 {
            return Ok(());
        }
        let was_under_way = events >= EVENTS;
        for &byte in &buffer[..read] {
            events += usize::from((last, byte) == (b'\n', b'\n'));
            last = byte;
        }
        if !was_under_way && events >= EVENTS && under_way.send(()).await.is_err() {
            return Ok(());
        }
    }
}

/// Raises this process's limit of open files, which the server inherits, as far as the system allows.
fn allow_files(files: u64) -> io::Result<()> {
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= files) {
        return Ok(());
    }
    if limit.maximum.is_some_and(|maximum| maximum < files) {
        let problem = format!("{files} open files are needed, and the system allows fewer");
        return Err(io::Error::other(problem));
    }
    limit.current = Some(files);
    setrlimit(Resource::Nofile, limit).map_err(io::Error::from)
}
