//! The HTTP side of a request: JSON parsed and checked once, tokens to server-sent events, the whole server over loopback.
//!
//! Run with `cargo bench -p genset-frontend --bench sse`. Elements are tokens; for `request`, bytes of JSON.

#![expect(
    clippy::unwrap_used,
    reason = "a benchmark that cannot be set up has nothing to measure"
)]

use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::BytesMut;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use futures_util::stream;
use genset_backend_common::output::{Finish, Output, OutputStream};
use genset_backend_common::worker::{Worker, WorkerConfig};
use genset_engine_sample::{SampleArgs, SampleEngine};
use genset_frontend::answer::Answer;
use genset_frontend::markup::Delta;
use genset_frontend::openai::{Api, ChatRequest, ChunkEncoder, CompletionHead, ParamLimits};
use genset_frontend::text::TextTokenizer;
use genset_frontend::{FrontendConfig, FrontendServer};
use genset_runtime::{EndpointName, ModelFolder, Runtime, RuntimeRegistrar};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const TOKENS: u32 = 1000;

fn folder() -> ModelFolder {
    ModelFolder::load(Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../models/tiny-chat"
    )))
    .unwrap()
}

fn tokenizer() -> Arc<TextTokenizer> {
    let folder = folder();
    let mut artifacts = folder.artifacts.iter();
    let file = artifacts.find(|artifact| artifact.reference.name == "tokenizer.json");
    Arc::new(TextTokenizer::from_bytes(&file.unwrap().content).unwrap())
}

fn head(api: Api) -> CompletionHead {
    CompletionHead {
        api,
        id: format!("{}{:032x}", api.id_prefix(), u128::MAX),
        created: 1_700_000_000,
        model: "tiny-chat".into(),
    }
}

fn encode(c: &mut Criterion) {
    let mut group = c.benchmark_group("encode");
    group.throughput(Throughput::Elements(1));
    let mut out = BytesMut::with_capacity(4096);
    for (name, api) in [("chat", Api::Chat), ("completions", Api::Completions)] {
        let encoder = ChunkEncoder::new(&head(api), false);
        for (kind, text) in [
            ("word", " wonderful"),
            ("escaped", "\n\t\"code\"\n"),
            ("emoji", "🦀"),
        ] {
            group.bench_function(format!("{name}/{kind}"), |b| {
                b.iter(|| {
                    out.clear();
                    encoder.text(0, black_box(text), &mut out);
                    black_box(&out);
                });
            });
        }
    }
    group.finish();
}

/// The work of a streamed answer for each token, without the socket: detokenize, match, encode.
fn answer(c: &mut Criterion) {
    let mut group = c.benchmark_group("answer");
    group.throughput(Throughput::Elements(u64::from(TOKENS)));
    let tokenizer = tokenizer();
    let encoder = ChunkEncoder::new(&head(Api::Chat), false);
    for (name, stops) in [("plain", &[][..]), ("one_stop_string", &["\n\nUser:"][..])] {
        let stops: Arc<[String]> = stops.iter().map(|&stop| stop.to_owned()).collect();
        let mut out = BytesMut::with_capacity(1 << 20);
        group.bench_function(name, |b| {
            b.iter(|| {
                out.clear();
                let tokens = (0..TOKENS).map(|id| Ok(Output::from(3 + id)));
                let end = Finish::stop().into_finished(1, TOKENS);
                let items = tokens.chain([Ok(Output::Finished(Box::new(end)))]);
                let outputs = OutputStream::from_raw(Box::pin(stream::iter(items)));
                let mut answer =
                    Answer::new(outputs, Some(Arc::clone(&tokenizer)), Arc::clone(&stops), 1);
                let mut cx = Context::from_waker(Waker::noop());
                let mut write =
                    |delta: Delta<'_>, rated: &[_]| encoder.delta(0, delta, rated, &mut out);
                while let Poll::Ready(Ok(None)) = answer.poll_deltas(&mut cx, &mut write) {}
                black_box(&out);
            });
        });
    }
    group.finish();
}

