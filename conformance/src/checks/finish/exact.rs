//! The exact end of a sequence. The unstopped answer shows what an answer must be under other stop conditions.

use std::iter;

use genset_backend_common::output::FinishReason;
use genset_backend_common::{
    GenerateRequest, StopConditions, TokenId,
    config::{Deviation, SamplingOption},
};

use crate::answer::Answer;
use crate::check::{CheckResult, Stop, ensure, fail, skip};
use crate::trial::{Live, Trial};

/// An unstopped answer.
struct Known {
    request: GenerateRequest,
    tokens: Vec<TokenId>,
}

impl Known {
    async fn ask(live: &Live, prompt: Vec<TokenId>, max_tokens: u32) -> Result<Self, Stop> {
        let request = live.greedy(prompt, max_tokens);
        let answer = live.answer(request.clone()).await?;
        let tokens = answer.tokens();
        ensure!(
            u32::try_from(tokens.len()) == Ok(max_tokens),
            "max_tokens = {max_tokens} gave {} tokens ({:?})",
            tokens.len(),
            answer.error()
        );
        Ok(Self { request, tokens })
    }

    /// Stop conditions that end it at `place`. If the token came before, `min_tokens` keeps it from stopping there.
    fn stop_at(&self, place: usize) -> StopConditions {
        let token = self.tokens[place];
        let is_first = !self.tokens[..place].contains(&token);
        let mut stop = self.request.stop.clone();
        stop.stop_token_ids = [token].into();
        stop.min_tokens = if is_first { 0 } else { number(place) };
        stop
    }

    /// `count` tokens that it does not contain, repeated if the vocabulary has too few; none if it has none.
    fn absent(&self, live: &Live, count: usize) -> Vec<TokenId> {
        let absent = (0..live.vocab_size()).filter(|token| !self.tokens.contains(token));
        let absent: Vec<TokenId> = absent.take(count).collect();
        absent.iter().copied().cycle().take(count).collect()
    }

    /// Whether an engine keeps `min_tokens` by banning the stop tokens. Then the answer differs from the first banned position
    /// on, and only its length is judged.
    fn bans(&self, request: &GenerateRequest, tokens: &[TokenId]) -> bool {
        let stop = &request.stop;
        let mut both = tokens.iter().zip(&self.tokens).zip(0..);
        let first = both.find(|((token, known), _)| token != known);
        first.is_some_and(|((_, known), place)| {
            place < stop.min_tokens
                && stop.is_stop(*known, stop.min_tokens)
                && number(tokens.len()) >= stop.min_tokens
        })
    }

    /// Sends the request with other conditions, and compares the answer with the prediction from this one.
    async fn expect(&self, live: &Live, what: &str, mut stop: StopConditions) -> CheckResult {
        if live.config.capabilities.deviates(Deviation::NoMinTokens) {
            // The token stops it at its first occurrence.
            stop.min_tokens = 0;
        }
        let stopped = self.tokens.iter().zip(0..);
        let end = stopped
            .clone()
            .find(|(token, place)| stop.is_stop(**token, *place));
        let (token, count) = match end {
            Some((token, place)) => (Some(*token), place),
            None => (None, number(self.tokens.len())),
        };
        let mut request = self.request.clone();
        request.stop = stop;
        let answer = live.answer(request.clone()).await?;
        let (tokens, reason) = (answer.tokens(), answer.reason());
        let expected = &self.tokens[..usize::try_from(count).unwrap_or(usize::MAX)];
        let is_right = match token {
            Some(_) => reason == Some(FinishReason::Stop) && named(&answer) == token,
            None => reason == Some(FinishReason::Length),
        };
        let is_met = is_right && tokens == expected;
        if is_met || ended_by_itself(&request, &answer, expected) || self.bans(&request, &tokens) {
            return Ok(());
        }
        // If the engine took another path this time, nothing can be predicted.
        let again = live.answer(self.request.clone()).await?.tokens();
        if again != self.tokens {
            skip!(
                NotDeclared,
                "the engine answers one request in different ways, so its end cannot be foretold"
            );
        }
        let right = match token {
            Some(token) => format!("{count} tokens and Stop at token {token}"),
            None => format!("{count} tokens and Length"),
        };
        let differs = if tokens.len() == expected.len() && tokens != expected {
            ", of them some others than before"
        } else {
            ""
        };
        fail!(
            "{what}: expected {right}, got {} tokens{differs}, {reason:?} and {:?} as the token that stopped ({:?})",
            tokens.len(),
            named(&answer),
            answer.error()
        )
    }
}

