//! ER: errors.
//!
//! Changed from the catalogue, with the reason:
//! - ER01: the type limits errors to known kinds. The promise is that the kind is the right one: a request out of range is
//!   its sender's mistake. FN, DT and the other checks here cover the other refusals.
//! - ER03: only the engine can lose its device; the check needs a probe with [`Probe::crash`].
//! - ER05: the kit cannot make a good engine panic. It sends valid but unusual requests, beside a neighbour that must not be
//!   affected; the Worker's own tests prove that it contains a panic.
//! - ER06: `model` is the served name, which the frontend resolves and an engine need not know; adapters are the engine's.
//!
//! [`Probe::crash`]: crate::Probe::crash

mod media;
mod refused;

use futures_util::future::{join, join_all};
use genset_backend_common::{
    EngineError, ErrorKind, FinishReason, GenerateRequest, Input, Output,
    config::{InputKind, SamplingOption},
    request::{ChatInput, ScorePair},
};

use crate::check::{Check, CheckResult, Stop, check, ensure, fail, skip};
use crate::trial::{Live, Trial};

pub(super) const CHECKS: &[Check] = &[
    check!("ER01", Core, Tokens, "a value out of its range is refused as the sender's mistake",
        clause: "GenerateRequest::validate; ErrorKind",
        breaks: "clients retry what can never succeed, and operators are woken for it", out_of_range),
    check!(tokens "ER02", Core, Tokens, "a token id outside the vocabulary is refused with InvalidArgument",
        clause: "EngineConfig::check",
        breaks: "one bad prompt reads memory that is not the model's, or kills the worker", invalid_token),
    check!("ER03", Core, Tokens, "a crash ends every stream with an error, and health says so",
        clause: "HealthReporter::report_dead; LLMEngine::generate, Contract",
        breaks: "clients hang on a dead engine, and the router sends more", crash),
    check!("ER04", Core, Tokens, "refused requests leave room for good ones",
        clause: "LLMEngine::generate, Contract",
        breaks: "a client's mistakes use up the worker's places", good_after_bad),
    check!("ER05", Core, Tokens, "no request that is allowed makes the engine panic, hang or fail",
        clause: "GenerateRequest; EngineConfig::check",
        breaks: "one odd request takes down all others", odd_requests),
    check!("ER06", Core, Tokens, "an unknown adapter is refused",
        clause: "ErrorKind::NotFound; Capabilities::adapters",
        breaks: "a customer's requests are answered by the base model", unknown_adapter),
    check!("ER07", Strict, Tokens, "an error's message says something, and nothing of the prompt",
        clause: "EngineError",
        breaks: "prompts end up in logs and in other people's error reports", messages),
    check!("ER08", Core, Tokens, "a kind of input is served if it is declared, and refused with Unsupported if not",
        clause: "Capabilities::inputs, media",
        breaks: "images and texts that are silently left out of the prompt", kinds_of_input),
    check!("ER09", Core, Tokens, "a refused request holds nothing, whether the engine is idle or full",
        clause: "LLMEngine::generate, Contract",
        breaks: "each mistake of a client costs a slot or a block for good, until the worker serves nobody", refused::hold_nothing),
];

type Change = fn(&mut GenerateRequest);

/// Valid but unusual prompts.
const ODD_PROMPTS: &[(&str, &[u32])] = &[
    ("a prompt of one token", &[0]),
    ("a prompt of one token, over and over", &[0; 100]),
];

