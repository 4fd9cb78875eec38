//! DT: sampling and determinism.

use genset_backend_common::{
    ErrorKind, GenerateRequest, GuidedDecoding,
    config::{Deviation, GuidedKind, SamplingOption},
};

use crate::answer::{Answer, Generated};
use crate::check::{Check, CheckResult, Stop, check, ensure, fail, skip};
use crate::trial::{Live, Trial};

mod beside;
mod counted;
mod drawn;
mod free;
mod rated;
mod warm;

pub(super) const CHECKS: &[Check] = &[
    check!("DT01", Core, Tokens, "a greedy request repeats exactly",
        clause: "SamplingOptions::temperature",
        breaks: "answers that change from run to run, and prefix caches and migrations that cannot be trusted",
        greedy_repeats),
    check!("DT02", Strict, Sampling, "the same seed gives the same answer",
        clause: "SamplingOptions::seed",
        breaks: "evaluations and bug reports that nobody can repeat", same_seed),
    // Changed: an engine with one possible next token correctly gives one answer for all seeds, so it is skipped.
    check!("DT03", Strict, Sampling, "different seeds give different answers",
        clause: "SamplingOptions::seed",
        breaks: "a constant random generator: every best-of-n candidate is the same", different_seeds),
    check!("DT04", Core, Sampling, "temperature 0 is greedy, whatever the seed",
        clause: "SamplingOptions::temperature",
        breaks: "a division by zero: garbage for the commonest setting of all", temperature_zero),
    check!("DT05", Strict, Sampling, "top_k = 1 is greedy at any temperature",
        clause: "SamplingOptions::top_k",
        breaks: "samplers applied in the wrong order or to the wrong tokens", top_k_one),
    check!(tokens "DT06", Strict, Sampling, "a bias of -100 bans a token and one of +100 forces it",
        clause: "SamplingOptions::logit_bias",
        breaks: "banned tokens that appear: the bias came after the softmax, or not at all", bias),
    check!("DT07", Strict, Logprobs, "log probabilities are at most 0, sorted, as many as asked for, and hold the chosen token",
        clause: "TokenLogprob",
        breaks: "evaluations and confidence scores computed from the wrong logits", logprobs),
    check!(tokens "DT08", Strict, Sampling, "a penalty changes an answer that repeats itself, where it repeats itself",
        clause: "SamplingOptions::presence_penalty",
        breaks: "penalties that do nothing, or punish the wrong tokens", penalties),
    check!("DT09", Core, Tokens, "what is not declared is refused as unsupported",
        clause: "Capabilities",
        breaks: "parameters that are dropped in silence: the client believes they hold", undeclared),
    check!(tokens "DT10", Core, Tokens, "a prompt of several KV blocks is answered alike, whatever of it was sent before",
        clause: "SamplingOptions::temperature",
        breaks: "wrong answers as soon as a prefix is reused: the second turn of every conversation", warm::warm_is_cold),
    check!("DT11", Strict, Sampling, "top_p near 0 and min_p = 1 are greedy at any temperature",
        clause: "SamplingOptions::top_p",
        breaks: "options that are declared and do nothing", free::narrowed_to_one),
    check!("DT12", Strict, Sampling, "requests without a seed are answered in different ways",
        clause: "SamplingOptions::seed",
        breaks: "every retry, and every candidate of best-of-n, is the same answer", free::unseeded_differ),
    check!("DT13", Strict, Logprobs, "log probabilities are of one distribution over the whole vocabulary",
        clause: "TokenLogprob::logprob",
        breaks: "confidence scores and perplexities that are off by a constant that nobody knows", rated::one_distribution),
    check!(tokens "DT14", Strict, Sampling, "a frequency penalty counts each time that a token came, a presence penalty once",
        clause: "SamplingOptions::frequency_penalty",
        breaks: "one penalty under two names: long answers repeat themselves, or may not use a word twice", counted::frequency_adds_up),
    check!("DT15", Strict, Sampling, "a seed gives the same answer beside other seeds",
        clause: "SamplingOptions::seed",
        breaks: "seeds that hold on an idle engine only", beside::seeded_beside_seeded),
    check!("DT16", Strict, Sampling, "a greedy answer is the same beside requests at a temperature",
        clause: "SamplingOptions::temperature",
        breaks: "one client's options applied to another's request", beside::greedy_beside_hot),
    check!("DT17", Strict, Logprobs, "log probabilities are the model's own, whatever biases and penalties a request has",
        clause: "TokenLogprob; Deviation::LogprobsAfterBias",
        breaks: "scores that say how a request was set up, and not what the model thinks", rated::before_bias),
    check!(tokens "DT18", Strict, Sampling, "a frequency penalty counts the prompt's tokens where the engine declares that it does, and only there",
        clause: "SamplingOptions::frequency_penalty; Deviation::PenaltiesCountPrompt",
        breaks: "answers that may not use the words of their question", counted::prompt_counts_where_declared),
    check!("DT19", Strict, Logprobs, "top_k, top_p and min_p leave no token but those that they say",
        clause: "SamplingOptions::top_k, top_p, min_p",
        breaks: "tokens that the client shut out: a list of candidates one too long, or cut before it was sorted", drawn::within_what_is_left),
    check!("DT20", Strict, Logprobs, "tokens are drawn as often as their probabilities and the temperature say",
        clause: "SamplingOptions::temperature",
        breaks: "evaluations of a model other than the one served: a temperature that is not the one asked for, or draws that are not even", drawn::as_often_as_probable),
];

