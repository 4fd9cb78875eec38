//! A conversation: turns through the frontend's pipeline, without HTTP.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use genset_backend_common::output::Usage;
use genset_backend_common::{CancelReason, EngineError, FinishReason, RequestContext};
use genset_frontend::markup::Delta;
use genset_frontend::model::{Models, ServedModel};
use genset_runtime::Signals;
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use super::is_unread;
use super::question::{Asker, OWN_FIELDS};
use super::saved::Saved;
use super::screen::{Screen, Shown};

/// How a turn ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// The answer is complete.
    Answered,
    /// It reached `max_tokens` or the end of the context. A continuation of a base model does as a rule, and is [`Self::Answered`].
    Cut,
    /// The person stopped it with Ctrl-C.
    Stopped,
    /// A signal told the process to end.
    Terminated,
    /// Nobody can read the rest of the answer.
    Unread,
}

/// What the person is told of [`Turn::Cut`].
pub(super) const CUT: &str = "[cut off: max_tokens or the end of the context is reached]\n";

/// The token counts and times of an answer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Figures {
    usage: Usage,
    /// To the first token (TTFT).
    first: Duration,
    /// To the end.
    whole: Duration,
}

impl fmt::Display for Figures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            usage,
            first,
            whole,
        } = self;
        let cached = usage.cached_tokens.unwrap_or(0);
        let (prompt, answer) = (usage.prompt_tokens, usage.completion_tokens);
        write!(
            f,
            "prompt {prompt} tokens ({cached} cached), first token after {:.2} s, answer {answer} tokens",
            first.as_secs_f64()
        )?;
        // The rate excludes the first token: its time is the TTFT.
        let seconds = whole.saturating_sub(*first).as_secs_f64();
        match answer.checked_sub(1) {
            Some(timed @ 1..) if seconds > 0.0 => {
                write!(f, " at {:.1} tokens/s", f64::from(timed) / seconds)
            }
            _ => Ok(()),
        }
    }
}

/// Refuses a field that is not a setting.
fn settable(name: &str) -> Result<(), EngineError> {
    if OWN_FIELDS.contains(&name) {
        let problem = "is no setting of this chat; ask over HTTP for it";
        return Err(EngineError::invalid_argument(name, problem));
    }
    Ok(())
}

/// A conversation with one model.
#[derive(Debug)]
pub(super) struct Chat {
    asker: Asker,
    screen: Screen,
    system: Option<String>,
    settings: Map<String, Value>,
    messages: Vec<Value>,
    figures: Option<Figures>,
    turns: u64,
}

impl Chat {
    pub(super) fn new(asker: Asker, screen: Screen) -> Self {
        Self {
            asker,
            screen,
            system: None,
            settings: Map::new(),
            messages: Vec::new(),
            figures: None,
            turns: 0,
        }
    }

    pub(super) fn screen(&self) -> Screen {
        self.screen
    }

    pub(super) fn model_name(&self) -> &str {
        self.asker.model_name()
    }

    /// The figures of the last answer.
    pub(super) fn figures(&self) -> Option<Figures> {
        self.figures
    }

    /// The number of questions and answers.
    pub(super) fn messages(&self) -> usize {
        self.messages.len()
    }

    /// The settings that differ from the model's own.
    pub(super) fn settings(&self) -> &Map<String, Value> {
        &self.settings
    }

    /// Forgets the conversation; the system prompt stays.
    pub(super) fn clear(&mut self) {
        self.messages.clear();
    }

    /// Sets the system prompt, or removes it, and forgets the conversation.
    pub(super) fn set_system(&mut self, system: Option<String>) {
        self.system = system;
        self.clear();
    }

    /// As [`Asker::keep_up`].
    pub(super) fn keep_up(&mut self, models: &Models) {
        self.asker.keep_up(models);
    }

    /// Switches to another model.
    pub(super) fn set_model(&mut self, model: Arc<ServedModel>) {
        self.asker.set_model(model);
    }

    /// Sets a field for the following requests; without a value, restores the model's own.
    ///
    /// # Errors
    /// The error with which the field or its value is refused.
    pub(super) fn set(&mut self, name: &str, value: Option<Value>) -> Result<(), EngineError> {
        settable(name)?;
        let mut settings = self.settings.clone();
        match value {
            Some(value) => settings.insert(name.to_owned(), value),
            None => settings.remove(name),
        };
        self.asker.check(&self.messages, &settings)?;
        self.settings = settings;
        Ok(())
    }

