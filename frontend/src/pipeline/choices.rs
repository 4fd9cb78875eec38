//! A job's answers: each choice and its request are created when it starts; what choices have in common is shared.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;

use futures_util::StreamExt as _;
use genset_backend_common::{
    EngineError, GenerateRequest, Input, OutputStream, RequestContext, RequestField, TokenId,
    context::Explanation, error::At,
};

use tokio::time::Instant;

use super::Job;
use super::unless_called::{BoundRequest, unless_called};
use crate::answer::{Account, Answer, StepMetrics};
use crate::error::ApiError;
use crate::text::{Detokenizer, StopStrings};

/// The number of tokens that a request's checks examine in the time that a tokenizer takes for a byte.
const CHECKED_TOKENS_A_BYTE: usize = 64;

impl Job {
    /// Checks and prepares all answers.
    ///
    /// # Errors
    /// The model card's refusal of any prompt's request.
    ///
    /// # Cancel safety
    /// If the future is dropped, nothing has started.
    pub async fn answers(self, ctx: &RequestContext) -> Result<Answers, ApiError> {
        let job = Arc::new(self);
        let checked = Arc::clone(&job);
        let check = move |_: &_| checked.check();
        let work = &job.model.work;
        work.run(job.bytes_to_check(), ctx.deadline(), check)
            .await?;
        let count = job.answer_count();
        let ctx = match (ctx.affinity(), &job.params.affinity) {
            (None, Some(key)) => ctx.clone().with_affinity(key),
            (Some(_), _) | (None, None) => ctx.clone(),
        };
        let ctx = match job.params.is_explained {
            true => ctx.with_explanation(Explanation::default()),
            false => ctx,
        };
        Ok(Answers {
            markers: job.markers(),
            stops: StopStrings::new(Arc::clone(&job.params.stop_strings)),
            job,
            ctx,
            measured: None,
            begun: None,
            rest: 0..count,
            has_siblings: count > 1,
        })
    }

    /// The number of answers: choices per prompt times prompts.
    pub(super) fn answer_count(&self) -> usize {
        self.inputs.len() * self.choices()
    }

    fn choices(&self) -> usize {
        usize::try_from(self.params.n).unwrap_or(1)
    }

    /// Checks the request of each prompt's first choice: the others differ only in the seed.
    fn check(&self) -> Result<(), ApiError> {
        let count = self.inputs.len();
        (0..count).try_for_each(|prompt| {
            let checked = self.model.card.check(&self.request(prompt, 0));
            checked.map_err(|error| ApiError::from(error).of_prompt(prompt, count))
        })
    }

    fn bytes_to_check(&self) -> usize {
        let options = self.params.stop.stop_token_ids.len() + self.params.sampling.logit_bias.len();
        let tokens = |input: &Input| match input {
            Input::Tokens(tokens) => tokens.len() + options,
            Input::Text(_) | Input::Chat(_) | Input::Embed(_) | Input::Score(_) => options,
        };
        self.inputs.iter().map(tokens).sum::<usize>() / CHECKED_TOKENS_A_BYTE
    }

    /// The special tokens in the markup of the answers.
    fn markers(&self) -> Arc<[TokenId]> {
        let text = self.model.text.as_ref();
        let markers = text.zip(self.splitting.as_ref());
        let markers = markers.map(|(text, splitting)| splitting.special_tokens(&text.tokenizer));
        markers.unwrap_or_default()
    }

    /// The request of one choice. It copies nothing large.
    fn request(&self, prompt: usize, choice: usize) -> GenerateRequest {
        let params = &self.params;
        let mut request = GenerateRequest::from_tokens(self.model.card.name.clone(), Vec::new());
        if let Some(input) = self.inputs.get(prompt) {
            request.input = input.clone();
        }
        request.adapter = self.model.adapter_name();
        request.stop = params.stop.clone();
        if let Some(text) = &self.model.text {
            request.stop.eos_token_ids = text.eos_token_ids.clone();
        }
        request.sampling = params.sampling.clone();
        // Each choice has its own seed, or all would be the same.
        let choice = u64::try_from(choice).unwrap_or(u64::MAX);
        request.sampling.seed = params.sampling.seed.map(|seed| seed.wrapping_add(choice));
        request.output.logprobs = params.logprobs.map(|logprobs| logprobs.top);
        if !self.may_call_instead {
            request.guided = self.guided.clone();
        }
        request.priority = params.priority;
        request.data_parallel_rank = params.data_parallel_rank;
        request.cache_salt.clone_from(&params.cache_salt);
        request.annotations = params.annotations.clone();
        request
    }

    /// Starts one choice.
    async fn start(
        self: Arc<Self>,
        prompt: usize,
        choice: usize,
        ctx: RequestContext,
        markers: Arc<[TokenId]>,
    ) -> Result<OutputStream, EngineError> {
        let request = self.request(prompt, choice);
        let bound = self.bound(&request, &ctx);
        let started = self.model.engine.generate(request, ctx).await;
        let started = with_clients_field(started, self.bound_by.clone())?;
        Ok(match (bound, &self.splitting, &self.model.text) {
            (Some(bound), Some(splitting), Some(text)) => {
                let detokenizer = Detokenizer::new(Arc::clone(&text.tokenizer), true);
                let detokenizer = detokenizer.showing(markers);
                unless_called(started, detokenizer, splitting.splitter(), bound)
            }
            _ => started,
        })
    }

