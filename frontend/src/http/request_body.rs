//! Reads a request's body whole, within limits of size and time, and never decodes it.
//!
//! A compressed body is refused: nobody compresses a prompt by accident, and a client must not choose how far a few bytes expand.
//! A body takes room in the memory budget for the bytes received, not for those announced. While memory is short, a large body
//! that arrives below a minimum rate is given up.

use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use http_body::Body as _;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use tokio::time::{Instant, timeout_at};

use crate::budget::MemoryShare;
use crate::config::FrontendConfig;
use crate::error::ApiError;
use crate::json::{JsonBody, metered};
use crate::work::WorkThreads;

/// Bodies of up to this many bytes may arrive at any rate.
const SMALL_BODY_BYTES: usize = 64 << 10;

/// The least room to allocate, in bytes.
const LEAST_ROOM_BYTES: usize = 4 << 10;

/// The bytes that a large body must bring in each period while memory is short.
const LEAST_BYTES: usize = 80 << 10;

/// The length of that period.
const LEAST_BYTES_WITHIN: Duration = Duration::from_secs(5);

/// A body and its share of the memory budget, which lasts as long as the body.
#[derive(Debug)]
pub(super) struct HeldBody {
    pieces: Pieces,
    share: MemoryShare,
}

impl HeldBody {
    /// An empty body: not read yet, or taken.
    pub(super) fn empty(share: MemoryShare) -> Self {
        Self {
            pieces: Pieces::default(),
            share,
        }
    }

    /// Its length in bytes.
    pub(super) fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Parses the body as a request. A long one is parsed where it delays no other request. `memory` then holds what was made of
    /// it. `further_bytes` of text besides the body count towards its length.
    ///
    /// # Errors
    /// The errors of `parse`; a 504 when the request's `deadline` passes while it waits for a thread.
    pub(super) async fn read<T: Send + 'static>(
        self,
        work: &WorkThreads,
        deadline: Option<Instant>,
        further_bytes: usize,
        memory: &mut MemoryShare,
        parse: impl FnOnce(JsonBody<'_>) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let bytes = self.len() + further_bytes;
        let share = memory.another();
        let read = move |_: &_| {
            let Self {
                pieces,
                share: _held,
            } = self;
            metered(&pieces.joined(), bytes, share, parse)
        };
        let (request, made) = work.run(bytes, deadline, read).await?;
        memory.absorb(made);
        Ok(request)
    }

    /// Puts back a body to be read again. Another account holds it.
    pub(super) fn put_back(&mut self, body: String) {
        self.pieces.first = body.into();
    }

    /// Takes the body out.
    pub(super) fn take(&mut self) -> Self {
        let empty = Self::empty(self.share.another());
        std::mem::replace(self, empty)
    }
}

/// Bytes to read before other tasks get a turn: a fast client has megabytes ready.
const BYTES_A_TURN: usize = 512 << 10;

/// Reads a body to its end, on the account of `share`.
///
/// # Errors
/// 413 over the size limit, 408 over the time limit, 415 for an encoding, 400 for a body that breaks off, 503 if there is no
/// memory for it.
pub(super) async fn read_body(
    config: &FrontendConfig,
    share: MemoryShare,
    headers: &HeaderMap,
    body: Body,
) -> Result<HeldBody, ApiError> {
    refuse_encoding(headers)?;
    // Does not wait for a body that is announced as too large.
    let hint = body.size_hint();
    if usize::try_from(hint.lower()).map_or(true, |size| size > config.max_body_bytes) {
        return Err(too_large(config));
    }
    let deadline = Instant::now() + config.body_timeout;
    let mut pieces = Limited::new(body, config.max_body_bytes);
    let announced = hint.exact().and_then(|size| usize::try_from(size).ok());
    let mut read = HeldBody::empty(share);
    let mut pace = Pace::new();
    let mut in_this_turn = 0;
    loop {
        let look = deadline.min(pace.next_look);
        match timeout_at(look, pieces.frame()).await {
            Ok(None) => return Ok(read),
            Ok(Some(Ok(frame))) => {
                if let Ok(data) = frame.into_data() {
                    in_this_turn += data.len();
                    read.add(data, announced)?;
                }
                if in_this_turn >= BYTES_A_TURN {
                    in_this_turn = 0;
                    tokio::task::yield_now().await;
                }
            }
            Ok(Some(Err(error))) if error.is::<LengthLimitError>() => {
                return Err(too_large(config));
            }
            Ok(Some(Err(_))) => {
                let message = "The request body broke off.";
                return Err(ApiError::new(StatusCode::BAD_REQUEST, message));
            }
            Err(_elapsed) if Instant::now() >= deadline => {
                return Err(too_slow(&format!(
                    "within {} s",
                    config.body_timeout.as_secs_f64()
                )));
            }
            Err(_elapsed) => pace.look(&read)?,
        }
    }
}

/// The size of a full piece. Received bytes are never copied to make room for more, because that would take longer than a turn
/// may.
const PIECE_BYTES: usize = 512 << 10;

/// A body's bytes, in order.
#[derive(Debug, Default)]
struct Pieces {
    /// The only piece of most bodies, used as it is.
    first: Bytes,
    /// The full pieces, if there are several.
    full: Vec<Vec<u8>>,
    /// The piece after the full ones.
    last: Vec<u8>,
}

impl Pieces {
    fn len(&self) -> usize {
        let full: usize = self.full.iter().map(Vec::len).sum();
        self.first.len() + full + self.last.len()
    }

