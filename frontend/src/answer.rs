//! [`Answer`]: one choice of a response. It detokenizes the engine's output and applies stop strings.

mod account;
mod counting;
mod ends;
mod logprobs;
mod reasoning_counter;
mod source;
mod steps;
mod whole;

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures_core::Stream;
use genset_backend_common::output::{Finished, TokenChunk, TokenLogprob, Usage};
use genset_backend_common::{
    EngineError, ErrorKind, FinishReason, Output, OutputStream, RequestContext, TokenId,
};
use tokio::task::coop::poll_proceed;
use tokio::time::Instant;

use crate::markup::{Delta, Splitter};
use crate::text::{Detokenizer, StopMatcher, StopOutcome, StopStrings, TextTokenizer};
pub(crate) use account::Meter;
pub use account::{Account, TokenCounters};
use counting::Prompt;
pub use ends::{AnswerEnd, Completed, Ending, TotalUsage};
use logprobs::LogprobQueue;
pub use logprobs::{CandidateToken, TokenLogprobs};
use reasoning_counter::ReasoningCounter;
use source::Source;
pub use source::Starting;
use steps::StepClock;
pub use steps::StepMetrics;

/// One choice: a stream of text that ends. Dropping it cancels the request.
pub struct Answer {
    source: Source,
    detokenizer: Option<Detokenizer>,
    stops: StopMatcher,
    /// Text between the detokenizer and the stop matcher; empty between two items.
    scratch: String,
    /// Text that passed the stop matcher and was not emitted yet; empty between two items.
    text: String,
    prompt: Prompt,
    completion_tokens: u32,
    /// Splits the text into deltas; `None` if no markup is expected.
    splitter: Option<Box<Splitter>>,
    /// Counts reasoning tokens; `None` unless the splitter looks for reasoning.
    reasoning: Option<Box<ReasoningCounter>>,
    /// Queues log probabilities, if the request asked for them.
    ratings: Option<Box<LogprobQueue>>,
    /// Bytes of text that passed the stop matcher.
    given: usize,
    /// The prompt until it is emitted, if the answer echoes it.
    echo: Option<Arc<str>>,
    /// Measures the answer's pace, if enabled.
    steps: Option<Box<StepClock>>,
    /// Charges the answer's tokens to an account, if there is one.
    meter: Option<Meter>,
}

impl Answer {
    /// An answer read from `outputs`; `tokenizer` is `None` for engines that stream text.
    #[must_use]
    pub fn new(
        outputs: OutputStream,
        tokenizer: Option<Arc<TextTokenizer>>,
        stops: Arc<[String]>,
        prompt_tokens: u32,
    ) -> Self {
        let stops = StopStrings::new(stops);
        Self::from_source(Source::Running(outputs), tokenizer, stops, prompt_tokens)
    }

    /// Like [`Self::new`], for an answer that starts when it is first polled.
    #[must_use]
    pub fn starting(
        starting: Starting,
        tokenizer: Option<Arc<TextTokenizer>>,
        stops: StopStrings,
        prompt_tokens: u32,
    ) -> Self {
        Self::from_source(Source::starting(starting), tokenizer, stops, prompt_tokens)
    }

    fn from_source(
        source: Source,
        tokenizer: Option<Arc<TextTokenizer>>,
        stops: StopStrings,
        prompt_tokens: u32,
    ) -> Self {
        Self {
            source,
            detokenizer: tokenizer.map(|tokenizer| Detokenizer::new(tokenizer, true)),
            stops: StopMatcher::of(stops),
            scratch: String::new(),
            text: String::new(),
            prompt: Prompt::of(prompt_tokens),
            completion_tokens: 0,
            splitter: None,
            reasoning: None,
            ratings: None,
            given: 0,
            echo: None,
            steps: None,
            meter: None,
        }
    }

