mod reference;

use std::collections::BTreeMap;

use genset_backend_common::{ErrorKind, SamplingOptions};
use proptest::prelude::*;

use self::reference::Reference;
use super::*;
use crate::logprobs::MIN_LOGPROB;

const VOCAB: u32 = 80;

fn options() -> impl Strategy<Value = SamplingOptions> {
    let maybe = |range: std::ops::Range<f32>| prop::option::of(range);
    let cuts = (
        prop::option::of(1..100_u32),
        maybe(0.05..1.0),
        maybe(0.0..0.9),
    );
    let penalties = (maybe(-2.0..2.0), maybe(-2.0..2.0), maybe(0.5..2.0));
    let bias = prop::collection::btree_map(0..VOCAB, -10.0_f32..10.0, 0..4);
    (
        prop_oneof![Just(0.0_f32), 0.1_f32..2.0],
        cuts,
        penalties,
        bias,
        any::<u64>(),
    )
        .prop_map(
            |(
                temperature,
                (top_k, top_p, min_p),
                (presence, frequency, repetition),
                logit_bias,
                seed,
            )| SamplingOptions {
                temperature: Some(temperature),
                top_p,
                top_k,
                min_p,
                presence_penalty: presence,
                frequency_penalty: frequency,
                repetition_penalty: repetition,
                logit_bias: logit_bias.into(),
                seed: Some(seed),
            },
        )
}

fn requests() -> impl Strategy<Value = GenerateRequest> {
    let stop = (
        0..4_u32,
        prop::collection::vec(0..VOCAB, 0..3),
        prop::collection::vec(0..VOCAB, 0..3),
        any::<bool>(),
    );
    (
        options(),
        prop::collection::vec(0..VOCAB, 1..20),
        0..20_u32,
        stop,
    )
        .prop_map(
            |(
                sampling,
                prompt,
                resumed,
                (min_tokens, stop_token_ids, eos_token_ids, ignore_eos),
            )| {
                let resumed_tokens = resumed.min(u32::try_from(prompt.len()).unwrap());
                let mut request = GenerateRequest::from_tokens("m", prompt);
                request.sampling = sampling;
                request.resumed_tokens = resumed_tokens;
                request.stop = StopConditions {
                    max_tokens: None,
                    min_tokens,
                    stop_token_ids: stop_token_ids.into(),
                    eos_token_ids: eos_token_ids.into(),
                    ignore_eos,
                };
                request
            },
        )
}

/// Rows with and without ties and impossible tokens.
fn rows() -> impl Strategy<Value = Vec<Vec<f32>>> {
    let coarse = prop_oneof![9 => (-8_i8..8).prop_map(f32::from), 1 => Just(f32::NEG_INFINITY)];
    let row =
        |logit: BoxedStrategy<f32>| prop::collection::vec(logit, usize::try_from(VOCAB).unwrap());
    prop::collection::vec(
        prop_oneof![row(coarse.boxed()), row((-8.0_f32..8.0).boxed())],
        1..6,
    )
}

fn masks() -> impl Strategy<Value = Option<TokenMask>> {
    let words = prop::collection::vec(any::<u32>(), 3);
    prop::option::of(
        words.prop_map(|words| TokenMask::from_words(words, usize::try_from(VOCAB).unwrap())),
    )
}

