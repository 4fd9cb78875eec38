//! The tasks of a [`Link`]: the greeting, the reader, the writer and the heartbeat.

use bytes::BytesMut;
use genset_process::Supervision;
use genset_wire::{FrameDecoder, FrameKind, Greeting, GreetingError, Hello};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::Duration;

use crate::config::{MIN_FRAME_BYTES, SubprocessConfig};
use crate::failure::ChildFailure;
use crate::link::Link;

/// The minimum number of bytes that one read has room for.
const READ_BYTES: usize = 64 << 10;

/// Exchanges Hellos with the process. Returns its payload limit, and the decoder with any bytes that followed.
///
/// # Errors
/// The process's failure: it closed its socket, sent something else, or speaks another version.
pub(crate) async fn greet(
    socket: &mut UnixStream,
    max_frame_bytes: u32,
) -> Result<(u32, FrameDecoder), ChildFailure> {
    let ours = Hello::new(max_frame_bytes);
    let mut greeting = Greeting::new(socket);
    let theirs: Hello = async {
        greeting.send(FrameKind::Hello, &ours).await?;
        greeting.receive(FrameKind::Hello).await
    }
    .await
    .map_err(|error| ungreeted(error, !greeting.unread().is_empty()))?;
    ours.agree(&theirs).map_err(|error| ChildFailure::Version {
        what: error.message().to_owned(),
    })?;
    if theirs.max_frame_bytes < MIN_FRAME_BYTES {
        let what = "Hello: max_frame_bytes must be at least 65536";
        return Err(ChildFailure::protocol(what));
    }
    let decoder = greeting.into_decoder(max_frame_bytes as usize);
    Ok((theirs.max_frame_bytes, decoder))
}

/// Why the process sent no Hello.
fn ungreeted(error: GreetingError, is_cut: bool) -> ChildFailure {
    match error {
        GreetingError::Closed | GreetingError::Io(_) if is_cut => ChildFailure::HalfFrame,
        GreetingError::Closed | GreetingError::Io(_) => ChildFailure::ClosedSocket,
        GreetingError::NoFrames(error) => ChildFailure::protocol(error.to_string()),
        GreetingError::Unexpected(what) => ChildFailure::protocol(what),
        GreetingError::Refused(go_away) => ChildFailure::Version {
            what: go_away.reason,
        },
    }
}

/// Reads frames until the process closes its end or breaks the protocol, and reports which.
pub(crate) async fn read(link: &Link, mut socket: OwnedReadHalf, mut decoder: FrameDecoder) {
    let failure = loop {
        if let Err(failure) = take_frames(link, &mut decoder) {
            break failure;
        }
        decoder.buffer_mut().reserve(READ_BYTES);
        let read = tokio::select! {
            biased;
            () = link.closed.cancelled() => return,
            read = socket.read_buf(decoder.buffer_mut()) => read,
        };
        match read {
            Ok(0) | Err(_) if decoder.buffered() > 0 => break ChildFailure::HalfFrame,
            Ok(0) | Err(_) => break ChildFailure::ClosedSocket,
            Ok(_) => link.hear(),
        }
    };
    link.report(failure);
}

fn take_frames(link: &Link, decoder: &mut FrameDecoder) -> Result<(), ChildFailure> {
    loop {
        let frame = decoder.next_frame();
        match frame.map_err(|error| ChildFailure::protocol(error.to_string()))? {
            Some(frame) => link.arrived(frame)?,
            None => return Ok(()),
        }
    }
}

/// Writes the outbox until the connection is closed. If the process must end, closes our direction after the queued frames.
pub(crate) async fn write(link: &Link, mut socket: OwnedWriteHalf, supervision: &Supervision) {
    let mut spent = BytesMut::new();
    loop {
        let mut batch = tokio::select! {
            biased;
            () = link.closed.cancelled() => return,
            batch = link.outbox.take(std::mem::take(&mut spent)) => batch,
            () = supervision.ending() => break,
        };
        let written = tokio::select! {
            biased;
            () = link.closed.cancelled() => return,
            written = batch.write_to(&mut socket, || ()) => written,
        };
        // The reader sees the same end and reports it.
        if written.is_err() {
            return;
        }
        spent = batch.into_buffer();
    }
    drop(socket.shutdown().await);
}

/// Sends heartbeats; returns when nothing was received for too long.
///
/// Silence is counted in ticks. A late tick does not count, and so neither does time in which this process was suspended or got
/// no CPU. Earlier silence stays counted until something is received.
pub(crate) async fn watch(link: &Link, config: &SubprocessConfig) -> ChildFailure {
    let interval = config.heartbeat_interval;
    let mut ticks = tokio::time::interval(interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    // The first tick comes at once, before any time has passed.
    ticks.tick().await;
    let mut silent_for = Duration::ZERO;
    loop {
        link.ping();
        let due = ticks.tick().await;
        if link.was_heard() {
            silent_for = Duration::ZERO;
        } else if due.elapsed() < interval / 2 {
            silent_for += interval;
        }
        if silent_for >= config.heartbeat_timeout {
            return ChildFailure::Hung { silent_for };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::FutureExt as _;
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_time_in_which_this_process_stood_still_is_no_silence() {
        let (link, config) = (Link::new(), SubprocessConfig::new("engine"));
        let mut watch = pin!(watch(&link, &config));
        assert!(watch.as_mut().now_or_never().is_none());
        // Simulates the time between SIGSTOP and SIGCONT.
        tokio::time::advance(Duration::from_secs(3600)).await;
        assert!(watch.as_mut().now_or_never().is_none());
        let goes_on = Instant::now();
        let failure = watch.await;
        assert!(matches!(failure, ChildFailure::Hung { .. }), "{failure}");
        assert_eq!(goes_on.elapsed(), config.heartbeat_timeout);
    }
}
