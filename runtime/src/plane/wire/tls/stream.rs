//! [`TlsStream`]: one end of a TLS connection. An accepted one performs its handshake on first use.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::BytesMut;
use genset_wire::{
    FrameDecoder, FrameKind, GoAway, GoAwayCode, MAX_GREETING_BYTES, encode_frame, encode_payload,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsStream as Rustls};

use super::super::transport::Refusal;
use super::problem::{self, Side};

/// The first byte of a TLS connection: its first record is a handshake record.
const HANDSHAKE_RECORD: u8 = 22;

/// The first byte of a connection of this protocol: no handshake frame has a length of 2^24 or more.
const SHORT_FRAME: u8 = 0;

/// How long a refused caller may take to read the reason.
const PARTING_TIME: Duration = Duration::from_millis(250);

/// One end of a connection.
pub(in super::super) struct TlsStream {
    state: State,
    side: Side,
}

enum State {
    Opening(Opening),
    Open(Box<Rustls<TcpStream>>),
    Failed,
}

type Opening = Pin<Box<dyn Future<Output = io::Result<Rustls<TcpStream>>> + Send>>;

impl TlsStream {
    /// A connection after its handshake.
    pub(super) fn open(stream: Rustls<TcpStream>, side: Side) -> Self {
        Self {
            state: State::Open(Box::new(stream)),
            side,
        }
    }

    /// A connection whose handshake runs on first read or write.
    pub(super) fn accepting(stream: TcpStream, acceptor: Option<TlsAcceptor>) -> Self {
        Self {
            state: State::Opening(Box::pin(secured(stream, acceptor))),
            side: Side::Worker,
        }
    }

    fn poll_open(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Pin<&mut Rustls<TcpStream>>>> {
        if let State::Opening(opening) = &mut self.state {
            let opened = ready!(opening.as_mut().poll(cx));
            // If this fails, later calls find an ended connection.
            self.state = State::Failed;
            self.state = State::Open(Box::new(opened?));
        }
        match &mut self.state {
            State::Open(stream) => Poll::Ready(Ok(Pin::new(stream))),
            State::Opening(_) | State::Failed => {
                Poll::Ready(Err(io::ErrorKind::NotConnected.into()))
            }
        }
    }
}

impl AsyncRead for TlsStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let side = self.side;
        let stream = ready!(self.poll_open(cx))?;
        match ready!(stream.poll_read(cx, buffer)) {
            // TLS expects a close notification before the end. Frames show whether data is missing, so treat any end as an end.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Poll::Ready(Ok(())),
            Err(error) => Poll::Ready(Err(problem::explained(error, side))),
            Ok(()) => Poll::Ready(Ok(())),
        }
    }
}

impl AsyncWrite for TlsStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_open(cx))?.poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_open(cx))?.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_open(cx))?.poll_shutdown(cx)
    }
}

/// Performs a worker's half of the handshake.
///
/// # Errors
/// A [`Refusal`] if the caller is at fault; the caller received it, unless it speaks another protocol.
async fn secured(
    stream: TcpStream,
    acceptor: Option<TlsAcceptor>,
) -> io::Result<Rustls<TcpStream>> {
    let acceptor = acceptor.ok_or(io::ErrorKind::Unsupported)?;
    let mut first = [0];
    if stream.peek(&mut first).await? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    match first {
        [HANDSHAKE_RECORD] => match acceptor.accept(stream).into_fallible().await {
            Ok(stream) => Ok(stream.into()),
            Err((error, stream)) => {
                part_from(stream).await;
                Err(problem::explained(error, Side::Worker))
            }
        },
        [SHORT_FRAME] => Err(refused_in_plaintext(stream).await),
        [_] => Err(io::Error::other(problem::not_our_protocol())),
    }
}

/// Sends a caller without TLS the reason for the refusal, in its own protocol.
async fn refused_in_plaintext(mut stream: TcpStream) -> io::Error {
    match is_of_our_protocol(&mut stream).await {
        Ok(true) => {}
        Ok(false) => return io::Error::other(problem::not_our_protocol()),
        Err(error) => return error,
    }
    let refusal = problem::plaintext();
    if let Some(bytes) = go_away(&refusal) {
        // The caller may be gone; the refusal stands.
        let _ = stream.write_all(&bytes).await;
    }
    part_from(stream).await;
    io::Error::other(refusal)
}

/// Whether the first frame is a caller's greeting.
async fn is_of_our_protocol(stream: &mut TcpStream) -> io::Result<bool> {
    let mut decoder = FrameDecoder::with_limit(MAX_GREETING_BYTES);
    loop {
        match decoder.next_frame() {
            Ok(Some(frame)) => {
                return Ok(matches!(
                    frame.kind,
                    FrameKind::Hello | FrameKind::Unknown(_)
                ));
            }
            Ok(None) => {
                if stream.read_buf(decoder.buffer_mut()).await? == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
            }
            Err(_) => return Ok(false),
        }
    }
}

fn go_away(refusal: &Refusal) -> Option<BytesMut> {
    let go_away = GoAway {
        code: GoAwayCode::Unauthorized,
        reason: refusal.problem.clone(),
    };
    let mut bytes = BytesMut::new();
    let payload = encode_payload(&go_away).ok()?;
    encode_frame(FrameKind::GoAway, 0, &payload, &mut bytes).ok()?;
    Some(bytes)
}

/// Ends a connection so that the peer can read our last bytes: closing with unread input resets the connection, which may lose
/// them.
async fn part_from(mut stream: TcpStream) {
    let parting = async {
        stream.shutdown().await?;
        let mut unread = [0; 1024];
        while stream.read(&mut unread).await? > 0 {}
        io::Result::Ok(())
    };
    // In time or not, the connection is over.
    drop(tokio::time::timeout(PARTING_TIME, parting).await);
}
