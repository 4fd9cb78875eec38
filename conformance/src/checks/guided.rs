//! GD: guided decoding. The checks read text, so the subject must decode it: [`Subject::with_text`](crate::Subject::with_text).
//!
//! Changed from the catalogue, with the reason:
//! - GD07: without a probe, the time of a mask is the difference in time per token with and without a grammar.

mod json;
mod schema;

use genset_backend_common::{
    FinishReason, GenerateRequest, GuidedDecoding,
    config::{GuidedKind, SamplingOption},
};
use serde_json::{Value, json};

use tokio::time::Instant;

use self::json::value_of;
use super::performance::{Times, median, ns};
use crate::answer::Answer;
use crate::check::{Check, CheckResult, Stop, check, ensure, skip};
use crate::trial::{Live, Trial};

pub(super) const CHECKS: &[Check] = &[
    check!("GD01", Core, Guided, "an answer guided by a JSON schema validates against it",
        clause: "GuidedDecoding::JsonSchema",
        breaks: "structured output that the client's parser rejects", json_validates),
    check!("GD02", Core, Guided, "an answer guided by a regular expression or a choice matches from end to end",
        clause: "GuidedDecoding::Regex",
        breaks: "classifiers that answer with half a label", text_matches),
    check!("GD03", Core, Guided, "a grammar that is malformed is refused before any token",
        clause: "LLMEngine::generate, Errors",
        breaks: "unguided answers to a typing mistake, or an engine that dies of it", bad_grammar_refused),
    check!("GD04", Core, Guided, "a guided answer cut by max_tokens ends with length",
        clause: "FinishReason::Length",
        breaks: "half a JSON object that claims to be whole", truncation_is_length),
    check!("GD05", Core, Guided, "concurrent requests each follow their own grammar",
        clause: "LLMEngine::generate, Contract",
        breaks: "one client's answer in another client's format", own_grammar_each),
    check!(tokens "GD06", Strict, Guided, "the end of the grammar, stop tokens and ignore_eos agree",
        clause: "StopConditions",
        breaks: "answers padded after their end, or stops that do not stop", ends_agree),
    check!(multi_thread "GD07", Info, Guided, "the time that a grammar adds to each token",
        clause: "GuidedDecoding",
        breaks: "nothing by itself: a growth between two reports is what structured output costs every request", mask_time),
    check!("GD08", Strict, Guided, "an answer guided at a temperature matches to its end",
        clause: "GuidedDecoding",
        breaks: "structured output that is sound in tests, which are greedy, and broken for clients", hot_matches),
    check!("GD09", Core, Guided, "an answer guided by a grammar in the engine's own notation is a text of it",
        clause: "GuidedDecoding::Grammar",
        breaks: "programs and queries that do not parse", own_notation),
];

/// Enough for every grammar of the group in tokens of one character, with white space.
const ROOM: u32 = 512;

/// Reads an answer; an answer in text is used directly.
type Reader = Box<dyn Fn(&Answer) -> String + Send + Sync>;

fn reader(live: &Live) -> Result<Reader, Stop> {
    match &live.subject.text {
        _ if !live.medium().is_tokens() => Ok(Box::new(Answer::text)),
        Some(text) => {
            let text = text.clone();
            Ok(Box::new(move |answer| text(&answer.tokens())))
        }
        None => skip!(
            NoProbe,
            "the subject does not say how to read its tokens (with_text)"
        ),
    }
}

fn request(live: &Live, guided: GuidedDecoding, seed: u64) -> GenerateRequest {
    let mut request = live.greedy(live.prompt(6, seed), ROOM);
    request.stop.ignore_eos = false;
    request.guided = Some(guided.into());
    request
}

/// A grammar, and a test for its texts.
struct Case {
    guided: GuidedDecoding,
    holds: Box<dyn Fn(&str) -> bool + Send + Sync>,
}

impl Case {
    fn regex(pattern: &str, holds: fn(&str) -> bool) -> Self {
        Self {
            guided: GuidedDecoding::Regex(pattern.into()),
            holds: Box::new(holds),
        }
    }

    fn choice(texts: &[&str]) -> Self {
        let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
        Self {
            guided: GuidedDecoding::Choice(texts.clone()),
            holds: Box::new(move |text| texts.iter().any(|choice| choice == text)),
        }
    }

    fn schema(schema: Value) -> Self {
        Self {
            guided: GuidedDecoding::JsonSchema(schema.clone()),
            holds: Box::new(move |text| {
                value_of(text).is_some_and(|value| schema::validates(&schema, &value))
            }),
        }
    }

    fn object() -> Self {
        Self {
            guided: GuidedDecoding::JsonObject,
            holds: Box::new(|text| value_of(text).is_some_and(|value| value.is_object())),
        }
    }

    fn is_declared(&self, live: &Live) -> bool {
        let kinds = &live.config.capabilities.guided;
        kinds.contains(&self.guided.kind())
    }
}

