//! Payloads: MessagePack maps with named fields.

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use bytes::Bytes;
use serde::de::value::Error as ValueError;
use serde::de::{DeserializeOwned, IntoDeserializer};
use serde::{Deserialize, Deserializer, Serialize};
use tokio::time::Instant;

use genset_backend_common::context::{CancelReason, RequestContext, TraceContext};
use genset_backend_common::error::{EngineError, ErrorDetails, ErrorKind};

/// The newest protocol version this crate speaks.
pub const PROTOCOL_VERSION: u16 = 1;

/// The oldest protocol version this crate speaks: the one before [`PROTOCOL_VERSION`], if there is one, so that a fleet can be
/// upgraded version by version.
pub const MIN_PROTOCOL_VERSION: u16 = 1;

/// The payload of `Hello`, the first frame in each direction.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The newest version the sender speaks.
    pub version: u16,
    /// The oldest version the sender speaks.
    pub min_version: u16,
    /// The largest payload the sender accepts, in bytes.
    pub max_frame_bytes: u32,
    /// Whether the sender has a shared secret, and therefore requires a proof of it from the peer.
    #[serde(default)]
    pub has_secret: bool,
    /// Random bytes covered by the peer's proof; at least 16 when `has_secret`.
    #[serde(default)]
    pub nonce: Bytes,
}

/// The payload of `Auth`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Auth {
    /// Keyed BLAKE2b-256 over the sender's role and both nonces.
    pub proof: Bytes,
}

impl Hello {
    /// Returns this crate's `Hello`, without a secret.
    #[must_use]
    pub fn new(max_frame_bytes: u32) -> Self {
        Self {
            version: PROTOCOL_VERSION,
            min_version: MIN_PROTOCOL_VERSION,
            max_frame_bytes,
            has_secret: false,
            nonce: Bytes::new(),
        }
    }

    /// Returns the newest version that both sides speak.
    ///
    /// # Errors
    /// `CannotConnect`, naming both ranges, when there is none.
    pub fn agree(&self, other: &Self) -> Result<u16, EngineError> {
        let newest = self.version.min(other.version);
        if newest >= self.min_version && newest >= other.min_version {
            return Ok(newest);
        }
        Err(EngineError::new(
            ErrorKind::CannotConnect,
            format!(
                "no common protocol version: we speak {} to {}, the peer {} to {}",
                self.min_version, self.version, other.min_version, other.version
            ),
        ))
    }
}

/// The first part of a `Request` frame's payload: metadata, which the request itself follows.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RequestHead {
    /// The endpoint's full name, `namespace.component.endpoint`.
    pub endpoint: String,
    /// The called instance's id, below 2^53.
    pub instance: u64,
    /// The request's id.
    pub id: String,
    /// Milliseconds left until the deadline. Relative, because clocks differ between hosts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
    /// Milliseconds since the request began at another instance; absent if this instance is the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub age_ms: Option<u64>,
    /// W3C traceparent; empty when there is none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub traceparent: String,
    /// W3C tracestate; empty when there is none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub tracestate: String,
    /// Other headers, names in lower case.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub headers: BTreeMap<String, String>,
    /// The caller's initial credit: the number of items it has room for.
    pub credit: u32,
    /// Proof of the control secret, for requests to `control`; empty when there is none.
    #[serde(skip_serializing_if = "Bytes::is_empty")]
    pub control_proof: Bytes,
}

impl RequestHead {
    /// Builds the head from a request's context: id, time left until the deadline, age, trace and headers.
    #[must_use]
    pub fn of(endpoint: String, ctx: &RequestContext) -> Self {
        let trace = ctx.trace().cloned().unwrap_or_default();
        let ms = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Self {
            endpoint,
            id: ctx.id().to_owned(),
            deadline_ms: ctx.time_left().map(ms),
            age_ms: ctx.began().map(|began| ms(began.elapsed())),
            traceparent: trace.traceparent,
            tracestate: trace.tracestate,
            headers: ctx.headers().clone(),
            ..Self::default()
        }
    }

