//! Tokens through a whole server on one thread: an engine's stream, its Worker, the answer, its events, hyper, a socket, and a
//! client that allocates nothing.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::Stream;
use genset_backend_common::{
    Capabilities, EngineConfig, EngineError, GenerateRequest, LLMEngine, Output, OutputStream,
    RequestContext, StartContext, async_trait, config::SamplingOption,
};
use genset_frontend::FrontendConfig;
use serde_json::{Map, Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::counting::{allocations, asked_bytes, live_bytes};
use crate::site::Site;
use crate::{STOPS, answer};

/// A test fails after this much silence.
const PATIENCE: Duration = Duration::from_secs(60);

/// The most choices of a request.
const CHOICES: u32 = 128;

/// When an engine's items arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pace {
    /// One at a time: each token is a separate event, frame and write.
    OneByOne,
    /// All at once.
    Together,
    /// The first item, and never another.
    Once,
}

impl Pace {
    /// How often the next item is not ready when polled: once for the body, which would put it into the same frame, and once for
    /// hyper, which would put its frame into the same write.
    fn pauses(self) -> u8 {
        match self {
            Self::OneByOne => 2,
            Self::Together => 0,
            Self::Once => 1,
        }
    }
}

struct Prebuilt(Pace);

#[async_trait]
impl LLMEngine for Prebuilt {
    async fn start(&self, _ctx: StartContext) -> Result<EngineConfig, EngineError> {
        Ok(EngineConfig::new("prebuilt", 1 << 20)
            .with_vocab_size(2048)
            .with_capabilities(
                Capabilities::tokens()
                    .with_point_mass_sampling()
                    .with_sampling([SamplingOption::LogitBias]),
            ))
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        _ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let tokens = request.stop.max_tokens.unwrap_or(1);
        let items = answer(request.prompt_tokens().unwrap_or(0), tokens);
        Ok(OutputStream::from_raw(Box::pin(Items {
            // The canary is answered at once.
            pace: if tokens == 1 { Pace::Together } else { self.0 },
            items: items.into_iter(),
            pauses: 0,
        })))
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        Ok(())
    }
}

struct Items {
    pace: Pace,
    items: std::vec::IntoIter<Result<Output, EngineError>>,
    /// How often the next item will still not be ready.
    pauses: u8,
}

impl Stream for Items {
    type Item = Result<Output, EngineError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.pauses == 0 {
            self.pauses = self.pace.pauses();
            return Poll::Ready(self.items.next());
        }
        if self.pace == Pace::OneByOne {
            self.pauses -= 1;
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }
}

async fn site(pace: Pace) -> Site {
    let config = FrontendConfig {
        max_choices: CHOICES,
        ..FrontendConfig::default()
    };
    Site::start(Arc::new(Prebuilt(pace)), config).await
}

/// A client on its own connection.
struct Client {
    stream: TcpStream,
    buffer: Box<[u8]>,
}

impl Client {
    async fn connect(site: &Site) -> Self {
        let stream = TcpStream::connect(site.server.address()).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let buffer = vec![0; 1 << 10].into();
        Self { stream, buffer }
    }

    /// Sends `request` and reads until `end` arrives. Returns the number of bytes read.
    async fn exchange(&mut self, request: &[u8], end: &[u8]) -> usize {
        self.stream.write_all(request).await.unwrap();
        let (mut read, mut kept) = (0, 0);
        loop {
            let more = self.stream.read(&mut self.buffer[kept..]);
            let more = tokio::time::timeout(PATIENCE, more).await.unwrap().unwrap();
            assert_ne!(more, 0, "the server closed");
            let have = &self.buffer[..kept + more];
            let is_head = read == 0;
            if is_head && !have.starts_with(b"HTTP/1.1 200") {
                panic!("refused: {}", String::from_utf8_lossy(have));
            }
            read += more;
            if have.windows(end.len()).any(|window| window == end) {
                return read;
            }
            let from = have.len() - have.len().min(end.len());
            kept = have.len() - from;
            self.buffer.copy_within(from..from + kept, 0);
        }
    }
}

/// A streamed request as bytes on the wire.
fn request(path: &str, tokens: u32, further: &Value) -> Vec<u8> {
    let mut body = json!({"model": "tiny", "stream": true});
    let fields = match path {
        "/v1/chat/completions" | "/v1/messages" => {
            json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": tokens})
        }
        "/v1/completions" => json!({"prompt": "Hi", "max_tokens": tokens}),
        _ => json!({"input": "Hi", "max_output_tokens": tokens}),
    };
    for more in [&fields, further] {
        let fields = more.as_object().unwrap().clone();
        body.as_object_mut().unwrap().extend(fields);
    }
    let (body, host) = (
        body.to_string(),
        "host: localhost\r\nanthropic-version: 2023-06-01",
    );
    let length = body.len();
    format!("POST {path} HTTP/1.1\r\n{host}\r\ncontent-length: {length}\r\n\r\n{body}").into_bytes()
}

/// Every streamed API, with and without options that change its path.
fn requests(tokens: u32) -> Vec<(String, Vec<u8>)> {
    let usage = json!({"stream_options": {"include_usage": true}});
    let stops = json!({"stop": STOPS});
    let cases = [
        ("/v1/chat/completions", json!({})),
        ("/v1/chat/completions", stops.clone()),
        ("/v1/chat/completions", usage.clone()),
        ("/v1/completions", json!({})),
        ("/v1/completions", stops),
        ("/v1/completions", usage),
        ("/v1/messages", json!({})),
        ("/v1/messages", json!({"stop_sequences": STOPS})),
        ("/v1/responses", json!({})),
    ];
    let named = cases.map(|(path, further)| {
        let request = request(path, tokens, &further);
        (format!("{path} {further}"), request)
    });
    named.into()
}

