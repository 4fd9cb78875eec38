//! Cross-encoders compared with `transformers`, and with themselves.
//!
//! `tests/encoders/make_cross_encoders.py` makes the reference models and their results.

use super::*;
use crate::load::Purpose;

const CROSS_ENCODERS: [&str; 4] = [
    "bert-scores",
    "xlm-roberta-scores",
    "modernbert-scores",
    "modernbert-mean-scores",
];

/// The tolerance of scores against the reference. The largest is of order 2.
const TOLERANCE: f32 = 2e-5;

#[derive(Deserialize)]
struct Scores {
    cases: Vec<Pair>,
    texts: Vec<Pair>,
}

#[derive(Deserialize)]
struct Pair {
    tokens: Vec<u32>,
    first_tokens: usize,
    score: f32,
}

fn pairs(name: &str) -> (Vec<WholeSequence>, Vec<f32>) {
    let text = std::fs::read_to_string(encoder(name).join("expected.json")).unwrap();
    let Scores { cases, texts } = serde_json::from_str(&text).unwrap();
    assert!(cases.len() > 3 && texts.len() > 3, "{name}");
    let sequence = |pair: Pair| {
        let sequence = WholeSequence {
            tokens: pair.tokens,
            first_tokens: pair.first_tokens,
        };
        (sequence, pair.score)
    };
    cases.into_iter().chain(texts).map(sequence).unzip()
}

#[test]
fn scores_are_those_of_the_reference() {
    for name in CROSS_ENCODERS {
        let (mut model, open) = load(name, Quantization::None);
        assert_eq!((open.purpose, open.width()), (Purpose::Score, 1), "{name}");
        let (pairs, scores) = pairs(name);
        for (pair, want) in pairs.iter().zip(scores) {
            let got = model.forward(&[pair]).unwrap().remove(0);
            let far = (got[0] - want).abs();
            let len = pair.tokens.len();
            assert!(far < TOLERANCE, "{name}: {len} tokens are {far} off");
        }
    }
}

#[test]
fn a_score_does_not_depend_on_its_batch_in_one_bit() {
    for name in CROSS_ENCODERS {
        let (pairs, _) = pairs(name);
        for quantization in [Quantization::None, Quantization::Q8_0] {
            let (mut model, _) = load(name, quantization);
            let alone: Vec<Vec<f32>> = (pairs.iter())
                .map(|pair| model.forward(&[pair]).unwrap().remove(0))
                .collect();
            let mut batch: Vec<&WholeSequence> = pairs.iter().collect();
            assert_eq!(model.forward(&batch).unwrap(), alone, "{name}");
            batch.reverse();
            let mut backwards = model.forward(&batch).unwrap();
            backwards.reverse();
            assert_eq!(backwards, alone, "{name} backwards");
        }
    }
}

/// BERT knows which text a token is of; the others do not.
#[test]
fn kinds_of_token_count_where_the_model_knows_them() {
    for (name, counts) in [("bert-scores", true), ("xlm-roberta-scores", false)] {
        let (mut model, _) = load(name, Quantization::None);
        let mut score = |first_tokens| {
            let pair = WholeSequence {
                tokens: vec![7, 8, 9, 10],
                first_tokens,
            };
            model.forward(&[&pair]).unwrap().remove(0)
        };
        assert_eq!(score(2) != score(4), counts, "{name}");
    }
}
