//! The conversation in `docs/wire-protocol.md`, repeated by two planes and compared byte for byte, and the names
//! in its tables and lists.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::{StreamExt, stream};
use genset_backend_common::output::Finish;
use genset_backend_common::{
    Capabilities, EngineConfig, EngineError, ErrorKind, GenerateRequest, MetricsRegistry,
    ModelCard, Output, RequestContext, RequestField, controls::Adapter, handles::Load,
};
use genset_runtime::discovery::Address;
use genset_runtime::plane::{
    self, ErasedHandler, Handler, Payload, RequestPlane, ResponseStream, TcpConfig, WireConfig,
    WirePlane,
};
use genset_runtime::{EndpointName, InstanceId};
use genset_wire::FrameKind;
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::support::{soon, until};

const DOCUMENT: &str = include_str!("../../../docs/wire-protocol.md");
const INSTANCE: InstanceId = InstanceId(0x2a);

/// Size of the length field, which does not count itself.
const LENGTH_BYTES: usize = 4;
const NONCE_BYTES: usize = 32;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Caller,
    Callee,
}

/// Whole frames and their senders.
type Frames = Vec<(Side, Vec<u8>)>;

/// Every frame on the connection, in order.
#[derive(Clone, Default)]
struct Transcript(Arc<Mutex<Frames>>);

impl Transcript {
    /// The number of frames that `side` has sent.
    fn sent_by(&self, side: Side) -> usize {
        let frames = self.0.lock();
        frames.iter().filter(|(by, _)| *by == side).count()
    }

    fn shown(&self) -> String {
        let mut text = String::new();
        for (side, frame) in self.0.lock().iter() {
            let kind = FrameKind::from_code(frame[LENGTH_BYTES]);
            writeln!(text, "{}: {kind:?}", format!("{side:?}").to_lowercase()).unwrap();
            let mut frame = frame.clone();
            if kind == FrameKind::Hello {
                // The nonce comes last and is random; the document shows this one.
                let start = frame.len() - NONCE_BYTES;
                let first = if *side == Side::Caller { 0x00 } else { 0x20 };
                frame[start..].copy_from_slice(&nonce(first));
            }
            frame
                .chunks(16)
                .for_each(|row| text.push_str(&shown_row(row)));
        }
        text
    }
}

fn nonce(first: u8) -> [u8; NONCE_BYTES] {
    std::array::from_fn(|index| first + u8::try_from(index).unwrap())
}

fn shown_row(row: &[u8]) -> String {
    let halves = row.chunks(8).map(|half| {
        let digits: Vec<_> = half.iter().map(|byte| format!("{byte:02x}")).collect();
        digits.join(" ")
    });
    let hex = halves.collect::<Vec<_>>().join("  ");
    let visible = |byte: &u8| {
        if byte.is_ascii_graphic() || *byte == b' ' {
            char::from(*byte)
        } else {
            '.'
        }
    };
    let ascii: String = row.iter().map(visible).collect();
    format!("    {hex:<48}  |{ascii}|\n")
}

/// A proxy between the two ends, which records frames. Returns its address.
async fn write_down(callee: String, transcript: Transcript) -> (String, JoinSet<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let location = listener.local_addr().unwrap().to_string();
    let mut task = JoinSet::new();
    task.spawn(async move {
        let (caller, _) = listener.accept().await.unwrap();
        let callee = TcpStream::connect(callee).await.unwrap();
        let (from_caller, to_caller) = caller.into_split();
        let (from_callee, to_callee) = callee.into_split();
        tokio::join!(
            pass(Side::Caller, from_caller, to_callee, transcript.clone()),
            pass(Side::Callee, from_callee, to_caller, transcript.clone()),
        );
    });
    (location, task)
}