fn sampler(request: &GenerateRequest) -> Sampler {
    Sampler::try_new(request, usize::try_from(VOCAB).unwrap(), 0).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn every_combination_of_options_agrees_with_the_reference(
        request in requests(), rows in rows(), mask in masks(),
    ) {
        let mut sampler = sampler(&request);
        let mut output = Vec::new();
        for row in rows {
            let Some(reference) = Reference::new(&request, &output, &row, mask.as_ref()) else {
                continue;
            };
            let position = u64::from(request.resumed_tokens) + u64::try_from(output.len()).unwrap();
            let draw = uniform(request.sampling.seed.unwrap(), position);
            let sampled = sampler.sample(&mut row.clone(), mask.as_ref()).unwrap();
            prop_assert!(reference.draws(draw, sampled.token), "{sampled:?}, draw {draw}, {:?}", reference.kept);
            let again = sampler.sample(&mut row.clone(), mask.as_ref()).unwrap();
            prop_assert_eq!(&again, &sampled);
            sampler.accept(sampled.token);
            output.push(sampled.token);
        }
    }

    #[test]
    fn a_resumed_request_goes_on_as_the_uninterrupted_one(request in requests(), rows in rows(), cut in 0..6_usize) {
        let mut whole = request;
        whole.stop.min_tokens = 0;
        let mut sampler = sampler(&whole);
        let cut = cut.min(rows.len());
        let mut resumed = None;
        for (place, row) in rows.iter().enumerate() {
            if place == cut {
                resumed = Some(self::sampler(&whole));
            }
            let Ok(sampled) = sampler.sample(&mut row.clone(), None) else { break };
            if let Some(resumed) = &mut resumed {
                prop_assert_eq!(&resumed.sample(&mut row.clone(), None).unwrap(), &sampled);
                resumed.accept(sampled.token);
            }
            sampler.accept(sampled.token);
            if resumed.is_none() {
                let mut tokens = whole.tokens().unwrap().to_vec();
                tokens.push(sampled.token);
                whole.input = genset_backend_common::Input::Tokens(tokens.into());
                whole.resumed_tokens += 1;
            }
        }
    }

    #[test]
    fn logprobs_are_of_the_raw_row(request in requests(), rows in rows(), mask in masks(), top in 0..90_u32) {
        let mut request = request;
        request.output.logprobs = Some(top);
        let mut sampler = sampler(&request);
        for row in rows {
            let Ok(sampled) = sampler.sample(&mut row.clone(), mask.as_ref()) else { continue };
            let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let total: f64 = row.iter().map(|logit| f64::from(logit - best).exp()).sum();
            let expected = |token: TokenId| {
                (f64::from(row[usize::try_from(token).unwrap()] - best) - total.ln()).max(f64::from(MIN_LOGPROB))
            };
            let found = sampled.logprob.unwrap();
            prop_assert!((f64::from(found.logprob) - expected(sampled.token)).abs() < 1e-4);
            prop_assert_eq!(found.top.len(), usize::try_from(top.min(VOCAB)).unwrap());
            prop_assert!(found.top.iter().all(|at| (f64::from(at.logprob) - expected(at.token_id)).abs() < 1e-4));
            let rank = |token: TokenId| (-row[usize::try_from(token).unwrap()], token);
            let in_order = found.top.is_sorted_by(|a, b| rank(a.token_id) < rank(b.token_id));
            prop_assert!(in_order, "{:?}", found.top);
            if top >= VOCAB {
                let sum: f64 = found.top.iter().map(|at| f64::from(at.logprob).exp()).sum();
                prop_assert!((sum - 1.0).abs() < 1e-4, "{sum}");
            }
        }
    }
}

fn request(set: impl FnOnce(&mut GenerateRequest)) -> GenerateRequest {
    let mut request = GenerateRequest::from_tokens("m", vec![1, 2]);
    request.sampling.temperature = Some(1.0);
    request.sampling.seed = Some(11);
    set(&mut request);
    request
}

fn next(sampler: &mut Sampler, row: &[f32], mask: Option<&TokenMask>) -> TokenId {
    let token = sampler.sample(&mut row.to_vec(), mask).unwrap().token;
    sampler.accept(token);
    token
}

/// The frequency of each token in `count` draws on the same row.
fn counts(request: &GenerateRequest, row: &[f32], count: usize) -> BTreeMap<TokenId, f64> {
    let mut sampler = Sampler::try_new(request, row.len(), 0).unwrap();
    let mut counts = BTreeMap::new();
    for _ in 0..count {
        let token = next(&mut sampler, row, None);
        *counts.entry(token).or_insert(0.0) += 1.0;
    }
    counts
}

