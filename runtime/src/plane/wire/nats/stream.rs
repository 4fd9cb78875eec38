//! The two halves of a virtual connection as a byte stream.
//!
//! There are no tasks behind them: when polled, the writer passes messages to the NATS client and the reader takes them from its
//! subscription. The peer's acknowledgements arrive among its data, so a writer that waits for room also
//! reads the subscription, and leaves the data to the reader: a writer makes progress without a reader.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker, ready};

use async_nats::client::FlushError;
use async_nats::message::OutboundMessage;
use async_nats::{Client, StatusCode, Subject, Subscriber};
use bytes::{Buf, Bytes};
use futures_util::{Sink, Stream};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::flow::Flow;
use super::message::{HEADER_BYTES, Message, encode_data};
use crate::plane::wire::transport::Io;

/// A virtual connection that both ends have agreed on.
pub(super) struct Connection {
    pub(super) client: Client,
    /// Receives the peer's messages.
    pub(super) subscriber: Subscriber,
    /// Our subject, to which the peer publishes.
    pub(super) own: Subject,
    /// The peer's subject.
    pub(super) peer: Subject,
    /// Data messages that our subscription holds.
    pub(super) window: u32,
    /// Data messages that the peer's subscription holds.
    pub(super) peer_window: u32,
    pub(super) max_message_bytes: usize,
}

impl Connection {
    pub(super) fn into_io(self) -> Io {
        let peer = self.peer.to_string();
        let sender = Sender {
            client: self.client,
            own: self.own,
            peer: self.peer,
            books: Arc::new(Mutex::new(Books {
                flow: Flow::new(self.window, self.peer_window),
                subscriber: self.subscriber,
                waiting: VecDeque::new(),
                end: None,
            })),
            halves: Arc::default(),
        };
        Io {
            reader: Box::new(Reader {
                sender: sender.clone(),
                rest: Bytes::new(),
            }),
            writer: Box::new(Writer {
                sender,
                max_message_bytes: self.max_message_bytes,
                closing: Closing::Open,
            }),
            peer,
        }
    }
}

/// State shared by the halves.
struct Books {
    flow: Flow,
    subscriber: Subscriber,
    /// Data received and not yet consumed: at most the window, which [`Flow`] enforces.
    waiting: VecDeque<Bytes>,
    /// No more data will come: the peer closed its direction, or the connection is broken.
    end: Option<End>,
}

enum End {
    Closed,
    Broken(Arc<io::Error>),
}

impl Books {
    /// Takes in received messages; returns whether there were any.
    fn listen(&mut self, cx: &mut Context<'_>) -> bool {
        let mut has_come = false;
        while self.end.is_none()
            && let Poll::Ready(message) = Pin::new(&mut self.subscriber).poll_next(cx)
        {
            has_come = true;
            let ended = || io::Error::new(io::ErrorKind::BrokenPipe, "the NATS client has ended");
            let heard = message.ok_or_else(ended).and_then(|it| self.hear(&it));
            if let Err(error) = heard {
                self.end = Some(End::Broken(Arc::new(error)));
            }
        }
        has_come
    }

    /// # Errors
    /// The connection is broken.
    fn check(&self) -> io::Result<()> {
        match &self.end {
            Some(End::Broken(error)) => Err(io::Error::new(error.kind(), Arc::clone(error))),
            Some(End::Closed) | None => Ok(()),
        }
    }

    fn hear(&mut self, message: &async_nats::Message) -> io::Result<()> {
        if message.status == Some(StatusCode::NO_RESPONDERS) {
            let gone = "the peer is gone: NATS knows nobody at its subject";
            return Err(io::Error::new(io::ErrorKind::ConnectionReset, gone));
        }
        match Message::decode(&message.payload).map_err(invalid)? {
            Message::Data(position, data) => {
                self.flow.hear_data(position).map_err(invalid)?;
                self.waiting.push_back(data);
            }
            Message::Taken(position) => self.flow.hear(position).map_err(invalid)?,
            Message::Close(position) => {
                self.flow.hear(position).map_err(invalid)?;
                self.end = Some(End::Closed);
            }
            message @ (Message::Open { .. } | Message::Accept { .. } | Message::Probe) => {
                let problem = format!("{message:?} on a connection that is open");
                return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
            }
        }
        Ok(())
    }
}

fn invalid(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// The wakers of both halves: either may have polled the subscription last.
#[derive(Default)]
struct Halves {
    reader: Mutex<Option<Waker>>,
    writer: Mutex<Option<Waker>>,
}

impl Wake for Halves {
    fn wake(self: Arc<Self>) {
        wake(&self.reader);
        wake(&self.writer);
    }
}

fn wake(half: &Mutex<Option<Waker>>) {
    let waker = half.lock().take();
    if let Some(waker) = waker {
        waker.wake();
    }
}

/// Publishes to the peer. Each half has one, with its own place in the client's queue.
#[derive(Clone)]
struct Sender {
    client: Client,
    own: Subject,
    peer: Subject,
    books: Arc<Mutex<Books>>,
    halves: Arc<Halves>,
}

impl Sender {
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.client)
            .poll_ready(cx)
            .map_err(client_ended)
    }

    /// Publishes the message that `make` builds; call after [`Self::poll_ready`]. The books stay locked until it is queued,
    /// so that messages are queued in the order of their numbers.
    fn send(&mut self, make: impl FnOnce(&mut Flow) -> Bytes) -> io::Result<()> {
        let mut books = self.books.lock();
        let message = OutboundMessage {
            subject: self.peer.clone(),
            // If nobody listens any more, the server reports it to this subject at once.
            reply: Some(self.own.clone()),
            payload: make(&mut books.flow),
            headers: None,
        };
        Pin::new(&mut self.client)
            .start_send(message)
            .map_err(client_ended)
    }
}