/// The token named by the terminal.
fn named(answer: &Answer) -> Option<TokenId> {
    answer.finished().and_then(|finished| finished.stop_token)
}

/// An engine may have its own end, which counts unless the request ignores it.
fn ended_by_itself(request: &GenerateRequest, answer: &Answer, expected: &[TokenId]) -> bool {
    let stop = &request.stop;
    let is_asked = |token: TokenId| {
        stop.stop_token_ids.contains(&token) || stop.eos_token_ids.contains(&token)
    };
    !stop.ignore_eos
        && answer.reason() == Some(FinishReason::Stop)
        && named(answer).is_none_or(|token| !is_asked(token))
        && expected.starts_with(&answer.tokens())
}

fn number(place: usize) -> u32 {
    u32::try_from(place).unwrap_or(u32::MAX)
}

/// The number of tokens of an answer that is not about lengths.
const SHORT_TOKENS: u32 = 24;

/// A position in a short answer.
const PLACE: usize = 5;

/// A prompt length that leaves room for a short answer in a small context.
const PROMPT_TOKENS: usize = 8;

async fn short(live: &Live, seed: u64) -> Result<Known, Stop> {
    let room = live.affordable_answer(PROMPT_TOKENS, SHORT_TOKENS);
    if usize::try_from(room).is_ok_and(|room| room <= PLACE + 2) {
        skip!(Level, "the context has no room for {SHORT_TOKENS} tokens");
    }
    Known::ask(live, live.prompt(PROMPT_TOKENS, seed), room).await
}

/// The number of stop tokens of one request: more than fit a list on the stack, and a word's bits.
const LISTS: [usize; 3] = [3, 9, 64];

pub(super) async fn long_stop_lists(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let known = short(&live, 0).await?;
    for len in LISTS {
        for (place, name) in [(0, "first"), (len / 2, "middle"), (len - 1, "last")] {
            let mut stop = known.stop_at(PLACE);
            let mut list = known.absent(&live, len - 1);
            // A vocabulary of one token has no others.
            list.insert(place.min(list.len()), known.tokens[PLACE]);
            stop.stop_token_ids = list.into();
            let what = format!("the {name} of {len} stop tokens");
            known.expect(&live, &what, stop).await?;
        }
    }
    Ok(())
}

pub(super) async fn both_lists(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let known = short(&live, 0).await?;
    let token = known.tokens[PLACE];
    let others = known.absent(&live, 2);
    for (last, what) in [
        (true, "the last of three end-of-sequence tokens"),
        (false, "the first of three end-of-sequence tokens"),
    ] {
        let mut stop = ending(&known);
        let first: Vec<TokenId> = [token].into();
        let list = if last {
            [others.clone(), first]
        } else {
            [first, others.clone()]
        };
        stop.eos_token_ids = list.concat().into();
        known.expect(&live, what, stop).await?;
    }
    let mut stop = ending(&known);
    stop.eos_token_ids = [token].into();
    stop.stop_token_ids = others.clone().into();
    let what = "an end-of-sequence token beside stop tokens that do not come";
    known.expect(&live, what, stop).await?;

    let mut stop = ending(&known);
    stop.eos_token_ids = others.into();
    stop.stop_token_ids = [token].into();
    let what = "a stop token beside end-of-sequence tokens that do not come";
    known.expect(&live, what, stop.clone()).await?;
    stop.ignore_eos = true;
    let what = "a stop token while end-of-sequence tokens are ignored";
    known.expect(&live, what, stop).await?;
    in_the_prompt(&live, &known).await
}

/// The conditions of a request that ends at the model's end.
fn ending(known: &Known) -> StopConditions {
    let mut stop = known.stop_at(PLACE);
    stop.stop_token_ids = [].into();
    stop.ignore_eos = false;
    stop
}