    /// Returns the request's context for the callee.
    #[must_use]
    pub fn into_context(self) -> RequestContext {
        let mut ctx = RequestContext::new(self.id).with_headers(self.headers);
        // A year is long enough, and cannot overflow the clock.
        let time = |ms| Duration::from_millis(ms).min(Duration::from_secs(365 * 24 * 3600));
        let now = Instant::now();
        if let Some(ms) = self.deadline_ms {
            ctx = ctx.with_deadline(now + time(ms));
        }
        if let Some(began) = self.age_ms.and_then(|ms| now.checked_sub(time(ms))) {
            ctx = ctx.with_began(began);
        }
        match TraceContext::parse(&self.traceparent, &self.tracestate) {
            Some(trace) => ctx.with_trace(trace),
            None => ctx,
        }
    }
}

/// The most bytes of a [`RequestHead`], headers included.
pub const MAX_HEAD_BYTES: usize = 64 << 10;

/// The payload of `Error`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WireError {
    /// The kind; names from later versions decode as `Internal`.
    #[serde(deserialize_with = "known_kind")]
    pub kind: ErrorKind,
    /// The message for the client.
    pub message: String,
    /// Details for programs.
    #[serde(default)]
    pub details: ErrorDetails,
}

fn known_kind<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ErrorKind, D::Error> {
    let name = String::deserialize(deserializer)?;
    let known: Result<_, ValueError> = ErrorKind::deserialize(name.into_deserializer());
    Ok(known.unwrap_or(ErrorKind::Internal))
}

impl From<&EngineError> for WireError {
    fn from(error: &EngineError) -> Self {
        Self {
            kind: error.kind(),
            message: error.message().to_owned(),
            details: error.details().clone(),
        }
    }
}

impl From<WireError> for EngineError {
    fn from(error: WireError) -> Self {
        Self::new(error.kind, error.message).with_details(error.details)
    }
}

/// The payload of `Credit`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credit {
    /// The number of further items the caller has room for.
    pub items: u32,
}

/// The payload of `Cancel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cancel {
    /// The reason; reasons from later versions decode as `Client`.
    #[serde(deserialize_with = "known_reason")]
    pub reason: CancelReason,
    /// Whether the caller has stopped reading: the callee then sends nothing more on the stream. Otherwise it still sends the
    /// terminal.
    pub discard: bool,
}

fn known_reason<'de, D: Deserializer<'de>>(deserializer: D) -> Result<CancelReason, D::Error> {
    let name = String::deserialize(deserializer)?;
    let known: Result<_, ValueError> = CancelReason::deserialize(name.into_deserializer());
    Ok(known.unwrap_or(CancelReason::Client))
}

/// The payload of `GoAway`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GoAway {
    /// The reason, for programs.
    pub code: GoAwayCode,
    /// The reason, for the log.
    pub reason: String,
}

/// Why a peer accepts no new streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GoAwayCode {
    /// The peer shuts down; open streams continue.
    Shutdown,
    /// The peers have no protocol version in common.
    Version,
    /// The shared secret is missing or wrong.
    Unauthorized,
    /// The peer has reached its limit on connections.
    Limit,
    /// The receiver of this frame violated the protocol; the connection ends.
    Protocol,
    /// A code from a later version.
    #[serde(other)]
    Other,
}

/// The payload of `Leaving`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leaving {
    /// The instance that accepts no new requests.
    pub instance: u64,
}