fn client_ended(error: async_nats::PublishError) -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, error)
}

struct Reader {
    sender: Sender,
    /// The unread part of the last message.
    rest: Bytes,
}

impl Reader {
    /// Acknowledges consumed data if it is due and the client's queue has room; otherwise the next poll tries again.
    fn acknowledge(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        if self.sender.books.lock().flow.owes()
            && let Poll::Ready(ready) = self.sender.poll_ready(cx)
        {
            ready?;
            self.sender
                .send(|flow| Message::Taken(flow.position()).encode())?;
        }
        Ok(())
    }

    /// The next data; `None` at the end of the stream.
    fn poll_data(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Option<Bytes>>> {
        let Sender { books, halves, .. } = &self.sender;
        *halves.reader.lock() = Some(cx.waker().clone());
        let mut books = books.lock();
        if books.listen(&mut Context::from_waker(&Arc::clone(halves).into())) {
            wake(&halves.writer);
        }
        if let Some(data) = books.waiting.pop_front() {
            books.flow.take();
            return Poll::Ready(Ok(Some(data)));
        }
        books.check()?;
        match books.end {
            Some(_) => Poll::Ready(Ok(None)),
            None => Poll::Pending,
        }
    }
}

impl AsyncRead for Reader {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            this.acknowledge(cx)?;
            if !this.rest.is_empty() {
                let length = this.rest.len().min(buffer.remaining());
                buffer.put_slice(&this.rest[..length]);
                this.rest.advance(length);
                return Poll::Ready(Ok(()));
            }
            match ready!(this.poll_data(cx))? {
                Some(data) => this.rest = data,
                None => return Poll::Ready(Ok(())),
            }
        }
    }
}

struct Writer {
    sender: Sender,
    max_message_bytes: usize,
    closing: Closing,
}

/// The state of closing our direction.
enum Closing {
    Open,
    /// The last message is in the client's queue, and being written to the socket.
    Flushing(Pin<Box<dyn Future<Output = Result<(), FlushError>> + Send>>),
    Closed,
}

impl Writer {
    /// Bytes of the stream that fit in one message now: the client may have reconnected to a server with another limit.
    fn max_data_bytes(&self) -> usize {
        let limit = self.max_message_bytes.min(self.sender.client.max_payload());
        limit.saturating_sub(HEADER_BYTES).max(1)
    }

    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Sender { books, halves, .. } = &self.sender;
        let mut books = books.lock();
        if !books.flow.has_room() {
            *halves.writer.lock() = Some(cx.waker().clone());
            if books.listen(&mut Context::from_waker(&Arc::clone(halves).into())) {
                wake(&halves.reader);
            }
        }
        books.check()?;
        if books.flow.has_room() {
            Poll::Ready(Ok(()))
        } else {
            Poll::Pending
        }
    }

    fn send_close(&mut self) -> io::Result<()> {
        self.sender
            .send(|flow| Message::Close(flow.position()).encode())
    }
}

impl AsyncWrite for Writer {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if !matches!(self.closing, Closing::Open) {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        if bytes.is_empty() {
            return Poll::Ready(Ok(0));
        }
        ready!(self.poll_room(cx))?;
        ready!(self.sender.poll_ready(cx))?;
        let data = &bytes[..bytes.len().min(self.max_data_bytes())];
        self.sender
            .send(|flow| encode_data(flow.next_data(), data))?;
        Poll::Ready(Ok(data.len()))
    }

    /// Does nothing: the client writes what is in its queue as soon as it can.
    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Ends the stream; ready when the end is written to the server's socket, so that the process may then exit.
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            match &mut self.closing {
                Closing::Open => {
                    ready!(self.sender.poll_ready(cx))?;
                    self.send_close()?;
                    let client = self.sender.client.clone();
                    self.closing = Closing::Flushing(Box::pin(async move { client.flush().await }));
                }
                Closing::Flushing(flushing) => {
                    let flushed = ready!(flushing.as_mut().poll(cx));
                    self.closing = Closing::Closed;
                    return Poll::Ready(flushed.map_err(io::Error::other));
                }
                Closing::Closed => return Poll::Ready(Ok(())),
            }
        }
    }
}

impl Drop for Writer {
    /// Notifies the peer at once, if that is possible without waiting. Otherwise it finds out by itself.
    fn drop(&mut self) {
        let mut cx = Context::from_waker(Waker::noop());
        if matches!(self.closing, Closing::Open)
            && let Poll::Ready(Ok(())) = self.sender.poll_ready(&mut cx)
            && let Err(error) = self.send_close()
        {
            tracing::debug!(%error, "the NATS client has ended before a connection over it");
        }
    }
}