/// Values outside the documented ranges of their fields.
const OUT_OF_RANGE: &[(&str, Change)] = &[
    ("min_tokens above max_tokens", |r| r.stop.min_tokens = 1000),
    ("temperature -1", |r| r.sampling.temperature = Some(-1.0)),
    ("temperature NaN", |r| {
        r.sampling.temperature = Some(f32::NAN)
    }),
    ("top_p 0", |r| r.sampling.top_p = Some(0.0)),
    ("top_p 1.5", |r| r.sampling.top_p = Some(1.5)),
    ("top_k 0", |r| r.sampling.top_k = Some(0)),
    ("min_p 2", |r| r.sampling.min_p = Some(2.0)),
    ("presence_penalty 3", |r| {
        r.sampling.presence_penalty = Some(3.0)
    }),
    ("frequency_penalty -3", |r| {
        r.sampling.frequency_penalty = Some(-3.0)
    }),
    ("repetition_penalty 0", |r| {
        r.sampling.repetition_penalty = Some(0.0)
    }),
    ("logit_bias 101", |r| {
        r.sampling.logit_bias = [(0, 101.0)].into()
    }),
];

async fn out_of_range(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    for (what, change) in OUT_OF_RANGE {
        let mut request = live.request(4, 4);
        change(&mut request);
        let error = live.refusal(request).await?;
        let is_senders = matches!(
            error.kind(),
            ErrorKind::InvalidArgument | ErrorKind::Unsupported
        );
        ensure!(
            is_senders,
            "{what} is refused with {}: {error}",
            error.kind()
        );
    }
    Ok(())
}

async fn invalid_token(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    for token in [live.vocab_size(), u32::MAX] {
        for place in [0, 2, 3] {
            let mut prompt = live.prompt(4, 1);
            prompt[place] = token;
            let mut request = live.request(4, 4);
            request.input = Input::Tokens(prompt.into());
            let error = live.refusal(request).await?;
            ensure!(
                error.kind() == ErrorKind::InvalidArgument,
                "token id {token} is refused with {}: {error}",
                error.kind()
            );
        }
    }
    Ok(())
}

async fn crash(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let Some(probe) = live.subject.probe.clone() else {
        skip!(NoProbe, "only a probe can make the engine crash");
    };
    let mut all = Vec::new();
    for _ in 0..live.at_once(3) {
        let request = live.busy_request(0, 1000);
        let wanted = request.stop.max_tokens;
        let mut running = live.generate(request).await?;
        let begun = running.read_tokens(1).await?.len();
        all.push((wanted, begun, running));
    }
    if !probe.crash() {
        skip!(NoProbe, "the engine's probe has no way to make it crash");
    }
    trial.expect_death(&live.subject);
    let ends = all
        .into_iter()
        .map(|(wanted, begun, running)| async move { (wanted, begun, running.finish().await) });
    for (wanted, begun, answer) in join_all(ends).await {
        let answer = answer?;
        // An engine of large items may have computed all of an answer before the crash.
        let count = u32::try_from(begun + answer.generated().len()).ok();
        let is_whole = answer.reason() == Some(FinishReason::Length) && count == wanted;
        ensure!(
            answer.error().is_some() || is_whole,
            "a crash ended a stream as if it were complete: {:?}",
            answer.reason()
        );
    }
    let died = live.start.health.died();
    trial
        .within(
            "the report that the engine is dead",
            trial.limits().cancel,
            died,
        )
        .await?;
    // Later requests end in an error, at once or in their streams.
    let request = live.request(4, 4);
    let ctx = live.context(&request);
    let late = live.outcome(request, ctx).await?;
    ensure!(late.error().is_some(), "a dead engine answers");
    Ok(())
}

/// The number of refusals, more than any engine has seats.
const MANY: usize = 64;

async fn good_after_bad(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    for (_, change) in OUT_OF_RANGE.iter().cycle().take(MANY) {
        let mut request = live.request(4, 4);
        change(&mut request);
        let ctx = live.context(&request);
        // ER01 judges how it is refused.
        drop(live.try_generate(request, ctx).await?);
    }
    let answer = live.answer(live.request(4, 4)).await?;
    ensure!(
        answer.finished().is_some(),
        "after {MANY} refusals a good request fails: {:?}",
        answer.error()
    );
    Ok(())
}

