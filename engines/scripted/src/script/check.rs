//! Converts the script as written to the script as played, and checks every rule that types alone do not enforce.

use std::time::Duration;

use genset_backend_common::FinishReason;
use toml::Spanned;

use super::raw::{RawDefaults, RawFinishReason, RawLogprob, RawReply, RawScript};
use super::{
    Body, Fault, Matcher, Pace, Place, PromptMarks, Reply, ReplyError, Script, ScriptError,
    ScriptedLogprob, Split, Template,
};

/// Reads and checks a script.
pub(super) fn script(text: &str) -> Result<Script, ScriptError> {
    let raw: RawScript = toml::from_str(text).map_err(|source| ScriptError::Toml {
        source: Box::new(source),
    })?;
    if raw.defaults.chunk_chars == Some(0) {
        return Err(ScriptError::Key {
            key: "defaults.chunk_chars",
            problem: AT_LEAST_ONE.into(),
        });
    }
    let replies = (1..)
        .zip(raw.reply)
        .map(|(number, spanned)| {
            let place = Place {
                line: line_at(text, &spanned),
                number,
            };
            reply(spanned.into_inner(), &raw.defaults, place).map_err(|error| error.at(place))
        })
        .collect::<Result<Vec<Reply>, ScriptError>>()?;
    if replies.is_empty() {
        return Err(ScriptError::NoReply);
    }
    refuse_unreachable(&replies)?;
    Ok(Script {
        replies,
        marks: PromptMarks::try_from(raw.prompt)?,
        guided: raw.guided,
    })
}

const AT_LEAST_ONE: &str = "must be at least 1";

fn line_at(text: &str, spanned: &Spanned<RawReply>) -> usize {
    let before = text.get(..spanned.span().start).unwrap_or_default();
    1 + before.matches('\n').count()
}

fn reply(raw: RawReply, defaults: &RawDefaults, place: Place) -> Result<Reply, ReplyError> {
    if raw.times == Some(0) {
        return Err(ReplyError::new("times", AT_LEAST_ONE));
    }
    let pace = Pace {
        first: millis(raw.first_token_ms.or(defaults.first_token_ms)),
        each: millis(raw.token_ms.or(defaults.token_ms)),
    };
    let body = body(&raw, defaults)?;
    let matcher = raw.matcher.map(Matcher::try_from).transpose()?;
    let fault = raw.fault.map(Fault::try_from).transpose()?;
    let body = match body {
        Some(body) => body,
        None if fault.as_ref().is_some_and(Fault::needs_no_text) => Body::Chunks(Vec::new()),
        None => return Err(ReplyError::new("text", "a reply needs text or chunks")),
    };
    Ok(Reply {
        place,
        matcher: matcher.unwrap_or_default(),
        times: raw.times,
        body,
        pace,
        finish_reason: raw.finish_reason.map_or(FinishReason::Stop, finish_reason),
        logprobs: logprobs(raw.logprobs)?,
        fault,
    })
}

fn millis(given: Option<u64>) -> Duration {
    Duration::from_millis(given.unwrap_or(0))
}

fn finish_reason(raw: RawFinishReason) -> FinishReason {
    match raw {
        RawFinishReason::Stop => FinishReason::Stop,
        RawFinishReason::Length => FinishReason::Length,
        RawFinishReason::ContentFilter => FinishReason::ContentFilter,
    }
}

fn body(raw: &RawReply, defaults: &RawDefaults) -> Result<Option<Body>, ReplyError> {
    let template = |text: &str, key: &str| match raw.substitute {
        Some(false) => Ok(Template::literal(text.to_owned())),
        Some(true) | None => Template::parse(text).map_err(|problem| ReplyError::new(key, problem)),
    };
    match (&raw.text, &raw.chunks) {
        (Some(_), Some(_)) => Err(ReplyError::new("chunks", "give either text or chunks")),
        (None, _) if raw.chunk_chars.is_some() => Err(ReplyError::new(
            "chunk_chars",
            "cuts text, and there is none",
        )),
        (None, None) => Ok(None),
        (Some(text), None) => {
            let split = match raw.chunk_chars.or(defaults.chunk_chars) {
                Some(0) => return Err(ReplyError::new("chunk_chars", AT_LEAST_ONE)),
                Some(count) => Split::Chars(count),
                None => Split::Natural,
            };
            Ok(Some(Body::Text(template(text, "text")?, split)))
        }
        (None, Some(chunks)) => {
            let checked = (1..).zip(chunks).map(|(number, chunk)| {
                let key = format!("chunks, chunk {number}");
                if chunk.is_empty() {
                    return Err(ReplyError::new(key, "must not be empty"));
                }
                template(chunk, &key)
            });
            Ok(Some(Body::Chunks(checked.collect::<Result<_, _>>()?)))
        }
    }
}

fn logprobs(raw: Vec<RawLogprob>) -> Result<Vec<ScriptedLogprob>, ReplyError> {
    (1..)
        .zip(raw)
        .map(|(number, raw)| {
            let all = raw.alternatives.values().chain([&raw.logprob]);
            for logprob in all {
                if !(logprob.is_finite() && *logprob <= 0.0) {
                    let problem = format!("must be finite and at most 0, got {logprob}");
                    return Err(ReplyError::new(
                        format!("logprobs, token {number}"),
                        problem,
                    ));
                }
            }
            Ok(ScriptedLogprob {
                logprob: raw.logprob,
                alternatives: raw.alternatives.into_iter().collect(),
            })
        })
        .collect()
}

/// Refuses replies after one that matches every request without a limit: they would never be used.
fn refuse_unreachable(replies: &[Reply]) -> Result<(), ScriptError> {
    let takes_all = |reply: &Reply| reply.matcher.is_any() && reply.times.is_none();
    let first = replies.iter().position(takes_all);
    match first.and_then(|index| replies.get(index + 1)) {
        None => Ok(()),
        Some(unreachable) => {
            let problem = format!(
                "never used: reply {} before it takes every request",
                unreachable.place.number - 1
            );
            Err(ReplyError::new("match", problem).at(unreachable.place))
        }
    }
}