/// One language in the notations of engines: GBNF and EBNF, and Lark.
const NOTATIONS: [&str; 2] = ["root ::= \"yes\" | \"no\"", "start: \"yes\" | \"no\""];

async fn own_notation(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    if !live
        .config
        .capabilities
        .guided
        .contains(&GuidedKind::Grammar)
    {
        skip!(NotDeclared, "the engine does not declare grammars");
    }
    let read = reader(&live)?;
    let mut is_known = false;
    for notation in NOTATIONS {
        let asked = request(&live, GuidedDecoding::Grammar(notation.into()), 1);
        let ctx = live.context(&asked);
        let answer = live.outcome(asked, ctx).await?;
        // A notation that it cannot parse is refused, at once or in the stream.
        if answer.error().is_some() && answer.generated().is_empty() {
            continue;
        }
        let text = read(&answer);
        ensure!(
            matches!(text.trim(), "yes" | "no"),
            "guided by {notation:?}, the answer is {text:?} ({:?})",
            answer.reason()
        );
        is_known = true;
    }
    if !is_known {
        skip!(
            NotMeasured,
            "the engine's grammars are in a notation that the kit does not know"
        );
    }
    Ok(())
}

fn is_digits(text: &str, len: usize) -> bool {
    text.len() == len && text.bytes().all(|byte| byte.is_ascii_digit())
}

fn texts() -> Vec<Case> {
    vec![
        Case::choice(&["positive", "negative", "neutral"]),
        Case::choice(&["yes", "no"]),
        Case::choice(&["only this"]),
        Case::regex("[0-9]{4}", |text| is_digits(text, 4)),
        Case::regex("(red|green|blue)", |text| {
            ["red", "green", "blue"].contains(&text)
        }),
        Case::regex("[0-9]{2}:[0-9]{2}", |text| {
            text.split_once(':')
                .is_some_and(|(a, b)| is_digits(a, 2) && is_digits(b, 2))
        }),
        Case::regex("v[0-9]\\.[0-9]", |text| {
            let digits: Option<(&str, &str)> =
                text.strip_prefix('v').and_then(|t| t.split_once('.'));
            digits.is_some_and(|(a, b)| is_digits(a, 1) && is_digits(b, 1))
        }),
    ]
}

/// The declared grammars, each with different texts.
fn declared(live: &Live, cases: Vec<Case>) -> Result<Vec<Case>, Stop> {
    let cases: Vec<Case> = cases
        .into_iter()
        .filter(|case| case.is_declared(live))
        .collect();
    if cases.is_empty() {
        skip!(
            NotDeclared,
            "the engine does not declare the kinds of grammar of this check"
        );
    }
    Ok(cases)
}

fn ensure_holds(case: &Case, text: &Reader, answer: &Answer) -> CheckResult {
    let text = text(answer);
    ensure!(
        (case.holds)(&text),
        "{:?} gave {text:?} ({:?})",
        case.guided,
        answer.reason()
    );
    Ok(())
}

/// A real model may write white space until it runs out of room, so only half of the answers must end.
async fn json_validates(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let text = reader(&live)?;
    let mut cases: Vec<Case> = schema::examples().into_iter().map(Case::schema).collect();
    cases.push(Case::object());
    let cases = declared(&live, cases)?;
    let mut ended = 0;
    for (seed, case) in (0..).zip(&cases) {
        let answer = live
            .answer(request(&live, case.guided.clone(), seed))
            .await?;
        match answer.reason() {
            Some(FinishReason::Stop) => {
                ensure_holds(case, &text, &answer)?;
                ended += 1;
            }
            Some(FinishReason::Length) => {}
            other => {
                return Err(Stop::Fail(format!(
                    "{:?} ended with {other:?}, {:?}",
                    case.guided,
                    answer.error()
                )));
            }
        }
    }
    ensure!(
        2 * ended >= cases.len(),
        "of {} guided answers {ended} came to an end within {ROOM} tokens",
        cases.len()
    );
    Ok(())
}

async fn text_matches(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let text = reader(&live)?;
    for (seed, case) in (0..).zip(&declared(&live, texts())?) {
        let answer = live
            .answer(request(&live, case.guided.clone(), seed))
            .await?;
        ensure!(
            answer.reason() == Some(FinishReason::Stop),
            "{:?} ended with {:?}",
            case.guided,
            answer.items.last()
        );
        ensure_holds(case, &text, &answer)?;
    }
    Ok(())
}

/// The number of draws for each grammar.
const DRAWS: u64 = 3;

async fn hot_matches(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    live.needs(SamplingOption::Temperature)?;
    let text = reader(&live)?;
    let mut cases = texts();
    cases.push(Case::schema(json!({ "enum": ["north", "south", 7, null] })));
    for case in declared(&live, cases)? {
        for seed in 0..DRAWS {
            let mut request = request(&live, case.guided.clone(), seed);
            request.sampling.temperature = Some(1.0);
            request.sampling.seed = live.can(SamplingOption::Seed).then_some(seed);
            let answer = live.answer(request).await?;
            ensure!(
                answer.reason() == Some(FinishReason::Stop),
                "{:?} at a temperature ended with {:?}",
                case.guided,
                answer.items.last()
            );
            ensure_holds(&case, &text, &answer)?;
        }
    }
    Ok(())
}