/// Valid but unusual changes.
const ODD: &[(&str, Change)] = &[
    ("the same stop token twice", |r| {
        r.stop.stop_token_ids = [7, 7].into()
    }),
    ("a stop token outside the vocabulary", |r| {
        r.stop.stop_token_ids = [u32::MAX].into()
    }),
    ("a thousand stop tokens", |r| {
        r.stop.stop_token_ids = (0..1000).collect()
    }),
    ("a stop token that is an end-of-sequence token too", |r| {
        (r.stop.stop_token_ids, r.stop.eos_token_ids) = ([7].into(), [7].into());
    }),
    ("min_tokens equal to max_tokens", |r| r.stop.min_tokens = 4),
    ("the largest max_tokens", |r| {
        r.stop.max_tokens = Some(u32::MAX)
    }),
    ("no max_tokens", |r| r.stop.max_tokens = None),
    ("an annotation", |r| {
        r.annotations.insert("x".repeat(1000), [1, 2, 3].into());
    }),
    ("another served name", |r| {
        r.model = "a name/with:odd 字".into()
    }),
];

/// As [`ODD`], for engines that declare the option.
const ODD_SAMPLING: &[(SamplingOption, Change)] = &[
    (SamplingOption::Temperature, |r| {
        r.sampling.temperature = Some(0.0)
    }),
    (SamplingOption::Temperature, |r| {
        r.sampling.temperature = Some(f32::MIN_POSITIVE)
    }),
    (SamplingOption::TopP, |r| {
        r.sampling.top_p = Some(f32::MIN_POSITIVE)
    }),
    (SamplingOption::TopK, |r| r.sampling.top_k = Some(u32::MAX)),
    (SamplingOption::MinP, |r| r.sampling.min_p = Some(1.0)),
    (SamplingOption::Seed, |r| r.sampling.seed = Some(u64::MAX)),
    (SamplingOption::LogitBias, |r| {
        r.sampling.logit_bias = [(u32::MAX, 1.0)].into()
    }),
];

async fn odd_requests(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let declared = &live.config.capabilities.sampling;
    let sampling = ODD_SAMPLING
        .iter()
        .filter(|(option, _)| declared.contains(option))
        .map(|(_, change)| ("an extreme value of a sampling option", *change));
    let changed = ODD.iter().copied().chain(sampling).map(|(what, change)| {
        let mut request = live.request(4, 4);
        change(&mut request);
        (what, request)
    });
    let prompts = ODD_PROMPTS.iter().map(|(what, prompt)| {
        let mut request = live.request(4, 4);
        request.input = live.input(prompt.to_vec());
        (*what, request)
    });
    for (what, request) in changed.chain(prompts) {
        let mut neighbour = live.generate(live.busy_request(0, 16)).await?;
        neighbour.read_tokens(1).await?;
        // Read the neighbour meanwhile, since an engine may let the odd request wait for it.
        let (odd, answer) = join(first_tokens(&live, request), neighbour.finish()).await;
        if let Some(error) = odd? {
            ensure!(
                error.policy().http_status < 500,
                "{what}: the engine failed with {}: {error}",
                error.kind()
            );
        }
        let answer = answer?;
        ensure!(
            answer.finished().is_some(),
            "{what}: its neighbour ended with {:?}",
            answer.error()
        );
    }
    Ok(())
}

/// Reads the first items of an answer and drops the rest. Returns the error, if one came.
async fn first_tokens(live: &Live, request: GenerateRequest) -> Result<Option<EngineError>, Stop> {
    let ctx = live.context(&request);
    let mut running = match live.try_generate(request, ctx).await? {
        Err(error) => return Ok(Some(error)),
        Ok(running) => running,
    };
    for _ in 0..4 {
        match running.next().await? {
            Some(Err(error)) => return Ok(Some(error)),
            Some(Ok(Output::Finished(_))) | None => break,
            Some(Ok(_)) => {}
        }
    }
    Ok(None)
}