fn chi_square(counts: &BTreeMap<TokenId, f64>, expected: &[(TokenId, f64)]) -> f64 {
    assert!(
        counts
            .keys()
            .all(|token| expected.iter().any(|(kept, _)| kept == token)),
        "{counts:?}"
    );
    let cell = |(token, expected): &(TokenId, f64)| {
        (counts.get(token).copied().unwrap_or(0.0) - expected).powi(2) / expected
    };
    expected.iter().map(cell).sum()
}

/// The seed is fixed, so the test is deterministic. Bounds are the 0.1 % points of chi-square for one less than the cells.
#[test]
fn draws_follow_the_distribution() {
    const DRAWS: usize = 20_000;
    let row: Vec<f32> = [2.0, -1.0, 0.5, 3.0, 0.0, 1.5, -0.5, 2.5].to_vec();
    type Case = (fn(&mut SamplingOptions), f64);
    let cases: [Case; 5] = [
        (|_| {}, 24.32),
        (|options| options.temperature = Some(0.5), 24.32),
        (|options| options.top_k = Some(4), 16.27),
        (|options| options.top_p = Some(0.8), 13.82),
        (|options| options.min_p = Some(0.2), 16.27),
    ];
    for (set, limit) in cases {
        let request = request(|request| set(&mut request.sampling));
        let reference = Reference::new(&request, &[], &row, None).unwrap();
        let expected: Vec<(TokenId, f64)> = reference
            .kept
            .iter()
            .map(|(token, p)| (*token, p * 20_000.0))
            .collect();
        let chi = chi_square(&counts(&request, &row, DRAWS), &expected);
        assert!(chi < limit, "{:?}: {chi}", request.sampling);
    }
}

#[test]
fn large_rows_agree_with_the_reference_too() {
    let row: Vec<f32> = (0..40_000_u64)
        .map(|token| {
            #[expect(clippy::cast_possible_truncation, reason = "a logit")]
            let noise = uniform(3, token) as f32;
            noise.powi(4) * 14.0
        })
        .collect();
    let cases: [fn(&mut SamplingOptions); 6] = [
        |_| {},
        |options| options.top_k = Some(1000),
        |options| options.top_p = Some(0.95),
        |options| options.top_p = Some(0.01),
        |options| options.min_p = Some(0.01),
        |options| (options.top_k, options.top_p) = (Some(30_000), Some(0.7)),
    ];
    for set in cases {
        let request = request(|request| set(&mut request.sampling));
        let reference = Reference::new(&request, &[], &row, None).unwrap();
        let mut sampler = Sampler::try_new(&request, row.len(), 0).unwrap();
        for position in 0..20 {
            let token = next(&mut sampler, &row, None);
            assert!(
                reference.draws(uniform(11, position), token),
                "{:?}",
                request.sampling
            );
        }
    }
}

#[test]
fn seeds_and_positions_alone_decide() {
    let row = [0.0_f32; 50];
    let draw = |seed: Option<u64>, fallback: u64| {
        let request = request(|request| request.sampling.seed = seed);
        let mut sampler = Sampler::try_new(&request, row.len(), fallback).unwrap();
        let tokens = (0..20).map(|_| next(&mut sampler, &row, None));
        tokens.collect::<Vec<_>>()
    };
    assert_eq!(draw(Some(1), 5), draw(Some(1), 6));
    assert_eq!(draw(None, 1), draw(Some(1), 6));
    assert_ne!(draw(Some(1), 0), draw(Some(2), 0));
    assert_ne!(draw(None, 1), draw(None, 2));
    let first = draw(Some(1), 0);
    assert!(first.iter().any(|token| *token != first[0]));
}