/// A request long enough to show a wrong choice.
fn greedy(live: &Live, seed: u64) -> GenerateRequest {
    live.greedy(live.prompt(8, seed), 24)
}

/// A request with the same prompt that chooses freely.
fn free(live: &Live, seed: u64) -> GenerateRequest {
    let mut request = greedy(live, seed);
    if live.can(SamplingOption::Temperature) {
        request.sampling.temperature = Some(1.5);
    }
    live.draw_from_all(&mut request);
    request
}

async fn answered(live: &Live, request: GenerateRequest) -> Result<Answer, Stop> {
    let answer = live.answer(request).await?;
    ensure!(
        !answer.generated().is_empty(),
        "the answer holds no token: {:?}",
        answer.items
    );
    Ok(answer)
}

async fn generated(live: &Live, request: GenerateRequest) -> Result<Generated, Stop> {
    Ok(answered(live, request).await?.generated())
}

async fn greedy_repeats(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    for seed in 0..3 {
        live.warm(&greedy(&live, seed)).await?;
        let first = generated(&live, greedy(&live, seed)).await?;
        let second = generated(&live, greedy(&live, seed)).await?;
        ensure!(
            first == second,
            "the same greedy request gave {first:?}, then {second:?}"
        );
    }
    Ok(())
}

async fn same_seed(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    live.needs(SamplingOption::Seed)?;
    for seed in 0..3 {
        let mut request = free(&live, seed);
        request.sampling.seed = Some(seed + 7);
        live.warm(&request).await?;
        let first = generated(&live, request.clone()).await?;
        let second = generated(&live, request).await?;
        ensure!(
            first == second,
            "with the same seed came {first:?}, then {second:?}"
        );
    }
    Ok(())
}

async fn different_seeds(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    live.needs(SamplingOption::Seed)?;
    live.needs(SamplingOption::Temperature)?;
    if !has_a_choice(&live).await? {
        skip!(
            NotDeclared,
            "the engine seems to have one possible next token"
        );
    }
    match only_answer(&live, (0..TRIES).map(|seed| seeded(&live, seed))).await? {
        Some(answer) => fail!("{TRIES} seeds gave one answer: {answer:?}"),
        None => Ok(()),
    }
}

/// The number of requests, whose answers must not all be equal: many, for an engine that is nearly certain of its tokens. The
/// first other answer ends them.
const TRIES: u64 = 32;

/// A request that chooses freely, with a seed.
fn seeded(live: &Live, seed: u64) -> GenerateRequest {
    let mut request = free(live, 0);
    request.sampling.seed = Some(seed);
    request
}

/// The answer to all of these requests; `None` if they are answered in different ways.
async fn only_answer(
    live: &Live,
    requests: impl Iterator<Item = GenerateRequest>,
) -> Result<Option<Generated>, Stop> {
    let mut first = None;
    for request in requests {
        let answer = generated(live, request).await?;
        if *first.get_or_insert_with(|| answer.clone()) != answer {
            return Ok(None);
        }
    }
    Ok(first)
}

