//! Drafts never change an answer: whatever their source, right or wrong, the tokens are those without speculation.

use genset_backend_common::GuidedDecoding;
use genset_backend_common::output::TokenLogprob;
use genset_conformance::Answer;

use super::fake::{Guesser, logits_after};
use super::*;

const GUESSERS: [Guesser; 6] = [
    Guesser::Ngram,
    Guesser::Model { wrong: 0 },
    Guesser::Model { wrong: 3 },
    Guesser::Model { wrong: 1 },
    Guesser::ShortModel(40),
    Guesser::Broken,
];

/// An engine with drafts, whose answers run in cycles so that lookups succeed.
fn guessing(guesser: Guesser) -> Fake {
    Fake {
        memory: Some(1),
        guesses: Some((guesser, 4)),
        ..Fake::default()
    }
}

/// The same without drafts.
fn plain() -> Fake {
    Fake {
        memory: Some(1),
        ..Fake::default()
    }
}

/// Tokens, log probabilities, and the finish.
type Whole = (Vec<TokenId>, Vec<TokenLogprob>, Finished);

async fn whole(live: &Live, request: GenerateRequest) -> Whole {
    let outputs = live.send(request).await.unwrap();
    let answer = Answer::of(in_time(outputs.collect()).await);
    let finished = answer.finished().unwrap().clone();
    (answer.tokens(), answer.logprobs(), finished)
}

/// Asks an engine with and one without drafts, compares, and returns the answers of the former.
async fn same(guesser: Guesser, requests: &[GenerateRequest]) -> Vec<Whole> {
    let (plain, guessing) = (
        Live::start(plain()).await,
        Live::start(guessing(guesser)).await,
    );
    let asked = requests
        .iter()
        .map(|request| whole(&guessing, request.clone()));
    let answers = join_all(asked).await;
    for (request, answer) in requests.iter().zip(&answers) {
        let expected = whole(&plain, request.clone()).await;
        assert_eq!(answer.0, expected.0, "{guesser:?}, {request:?}");
        assert_eq!(answer.1, expected.1, "{guesser:?}, {request:?}");
        let ends = [&answer.2, &expected.2].map(|it| (it.reason, it.stop_token));
        assert_eq!(ends[0], ends[1], "{guesser:?}, {request:?}");
        assert_eq!(
            answer.2.usage.completion_tokens,
            expected.2.usage.completion_tokens
        );
        assert_eq!(expected.2.usage.predictions, None);
    }
    guessing.idle().await;
    answers
}

#[tokio::test]
async fn greedy_answers_are_the_models() {
    for guesser in GUESSERS {
        let live = Live::start(guessing(guesser)).await;
        let all = live.crowd(&format!("{guesser:?}"), Some(1), 150).await;
        live.idle().await;
        let of = |finished: &Finished| finished.usage.predictions.unwrap();
        let accepted: u32 = all.iter().map(|one| of(one).accepted).sum();
        let rejected: u32 = all.iter().map(|one| of(one).rejected).sum();
        for (tokens, expected) in [
            ("accepted_draft", accepted),
            ("draft", accepted + rejected),
            ("generated", 6000),
        ] {
            let name = format!("genset_candle_{tokens}_tokens_total ");
            assert_eq!(live.metric(&name), expected, "{guesser:?}");
        }
        let is_as_expected = match guesser {
            // In a cycle, what came once comes again.
            Guesser::Ngram => accepted > 500,
            Guesser::Model { wrong: 0 } => accepted > 2000 && rejected == 0,
            Guesser::Model { wrong: 1 } => accepted < 100 && rejected > 2000,
            Guesser::Model { .. } => accepted > 500 && rejected > 500,
            Guesser::ShortModel(_) => (1..2000).contains(&accepted) && rejected == 0,
            Guesser::Broken => (accepted, rejected) == (0, 0),
        };
        assert!(is_as_expected, "{guesser:?}: {accepted}, {rejected}");
    }
}

#[tokio::test]
async fn few_blocks_and_preemption_change_nothing() {
    for guesser in GUESSERS {
        let mut fake = guessing(guesser);
        (fake.num_blocks, fake.block_size) = (24, 4);
        fake.limits.max_num_seqs = 8;
        let live = Live::start(fake).await;
        live.crowd(&format!("{guesser:?}"), Some(1), 30).await;
        live.idle().await;
        assert!(live.metric("genset_candle_preemptions_total ") > 0);
    }
}

#[tokio::test]
async fn an_answer_ends_where_it_would() {
    let whole = answer_from(&prompt(1), 60, Some(1));
    let mut requests: Vec<GenerateRequest> = (1..=12)
        .map(|max_tokens| request(&prompt(1), max_tokens))
        .collect();
    for place in [0, 1, 2, 3, 4, 5, 17] {
        for (ignore_eos, min_tokens) in [(false, 0), (true, 0), (false, 9), (false, 40)] {
            let mut stopping = request(&prompt(1), 60);
            stopping.stop.eos_token_ids = [whole[place]].into();
            stopping.stop.ignore_eos = ignore_eos;
            stopping.stop.min_tokens = min_tokens;
            requests.push(stopping);
        }
    }
    for guesser in GUESSERS {
        same(guesser, &requests).await;
    }
}