fn request_body(messages: usize, further: Value) -> Vec<u8> {
    let roles = ["user", "assistant"].into_iter().cycle();
    let content = "Tell me about gensets, and what the frame does. ".repeat(10);
    let messages: Vec<Value> = roles
        .take(messages)
        .map(|role| json!({"role": role, "content": content}))
        .collect();
    let mut body = json!({"model": "tiny-chat", "messages": messages});
    if let (Value::Object(body), Value::Object(further)) = (&mut body, further) {
        body.extend(further);
    }
    body.to_string().into_bytes()
}

fn request(c: &mut Criterion) {
    let mut group = c.benchmark_group("request");
    let limits = ParamLimits::from(&FrontendConfig::default());
    let many = json!({
        "stream": true, "stream_options": {"include_usage": true}, "temperature": 0.7, "top_p": 0.9, "seed": 7,
        "max_tokens": 256, "stop": ["\n\n", "User:"], "nvext": {"ignore_eos": true}, "user": "me",
    });
    for (name, body) in [
        ("small", request_body(1, json!({}))),
        ("many_fields", request_body(1, many.clone())),
        ("100_messages", request_body(100, many)),
    ] {
        group.throughput(Throughput::Bytes(body.len() as u64));
        group.bench_function(name, |b| {
            b.iter(|| black_box(ChatRequest::parse(&body, &limits).unwrap()));
        });
    }
    group.finish();
}

/// A server with a Worker of the sample engine, which takes no time for a token.
async fn serve() -> (FrontendServer, impl Sized) {
    let folder = folder();
    let runtime = Runtime::in_process();
    let engine = Arc::new(SampleEngine::from_args(&SampleArgs {
        vocab_size: 2048,
        token_delay_ms: 0,
    }));
    let config = WorkerConfig {
        model_name: Some("tiny-chat".into()),
        artifacts: folder.artifacts,
        ..WorkerConfig::default()
    };
    let registrar = Arc::new(RuntimeRegistrar::new(
        runtime.clone(),
        EndpointName::default(),
    ));
    let worker = Worker::new(1, engine, config, registrar, runtime.metrics().clone()).spawn();
    worker.ready().await.unwrap();
    let config = FrontendConfig {
        address: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0),
        ..FrontendConfig::default()
    };
    let server = FrontendServer::bind(&runtime, config).await.unwrap();
    server.models().any().await.unwrap();
    (server, (runtime, worker))
}

/// Sends `request` and reads until `end` arrives.
async fn exchange(client: &mut TcpStream, request: &[u8], end: &[u8], buffer: &mut Vec<u8>) {
    client.write_all(request).await.unwrap();
    buffer.clear();
    while !buffer.ends_with(end) {
        assert_ne!(client.read_buf(buffer).await.unwrap(), 0);
    }
}

fn http(body: &Value) -> Vec<u8> {
    let body = body.to_string();
    let length = body.len();
    format!("POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n\r\n{body}")
        .into_bytes()
}

/// One client on loopback: the time until it has read the last byte.
fn server(c: &mut Criterion) {
    let tokio = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    let (server, _worker) = tokio.block_on(serve());
    let mut client = tokio
        .block_on(TcpStream::connect(server.address()))
        .unwrap();
    client.set_nodelay(true).unwrap();
    let mut buffer = Vec::with_capacity(1 << 20);
    let mut group = c.benchmark_group("server");
    group.measurement_time(Duration::from_secs(8));
    for (name, tokens) in [("stream_1_token", 1), ("stream_1000_tokens", 1000)] {
        let request = http(&json!({
            "model": "tiny-chat", "messages": [{"role": "user", "content": "Hello"}], "stream": true,
            "max_tokens": tokens, "ignore_eos": true,
        }));
        group.throughput(Throughput::Elements(tokens));
        group.bench_function(name, |b| {
            b.iter(|| tokio.block_on(exchange(&mut client, &request, b"0\r\n\r\n", &mut buffer)));
        });
    }
    let request = http(&json!({
        "model": "tiny-chat", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1000,
        "ignore_eos": true,
    }));
    group.throughput(Throughput::Elements(1000));
    group.bench_function("whole_1000_tokens", |b| {
        b.iter(|| {
            tokio.block_on(exchange(
                &mut client,
                &request,
                b"\"default\"}",
                &mut buffer,
            ))
        });
    });
    group.finish();
    drop(client);
    tokio.block_on(server.shutdown(Duration::from_secs(1)));
}

criterion_group!(benches, encode, answer, request, server);
criterion_main!(benches);