/// The answer to requests without a seed, if it is always the same.
async fn only_unseeded(live: &Live) -> Result<Option<Generated>, Stop> {
    only_answer(live, (0..TRIES).map(|_| free(live, 0))).await
}

/// Whether there is more than one possible next token: its log probabilities show it, or requests without a seed differ.
async fn has_a_choice(live: &Live) -> Result<bool, Stop> {
    if live.config.capabilities.max_logprobs.is_some() {
        let mut request = greedy(live, 0);
        request.output.logprobs = Some(0);
        let answer = live.answer(request).await?;
        return Ok(answer.logprobs().iter().any(|at| at.logprob < -0.1));
    }
    Ok(only_unseeded(live).await?.is_none())
}

/// The default is greedy for most engines, but may be documented otherwise; it counts only if it repeats itself.
async fn temperature_zero(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    live.needs(SamplingOption::Temperature)?;
    for seed in 0..3 {
        let mut default = greedy(&live, seed);
        default.sampling.temperature = None;
        live.warm(&default).await?;
        let reference = generated(&live, default.clone()).await?;
        let is_greedy = generated(&live, default).await? == reference;
        let cold = generated(&live, greedy(&live, seed)).await?;
        ensure!(
            !is_greedy || cold == reference,
            "temperature 0 gave {cold:?}, the greedy default {reference:?}"
        );
        let mut seeded = greedy(&live, seed);
        seeded.sampling.seed = live.can(SamplingOption::Seed).then_some(seed + 1);
        let seeded = generated(&live, seeded).await?;
        ensure!(
            seeded == cold,
            "at temperature 0 a seed turned {cold:?} into {seeded:?}"
        );
    }
    Ok(())
}

async fn top_k_one(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    live.needs(SamplingOption::TopK)?;
    for seed in 0..3 {
        live.warm(&greedy(&live, seed)).await?;
        let reference = generated(&live, greedy(&live, seed)).await?;
        let mut request = free(&live, seed);
        request.sampling.top_k = Some(1);
        let narrow = generated(&live, request).await?;
        ensure!(
            narrow == reference,
            "top_k = 1 gave {narrow:?}, greedy {reference:?}"
        );
    }
    Ok(())
}

/// The number of tokens to search for one that the answer does not contain: with a small vocabulary it may contain all.
const FORCED_FROM: usize = 1000;

async fn bias(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    live.needs(SamplingOption::LogitBias)?;
    let reference = generated(&live, greedy(&live, 0)).await?;
    let banned = reference.units()[0];
    let mut request = greedy(&live, 0);
    request.sampling.logit_bias = [(banned, -100.0)].into();
    let without = generated(&live, request).await?;
    ensure!(
        !without.units().contains(&banned),
        "token {banned} appeared with a bias of -100: {without:?}"
    );
    let forced = (0..)
        .map(|seed| live.token(seed))
        .take(FORCED_FROM)
        .find(|token| !reference.units().contains(token));
    let Some(forced) = forced else {
        return Ok(());
    };
    let mut request = greedy(&live, 0);
    request.sampling.logit_bias = [(forced, 100.0)].into();
    let only = generated(&live, request).await?;
    ensure!(
        only.units().iter().all(|token| *token == forced),
        "other tokens appeared although {forced} had a bias of +100: {only:?}"
    );
    Ok(())
}