/// A stop token may be in the prompt; only generated tokens count. Tested if the model repeats its prompt.
async fn in_the_prompt(live: &Live, known: &Known) -> CheckResult {
    let prompt: Vec<TokenId> = iter::once(known.tokens[PLACE])
        .chain(live.prompt(PROMPT_TOKENS, 0).into_iter().skip(1))
        .collect();
    let known = Known::ask(live, prompt.clone(), number(known.tokens.len())).await?;
    let place = known.tokens.iter().position(|token| prompt.contains(token));
    match place {
        Some(place) => {
            let what = "a stop token that the prompt has too";
            known.expect(live, what, known.stop_at(place)).await
        }
        None => Ok(()),
    }
}

/// Positions to stop at: at once, and beyond a block, a word's bits and a byte's range.
const PLACES: [usize; 4] = [0, 1, 65, 257];

/// A minimum length beyond a byte's range.
const LONG_MIN_TOKENS: u32 = 260;

/// The number of tokens of an answer that has all these positions.
const LONG_TOKENS: u32 = 264;

pub(super) async fn stops_at_every_place(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let len = live.affordable_answer(4, LONG_TOKENS);
    let known = Known::ask(&live, live.prompt(4, 0), len).await?;
    for place in PLACES
        .into_iter()
        .filter(|place| *place < known.tokens.len())
    {
        let what = format!("a stop token after {place} others");
        known.expect(&live, &what, known.stop_at(place)).await?;
    }
    Ok(())
}

pub(super) async fn min_tokens_to_the_token(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    live.needs_min_tokens()?;
    let known = short(&live, 0).await?;
    for place in [1, PLACE] {
        for (min_tokens, what) in [
            (place, "min_tokens reached as the stop token comes"),
            (
                place + 1,
                "min_tokens one more than came before the stop token",
            ),
        ] {
            let mut stop = known.stop_at(place);
            stop.min_tokens = number(min_tokens);
            let what = format!("{what}, {place} tokens in");
            known.expect(&live, &what, stop).await?;
        }
    }
    let len = live.affordable_answer(4, LONG_TOKENS);
    if len <= LONG_MIN_TOKENS {
        return Ok(());
    }
    let known = Known::ask(&live, live.prompt(4, 0), len).await?;
    let mut stop = known.stop_at(PLACE);
    stop.min_tokens = LONG_MIN_TOKENS;
    let what = format!("a stop token {PLACE} tokens in, and min_tokens = {LONG_MIN_TOKENS}");
    known.expect(&live, &what, stop).await
}

/// A bias that exceeds any model's logits.
const FORCED: f32 = 100.0;

/// Forces tokens by a bias, all of them before `min_tokens` is reached. Token 0 is the usual padding of lists.
pub(super) async fn min_tokens_ban_no_other(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    live.needs_min_tokens()?;
    live.needs(SamplingOption::LogitBias)?;
    for forced in [0, live.token(1)] {
        let max_tokens = number(PLACE);
        let mut request = live.greedy(live.prompt(PROMPT_TOKENS, 0), max_tokens);
        request.sampling.logit_bias = [(forced, FORCED)].into();
        let known = live.answer(request.clone()).await?.tokens();
        if known.is_empty() || known.iter().any(|token| *token != forced) {
            // A token that cannot come, such as one that begins a text: DT06 covers others.
            continue;
        }
        let others = (2..10).map(|seed| live.token(seed));
        let others: Vec<TokenId> = others.filter(|token| *token != forced).collect();
        let stops = [others.get(..1), others.get(..5), Some(&others)];
        for stops in stops.into_iter().flatten() {
            let mut request = request.clone();
            request.stop.stop_token_ids = stops.to_vec().into();
            request.stop.min_tokens = max_tokens;
            let tokens = live.answer(request).await?.tokens();
            ensure!(
                tokens == known,
                "a bias forces token {forced}, which stops nothing, yet with min_tokens = {max_tokens} and the stop tokens {stops:?} came {tokens:?}"
            );
        }
    }
    Ok(())
}