    /// The request to send when content begins, for an answer that may call tools instead.
    fn bound(&self, request: &GenerateRequest, ctx: &RequestContext) -> Option<BoundRequest> {
        self.may_call_instead.then(|| BoundRequest {
            engine: Arc::clone(&self.model.engine),
            request: request.clone(),
            guided: self.guided.clone(),
            bound_by: self.bound_by.clone(),
            ctx: ctx.sibling(0),
        })
    }
}

/// The answers of a job, prompt by prompt. Each is created when it is taken, and starts when it is polled. The order of
/// taking is its index in the response.
///
/// A request may have thousands of them. The reader keeps [`Self::at_once`] running and takes another when one has ended. So
/// a request never takes more memory or engine slots than that, and answers that have not started cost nothing. The running
/// ones must be polled concurrently: an unpolled answer waits for its engine slot and may keep another from getting one.
#[derive(Debug)]
pub struct Answers {
    job: Arc<Job>,
    ctx: RequestContext,
    markers: Arc<[TokenId]>,
    stops: StopStrings,
    measured: Option<Measured>,
    /// The first one, if it has started and was not taken yet.
    begun: Option<Box<Answer>>,
    /// The indexes of those that were not created yet.
    rest: Range<usize>,
    has_siblings: bool,
}

/// Measures the pace of answers, and charges their tokens.
#[derive(Debug)]
struct Measured {
    steps: StepMetrics,
    arrived: Instant,
    account: Arc<Account>,
}

impl Answers {
    /// Measures each answer's pace since `arrived`, and charges its tokens to `account`.
    pub fn measure(&mut self, steps: &StepMetrics, arrived: Instant, account: &Arc<Account>) {
        self.measured = Some(Measured {
            steps: steps.clone(),
            arrived,
            account: Arc::clone(account),
        });
    }

    /// How many of them to run at once.
    #[must_use]
    pub fn at_once(&self) -> NonZeroUsize {
        self.job.model.max_running_choices
    }

    /// How the started ones are routed; `None` if the request does not ask.
    #[must_use]
    pub fn explanation(&self) -> Option<&Explanation> {
        self.ctx.explanation()
    }

    /// Starts the first answer, so that a refusal by the engine is known before anything is sent.
    ///
    /// # Errors
    /// The engine's refusal.
    ///
    /// # Cancel safety
    /// If the future is dropped, the answer is still starting.
    pub async fn begin(&mut self) -> Result<(), EngineError> {
        self.begun = self.next().map(Box::new);
        match &mut self.begun {
            Some(first) => first.started().await,
            None => Ok(()),
        }
    }

    fn make(&self, index: usize) -> Answer {
        let (job, markers) = (&self.job, &self.markers);
        let choices = job.choices();
        let (prompt, choice) = (index / choices, index % choices);
        let ctx = match self.has_siblings {
            true => self.ctx.sibling(index),
            false => self.ctx.child(),
        };
        let tokens = job.prompt_at(prompt);
        let tokenizer = job.model.text.as_ref();
        let tokenizer = tokenizer.map(|text| Arc::clone(&text.tokenizer));
        let stops = self.stops.clone();
        let starting = Arc::clone(job).start(prompt, choice, ctx.clone(), Arc::clone(markers));
        let known = tokens.map_or(0, |tokens| u32::try_from(tokens.len()).unwrap_or(u32::MAX));
        let mut answer = Answer::starting(Box::pin(starting), tokenizer, stops, known);
        if tokens.is_none() {
            answer = answer.counted_by_engine(ctx);
        }
        if let Some(splitting) = &job.splitting {
            answer = answer.with_splitter(splitting.splitter(), Arc::clone(markers));
        }
        if let (Some(logprobs), Some(text)) = (&job.params.logprobs, &job.model.text) {
            answer = answer.with_logprobs(Arc::clone(&text.tokenizer), logprobs.top);
        }
        if let (true, Some(tokens)) = (job.continues_prompts, tokens) {
            answer = answer.behind(tokens);
        }
        if let Some(echo) = job.echoes.get(prompt) {
            answer = answer.with_echo(Arc::clone(echo));
        }
        if choice > 0 {
            answer = answer.sharing_prompt();
        }
        let Some(measured) = &self.measured else {
            return answer;
        };
        let account = Arc::clone(&measured.account);
        answer.measured(&measured.steps, measured.arrived, account)
    }
}

impl Iterator for Answers {
    type Item = Answer;

    fn next(&mut self) -> Option<Answer> {
        if let Some(begun) = self.begun.take() {
            return Some(*begun);
        }
        let index = self.rest.next()?;
        Some(self.make(index))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.rest.len() + usize::from(self.begun.is_some());
        (left, Some(left))
    }
}

impl ExactSizeIterator for Answers {}

/// Puts the client's own field in an engine's errors about the constraint, at the start or later.
pub(super) fn with_clients_field(
    started: Result<OutputStream, EngineError>,
    bound_by: Option<Arc<str>>,
) -> Result<OutputStream, EngineError> {
    let Some(field) = bound_by else {
        return started;
    };
    let named = move |error: EngineError| {
        if error.at() == Some(&At::Request(RequestField::Guided)) {
            error.with_at(At::other(&*field))
        } else {
            error
        }
    };
    let outputs = started.map_err(&named)?;
    let outputs = outputs.map(move |output| output.map_err(&named));
    Ok(OutputStream::from_raw(Box::pin(outputs)))
}