/// Why a payload could not be encoded or decoded.
#[derive(Debug, thiserror::Error)]
pub enum PayloadError {
    /// The value cannot be written as MessagePack.
    #[error("cannot encode the payload as MessagePack")]
    Encode(#[from] rmp_serde::encode::Error),
    /// The bytes are not MessagePack of the expected type.
    #[error("cannot decode the payload: not MessagePack of the expected type")]
    Decode(#[from] rmp_serde::decode::Error),
    /// The head of a request exceeds [`MAX_HEAD_BYTES`].
    #[error("the head of the request, headers included, has more than {MAX_HEAD_BYTES} bytes")]
    HeadTooLong,
    /// Bytes follow the value.
    #[error("cannot decode the payload: {extra} bytes follow the value")]
    TrailingBytes {
        /// The number of bytes.
        extra: usize,
    },
}

impl PayloadError {
    /// What is wrong with the payload, such as the field that it lacks, in at most 300 bytes. Unlike `Display`, it may quote a value.
    #[must_use]
    pub fn detail(&self) -> String {
        let source = std::error::Error::source(self).map(ToString::to_string);
        let mut detail = source.unwrap_or_else(|| self.to_string());
        detail.truncate(detail.floor_char_boundary(300));
        detail
    }
}

/// Writes `value` as a MessagePack map with named fields.
///
/// # Errors
/// [`PayloadError::Encode`], for types that MessagePack cannot represent.
///
/// # Examples
/// ```
/// use genset_backend_common::GenerateRequest;
/// use genset_wire::{decode_payload, encode_payload};
///
/// let request = GenerateRequest::from_tokens("tiny-chat", vec![1, 2, 3]);
/// let bytes = encode_payload(&request)?;
/// assert_eq!(decode_payload::<GenerateRequest>(&bytes)?, request);
/// # Ok::<(), genset_wire::PayloadError>(())
/// ```
pub fn encode_payload<T: Serialize>(value: &T) -> Result<Vec<u8>, PayloadError> {
    Ok(rmp_serde::to_vec_named(value)?)
}

/// Like [`encode_payload`], but stops and returns `None` if the payload exceeds `most` bytes.
///
/// # Errors
/// Same as [`encode_payload`].
pub fn encode_short_payload<T: Serialize>(
    value: &T,
    most: usize,
) -> Result<Option<Vec<u8>>, PayloadError> {
    let mut short = Short {
        bytes: Vec::new(),
        most,
        is_over: false,
    };
    let mut serializer = rmp_serde::Serializer::new(&mut short).with_struct_map();
    let written = value.serialize(&mut serializer);
    if short.is_over {
        return Ok(None);
    }
    written?;
    Ok(Some(short.bytes))
}

/// A buffer of at most `most` bytes.
struct Short {
    bytes: Vec<u8>,
    most: usize,
    is_over: bool,
}

impl io::Write for Short {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.is_over |= bytes.len() > self.most - self.bytes.len();
        if self.is_over {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Decodes one value; trailing bytes are an error. Unknown fields are ignored.
///
/// # Errors
/// [`PayloadError::Decode`] or [`PayloadError::TrailingBytes`].
pub fn decode_payload<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, PayloadError> {
    let mut rest = bytes;
    let value = T::deserialize(&mut rmp_serde::Deserializer::new(&mut rest))?;
    if rest.is_empty() {
        Ok(value)
    } else {
        Err(PayloadError::TrailingBytes { extra: rest.len() })
    }
}

/// Encodes the payload of `Request`: the head, then the request, which is already MessagePack.
///
/// # Errors
/// [`PayloadError::Encode`], which does not occur for a head.
pub fn encode_request(head: &RequestHead, body: &[u8]) -> Result<Vec<u8>, PayloadError> {
    let mut bytes = encode_payload(head)?;
    bytes.extend_from_slice(body);
    Ok(bytes)
}

/// Splits the payload of `Request` into the head and the undecoded request.
///
/// # Errors
/// [`PayloadError::Decode`] when the payload does not begin with a head; [`PayloadError::HeadTooLong`] when the head exceeds
/// [`MAX_HEAD_BYTES`], in which case the rest of it is not read.
///
/// # Examples
/// ```
/// use genset_wire::{RequestHead, decode_request, encode_payload, encode_request};
///
/// let head = RequestHead { endpoint: "ns.backend.generate".into(), ..RequestHead::default() };
/// let payload = encode_request(&head, &encode_payload(&[1, 2, 3])?)?;
/// let (decoded, body) = decode_request(&payload.into())?;
/// assert_eq!((decoded, &body[..]), (head, &[0x93, 1, 2, 3][..]));
/// # Ok::<(), genset_wire::PayloadError>(())
/// ```
pub fn decode_request(payload: &Bytes) -> Result<(RequestHead, Bytes), PayloadError> {
    let most = payload.get(..MAX_HEAD_BYTES).unwrap_or(payload);
    let mut rest = most;
    let read = RequestHead::deserialize(&mut rmp_serde::Deserializer::new(&mut rest));
    let head = read.map_err(|error| {
        if most.len() < payload.len() && ends_early(&error) {
            PayloadError::HeadTooLong
        } else {
            error.into()
        }
    })?;
    let body = payload.slice(most.len() - rest.len()..);
    Ok((head, body))
}

fn ends_early(error: &rmp_serde::decode::Error) -> bool {
    use rmp_serde::decode::Error;
    if let Error::InvalidMarkerRead(error) | Error::InvalidDataRead(error) = error {
        return error.kind() == std::io::ErrorKind::UnexpectedEof;
    }
    false
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use genset_backend_common::error::RequestField;
    use genset_backend_common::output::{Finish, Output, TextChunk, TokenChunk};
    use genset_backend_common::request::{GenerateRequest, GuidedDecoding, Input, ScorePair};

    fn round_trip<T: Serialize + DeserializeOwned>(value: &T) -> T {
        decode_payload(&encode_payload(value).unwrap()).unwrap()
    }

    proptest! {
        #[test]
        fn requests_survive(
            tokens in proptest::collection::vec(any::<u32>(), 0..50),
            max_tokens in proptest::option::of(any::<u32>()),
            temperature in proptest::option::of(-1e3f32..1e3),
            bias in proptest::collection::btree_map(any::<u32>(), -100f32..100.0, 0..4),
            regex in proptest::option::of(".*"),
            seed in proptest::option::of(any::<u64>()),
        ) {
            let mut request = GenerateRequest::from_tokens("m", tokens);
            request.stop.max_tokens = max_tokens;
            request.sampling.temperature = temperature;
            request.sampling.logit_bias = bias.into();
            request.sampling.seed = seed;
            request.guided = regex.map(|regex| GuidedDecoding::Regex(regex).into());
            prop_assert_eq!(round_trip(&request), request);
        }

        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            drop(decode_payload::<GenerateRequest>(&bytes));
            drop(decode_payload::<Output>(&bytes));
            drop(decode_payload::<WireError>(&bytes));
            drop(decode_request(&bytes.into()));
        }
    }

    #[test]
    fn pairs_to_score_survive() {
        let pair = ScorePair {
            token_ids: vec![1, 70_000, 3],
            first_tokens: 2,
        };
        let mut request = GenerateRequest::from_tokens("m", vec![]);
        request.input = Input::Score([pair].into());
        assert_eq!(round_trip(&request), request);
    }

    #[test]
    fn outputs_survive() {
        let chunk: TokenChunk = [1, 2, 3, 4, 5].into_iter().collect();
        let finished = Finish::stop_token(2)
            .with_last(chunk.clone())
            .with_cached_tokens(7)
            .into_finished(9, 1);
        for output in [
            Output::Tokens(chunk),
            Output::Text(TextChunk {
                text: "é".into(),
                token_count: 1,
            }),
            Output::Embeddings(vec![vec![0.5, -1.0]]),
            Output::Scores(vec![0.25, -3.5]),
            Output::Finished(Box::new(finished)),
        ] {
            assert_eq!(round_trip(&output), output);
        }
    }

    #[test]
    fn errors_survive_with_their_details() {
        let error = EngineError::invalid_argument(RequestField::TopP, "must be at most 1")
            .with_retry_after(Duration::from_millis(1500))
            .with_request_id("r");
        let back = EngineError::from(round_trip(&WireError::from(&error)));
        assert_eq!(
            (back.kind(), back.message(), back.details()),
            (error.kind(), error.message(), error.details())
        );
    }

    #[test]
    fn a_request_keeps_its_age() {
        let young = RequestHead::of(String::new(), &RequestContext::new("r"));
        assert_eq!(young.age_ms, None);
        for (told, kept) in [(60_000, 60_000), (u64::MAX, 1)] {
            let head = RequestHead {
                age_ms: Some(told),
                ..young.clone()
            };
            let there = round_trip(&head).into_context();
            assert_eq!(there.deadline(), None);
            assert!(RequestHead::of(String::new(), &there).age_ms >= Some(kept));
        }
    }

    #[test]
    fn what_is_wrong_quotes_a_long_value_in_part() {
        let text = encode_payload(&"é".repeat(1000)).unwrap();
        let detail = decode_payload::<char>(&text).unwrap_err().detail();
        assert!(detail.starts_with("invalid value: string"), "{detail}");
        assert!((290..=300).contains(&detail.len()), "{detail}");
    }

    /// A newer peer sends unknown fields; an older one omits fields that it does not know.
    #[test]
    fn unknown_fields_are_ignored_and_absent_ones_take_defaults() {
        #[derive(Serialize)]
        struct Newer<'a> {
            model: &'a str,
            input: Input,
            field_of_tomorrow: u32,
        }
        let newer = Newer {
            model: "m",
            input: Input::Tokens(vec![1].into()),
            field_of_tomorrow: 3,
        };
        let request: GenerateRequest = decode_payload(&encode_payload(&newer).unwrap()).unwrap();
        assert_eq!(request, GenerateRequest::from_tokens("m", vec![1]));
    }

    #[test]
    fn kinds_and_reasons_of_a_later_version_are_read_as_ones_we_know() {
        #[derive(Serialize)]
        struct Newer {
            kind: &'static str,
            message: &'static str,
            reason: &'static str,
            discard: bool,
        }
        let newer = Newer {
            kind: "overheated",
            message: "wait",
            reason: "boredom",
            discard: true,
        };
        let bytes = encode_payload(&newer).unwrap();
        let error: WireError = decode_payload(&bytes).unwrap();
        assert_eq!(error.kind, ErrorKind::Internal);
        let cancel: Cancel = decode_payload(&bytes).unwrap();
        assert_eq!(
            (cancel.reason, cancel.discard),
            (CancelReason::Client, true)
        );
    }

    #[test]
    fn bytes_after_the_value_are_refused() {
        let mut bytes = encode_payload(&Credit { items: 1 }).unwrap();
        bytes.push(0);
        assert!(matches!(
            decode_payload::<Credit>(&bytes),
            Err(PayloadError::TrailingBytes { extra: 1 })
        ));
    }

    #[test]
    fn the_newest_common_version_is_agreed_on() {
        for (ours, theirs, agreed) in [
            ((1, 1), (1, 1), Some(1)),
            ((1, 2), (1, 3), Some(2)),
            ((2, 3), (1, 2), Some(2)),
            ((1, 3), (2, 2), Some(2)),
            ((3, 4), (1, 2), None),
            ((1, 1), (2, 3), None),
        ] {
            let (ours, theirs) = (speaks(ours), speaks(theirs));
            for (one, other) in [(&ours, &theirs), (&theirs, &ours)] {
                let version = one.agree(other).map_err(|error| error.kind());
                let expected = agreed.ok_or(ErrorKind::CannotConnect);
                assert_eq!(version, expected, "{one:?} {other:?}");
            }
        }
    }

    #[test]
    fn a_peer_one_version_behind_or_ahead_is_understood() {
        let ours = Hello::new(1);
        let behind = PROTOCOL_VERSION.saturating_sub(1).max(1);
        assert_eq!(ours.agree(&speaks((behind, behind))).unwrap(), behind);
        let ahead = speaks((PROTOCOL_VERSION, PROTOCOL_VERSION + 1));
        assert_eq!(ours.agree(&ahead).unwrap(), PROTOCOL_VERSION);
    }

    /// Returns the `Hello` of a peer that speaks versions from the oldest to the newest.
    fn speaks((min_version, version): (u16, u16)) -> Hello {
        Hello {
            version,
            min_version,
            ..Hello::new(1)
        }
    }
}