async fn bad_grammar_refused(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let bad = vec![
        Case::regex("(a", |_| true),
        Case::regex("[a", |_| true),
        Case::choice(&[]),
        Case::schema(json!({ "type": "no-such-type" })),
    ];
    for case in declared(&live, bad)? {
        let error = live.refusal(request(&live, case.guided.clone(), 0)).await?;
        ensure!(
            error.policy().http_status == 400,
            "{:?} was refused as {}, which does not say that the request is at fault",
            case.guided,
            error.kind()
        );
    }
    Ok(())
}

/// Texts that need more than two tokens in any tokenizer, and fit in a small context at one token per byte.
fn long_texts() -> Vec<Case> {
    vec![
        Case::choice(&["Sphinx of black quartz, judge my vow."]),
        Case::regex("[0-9]{40}", |text| is_digits(text, 40)),
        Case::schema(json!({ "const": "Sphinx of black quartz, judge my vow." })),
    ]
}

async fn truncation_is_length(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    for case in declared(&live, long_texts())? {
        let mut request = request(&live, case.guided.clone(), 0);
        request.stop.max_tokens = Some(2);
        let answer = live.answer(request).await?;
        ensure!(
            answer.generated().len() == 2 && answer.reason() == Some(FinishReason::Length),
            "{:?}, cut after 2 tokens, ended with {:?} after {}",
            case.guided,
            answer.reason(),
            answer.generated().len()
        );
    }
    Ok(())
}

async fn own_grammar_each(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let text = reader(&live)?;
    let mut cases = texts();
    cases.extend(schema::examples().into_iter().take(3).map(Case::schema));
    let cases = declared(&live, cases)?;
    // Twice, so that a single kind runs concurrently too.
    let requests = (0..2).flat_map(|seed| {
        let live = &live;
        cases
            .iter()
            .map(move |case| request(live, case.guided.clone(), seed))
    });
    let requests: Vec<GenerateRequest> = requests.collect();
    // As many as the engine runs at once: the others would wait for whole answers, which may be long.
    let mut answers = Vec::new();
    for together in requests.chunks(live.at_once(u32::MAX)) {
        answers.extend(live.answers(together.to_vec()).await?);
    }
    for (case, answer) in cases.iter().cycle().zip(&answers) {
        if answer.reason() != Some(FinishReason::Length) {
            ensure_holds(case, &text, answer)?;
        }
    }
    ensure!(
        answers
            .iter()
            .any(|answer| answer.reason() == Some(FinishReason::Stop)),
        "no guided answer came to its end"
    );
    Ok(())
}

async fn mask_time(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let case = declared(&live, long_texts())?.remove(0);
    let (begun, mut guided, mut plain) = (Instant::now(), Times::default(), Times::default());
    for seed in 0.. {
        if !guided.wants_more(begun) {
            break;
        }
        // Alternating, so that both see the same noise.
        guided
            .take(&live, request(&live, case.guided.clone(), seed))
            .await?;
        plain
            .take(&live, live.greedy(live.prompt(6, seed), 48))
            .await?;
    }
    let (guided, plain) = (ns(median(guided.between)), ns(median(plain.between)));
    trial.measured("guided_between_tokens_ns", guided);
    trial.measured("plain_between_tokens_ns", plain);
    trial.measured("mask_ns", guided.saturating_sub(plain));
    Ok(())
}

async fn ends_agree(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let case = declared(&live, long_texts())?.remove(0);
    let plain = request(&live, case.guided.clone(), 0);
    let whole = live.answer(plain.clone()).await?;
    let tokens = whole.tokens();
    ensure!(
        whole.reason() == Some(FinishReason::Stop) && tokens.len() >= 2,
        "{:?} ended with {:?}",
        case.guided,
        whole.items.last()
    );
    let mut on = plain.clone();
    on.stop.ignore_eos = true;
    let on = live.answer(on).await?;
    ensure!(
        on.tokens() == tokens && on.reason() == Some(FinishReason::Stop),
        "with ignore_eos a finished grammar went on: {} tokens became {} ({:?})",
        tokens.len(),
        on.tokens().len(),
        on.reason()
    );
    let mut stopped = plain;
    stopped.stop.stop_token_ids = [tokens[1]].into();
    let stopped = live.answer(stopped).await?;
    let before = tokens
        .iter()
        .take_while(|token| **token != tokens[1])
        .count();
    ensure!(
        stopped.tokens() == tokens[..before] && stopped.reason() == Some(FinishReason::Stop),
        "the stop token {} inside a grammar left {:?} ({:?}) of {tokens:?}",
        tokens[1],
        stopped.tokens(),
        stopped.reason()
    );
    Ok(())
}