    /// Sets up an answer whose prompt tokens only the engine counts. If a stop string cuts the answer, it cancels
    /// `ctx`, the request's context, and waits for the engine's usage.
    #[must_use]
    pub fn counted_by_engine(mut self, ctx: RequestContext) -> Self {
        self.prompt.counted_by_engine = Some(ctx);
        self
    }

    /// Keeps the log probability of each token and of the `top` most probable candidates in its position.
    #[must_use]
    pub fn with_logprobs(mut self, tokenizer: Arc<TextTokenizer>, top: u32) -> Self {
        self.ratings = Some(Box::new(LogprobQueue::new(tokenizer, top)));
        self
    }

    /// Measures the pace of an answer that has not started; its request arrived at `arrived`. Charges its tokens to
    /// `account`: prompt tokens once the engine has accepted the request, completion tokens as they are read.
    #[must_use]
    pub fn measured(
        mut self,
        steps: &StepMetrics,
        arrived: Instant,
        account: Arc<Account>,
    ) -> Self {
        self.steps = Some(Box::new(StepClock::new(steps.clone(), arrived)));
        self.meter = Some(Meter::new(account));
        self
    }

    /// Notes the tokens produced so far or, at the end, the final usage.
    fn note_cost(&mut self, end: Option<&AnswerEnd>) {
        if let Some(meter) = &mut self.meter {
            let prompt = end.map_or(self.prompt.tokens, |end| end.usage.prompt_tokens);
            let completion = end.map_or(self.completion_tokens, |end| end.usage.completion_tokens);
            meter.note(if self.prompt.is_paid { prompt } else { 0 }, completion);
        }
    }

    /// Charges and counts a turn's tokens. All threads share these counters, so this is not done per token.
    fn settle(&mut self) {
        if let Some(meter) = &mut self.meter {
            meter.settle();
        }
        if let Some(steps) = &mut self.steps {
            steps.end_turn();
        }
    }

    /// Makes the answer's text continue that of `prompt`.
    #[must_use]
    pub fn behind(mut self, prompt: &[TokenId]) -> Self {
        self.detokenizer = self
            .detokenizer
            .map(|detokenizer| detokenizer.behind(prompt));
        self
    }

    /// Makes the answer begin with its prompt. Stop strings are not searched for in the prompt.
    #[must_use]
    pub fn with_echo(mut self, prompt: Arc<str>) -> Self {
        self.echo = Some(prompt);
        self
    }

    /// Splits the text with `splitter`. `markers` are the special tokens of its markup; they become part of the text.
    #[must_use]
    pub fn with_splitter(mut self, splitter: Splitter, markers: Arc<[TokenId]>) -> Self {
        self.reasoning = ReasoningCounter::of(&splitter).map(Box::new);
        self.splitter = Some(Box::new(splitter));
        self.detokenizer = self
            .detokenizer
            .map(|detokenizer| detokenizer.showing(markers));
        self
    }