async fn pass(side: Side, mut from: OwnedReadHalf, mut to: OwnedWriteHalf, transcript: Transcript) {
    while let Ok(length) = from.read_u32().await {
        let mut frame = length.to_be_bytes().to_vec();
        frame.resize(LENGTH_BYTES + usize::try_from(length).unwrap(), 0);
        from.read_exact(&mut frame[LENGTH_BYTES..]).await.unwrap();
        transcript.0.lock().push((side, frame.clone()));
        // The other end may have closed.
        let _ = to.write_all(&frame).await;
    }
}

/// Responds to any request, once, with the items of the receiver.
struct Scripted<Resp>(Mutex<Option<mpsc::Receiver<Resp>>>);

impl<Resp: Payload> Scripted<Resp> {
    fn serving<Req: Payload>() -> (mpsc::Sender<Resp>, Arc<ErasedHandler>) {
        let (items, receiver) = mpsc::channel(1);
        let handler: Arc<dyn Handler<Req, Resp>> = Arc::new(Self(Mutex::new(Some(receiver))));
        (items, Arc::new(ErasedHandler::new(handler)))
    }
}

#[async_trait]
impl<Req: Payload, Resp: Payload> Handler<Req, Resp> for Scripted<Resp> {
    async fn handle(
        &self,
        _request: Req,
        _ctx: RequestContext,
    ) -> Result<ResponseStream<Resp>, EngineError> {
        let items = self.0.lock().take().expect("one request");
        Ok(Box::pin(stream::unfold(items, |mut items| async move {
            Some((Ok(items.recv().await?), items))
        })))
    }
}

fn plane() -> WirePlane {
    let config = WireConfig {
        window_items: 2,
        // No ping occurs in the conversation.
        ping_interval: Duration::from_secs(600),
        peer_timeout: Duration::from_secs(1200),
        ..WireConfig::default()
    };
    WirePlane::tcp(TcpConfig::default(), config, &MetricsRegistry::default()).unwrap()
}

fn finished() -> Output {
    let finish = Finish::length().with_last(5);
    Output::Finished(Box::new(finish.into_finished(3, 1)))
}

/// The caller's end, and the frames seen so far.
struct Conversation {
    caller: WirePlane,
    address: Address,
    transcript: Transcript,
}

impl Conversation {
    async fn call<Req: Payload, Resp: Payload>(
        &self,
        endpoint: &EndpointName,
        request: Req,
        id: &str,
    ) -> Result<ResponseStream<Resp>, EngineError> {
        let ctx = RequestContext::new(id);
        soon(plane::call(
            &self.caller,
            &self.address,
            endpoint,
            request,
            ctx,
        ))
        .await
    }

    /// Two items. Each step waits until the credit for the last item was seen.
    async fn generate(&self, generate: &EndpointName, engine: mpsc::Sender<Output>) {
        let mut request = GenerateRequest::from_tokens("tiny-chat", vec![1, 2, 3]);
        request.stop.max_tokens = Some(2);
        engine.send(Output::from(4)).await.unwrap();
        let answer = self.call(generate, request, "req-1").await;
        let mut items: ResponseStream<Output> = answer.unwrap();
        soon(items.next()).await.unwrap().unwrap();
        until(|| self.transcript.sent_by(Side::Caller) == 3).await;
        engine.send(finished()).await.unwrap();
        soon(items.next()).await.unwrap().unwrap();
        until(|| self.transcript.sent_by(Side::Caller) == 4).await;
        drop(engine);
        assert!(soon(items.next()).await.is_none());
    }

    async fn call_what_nobody_serves(&self, nowhere: &EndpointName) {
        let answer = self.call::<(), Load>(nowhere, (), "req-2").await;
        assert_eq!(answer.err().unwrap().kind(), ErrorKind::CannotConnect);
    }

    async fn leave_after_the_first_item(&self, load: &EndpointName, loads: mpsc::Sender<Load>) {
        loads.send(Load::default()).await.unwrap();
        drop(self.call::<(), Load>(load, (), "req-3").await.unwrap());
        soon(loads.closed()).await;
    }
}

