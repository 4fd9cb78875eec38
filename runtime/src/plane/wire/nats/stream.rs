//! The two halves of a virtual connection as a byte stream.
//!
//! There are no tasks behind them: the writer hands messages to the NATS client and the reader takes them from its
//! subscription, each when it is polled. The reader also reads what the peer acknowledges, so a writer that waits for room
//! needs its reader polled; a [`Link`](crate::plane::wire::link::Link) always does that.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

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

/// A virtual connection that both ends agreed on.
pub(super) struct Connection {
    pub(super) client: Client,
    /// Delivers what the peer sends.
    pub(super) subscriber: Subscriber,
    /// Where that is published, for the peer to answer to.
    pub(super) own: Subject,
    /// Where the peer is.
    pub(super) peer: Subject,
    /// Data messages the subscription holds for us.
    pub(super) window: u32,
    /// Data messages the peer's subscription holds for it.
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
                has_failed: false,
                writer: None,
            })),
        };
        Io {
            reader: Box::new(Reader {
                subscriber: self.subscriber,
                sender: sender.clone(),
                rest: Bytes::new(),
                has_ended: false,
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

/// What the halves share.
struct Books {
    flow: Flow,
    /// The reader found the connection broken.
    has_failed: bool,
    /// Waits for room.
    writer: Option<Waker>,
}

/// Publishes to the peer. Each half has one, with a place of its own in the client's queue.
#[derive(Clone)]
struct Sender {
    client: Client,
    own: Subject,
    peer: Subject,
    books: Arc<Mutex<Books>>,
}

impl Sender {
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.client)
            .poll_ready(cx)
            .map_err(client_ended)
    }

    /// Publishes what `make` makes of the books; after [`Self::poll_ready`]. The books stay locked until it is in the queue,
    /// so that messages are in it in the order of their numbers.
    fn send(&mut self, make: impl FnOnce(&mut Flow) -> Bytes) -> io::Result<()> {
        let mut books = self.books.lock();
        let message = OutboundMessage {
            subject: self.peer.clone(),
            // Where nobody listens any more, the server says so to this subject, at once.
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
    subscriber: Subscriber,
    sender: Sender,
    /// What is left of the last message.
    rest: Bytes,
    has_ended: bool,
}

impl Reader {
    /// Tells the peer what was taken, if it is due and the client's queue has room; else it is tried at the next poll.
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

    fn take(&mut self, message: &async_nats::Message) -> io::Result<()> {
        if message.status == Some(StatusCode::NO_RESPONDERS) {
            let gone = "the peer is gone: NATS knows nobody at its subject";
            return Err(io::Error::new(io::ErrorKind::ConnectionReset, gone));
        }
        let mut books = self.sender.books.lock();
        match Message::decode(&message.payload).map_err(invalid)? {
            Message::Data(position, data) => {
                books.flow.take_data(position).map_err(invalid)?;
                self.rest = data;
            }
            Message::Taken(position) => books.flow.take(position).map_err(invalid)?,
            Message::Close(position) => {
                books.flow.take(position).map_err(invalid)?;
                self.has_ended = true;
            }
            message @ (Message::Open { .. } | Message::Accept { .. } | Message::Probe) => {
                let problem = format!("{message:?} on a connection that is open");
                return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
            }
        }
        if books.flow.has_room()
            && let Some(writer) = books.writer.take()
        {
            writer.wake();
        }
        Ok(())
    }

    fn fail(&mut self, error: io::Error) -> io::Error {
        let mut books = self.sender.books.lock();
        books.has_failed = true;
        if let Some(writer) = books.writer.take() {
            writer.wake();
        }
        error
    }
}

fn invalid(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

impl AsyncRead for Reader {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            this.acknowledge(cx).map_err(|error| this.fail(error))?;
            if !this.rest.is_empty() {
                let length = this.rest.len().min(buffer.remaining());
                buffer.put_slice(&this.rest[..length]);
                this.rest.advance(length);
                return Poll::Ready(Ok(()));
            }
            if this.has_ended {
                return Poll::Ready(Ok(()));
            }
            let Some(message) = ready!(Pin::new(&mut this.subscriber).poll_next(cx)) else {
                let ended = io::Error::new(io::ErrorKind::BrokenPipe, "the NATS client has ended");
                return Poll::Ready(Err(this.fail(ended)));
            };
            this.take(&message).map_err(|error| this.fail(error))?;
        }
    }
}

struct Writer {
    sender: Sender,
    max_message_bytes: usize,
    closing: Closing,
}

/// How far the end of our direction is.
enum Closing {
    Open,
    /// The last message is in the client's queue, and on its way to the socket.
    Flushing(Pin<Box<dyn Future<Output = Result<(), FlushError>> + Send>>),
    Closed,
}

impl Writer {
    /// Bytes of the stream that one message carries now: the server may have become another, with another limit.
    fn max_data_bytes(&self) -> usize {
        let limit = self.max_message_bytes.min(self.sender.client.max_payload());
        limit.saturating_sub(HEADER_BYTES).max(1)
    }

    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut books = self.sender.books.lock();
        if books.has_failed {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        if books.flow.has_room() {
            return Poll::Ready(Ok(()));
        }
        books.writer = Some(cx.waker().clone());
        Poll::Pending
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

    /// Ends the stream; ready once the end is written to the server's socket, so that a process may exit after it.
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
    /// Tells the peer at once, if that is possible without waiting. Else it finds out by itself.
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
