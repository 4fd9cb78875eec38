//! The faults of a reply.

use std::time::Duration;

use genset_backend_common::{EngineError, ErrorKind, RequestContext};

use super::ReplyError;
use super::raw::{RawAction, RawFault};

/// A fault and its time.
#[derive(Debug, Clone)]
pub(crate) enum Fault {
    /// The request is not accepted.
    Refuse(ScriptedError),
    /// The answer breaks off.
    Break(Break),
}

/// A break in the middle of an answer.
#[derive(Debug, Clone)]
pub(crate) struct Break {
    /// The number of chunks before the break. If the reply has fewer, the break replaces its end.
    pub(crate) after_chunks: u32,
    pub(crate) how: How,
}

/// The kind of break.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum How {
    /// With an error.
    Error(ScriptedError),
    /// Nothing more is sent until the request is cancelled.
    Hang,
    /// With a panic in the stream.
    Panic,
    /// The stream ends without its terminal.
    Vanish,
}

/// An error as written in the script.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ScriptedError {
    kind: ErrorKind,
    message: String,
    retry_after: Option<Duration>,
}

impl ScriptedError {
    pub(crate) fn to_error(&self, ctx: &RequestContext) -> EngineError {
        let error = EngineError::new(self.kind, self.message.clone()).with_request_id(ctx.id());
        match self.retry_after {
            Some(after) => error.with_retry_after(after),
            None => error,
        }
    }
}

impl Fault {
    /// Whether the reply needs no text.
    pub(crate) fn needs_no_text(&self) -> bool {
        match self {
            Self::Refuse(_) => true,
            Self::Break(fault) => fault.after_chunks == 0,
        }
    }
}

impl TryFrom<RawFault> for Fault {
    type Error = ReplyError;

    fn try_from(raw: RawFault) -> Result<Self, ReplyError> {
        let after_chunks = raw.after_chunks.unwrap_or(0);
        match raw.action {
            RawAction::Refuse if raw.after_chunks.is_some() => Err(ReplyError::new(
                "fault.after_chunks",
                "a refused request has no chunks; use action = \"error\" to fail later",
            )),
            RawAction::Refuse => Ok(Self::Refuse(error(raw)?)),
            RawAction::Error => {
                let how = How::Error(error(raw)?);
                Ok(Self::Break(Break { after_chunks, how }))
            }
            RawAction::Hang => broken(&raw, after_chunks, How::Hang),
            RawAction::Panic => broken(&raw, after_chunks, How::Panic),
            RawAction::Vanish => broken(&raw, after_chunks, How::Vanish),
        }
    }
}

fn error(raw: RawFault) -> Result<ScriptedError, ReplyError> {
    let kind = raw.kind.ok_or_else(|| {
        let kinds = ErrorKind::ALL.map(ErrorKind::name).join(", ");
        ReplyError::new("fault.kind", format!("say which error: one of {kinds}"))
    })?;
    let message = raw
        .message
        .unwrap_or_else(|| format!("the script fails this request with {kind}"));
    if message.trim().is_empty() {
        return Err(ReplyError::new("fault.message", "must not be empty"));
    }
    Ok(ScriptedError {
        kind,
        message,
        retry_after: raw.retry_after_ms.map(Duration::from_millis),
    })
}

/// A break without an error. It must not have an error's keys.
fn broken(raw: &RawFault, after_chunks: u32, how: How) -> Result<Fault, ReplyError> {
    let given = [
        ("fault.kind", raw.kind.is_some()),
        ("fault.message", raw.message.is_some()),
        ("fault.retry_after_ms", raw.retry_after_ms.is_some()),
    ];
    match given.into_iter().find(|(_, is_given)| *is_given) {
        Some((key, _)) => Err(ReplyError::new(
            key,
            "only the actions \"refuse\" and \"error\" have one",
        )),
        None => Ok(Fault::Break(Break { after_chunks, how })),
    }
}
