//! Streamed chat requests over loopback, from a client that does as little as possible, because it shares the machine.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// A server that takes longer to start or to answer is broken.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// How long each load lasts. The clock of `/proc` ticks a hundred times a second, so this is exact to about 1 %.
pub(crate) const LOAD_TIME: Duration = Duration::from_secs(4);

/// Load before the measurement, to fill caches and allocator arenas.
pub(crate) const WARM_UP: Duration = Duration::from_millis(500);

pub(crate) struct Load {
    pub(crate) name: &'static str,
    pub(crate) streams: usize,
    pub(crate) tokens: u32,
    pub(crate) token_delay_ms: u32,
}

impl Load {
    /// As fast as possible.
    pub(crate) const FULL_SPEED: Self = Self {
        name: "256 streams, no delay",
        streams: 256,
        tokens: 128,
        token_delay_ms: 0,
    };

    /// At a model's pace.
    pub(crate) const PACED: Self = Self {
        name: "256 streams, a token every 7 ms",
        streams: 256,
        tokens: 128,
        token_delay_ms: 7,
    };

    /// Measures the cost of a request, rather than of a token.
    pub(crate) const SHORT_ANSWERS: Self = Self {
        name: "16 streams of one token",
        streams: 16,
        tokens: 1,
        token_delay_ms: 0,
    };
}

#[derive(Default)]
pub(crate) struct Done {
    pub(crate) requests: u64,
    pub(crate) tokens: u64,
    pub(crate) events: u64,
}

/// Keeps every stream busy for `time`, each on its own connection, and lets the last requests finish.
pub(crate) async fn drive(address: SocketAddr, load: &Load, time: Duration) -> io::Result<Done> {
    let until = Instant::now() + time;
    let request = request(load.tokens);
    let mut streams = JoinSet::new();
    for _ in 0..load.streams {
        let request = request.clone();
        streams.spawn(async move {
            let mut connection = TcpStream::connect(address).await?;
            connection.set_nodelay(true)?;
            let (mut requests, mut events) = (0, 0);
            while Instant::now() < until {
                connection.write_all(&request).await?;
                events += tokio::time::timeout(PATIENCE, read_stream(&mut connection)).await??;
                requests += 1;
            }
            io::Result::Ok((requests, events))
        });
    }
    let mut done = Done::default();
    while let Some(stream) = streams.join_next().await {
        let (requests, events) = stream.map_err(io::Error::other)??;
        done.requests += requests;
        done.tokens += requests * u64::from(load.tokens);
        done.events += events;
    }
    Ok(done)
}

/// A streamed request for `max_tokens`, in its wire format.
pub(crate) fn request(max_tokens: u32) -> Vec<u8> {
    let body = json!({
        "model": "tiny-chat",
        "stream": true,
        "ignore_eos": true,
        "max_tokens": max_tokens,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    });
    http_request(&body)
}

/// A request with this body, in its wire format.
pub(crate) fn http_request(body: &Value) -> Vec<u8> {
    let body = body.to_string();
    let len = body.len();
    format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         content-length: {len}\r\n\r\n{body}"
    )
    .into_bytes()
}

/// Reads one streamed answer and counts its events.
pub(crate) async fn read_stream(connection: &mut TcpStream) -> io::Result<u64> {
    const LAST_CHUNK: &[u8] = b"data: [DONE]\n\n\r\n0\r\n\r\n";
    let (mut buffer, mut events) = (Vec::with_capacity(16 << 10), 0);
    loop {
        // Keep a possible beginning of the end, or of an event's end.
        let kept = buffer.len().min(LAST_CHUNK.len());
        buffer.drain(..buffer.len() - kept);
        if connection.read_buf(&mut buffer).await? == 0 {
            return Err(io::Error::other("the server closed inside a stream"));
        }
        let new = buffer.get(kept.saturating_sub(1)..).unwrap_or_default();
        events += new.windows(2).filter(|pair| pair == b"\n\n").count() as u64;
        if buffer.ends_with(LAST_CHUNK) {
            return Ok(events);
        }
        if buffer.starts_with(b"HTTP/1.1 ") && !buffer.starts_with(b"HTTP/1.1 200") {
            let answer = String::from_utf8_lossy(&buffer);
            return Err(io::Error::other(format!("refused: {answer}")));
        }
    }
}