#[tokio::test]
async fn the_documents_conversation_is_what_two_planes_say() {
    let transcript = Transcript::default();
    let callee = plane();
    let generate: EndpointName = "demo.backend.generate".parse().unwrap();
    let load = generate.sibling("load").unwrap();
    let (engine, handler) = Scripted::serving::<GenerateRequest>();
    let served = callee.serve(&generate, INSTANCE, handler).await.unwrap();
    let (loads, handler) = Scripted::serving::<()>();
    let _load = callee.serve(&load, INSTANCE, handler).await.unwrap();
    let (process, _) = served.address.location.rsplit_once('/').unwrap();
    let (location, _task) = write_down(process.to_owned(), transcript.clone()).await;
    let conversation = Conversation {
        caller: plane(),
        address: Address {
            plane: "tcp".into(),
            location: format!("{location}/{INSTANCE}"),
        },
        transcript: transcript.clone(),
    };

    conversation.generate(&generate, engine).await;
    let nowhere = generate.sibling("nowhere").unwrap();
    conversation.call_what_nobody_serves(&nowhere).await;
    conversation.leave_after_the_first_item(&load, loads).await;
    soon(callee.shutdown()).await;
    until(|| transcript.sent_by(Side::Callee) == 7).await;
    soon(conversation.caller.shutdown()).await;

    let shown = transcript.shown();
    let documented = DOCUMENT
        .split_once("<!-- conversation -->\n```text\n")
        .and_then(|(_, rest)| rest.split_once("```\n<!-- end of conversation -->"));
    let (documented, _) = documented.expect("the document has no conversation between its marks");
    assert!(
        documented == shown,
        "docs/wire-protocol.md shows another conversation than is held; put this between its marks:\n{shown}"
    );
}

/// The names in the first column of the table whose heading row starts with `heading`.
fn documented_fields(heading: &str) -> BTreeSet<String> {
    let (_, table) = DOCUMENT.split_once(heading).expect("the table is there");
    let rows = table.lines().skip(1).take_while(|row| row.starts_with('|'));
    let cells = rows.filter_map(|row| row.split('|').nth(1));
    let names = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    names.map(str::to_owned).collect()
}

fn written_fields(value: &impl serde::Serialize) -> BTreeSet<String> {
    let value = serde_json::to_value(value).unwrap();
    value.as_object().unwrap().keys().cloned().collect()
}

#[test]
fn the_documents_tables_have_every_field_of_a_card() {
    let card = ModelCard::from_config(&EngineConfig::new("m", 10));
    // No `..`: when a new field is optional in the encoding, it must get a value here.
    let card = ModelCard {
        max_num_seqs: Some(1),
        adapters: vec![Adapter {
            name: "a".into(),
            source: "adapters/a".into(),
        }],
        name: card.name,
        aliases: card.aliases,
        endpoint_types: card.endpoint_types,
        role: card.role,
        context_length_tokens: card.context_length_tokens,
        kv_block_size: card.kv_block_size,
        data_parallel_size: card.data_parallel_size,
        vocab_size: card.vocab_size,
        capabilities: card.capabilities,
        tool_parser: card.tool_parser,
        reasoning_parser: card.reasoning_parser,
        migration_limit: card.migration_limit,
        artifacts: card.artifacts,
        user_data: card.user_data,
    };
    let documented = documented_fields("The card:\n\n| field | type, default | |\n");
    assert_eq!(documented, written_fields(&card));
    let documented = documented_fields("| field of `capabilities` | type, default | |\n");
    assert_eq!(documented, written_fields(&Capabilities::default()));
}

#[test]
fn the_document_has_every_name_of_a_field_at_fault() {
    let (_, list) = DOCUMENT.split_once("\n`field` is one of ").unwrap();
    let (list, _) = list.split_once(". ").unwrap();
    let documented: BTreeSet<&str> = list.split('`').skip(1).step_by(2).collect();
    let names: BTreeSet<&str> = RequestField::ALL.iter().map(|field| field.name()).collect();
    assert_eq!(documented, names);
}