#[test]
fn greedy_takes_the_lowest_of_equals() {
    for set in [
        (|options: &mut SamplingOptions| options.temperature = Some(0.0))
            as fn(&mut SamplingOptions),
        |options| options.temperature = None,
        |options| options.temperature = Some(1e-6),
        |options| options.top_k = Some(1),
        |options| options.top_p = Some(1e-6),
        |options| options.min_p = Some(1.0),
    ] {
        let request = request(|request| set(&mut request.sampling));
        let mut sampler = Sampler::try_new(&request, 5, 0).unwrap();
        let found = sampler
            .sample(&mut [0.0, 4.0, 1.0, 4.0, 2.0], None)
            .unwrap();
        // With min_p 1 both of the best remain, and either may be drawn.
        let is_right = found.token == 1 || (request.sampling.min_p.is_some() && found.token == 3);
        assert!(is_right, "{:?} gave {}", request.sampling, found.token);
    }
}

#[test]
fn rows_that_are_no_rows_are_named() {
    let plain = request(|_| {});
    let changed = request(|request| request.sampling.logit_bias = [(1, -100.0)].into());
    let only_first = TokenMask::from_words(vec![1], 3);
    let nothing = TokenMask::none(3);
    let wrong = TokenMask::none(4);
    for request in [plain, changed] {
        let mut sampler = Sampler::try_new(&request, 3, 0).unwrap();
        let mut fails = |row: [f32; 3], mask| sampler.sample(&mut row.to_vec(), mask).unwrap_err();
        let inf = f32::INFINITY;
        assert_eq!(
            fails([0.0, f32::NAN, 0.0], None),
            SampleError::NotANumber { token: 1 }
        );
        assert_eq!(
            fails([0.0, inf, 0.0], None),
            SampleError::Infinite { token: 1 }
        );
        assert_eq!(
            fails([0.0, f32::NAN, 0.0], Some(&only_first)),
            SampleError::NotANumber { token: 1 }
        );
        assert_eq!(fails([-inf; 3], None), SampleError::NothingPossible);
        assert_eq!(
            fails([-inf, 0.0, 0.0], Some(&only_first)),
            SampleError::NothingPossible
        );
        assert_eq!(
            fails([0.0; 3], Some(&nothing)),
            SampleError::NothingPossible
        );
        assert_eq!(
            fails([0.0; 3], Some(&wrong)),
            SampleError::WrongMaskLength {
                expected: 3,
                found: 4
            }
        );
        let error = sampler.sample(&mut [0.0; 2], None).unwrap_err();
        assert_eq!(
            error,
            SampleError::WrongLength {
                expected: 3,
                found: 2
            }
        );
        assert_eq!(EngineError::from(error).kind(), ErrorKind::Internal);
        // The sampler still works.
        assert!(sampler.sample(&mut [0.0; 3], None).is_ok());
    }
}

#[test]
fn extreme_values_stay_in_bounds() {
    let options = [
        SamplingOptions {
            repetition_penalty: Some(1e-30),
            temperature: Some(1.0),
            ..Default::default()
        },
        SamplingOptions {
            repetition_penalty: Some(1e30),
            temperature: Some(2.0),
            ..Default::default()
        },
        SamplingOptions {
            temperature: Some(1.1e-5),
            top_p: Some(0.9),
            ..Default::default()
        },
        SamplingOptions {
            temperature: Some(2.0),
            min_p: Some(f32::MIN_POSITIVE),
            ..Default::default()
        },
    ];
    for sampling in options {
        let request = request(|request| request.sampling = sampling);
        let mut sampler = Sampler::try_new(&request, 4, 0).unwrap();
        for row in [
            [f32::MAX, f32::MIN, f32::MAX, 0.0],
            [1e30, 1e30, -1e30, -1e30],
            [f32::NEG_INFINITY, 0.0, 0.0, 0.0],
        ] {
            let token = next(&mut sampler, &row, None);
            assert!(row[usize::try_from(token).unwrap()] > f32::NEG_INFINITY);
        }
    }
}