#[tokio::test]
async fn sampling_options_grammars_and_log_probabilities_are_kept() {
    let of = |change: &dyn Fn(&mut GenerateRequest)| {
        let mut request = request(&prompt(2), 40);
        change(&mut request);
        request
    };
    let requests = [
        of(&|it| it.output.logprobs = Some(3)),
        of(&|it| it.sampling.frequency_penalty = Some(1.5)),
        of(&|it| it.sampling.repetition_penalty = Some(1.3)),
        of(&|it| {
            it.sampling.presence_penalty = Some(0.7);
            it.output.logprobs = Some(0);
        }),
        of(&|it| {
            it.sampling.temperature = Some(1.0);
            it.sampling.seed = Some(7);
            it.output.logprobs = Some(2);
        }),
        of(&|it| {
            it.sampling.temperature = Some(0.3);
            it.sampling.seed = Some(8);
            it.sampling.top_p = Some(0.9);
        }),
        of(&|it| it.guided = Some(GuidedDecoding::Regex("[0-9]{3,30}".into()).into())),
        of(&|it| {
            it.guided = Some(GuidedDecoding::Regex("(ab|c)+d".into()).into());
            it.sampling.temperature = Some(1.5);
            it.sampling.seed = Some(9);
        }),
    ];
    for guesser in GUESSERS {
        let answers = same(guesser, &requests).await;
        assert_eq!(answers[0].1.len(), 40);
    }
}

#[tokio::test]
async fn a_resumed_answer_goes_on_as_it_would() {
    let mut seeded = request(&prompt(3), 30);
    seeded.sampling.temperature = Some(1.0);
    seeded.sampling.seed = Some(3);
    let live = Live::start(plain()).await;
    let (tokens, ..) = whole(&live, seeded.clone()).await;
    let mut resumed = seeded.clone();
    let so_far = [&prompt(3)[..], &tokens[..11]].concat();
    resumed.input = genset_backend_common::Input::Tokens(so_far.into());
    resumed.resumed_tokens = 11;
    resumed.stop.max_tokens = Some(19);
    for guesser in GUESSERS {
        let answers = same(guesser, &[resumed.clone()]).await;
        assert_eq!(answers[0].0, tokens[11..], "{guesser:?}");
    }
}

#[tokio::test]
async fn events_tell_of_accepted_tokens_alone() {
    for guesser in GUESSERS {
        let fakes = [plain(), guessing(guesser)].map(|fake| Fake {
            block_size: 4,
            ..fake
        });
        let mut known = Vec::new();
        for fake in fakes {
            let live = Live::start(fake).await;
            for number in 0..8 {
                live.answer(request(&prompt(number), 45)).await.unwrap();
            }
            live.idle().await;
            let mut blocks = live.start.kv_events.subscribe().snapshot.blocks;
            blocks.sort();
            known.push(blocks);
        }
        assert!(known[0].len() > 50);
        assert_eq!(known[0], known[1], "{guesser:?}");
    }
}

/// The two best tokens after `context`, and the probability of each if only these can be drawn.
fn two_best(context: &[TokenId]) -> [(TokenId, f64); 2] {
    let logits = logits_after(context, Some(1));
    let mut ranked: Vec<(usize, f32)> = logits.into_iter().enumerate().collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
    let weights = [0, 1].map(|rank: usize| f64::from(ranked[rank].1).exp());
    [0, 1].map(|rank: usize| {
        let token = TokenId::try_from(ranked[rank].0).unwrap();
        (token, weights[rank] / (weights[0] + weights[1]))
    })
}

/// 10,000 answers of three tokens, each the best or the second best: compares the counts of the eight outcomes.
#[tokio::test]
async fn ten_thousand_sampled_answers_are_distributed_as_the_model_says() {
    const SAMPLES: u64 = 10_000;
    let mut expected = Vec::new();
    for (first, p) in two_best(&[1, 2, 3]) {
        for (second, q) in two_best(&[1, 2, 3, first]) {
            for (third, r) in two_best(&[1, 2, 3, first, second]) {
                expected.push((vec![first, second, third], p * q * r));
            }
        }
    }
    let live = Live::start(guessing(Guesser::Model { wrong: 0 })).await;
    let mut seen = vec![0_f64; expected.len()];
    let (mut accepted, mut rejected) = (0, 0);
    for seeds in (0..SAMPLES).collect::<Vec<_>>().chunks(100) {
        let asked = seeds.iter().map(|seed| {
            let mut sampled = request(&[1, 2, 3], 3);
            sampled.sampling.temperature = Some(1.0);
            sampled.sampling.top_k = Some(2);
            sampled.sampling.seed = Some(*seed);
            live.answer(sampled)
        });
        for answer in join_all(asked).await {
            let (tokens, finished) = answer.unwrap();
            let cell = expected.iter().position(|(known, _)| *known == tokens);
            seen[cell.unwrap()] += 1.0;
            let predictions = finished.usage.predictions.unwrap();
            accepted += predictions.accepted;
            rejected += predictions.rejected;
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "ten thousand")]
    let all = SAMPLES as f64;
    let chi: f64 = seen
        .iter()
        .zip(&expected)
        .map(|(seen, (_, p))| (seen - p * all).powi(2) / (p * all))
        .sum();
    // 7 degrees of freedom: 24.3 is the 0.1 % point.
    assert!(chi < 24.3, "{chi}: {seen:?}, expected {expected:?}");
    assert!(accepted > 5000 && rejected > 5000, "{accepted} {rejected}");
}
