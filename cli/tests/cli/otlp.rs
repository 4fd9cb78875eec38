//! The export of spans to a collector that is a few lines of HTTP and of protobuf's wire format.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use rustix::process::Signal;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::fleet::Fleet;
use crate::support::{Server, soon};

const TRACE_ID: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT_ID: &str = "b7ad6b7169203331";

/// A span that the collector received.
#[derive(Debug, Clone, Default)]
struct Span {
    service: String,
    name: String,
    trace_id: String,
    span_id: String,
    parent_id: String,
    kind: u64,
    attributes: BTreeMap<String, String>,
}

/// One field of a protobuf message.
enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// The fields of a message, by number.
fn fields(mut message: &[u8]) -> Vec<(u64, Field<'_>)> {
    let mut fields = Vec::new();
    while !message.is_empty() {
        let tag = varint(&mut message);
        let field = match tag & 7 {
            0 => Field::Number(varint(&mut message)),
            1 => Field::Bytes(message.split_off(..8).unwrap()),
            2 => {
                let length = usize::try_from(varint(&mut message)).unwrap();
                Field::Bytes(message.split_off(..length).unwrap())
            }
            5 => Field::Bytes(message.split_off(..4).unwrap()),
            other => panic!("no wire type {other}"),
        };
        fields.push((tag >> 3, field));
    }
    fields
}

fn varint(message: &mut &[u8]) -> u64 {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = *message.split_off_first().unwrap();
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return value;
        }
    }
    panic!("a number of more than 64 bits")
}

/// The values of one length-delimited field.
fn all(message: &[u8], number: u64) -> Vec<&[u8]> {
    let fields = fields(message).into_iter();
    let bytes = fields.filter_map(|(n, field)| match field {
        Field::Bytes(bytes) if n == number => Some(bytes),
        Field::Bytes(_) | Field::Number(_) => None,
    });
    bytes.collect()
}

fn one(message: &[u8], number: u64) -> &[u8] {
    all(message, number).first().copied().unwrap_or_default()
}

fn number(message: &[u8], number: u64) -> u64 {
    let found = fields(message).into_iter().find(|(n, _)| *n == number);
    match found {
        Some((_, Field::Number(value))) => value,
        Some((_, Field::Bytes(_))) | None => 0,
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The `KeyValue`s with text values.
fn attributes(pairs: Vec<&[u8]>) -> BTreeMap<String, String> {
    let pairs = pairs.into_iter();
    pairs
        .map(|pair| (text(one(pair, 1)), text(one(one(pair, 2), 1))))
        .collect()
}

/// The spans of an `ExportTraceServiceRequest`.
fn spans(request: &[u8]) -> Vec<Span> {
    let mut spans = Vec::new();
    for resource_spans in all(request, 1) {
        let resource = attributes(all(one(resource_spans, 1), 1));
        for scope_spans in all(resource_spans, 2) {
            spans.extend(all(scope_spans, 2).into_iter().map(|span| Span {
                service: resource["service.name"].clone(),
                trace_id: hex(one(span, 1)),
                span_id: hex(one(span, 2)),
                parent_id: hex(one(span, 4)),
                name: text(one(span, 5)),
                kind: number(span, 6),
                attributes: attributes(all(span, 9)),
            }));
        }
    }
    spans
}

/// A collector that accepts exports, or refuses all of them.
struct Collector {
    address: SocketAddr,
    posts: Arc<Mutex<Vec<Vec<u8>>>>,
    _tasks: JoinSet<()>,
}

impl Collector {
    async fn start(status: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let posts: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
        let mut tasks = JoinSet::new();
        let seen = Arc::clone(&posts);
        tasks.spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                // Serving one exporter at a time is fast enough for a test.
                serve(stream, &seen, status).await;
            }
        });
        Self {
            address,
            posts,
            _tasks: tasks,
        }
    }

    fn posts(&self) -> usize {
        self.posts.lock().unwrap().len()
    }

    fn spans(&self) -> Vec<Span> {
        let posts = self.posts.lock().unwrap();
        posts.iter().flat_map(|post| spans(post)).collect()
    }

    fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }
}