#[test]
fn stop_tokens_wait_for_min_tokens() {
    let request = |ignore_eos| {
        request(|request| {
            request.sampling.temperature = None;
            request.stop = StopConditions {
                min_tokens: 2,
                stop_token_ids: [0].into(),
                eos_token_ids: [1].into(),
                ignore_eos,
                ..Default::default()
            };
        })
    };
    let row = [3.0, 2.0, 1.0];
    let first_three = |request: &GenerateRequest, mask: Option<&TokenMask>| {
        let mut sampler = Sampler::try_new(request, 3, 0).unwrap();
        let tokens = (0..3).map(|_| next(&mut sampler, &row, mask));
        tokens.collect::<Vec<_>>()
    };
    assert_eq!(first_three(&request(false), None), [2, 2, 0]);
    assert_eq!(first_three(&request(true), None), [1, 1, 0]);
    let end_or_on = TokenMask::from_words(vec![0b110], 3);
    assert_eq!(first_three(&request(false), Some(&end_or_on)), [2, 2, 1]);
    let end_alone = TokenMask::from_words(vec![0b010], 3);
    assert_eq!(first_three(&request(false), Some(&end_alone)), [1, 1, 1]);
    // A resumed request counts its own tokens.
    let mut resumed = request(false);
    resumed.resumed_tokens = 2;
    assert_eq!(first_three(&resumed, None), [2, 2, 0]);
}

#[test]
fn argmax_is_claimed_only_where_it_is_all() {
    let is_argmax = |set: fn(&mut GenerateRequest)| {
        let request = request(|request| {
            request.sampling.temperature = None;
            set(request);
        });
        Sampler::try_new(&request, 9, 0).unwrap().is_argmax()
    };
    assert!(is_argmax(|_| {}));
    assert!(is_argmax(|r| r.sampling.presence_penalty = Some(0.0)));
    assert!(is_argmax(|r| r.stop.min_tokens = 3));
    assert!(!is_argmax(|r| r.sampling.temperature = Some(1.0)));
    assert!(!is_argmax(|r| r.output.logprobs = Some(0)));
    assert!(!is_argmax(|r| r.sampling.repetition_penalty = Some(1.1)));
    assert!(!is_argmax(|r| r.sampling.logit_bias = [(1, 1.0)].into()));
    assert!(!is_argmax(
        |r| (r.stop.min_tokens, r.stop.eos_token_ids) = (1, [2].into())
    ));
}

#[test]
fn requests_out_of_range_are_refused_by_field() {
    let field = |set: fn(&mut GenerateRequest)| {
        let error = Sampler::try_new(&request(set), 10, 0).unwrap_err();
        (
            error.kind(),
            error.at().map_or(String::new(), |at| at.name().to_owned()),
        )
    };
    let invalid = ErrorKind::InvalidArgument;
    assert_eq!(
        field(|r| r.sampling.top_k = Some(0)),
        (invalid, "top_k".into())
    );
    assert_eq!(
        field(|r| r.sampling.logit_bias = [(10, 1.0)].into()),
        (invalid, "logit_bias".into())
    );
    // Nothing could be chosen, and an engine would doubt the model's logits.
    let ends_with_all = |r: &mut GenerateRequest| {
        r.stop.min_tokens = 1;
        r.stop.stop_token_ids = (1..10).collect();
        r.stop.eos_token_ids = [0].into();
    };
    assert_eq!(field(ends_with_all), (invalid, "stop_token_ids".into()));
    let mut all_but_one = request(ends_with_all);
    all_but_one.stop.ignore_eos = true;
    let mut sampler = Sampler::try_new(&all_but_one, 10, 0).unwrap();
    assert_eq!(next(&mut sampler, &[0.0; 10], None), 0);
    let embed = |r: &mut GenerateRequest| r.input = genset_backend_common::Input::Text("x".into());
    assert_eq!(field(embed).0, ErrorKind::Unsupported);
}