    /// The conversation in the format of a file.
    pub(super) fn saved(&self) -> Saved {
        Saved {
            model: self.model_name().to_owned(),
            system: self.system.clone(),
            settings: self.settings.clone(),
            messages: self.messages.clone(),
        }
    }

    /// Resumes a conversation from a file, with the current model.
    ///
    /// # Errors
    /// The error with which one of its messages or settings is refused; then nothing has changed.
    pub(super) fn restore(&mut self, saved: Saved) -> Result<(), EngineError> {
        saved.settings.keys().try_for_each(|name| settable(name))?;
        self.asker.check(&saved.messages, &saved.settings)?;
        self.system = saved.system;
        self.settings = saved.settings;
        self.messages = saved.messages;
        Ok(())
    }

    /// Asks, and shows the answer as it arrives. Does not keep a failed turn; of a stopped turn, keeps the shown part, if there is one.
    ///
    /// # Errors
    /// The error of the request.
    pub(super) async fn ask(
        &mut self,
        text: &str,
        signals: &mut Signals,
    ) -> Result<Turn, EngineError> {
        self.messages.push(json!({"role": "user", "content": text}));
        let mut shown = Shown::on(self.screen);
        let asked = self.stream_answer(&mut shown, signals).await;
        drop(shown);
        let answered = asked.as_ref().ok();
        let answered = answered.filter(|(text, turn)| *turn != Turn::Stopped || !text.is_empty());
        match answered {
            Some((answer, _)) => self
                .messages
                .push(json!({"role": "assistant", "content": answer})),
            None => drop(self.messages.pop()),
        }
        asked.map(|(_, turn)| turn)
    }

    async fn stream_answer(
        &mut self,
        shown: &mut Shown,
        signals: &mut Signals,
    ) -> Result<(String, Turn), EngineError> {
        self.turns += 1;
        let suffix = rand::random::<u32>();
        let ctx = RequestContext::new(format!("chat-{}.{suffix:08x}", self.turns));
        let (asked, mut first) = (Instant::now(), None);
        let prompt = self.prompt();
        let mut text = String::new();
        let stopped = |signal: &str| match signal {
            "SIGINT" => Turn::Stopped,
            _ => Turn::Terminated,
        };
        let begun = self.asker.begin(&ctx, &prompt, &self.settings);
        let mut answer = tokio::select! {
            biased;
            signal = signals.next() => {
                ctx.cancel(CancelReason::Client);
                return Ok((text, stopped(signal)));
            }
            begun = begun => begun?,
        };
        loop {
            let end = tokio::select! {
                biased;
                signal = signals.next() => {
                    ctx.cancel(CancelReason::Client);
                    return Ok((text, stopped(signal)));
                }
                end = answer.next_deltas(|delta| {
                    if let Delta::Content(piece) = delta {
                        text.push_str(piece);
                    }
                    shown.take(delta);
                }) => end?,
            };
            let first = *first.get_or_insert_with(|| asked.elapsed());
            shown.flush();
            if is_unread() {
                ctx.cancel(CancelReason::Client);
                return Ok((text, Turn::Unread));
            }
            if let Some(end) = end {
                self.figures = Some(Figures {
                    usage: end.usage,
                    first,
                    whole: asked.elapsed(),
                });
                let is_cut = end.reason == FinishReason::Length && !self.asker.goes_on();
                let turn = if is_cut { Turn::Cut } else { Turn::Answered };
                return Ok((text, turn));
            }
        }
    }

    /// The conversation so far, starting with the system prompt.
    fn prompt(&self) -> Vec<Value> {
        let system = self
            .system
            .iter()
            .map(|text| json!({"role": "system", "content": text}));
        system.chain(self.messages.iter().cloned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_tell_the_pace_of_what_follows_the_first_token() {
        let usage = |completion_tokens| Usage {
            prompt_tokens: 7,
            completion_tokens,
            cached_tokens: Some(4),
            predictions: None,
        };
        let of = |tokens| {
            Figures {
                usage: usage(tokens),
                first: Duration::from_millis(500),
                whole: Duration::from_millis(2500),
            }
            .to_string()
        };
        let head = "prompt 7 tokens (4 cached), first token after 0.50 s, answer";
        assert_eq!(of(11), format!("{head} 11 tokens at 5.0 tokens/s"));
        assert_eq!(of(1), format!("{head} 1 tokens"));
        assert_eq!(of(0), format!("{head} 0 tokens"));
    }
}