async fn logprobs(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let max = live.config.capabilities.max_logprobs.unwrap_or(0);
    for top in [0, 1.min(max), max] {
        let mut request = greedy(&live, u64::from(top));
        request.output.logprobs = Some(top);
        let answer = live.answer(request).await?;
        let (tokens, logprobs) = (answer.tokens(), answer.logprobs());
        ensure!(
            tokens.len() == logprobs.len(),
            "{} tokens came with {} log probabilities",
            tokens.len(),
            logprobs.len()
        );
        for (token, at) in tokens.iter().zip(&logprobs) {
            let ranked: Vec<f32> = at.top.iter().map(|candidate| candidate.logprob).collect();
            ensure!(
                u32::try_from(ranked.len()) == Ok(top),
                "{top} candidates were asked for, {} came",
                ranked.len()
            );
            ensure!(
                at.logprob <= 0.0 && ranked.iter().all(|logprob| *logprob <= 0.0),
                "a log probability is above 0 or not a number: {at:?}"
            );
            ensure!(
                ranked.is_sorted_by(|a, b| a >= b),
                "the candidates are not sorted: {ranked:?}"
            );
            let ranked_as = at.top.iter().find(|candidate| candidate.token_id == *token);
            let is_among = ranked.last().is_none_or(|worst| at.logprob <= *worst);
            ensure!(
                ranked_as.map_or(is_among, |c| (c.logprob - at.logprob).abs() < 1e-3),
                "the chosen token {token} ({}) disagrees with the candidates {:?}",
                at.logprob,
                at.top
            );
        }
    }
    Ok(())
}