/// The allocations and bytes of an exchange: the fewest of several, because the server also does housekeeping.
async fn fewest(client: &mut Client, request: &[u8]) -> (u64, usize) {
    let mut fewest = (u64::MAX, 0);
    for _ in 0..5 {
        let before = allocations();
        let bytes = client.exchange(request, b"\r\n0\r\n\r\n").await;
        fewest = fewest.min((allocations() - before, bytes));
    }
    fewest
}

/// The cost of `tokens` more tokens.
struct Further {
    request: String,
    allocations: i64,
    bytes: usize,
}

async fn further(site: &Site, tokens: u32) -> Vec<Further> {
    let mut client = Client::connect(site).await;
    let mut found = Vec::new();
    let (short, long) = (requests(tokens), requests(2 * tokens));
    for ((request, short), (_, long)) in short.into_iter().zip(long) {
        let (short, short_bytes) = fewest(&mut client, &short).await;
        let (long, long_bytes) = fewest(&mut client, &long).await;
        found.push(Further {
            request,
            allocations: long.cast_signed() - short.cast_signed(),
            bytes: long_bytes - short_bytes,
        });
    }
    found
}

/// The text that `/v1/responses` keeps doubles its buffer now and then.
const DOUBLINGS: i64 = 4;

#[tokio::test]
async fn a_token_that_leaves_alone_allocates_nothing() {
    let site = site(Pace::OneByOne).await;
    for further in further(&site, 500).await {
        let (request, allocations) = (further.request, further.allocations);
        assert!(
            allocations <= DOUBLINGS,
            "{allocations} for 500 tokens: {request}"
        );
    }
    site.close().await;
}

/// Several frames are in flight at once, so each has its own buffer, which doubles while it fills.
#[tokio::test]
async fn tokens_that_leave_together_allocate_only_their_frames() {
    const FRAME_BYTES: usize = 8 << 10;
    const A_FRAME: usize = 6;
    let site = site(Pace::Together).await;
    for further in further(&site, 2000).await {
        let frames = i64::try_from((further.bytes / FRAME_BYTES + 1) * A_FRAME).unwrap();
        let (request, allocations) = (further.request, further.allocations);
        assert!(
            allocations <= frames + DOUBLINGS,
            "{allocations} for 2000 tokens: {request}"
        );
    }
    site.close().await;
}

/// Returns the bytes that an open stream holds, including the client's side.
async fn open_stream(path: &str) -> isize {
    const STREAMS: usize = 64;
    const FIRST_TOKEN: &[u8] = b":\"I";
    let site = site(Pace::Once).await;
    let request = request(path, 2, &json!({}));
    let mut first = Client::connect(&site).await;
    first.exchange(&request, FIRST_TOKEN).await;
    let mut clients = Vec::with_capacity(STREAMS);
    let before = live_bytes();
    for _ in 0..STREAMS {
        let mut client = Client::connect(&site).await;
        client.exchange(&request, FIRST_TOKEN).await;
        clients.push(client);
    }
    let each = (live_bytes() - before) / STREAMS.cast_signed();
    drop(clients);
    site.close().await;
    each
}

/// It includes two 16 KiB buffers of hyper's, of which a stream touches a part.
#[tokio::test]
async fn an_open_stream_holds_a_bounded_amount() {
    const MOST: isize = 34 << 10;
    for path in [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/responses",
    ] {
        let bytes = open_stream(path).await;
        assert!((1..=MOST).contains(&bytes), "{path}: {bytes} bytes");
    }
}

/// The choices of a request share what they have in common: another choice copies neither its prompt nor its options. This prompt
/// has 400 kB; a choice costs its answer and its way through the Worker. A body that arrives in other pieces, as on a busy
/// machine, costs another copy of the body, which many choices share.
#[tokio::test]
async fn a_further_choice_copies_nothing_of_its_request() {
    const A_CHOICE: u64 = 32 << 10;
    const PROMPT_TOKENS: u32 = 100_000;
    let site = site(Pace::Together).await;
    let mut client = Client::connect(&site).await;
    let mut fewest = async |choices: u32| {
        let further = json!({
            "prompt": (0..PROMPT_TOKENS).map(|token| token % 2000).collect::<Vec<_>>(),
            "stop_token_ids": (1000..1256).collect::<Vec<_>>(),
            "logit_bias": (0..256).map(|token| (token.to_string(), json!(1))).collect::<Map<_, _>>(),
            "genset": {"annotations": {"a": "a".repeat(10_000)}},
            "n": choices,
        });
        let request = request("/v1/completions", 1, &further);
        let mut fewest = u64::MAX;
        for _ in 0..10 {
            let before = asked_bytes();
            client.exchange(&request, b"\r\n0\r\n\r\n").await;
            fewest = fewest.min(asked_bytes() - before);
        }
        fewest
    };
    let (one, many) = (fewest(1).await, fewest(CHOICES).await);
    let each = many.saturating_sub(one) / u64::from(CHOICES - 1);
    assert!(each <= A_CHOICE, "a further choice took {each} bytes");
    site.close().await;
}
