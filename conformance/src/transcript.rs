//! [`Transcript`]: the requests and answers of a check, for the report of a failure. The [`Recorder`] of a
//! [`Trial`](crate::Trial) writes it.
//!
//! It describes requests by size and answers by kind. It contains no tokens and no text, so that a report can be shared.

mod recorded;

use std::collections::VecDeque;

use genset_backend_common::{EngineError, GenerateRequest, Output, RequestContext};
use parking_lot::Mutex;
pub(crate) use recorded::recorded;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

/// The events of a check, up to its end.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transcript {
    /// The number of earlier events that were not kept.
    pub left_out: u64,
    /// The last events, in order.
    pub events: Vec<TranscriptEvent>,
}

/// A call to the engine, or a result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TranscriptEvent {
    /// The time since the first event, in microseconds of the check's clock, which may be paused.
    pub at_us: u64,
    /// The request that it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<String>,
    /// The event, as text for people.
    pub event: String,
}

/// Keeps the last events of a check.
pub(crate) struct Recorder {
    most: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    is_closed: bool,
    begun: Option<Instant>,
    left_out: u64,
    entries: VecDeque<Entry>,
}

struct Entry {
    at_us: u64,
    request: Option<String>,
    what: What,
}

enum What {
    Said(String),
    /// Consecutive items of one request: a long answer is one entry.
    Streamed {
        items: u64,
        tokens: u64,
        is_cancelled: bool,
    },
}

impl Recorder {
    /// Keeps the last `most` events; 0 for none.
    pub(crate) fn new(most: usize) -> Self {
        Self {
            most,
            state: Mutex::default(),
        }
    }

    fn is_on(&self) -> bool {
        self.most > 0
    }

    /// Records an event, of a request or of the engine.
    pub(crate) fn note(&self, request: Option<&str>, event: impl FnOnce() -> String) {
        if self.most > 0 {
            self.push(request, What::Said(event()));
        }
    }

    /// Records an item of a stream; `None` is its end.
    pub(crate) fn item(&self, ctx: &RequestContext, item: Option<&Result<Output, EngineError>>) {
        if self.most == 0 {
            return;
        }
        let request = Some(ctx.id());
        match item {
            None => self.push(request, What::Said("the stream ended".into())),
            Some(Err(error)) => self.push(request, What::Said(format!("error: {}", error.kind()))),
            Some(Ok(Output::Finished(end))) => self.push(
                request,
                What::Said(format!(
                    "finished: {:?}, {} tokens with it, usage {} + {}",
                    end.reason,
                    end.last.len(),
                    end.usage.prompt_tokens,
                    end.usage.completion_tokens
                )),
            ),
            Some(Ok(output)) => {
                self.streamed(
                    ctx.id(),
                    u64::from(output.token_count()),
                    ctx.is_cancelled(),
                );
            }
        }
    }

    fn streamed(&self, request: &str, tokens: u64, is_cancelled: bool) {
        if let Some(Entry {
            request: Some(last),
            what:
                What::Streamed {
                    items: all,
                    tokens: sum,
                    is_cancelled: was_cancelled,
                },
            ..
        }) = self.state.lock().entries.back_mut()
            && last == request
            && *was_cancelled == is_cancelled
        {
            *all += 1;
            *sum += tokens;
            return;
        }
        let what = What::Streamed {
            items: 1,
            tokens,
            is_cancelled,
        };
        self.push(Some(request), what);
    }

    fn push(&self, request: Option<&str>, what: What) {
        let now = Instant::now();
        let mut state = self.state.lock();
        if state.is_closed {
            return;
        }
        let begun = *state.begun.get_or_insert(now);
        let at_us = now.saturating_duration_since(begun).as_micros();
        if state.entries.len() == self.most {
            state.entries.pop_front();
            state.left_out += 1;
        }
        state.entries.push_back(Entry {
            at_us: u64::try_from(at_us).unwrap_or(u64::MAX),
            request: request.map(str::to_owned),
            what,
        });
    }

    /// Ends the recording with the check; the cleanup after it is not recorded.
    pub(crate) fn close(&self) {
        self.state.lock().is_closed = true;
    }

    pub(crate) fn transcript(&self) -> Transcript {
        let state = self.state.lock();
        Transcript {
            left_out: state.left_out,
            events: state.entries.iter().map(Entry::told).collect(),
        }
    }
}

impl Entry {
    fn told(&self) -> TranscriptEvent {
        let event = match &self.what {
            What::Said(event) => event.clone(),
            What::Streamed {
                items,
                tokens,
                is_cancelled,
            } => {
                let when = if *is_cancelled {
                    " after the cancel"
                } else {
                    ""
                };
                format!("{tokens} tokens in {items} items{when}")
            }
        };
        TranscriptEvent {
            at_us: self.at_us,
            request: self.request.clone(),
            event,
        }
    }
}

/// A request, described by its size.
pub(crate) fn summary(request: &GenerateRequest) -> String {
    let most = match request.stop.max_tokens {
        Some(most) => format!("at most {most}"),
        None => "without a limit".to_owned(),
    };
    match request.prompt_tokens() {
        Some(prompt) => format!("generate: prompt of {prompt} tokens, {most}"),
        None => format!("generate: a prompt that is not tokens, {most}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token() -> Result<Output, EngineError> {
        Ok(Output::from(7))
    }

    #[test]
    fn items_of_one_request_in_a_row_are_one_event() {
        let recorder = Recorder::new(8);
        let (one, two) = (RequestContext::new("one"), RequestContext::new("two"));
        for ctx in [&one, &one, &two, &one] {
            recorder.item(ctx, Some(&token()));
        }
        one.cancel(genset_backend_common::CancelReason::Client);
        recorder.item(&one, Some(&token()));
        recorder.item(&one, None);
        let told: Vec<(Option<String>, String)> = recorder
            .transcript()
            .events
            .into_iter()
            .map(|event| (event.request, event.event))
            .collect();
        let expected = [
            ("one", "2 tokens in 2 items"),
            ("two", "1 tokens in 1 items"),
            ("one", "1 tokens in 1 items"),
            ("one", "1 tokens in 1 items after the cancel"),
            ("one", "the stream ended"),
        ];
        assert_eq!(
            told,
            expected.map(|(request, event)| (Some(request.to_owned()), event.to_owned()))
        );
    }

    #[test]
    fn the_last_events_are_kept_and_the_others_counted() {
        let recorder = Recorder::new(2);
        for number in 0..5 {
            recorder.note(None, || number.to_string());
        }
        let transcript = recorder.transcript();
        assert_eq!(transcript.left_out, 3);
        let kept: Vec<&str> = transcript.events.iter().map(|e| e.event.as_str()).collect();
        assert_eq!(kept, ["3", "4"]);
    }

    #[test]
    fn no_room_keeps_nothing() {
        let recorder = Recorder::new(0);
        recorder.note(None, || "seen".into());
        recorder.item(&RequestContext::new("one"), Some(&token()));
        assert_eq!(recorder.transcript(), Transcript::default());
    }
}