/// A penalty lowers the logits of earlier tokens, so the first token that it changes must be one of those.
async fn penalties(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    type Penalty = (SamplingOption, &'static str, fn(&mut GenerateRequest));
    let penalties: [Penalty; 4] = [
        (SamplingOption::PresencePenalty, "presence_penalty", |r| {
            r.sampling.presence_penalty = Some(2.0);
        }),
        (SamplingOption::FrequencyPenalty, "frequency_penalty", |r| {
            r.sampling.frequency_penalty = Some(2.0);
        }),
        (
            SamplingOption::RepetitionPenalty,
            "repetition_penalty",
            |r| {
                r.sampling.repetition_penalty = Some(2.0);
            },
        ),
        (
            SamplingOption::RepetitionPenalty,
            "repetition_penalty of 1000",
            |r| {
                r.sampling.repetition_penalty = Some(1000.0);
            },
        ),
    ];
    let mut was_tried = false;
    for (option, name, set) in penalties {
        if !live.can(option) {
            continue;
        }
        let counts_prompt = option == SamplingOption::RepetitionPenalty
            || live
                .config
                .capabilities
                .deviates(Deviation::PenaltiesCountPrompt);
        if is_above_a_limit(&live, set).await? {
            continue;
        }
        let (mut repeats, mut changes) = (0, 0);
        for seed in 0..4 {
            let prompt = live.prompt(8, seed);
            let plain = live.greedy(prompt.clone(), live.affordable_answer(prompt.len(), 64));
            let mut punished = plain.clone();
            set(&mut punished);
            let (plain, punished) = (
                generated(&live, plain).await?,
                generated(&live, punished).await?,
            );
            let (plain, punished) = (plain.units(), punished.units());
            let came_before = |place: usize| {
                plain[..place].contains(&plain[place])
                    || (counts_prompt && prompt.contains(&plain[place]))
            };
            repeats += (0..plain.len()).filter(|place| came_before(*place)).count();
            let change = (0..plain.len()).find(|place| punished.get(*place) != plain.get(*place));
            if let Some(place) = change {
                changes += 1;
                ensure!(
                    came_before(place),
                    "{name} changed token {place}, {}, which had not come before",
                    plain[place]
                );
            }
        }
        was_tried |= repeats > 0;
        ensure!(
            repeats == 0 || changes > 0,
            "{name} changed nothing, although {repeats} tokens were repeated"
        );
    }
    if !was_tried {
        skip!(
            NotDeclared,
            "no penalty is declared, or no answer repeats itself"
        );
    }
    Ok(())
}

/// Whether a repetition penalty is refused by its name, as a value above 2 may be: by `generate` or in the stream.
async fn is_above_a_limit(live: &Live, set: fn(&mut GenerateRequest)) -> Result<bool, Stop> {
    let mut request = live.greedy(live.prompt(8, 0), 1);
    set(&mut request);
    if request.sampling.repetition_penalty <= Some(2.0) {
        return Ok(false);
    }
    let ctx = live.context(&request);
    let answer = live.outcome(request, ctx).await?;
    Ok(answer.error().is_some_and(|error| {
        let at = error.at().map(|at| at.name());
        at == Some("repetition_penalty") && error.kind() == ErrorKind::InvalidArgument
    }))
}

/// Requests for every ability that the engine does not declare.
fn undeclared_requests(live: &Live) -> Vec<(&'static str, GenerateRequest)> {
    use SamplingOption as Opt;
    let can = &live.config.capabilities;
    type Ask = fn(&mut GenerateRequest);
    let resumes_exactly = can.resume || !can.resume_as_prompt;
    let asks: [(bool, &str, Ask); 21] = [
        (live.can(Opt::Temperature), "temperature", |r| {
            r.sampling.temperature = Some(0.7)
        }),
        (live.can(Opt::TopP), "top_p", |r| {
            r.sampling.top_p = Some(0.5)
        }),
        (live.can(Opt::TopK), "top_k", |r| r.sampling.top_k = Some(3)),
        (live.can(Opt::MinP), "min_p", |r| {
            r.sampling.min_p = Some(0.5)
        }),
        (live.can(Opt::PresencePenalty), "presence_penalty", |r| {
            r.sampling.presence_penalty = Some(1.0)
        }),
        (live.can(Opt::FrequencyPenalty), "frequency_penalty", |r| {
            r.sampling.frequency_penalty = Some(1.0)
        }),
        (
            live.can(Opt::RepetitionPenalty),
            "repetition_penalty",
            |r| r.sampling.repetition_penalty = Some(1.5),
        ),
        (live.can(Opt::LogitBias), "logit_bias", |r| {
            r.sampling.logit_bias = [(0, 1.0)].into()
        }),
        (live.can(Opt::Seed), "seed", |r| r.sampling.seed = Some(1)),
        (!can.deviates(Deviation::NoMinTokens), "min_tokens", |r| {
            r.stop.min_tokens = 1
        }),
        (can.max_logprobs.is_some(), "logprobs", |r| {
            r.output.logprobs = Some(0)
        }),
        (can.prompt_logprobs, "prompt_logprobs", |r| {
            r.output.prompt_logprobs = Some(0)
        }),
        (can.priority, "priority", |r| r.priority = 1),
        (can.adapters, "adapter", |r| {
            r.adapter = Some("no-such-adapter".into())
        }),
        (can.resume || can.resume_as_prompt, "resumed_tokens", |r| {
            r.resumed_tokens = 1
        }),
        // If it declares neither, the row above covers it.
        (resumes_exactly, "resumed_tokens beside a seed", |r| {
            (r.resumed_tokens, r.sampling.seed) = (1, Some(1));
        }),
        (
            can.guided.contains(&GuidedKind::JsonObject),
            "JSON objects",
            |r| r.guided = Some(GuidedDecoding::JsonObject.into()),
        ),
        (
            can.guided.contains(&GuidedKind::JsonSchema),
            "JSON schemas",
            |r| {
                r.guided =
                    Some(GuidedDecoding::JsonSchema(serde_json::json!({"type": "null"})).into())
            },
        ),
        (
            can.guided.contains(&GuidedKind::Regex),
            "regular expressions",
            |r| r.guided = Some(GuidedDecoding::Regex("a".into()).into()),
        ),
        (can.guided.contains(&GuidedKind::Choice), "choices", |r| {
            r.guided = Some(GuidedDecoding::Choice(vec!["a".into()]).into())
        }),
        (can.guided.contains(&GuidedKind::Grammar), "grammars", |r| {
            r.guided = Some(GuidedDecoding::Grammar("root ::= \"a\"".into()).into())
        }),
    ];
    let undeclared = asks.into_iter().filter(|(is_declared, _, _)| !is_declared);
    undeclared
        .map(|(_, name, ask)| {
            let mut request = live.request(4, 4);
            ask(&mut request);
            (name, request)
        })
        .collect()
}

async fn undeclared(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    for (name, request) in undeclared_requests(&live) {
        let ctx = live.context(&request);
        let accepted = match live.try_generate(request, ctx).await? {
            Err(error) => Err(error),
            Ok(mut running) => match running.next().await? {
                Some(Err(error)) => Err(error),
                item => Ok(item),
            },
        };
        match accepted {
            Ok(item) => fail!("{name} is not declared, yet it was accepted: {item:?}"),
            Err(error) => ensure!(
                error.kind() == ErrorKind::Unsupported,
                "{name} is not declared and was refused as {}, not as unsupported",
                error.kind()
            ),
        }
    }
    Ok(())
}