    /// Takes one item from the engine and passes its text to `each`, split into deltas if there is markup. The first
    /// delta carries the log probabilities that are ready; if there is no delta, the next item's carries them. `Some`
    /// is the end; then call [`Self::end`] for the rest.
    ///
    /// # Errors
    /// The error that ended the engine's stream. The answer is over then.
    pub fn poll_deltas(
        &mut self,
        cx: &mut Context<'_>,
        each: impl FnMut(Delta<'_>, &[TokenLogprobs]),
    ) -> Poll<Result<Option<AnswerEnd>, EngineError>> {
        let mut text = std::mem::take(&mut self.text);
        let taken = self.poll_text(cx, &mut text);
        if let (Poll::Ready(Ok(Some(end))), Some(splitter)) = (&taken, &mut self.splitter)
            && (end.reason != FinishReason::Stop || end.stop_string.is_some())
        {
            splitter.cut_short();
        }
        let splitter = self.splitter.as_ref();
        if !text.is_empty() || splitter.is_some_and(|splitter| splitter.has_deltas()) {
            self.deliver(&text, each);
            text.clear();
        }
        self.text = text;
        taken
    }

    fn deliver(&mut self, text: &str, mut each: impl FnMut(Delta<'_>, &[TokenLogprobs])) {
        let mut none = Vec::new();
        let ratings = self.ratings.as_mut();
        let rated = ratings.map_or(&mut none, |ratings| ratings.ready());
        match &mut self.splitter {
            None => {
                each(Delta::Content(text), rated);
                rated.clear();
            }
            Some(splitter) => {
                match &mut self.reasoning {
                    Some(counter) => counter.feed(splitter, text),
                    None => splitter.feed(text),
                }
                splitter.flush(|delta| {
                    each(delta, rated);
                    rated.clear();
                });
            }
        }
    }

    /// Passes on the text held back until the end, like [`Self::poll_deltas`].
    pub fn end(mut self, mut each: impl FnMut(Delta<'_>, &[TokenLogprobs])) -> Ending {
        let ratings = self.ratings.as_mut();
        let mut rated = ratings.map_or_else(Vec::new, |ratings| std::mem::take(ratings.ready()));
        let Some(splitter) = &mut self.splitter else {
            return Ending {
                rated,
                ..Ending::default()
            };
        };
        let said = splitter.said_reasoning_tokens();
        let reasoning_tokens = self.reasoning.map_or(said, |mut counter| {
            counter.feed(splitter, "");
            counter.count()
        });
        splitter.finish(|delta| {
            each(delta, &rated);
            rated.clear();
        });
        Ending {
            has_calls: splitter.has_calls(),
            has_open_call: splitter.has_open_call(),
            rated,
            reasoning_tokens,
        }
    }

    /// Marks the answer as a further one to a prompt that another answer pays for.
    #[must_use]
    pub fn sharing_prompt(mut self) -> Self {
        self.prompt.is_paid = false;
        self
    }

    /// Takes one item, like [`Self::poll_item`]. Charges tokens when no more items are ready, and at the end.
    fn poll_text(
        &mut self,
        cx: &mut Context<'_>,
        out: &mut String,
    ) -> Poll<Result<Option<AnswerEnd>, EngineError>> {
        let taken = self.poll_item(cx, out);
        if !matches!(taken, Poll::Ready(Ok(None))) {
            self.settle();
        }
        taken
    }

    /// Takes one item from the engine and appends its text to `out`; `Some` is the end.
    fn poll_item(
        &mut self,
        cx: &mut Context<'_>,
        out: &mut String,
    ) -> Poll<Result<Option<AnswerEnd>, EngineError>> {
        if let Source::Counting(counting) = &mut self.source {
            let end = ready!(counting.poll_end(cx));
            return Poll::Ready(Ok(Some(self.finish(end, cx))));
        }
        let outputs = match ready!(self.poll_started(cx)) {
            Ok(outputs) => outputs,
            Err(error) => return Poll::Ready(Err(error)),
        };
        // An engine that is always ready must not keep the thread: the task's budget ends its turn.
        let turn = ready!(poll_proceed(cx));
        let item = ready!(Pin::new(outputs).poll_next(cx));
        turn.made_progress();
        if let Some(prompt) = self.echo.take() {
            out.push_str(&prompt);
        }
        let end = match item {
            Some(Ok(output)) => {
                let is_terminal = output.is_terminal();
                self.take(output, out).map(|end| (end, is_terminal))
            }
            Some(Err(error)) => Err(error),
            None => Err(EngineError::new(
                ErrorKind::StreamIncomplete,
                "the engine's stream ended early",
            )),
        };
        match end {
            Ok((None, _)) => {
                self.note_cost(None);
                Poll::Ready(Ok(None))
            }
            Ok((Some(end), is_terminal)) => {
                if !is_terminal && let Some(ctx) = self.prompt.counted_by_engine.take() {
                    self.source.count(end, &ctx);
                    return self.poll_item(cx, out);
                }
                Poll::Ready(Ok(Some(self.finish(end, cx))))
            }
            Err(error) => {
                self.note_cost(None);
                self.source.close(cx);
                Poll::Ready(Err(error))
            }
        }
    }

    /// Notes the final usage and closes the source.
    fn finish(&mut self, end: AnswerEnd, cx: &mut Context<'_>) -> AnswerEnd {
        self.note_cost(Some(&end));
        self.source.close(cx);
        end
    }

    /// Returns the engine's stream once the engine has accepted the request.
    fn poll_started(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<&mut OutputStream, EngineError>> {
        if ready!(self.source.poll_accepted(cx))? {
            self.note_cost(None);
            self.settle();
        }
        Poll::Ready(self.source.outputs())
    }

    /// Waits until the engine has accepted the request.
    ///
    /// # Errors
    /// The engine's refusal. The answer is over then.
    ///
    /// # Cancel safety
    /// If the future is dropped, the request is still starting.
    pub async fn started(&mut self) -> Result<(), EngineError> {
        poll_fn(|cx| self.poll_started(cx).map(|started| started.map(drop))).await
    }

    fn take(&mut self, output: Output, out: &mut String) -> Result<Option<AnswerEnd>, EngineError> {
        if output.token_count() > 0 {
            self.note_step();
        }
        match output {
            Output::Tokens(chunk) if self.detokenizer.is_none() && !chunk.is_empty() => Err(
                EngineError::internal("the engine sent tokens for a text request"),
            ),
            Output::Tokens(chunk) => self.take_tokens(chunk, out),
            Output::Text(chunk) => {
                self.completion_tokens = self.completion_tokens.saturating_add(chunk.token_count);
                let splitter = self.splitter.as_mut();
                if let Some(bytes) = splitter.and_then(|splitter| splitter.take_object(&chunk.text))
                {
                    let bytes = bytes?;
                    // An engine may count the tokens of all its objects in the last one.
                    if bytes > 0 && chunk.token_count == 0 {
                        self.note_step();
                    }
                    self.give(bytes);
                    return Ok(None);
                }
                self.scratch.push_str(&chunk.text);
                let end = self.match_stops(out);
                self.note_tokens(chunk.token_count);
                Ok(end)
            }
            Output::Embeddings(_) | Output::Scores(_) => Err(EngineError::internal(
                "the engine sent embeddings or scores for a text request",
            )),
            Output::Finished(finished) => self.take_end(*finished, out).map(Some),
        }
    }

    /// Notes that the engine made a step for the answer.
    fn note_step(&mut self) {
        if let Some(steps) = &mut self.steps {
            steps.step();
        }
    }

    fn take_end(&mut self, finished: Finished, out: &mut String) -> Result<AnswerEnd, EngineError> {
        let usage = finished.usage;
        if let Some(end) = self.take_last(finished.last, out)? {
            return Ok(AnswerEnd {
                usage: Usage {
                    completion_tokens: end.usage.completion_tokens,
                    ..usage
                },
                ..end
            });
        }
        let before = out.len();
        let (reason, stop_string) = match self.stops.finish(out) {
            StopOutcome::Continue => (self.reason(finished.reason), None),
            StopOutcome::Stopped { index } => (FinishReason::Stop, Some(index)),
        };
        self.give(out.len() - before);
        Ok(AnswerEnd {
            reason,
            usage,
            pays_for_prompt: self.prompt.is_paid,
            stop_string,
        })
    }

    /// Why the answer ended. An engine that writes objects may report only in them that the answer was cut.
    fn reason(&self, of_engine: FinishReason) -> FinishReason {
        let splitter = self.splitter.as_ref();
        let said = splitter.and_then(|splitter| splitter.said_cut());
        said.filter(|_| of_engine == FinishReason::Stop)
            .unwrap_or(of_engine)
    }

    /// Takes the last tokens and the held-back text; `Some` if a stop string cuts them.
    fn take_last(
        &mut self,
        last: TokenChunk,
        out: &mut String,
    ) -> Result<Option<AnswerEnd>, EngineError> {
        if let Some(end) = self.take_tokens(last, out)? {
            return Ok(Some(end));
        }
        if let Some(detokenizer) = self.detokenizer.as_mut() {
            detokenizer.finish(&mut self.scratch);
        }
        if let Some(ratings) = &mut self.ratings {
            ratings.finish(&self.scratch);
        }
        Ok(self.match_stops(out))
    }

    /// Takes one token at a time, so that tokens after a stop string are neither shown nor counted.
    fn take_tokens(
        &mut self,
        chunk: TokenChunk,
        out: &mut String,
    ) -> Result<Option<AnswerEnd>, EngineError> {
        let mut logprobs = chunk.logprobs.into_iter();
        for token in chunk.token_ids {
            self.completion_tokens = self.completion_tokens.saturating_add(1);
            if let Some(detokenizer) = self.detokenizer.as_mut() {
                detokenizer.push(token, &mut self.scratch);
            }
            self.rate(token, logprobs.next())?;
            let end = self.match_stops(out);
            self.note_tokens(1);
            if end.is_some() {
                return Ok(end);
            }
        }
        Ok(None)
    }

    /// Queues the log probability of `token`, which was just detokenized, if the request asked for it.
    fn rate(&mut self, token: TokenId, logprob: Option<TokenLogprob>) -> Result<(), EngineError> {
        let Some(ratings) = &mut self.ratings else {
            return Ok(());
        };
        let logprob = logprob
            .ok_or_else(|| EngineError::internal("the engine left out a log probability"))?;
        let is_whole = self
            .detokenizer
            .as_ref()
            .is_none_or(|detokenizer| !detokenizer.holds_back());
        ratings.push(token, logprob, &self.scratch, is_whole);
        Ok(())
    }

    /// Notes that the text of `tokens` tokens, if they have any, ends here.
    fn note_tokens(&mut self, tokens: u32) {
        if let Some(counter) = &mut self.reasoning {
            counter.note(tokens, self.given);
        }
    }

    /// Notes that the next `bytes` of the text passed the stop matcher.
    fn give(&mut self, bytes: usize) {
        self.given += bytes;
        if let Some(ratings) = &mut self.ratings {
            ratings.give(self.given);
        }
    }

    fn match_stops(&mut self, out: &mut String) -> Option<AnswerEnd> {
        if self.scratch.is_empty() {
            return None;
        }
        let before = out.len();
        let outcome = self.stops.push(&self.scratch, out);
        self.scratch.clear();
        self.give(out.len() - before);
        match outcome {
            StopOutcome::Continue => None,
            StopOutcome::Stopped { index } => {
                let usage = Usage {
                    prompt_tokens: self.prompt.tokens,
                    completion_tokens: self.completion_tokens,
                    ..Usage::default()
                };
                Some(AnswerEnd {
                    reason: FinishReason::Stop,
                    usage,
                    pays_for_prompt: self.prompt.is_paid,
                    stop_string: Some(index),
                })
            }
        }
    }

    /// The bytes of text that passed the stop matcher so far.
    pub(crate) fn given_bytes(&self) -> usize {
        self.given
    }

    /// Waits for the engine's next item and passes its deltas to `each`; `Some` is the end.
    ///
    /// # Errors
    /// The error that ended the engine's stream.
    ///
    /// # Cancel safety
    /// If another branch wins, no item was taken.
    pub async fn next_deltas(
        &mut self,
        mut each: impl FnMut(Delta<'_>),
    ) -> Result<Option<AnswerEnd>, EngineError> {
        let end = poll_fn(|cx| self.poll_deltas(cx, |delta, _| each(delta))).await?;
        if let (Some(_), Some(splitter)) = (end, &mut self.splitter) {
            splitter.finish(each);
        }
        Ok(end)
    }
}

genset_backend_common::debug_as!(|it| Answer {
    completion_tokens: it.completion_tokens,
    ..
});

#[cfg(test)]
mod tests;