/// Answers one request and closes.
async fn serve(stream: TcpStream, posts: &Mutex<Vec<Vec<u8>>>, status: &str) {
    let mut stream = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if !matches!(stream.read_line(&mut head).await, Ok(read) if read > 0) {
            return;
        }
    }
    let head = head.to_ascii_lowercase();
    assert!(head.starts_with("post /v1/traces "), "{head}");
    assert!(head.contains("content-type: application/x-protobuf"));
    let (_, rest) = head.split_once("content-length: ").unwrap();
    let length: usize = rest.split("\r\n").next().unwrap().parse().unwrap();
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.unwrap();
    posts.lock().unwrap().push(body);
    let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
    drop(stream.write_all(answer.as_bytes()).await);
}

/// A chat of three tokens with its own trace.
async fn traced_chat(frontend: &Server, flags: &str) {
    let body =
        r#"{"model":"tiny-chat","max_tokens":3,"messages":[{"role":"user","content":"hello"}]}"#;
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-request-id: my-request\r\n\
         traceparent: 00-{TRACE_ID}-{PARENT_ID}-{flags}\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut stream = soon(TcpStream::connect(frontend.address)).await.unwrap();
    soon(stream.write_all(request.as_bytes())).await.unwrap();
    let mut answer = String::new();
    soon(stream.read_to_string(&mut answer)).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test]
async fn a_request_is_one_trace_from_client_to_worker_and_all_of_it_is_sent_before_the_end() {
    let collector = Collector::start("200 OK").await;
    let endpoint = collector.endpoint();
    let export = ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str());
    // Spans are sent only at the end.
    let late = ("OTEL_BSP_SCHEDULE_DELAY", "3600000");
    let fleet = Fleet::new();
    let worker = fleet
        .worker(&[export, late, ("OTEL_SERVICE_NAME", "a-worker")])
        .await;
    let mut frontend = fleet.frontend(&[export, late]).await;
    traced_chat(&frontend, "01").await;
    traced_chat(&frontend, "00").await;
    assert_eq!(collector.posts(), 0);
    frontend.signal(Signal::TERM);
    assert_eq!(frontend.exit_code().await, Some(0));
    let log = frontend.log();
    let lines = log.lines().filter(|line| line.contains("genset::access"));
    let named = lines.filter(|line| line.contains("my-request") && line.contains(TRACE_ID));
    assert_eq!(named.count(), 2, "{log}");
    worker.stop().await;

    let spans = collector.spans();
    let of_request = |name: &str| -> Vec<Span> {
        let is_it = |span: &&Span| span.name == name && span.trace_id == TRACE_ID;
        spans.iter().filter(is_it).cloned().collect()
    };
    let [http] = &of_request("http_request")[..] else {
        panic!("one sampled request in {spans:#?}");
    };
    let [at_worker] = &of_request("worker_request")[..] else {
        panic!("one sampled request in {spans:#?}");
    };
    assert_eq!(http.parent_id, PARENT_ID);
    assert_eq!(at_worker.parent_id, http.span_id);
    assert_eq!((&*http.service, http.kind), ("genset", 2));
    assert_eq!((&*at_worker.service, at_worker.kind), ("a-worker", 2));
    for span in [http, at_worker] {
        let id = &span.attributes["request_id"];
        assert!(id.starts_with("my-request."), "{id}");
    }
    let in_answer = &http.attributes["http.response.header.x-request-id"];
    assert_eq!(in_answer, "my-request");
}

#[tokio::test]
async fn a_collector_that_fails_costs_one_line_of_log_and_no_request() {
    let collector = Collector::start("503 Service Unavailable").await;
    let endpoint = collector.endpoint();
    let fleet = Fleet::new();
    let worker = fleet
        .worker(&[
            ("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint),
            ("OTEL_BSP_SCHEDULE_DELAY", "20"),
        ])
        .await;
    let frontend = fleet.frontend(&[]).await;
    soon(async {
        while collector.posts() < 5 {
            traced_chat(&frontend, "01").await;
        }
    })
    .await;
    frontend.stop().await;
    let log = worker.stop().await;
    assert_eq!(log.matches("spans cannot be exported").count(), 1, "{log}");
    assert_eq!(log.matches("WARN").count(), 1, "{log}");
}

#[tokio::test]
async fn a_collector_that_is_not_there_holds_up_neither_request_nor_end() {
    let fleet = Fleet::new();
    // The port of a listener that accepts connections and never answers.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let export = ("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint.as_str());
    let worker = fleet.worker(&[export]).await;
    let frontend = fleet.frontend(&[export]).await;
    traced_chat(&frontend, "01").await;
    frontend.stop().await;
    worker.stop().await;
}