async fn unknown_adapter(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let mut request = live.request(4, 4);
    request.adapter = Some("genset-conformance-no-such-adapter".into());
    let error = live.refusal(request).await?;
    let is_expected = match live.config.capabilities.adapters {
        true => error.kind() == ErrorKind::NotFound,
        false => matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Unsupported),
    };
    ensure!(
        is_expected,
        "an unknown adapter is refused with {}: {error}",
        error.kind()
    );
    Ok(())
}

/// A text that no error message may contain. Consecutive tokens of the prompt must not appear in one either.
const SECRET: &str = "genset-conformance-secret";

async fn messages(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let prompt = live.prompt(16, 5);
    let mut errors = Vec::new();
    let mut requests: Vec<GenerateRequest> = OUT_OF_RANGE
        .iter()
        .map(|(_, change)| {
            let mut request = live.request(4, 4);
            request.input = live.input(prompt.clone());
            change(&mut request);
            request
        })
        .collect();
    let mut outside = live.request(4, 4);
    outside.input = live.input(prompt.iter().copied().chain([u32::MAX]).collect());
    requests.push(outside);
    if !live.config.capabilities.inputs.contains(&InputKind::Text) {
        requests.push(GenerateRequest::from_text("m", SECRET));
    }
    // Other checks judge whether and how each is refused.
    for request in requests {
        errors.extend(first_tokens(&live, request).await?);
    }
    live.put_away().await?;
    let mut late = live.request(4, 4);
    late.input = live.input(prompt.clone());
    errors.extend(first_tokens(&live, late).await?);
    ensure!(!errors.is_empty(), "the engine refuses nothing");
    for error in errors {
        let message = error.message();
        ensure!(
            !message.trim().is_empty(),
            "an error of kind {} says nothing",
            error.kind()
        );
        ensure!(
            !message.contains(SECRET) && !holds_tokens(message, &prompt),
            "an error's message holds the prompt: {message}"
        );
    }
    Ok(())
}

/// Whether three consecutive tokens of the prompt are among the numbers in `message`.
fn holds_tokens(message: &str, prompt: &[u32]) -> bool {
    let numbers: Vec<u32> = message
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|number| number.parse().ok())
        .collect();
    prompt
        .windows(3)
        .any(|tokens| numbers.windows(3).any(|numbers| numbers == tokens))
}

async fn kinds_of_input(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let message = serde_json::json!({"role": "user", "content": "ping"});
    let chat = ChatInput {
        messages: vec![message],
        tools: Vec::new(),
    };
    let pair = ScorePair {
        token_ids: vec![0],
        first_tokens: 1,
    };
    let inputs = [
        (InputKind::Tokens, Input::Tokens(live.prompt(1, 0).into())),
        (InputKind::Text, Input::Text("ping".into())),
        (InputKind::Chat, Input::Chat(chat.into())),
        (
            InputKind::Embed,
            Input::Embed(vec![vec![0], vec![0]].into()),
        ),
        (InputKind::Score, Input::Score([pair.clone(), pair].into())),
    ];
    let can = &live.config.capabilities;
    for (kind, input) in inputs {
        if kind == InputKind::Text && can.whole_bodies {
            // A text would be a body then; WB01 sends those.
            continue;
        }
        let is_declared = can.inputs.contains(&kind);
        served_if_declared(&live, &format!("{kind:?}"), input, is_declared).await?;
    }
    media::kinds_of_media(&live).await
}

async fn served_if_declared(
    live: &Live,
    what: &str,
    input: Input,
    is_declared: bool,
) -> CheckResult {
    let mut request = live.request(1, 4);
    request.input = input;
    if is_declared {
        if let Some(error) = live.answer(request).await?.error() {
            fail!("{what} is declared, and fails: {error} ({})", error.kind());
        }
        return Ok(());
    }
    let error = live.refusal(request).await?;
    ensure!(
        error.kind() == ErrorKind::Unsupported,
        "{what} is not declared, and is refused with {}: {error}",
        error.kind()
    );
    Ok(())
}