    /// Returns the body in one piece. Frees each piece once it is copied, so that the peak is only one piece more than before.
    fn joined(self) -> Bytes {
        if self.full.is_empty() {
            return match self.last.is_empty() {
                true => self.first,
                false => self.last.into(),
            };
        }
        let mut all = Vec::with_capacity(self.len());
        for piece in self.full.into_iter().chain([self.last]) {
            all.extend_from_slice(&piece);
        }
        all.into()
    }
}

/// A body that is arriving. Its length may be announced.
impl HeldBody {
    fn add(&mut self, data: Bytes, announced: Option<usize>) -> Result<(), ApiError> {
        if self.len() == 0 {
            self.share.grow(data.len())?;
            self.pieces.first = data;
            return Ok(());
        }
        let first = std::mem::take(&mut self.pieces.first);
        self.put(&first, announced)?;
        self.put(&data, announced)
    }

    fn put(&mut self, data: &[u8], announced: Option<usize>) -> Result<(), ApiError> {
        if self.pieces.last.len() >= PIECE_BYTES {
            let full = std::mem::take(&mut self.pieces.last);
            self.pieces.full.push(full);
        }
        self.reserve(data.len(), announced)?;
        self.pieces.last.extend_from_slice(data);
        Ok(())
    }

    /// Makes room for `more` bytes in the last piece. Reserves twice the needed room, but at most a full piece, and not beyond the
    /// announced length.
    fn reserve(&mut self, more: usize, announced: Option<usize>) -> Result<(), ApiError> {
        let last = &mut self.pieces.last;
        let needed = last.len() + more;
        if needed <= last.capacity() {
            return Ok(());
        }
        let full = &self.pieces.full;
        let came: usize = full.iter().map(Vec::len).sum();
        let room: usize = full.iter().map(Vec::capacity).sum();
        let ahead = (2 * needed).clamp(LEAST_ROOM_BYTES, PIECE_BYTES);
        let to_come = announced.map_or(ahead, |whole| whole.saturating_sub(came));
        let ahead = ahead.min(to_come).max(needed);
        self.share.resize(room + ahead)?;
        last.reserve_exact(ahead - last.len());
        Ok(())
    }
}

/// How fast a body arrives.
struct Pace {
    next_look: Instant,
    seen_bytes: usize,
}

impl Pace {
    fn new() -> Self {
        Self {
            next_look: Instant::now() + LEAST_BYTES_WITHIN,
            seen_bytes: 0,
        }
    }

    /// Gives up a large body that brought too little since the last look, if others need its room.
    fn look(&mut self, read: &HeldBody) -> Result<(), ApiError> {
        let came = read.len() - self.seen_bytes;
        let is_slow = came < LEAST_BYTES && read.len() > SMALL_BODY_BYTES;
        if is_slow && read.share.budget().is_short() {
            let seconds = LEAST_BYTES_WITHIN.as_secs();
            return Err(too_slow(&format!(
                "fast enough: {came} bytes in {seconds} s, while this server is short of memory"
            )));
        }
        self.seen_bytes = read.len();
        self.next_look += LEAST_BYTES_WITHIN;
        Ok(())
    }
}

fn too_slow(how: &str) -> ApiError {
    let message = format!("The request body did not arrive {how}.");
    ApiError::new(StatusCode::REQUEST_TIMEOUT, message)
}

fn too_large(config: &FrontendConfig) -> ApiError {
    let limit = config.max_body_bytes;
    let message = format!("The request body is over this server's limit of {limit} bytes.");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message)
}

/// Refuses a body whose content or transfer is encoded, except as chunks. RFC 9112 has a 501 for the latter, which clients would send
/// again.
fn refuse_encoding(headers: &HeaderMap) -> Result<(), ApiError> {
    for (name, plain) in [
        ("content-encoding", "identity"),
        ("transfer-encoding", "chunked"),
    ] {
        for value in headers.get_all(name) {
            let encodings = String::from_utf8_lossy(value.as_bytes());
            let is_plain = |encoding: &str| {
                let plain = ["", "identity", plain];
                plain
                    .iter()
                    .any(|plain| encoding.eq_ignore_ascii_case(plain))
            };
            if let Some(encoding) = encodings.split(',').map(str::trim).find(|it| !is_plain(it)) {
                let message = format!(
                    "The {name} {encoding:?} is not available; send the body without encoding."
                );
                return Err(ApiError {
                    param: Some(name.into()),
                    ..ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message)
                });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;
    use crate::budget::MemoryBudget;
    use crate::work::tests::keep_busy;

    #[tokio::test]
    async fn a_body_waits_for_a_thread_no_longer_than_its_request_is_of_use() {
        let threads = WorkThreads::new(NonZeroUsize::MIN);
        let (working, end) = keep_busy(&threads).await;
        let budget = MemoryBudget::new(1 << 20);
        let mut memory = budget.share();
        let bytes = Bytes::from(vec![b' '; SMALL_BODY_BYTES]);
        let mut share = memory.another();
        share.grow(bytes.len()).unwrap();
        let pieces = Pieces {
            first: bytes,
            ..Pieces::default()
        };
        let body = HeldBody { pieces, share };
        let parse = |_: JsonBody<'_>| -> Result<(), ApiError> { panic!("it was read") };
        let read = body.read(&threads, Some(Instant::now()), 0, &mut memory, parse);
        assert_eq!(read.await.unwrap_err().status, 504);
        assert_eq!(budget.used(), 0);
        drop(end);
        working.await.unwrap();
    }
}
