//! Embedders compared with `transformers` and `sentence-transformers`, and with themselves: the other sequences of a step
//! change no bit of a vector.
//!
//! `tests/encoders/make.py` makes the reference models and their results.

mod scores;

use serde::Deserialize;

use super::*;
use crate::load::tests::encoder;
use crate::load::{OpenEmbedder, Quantization, WeightOptions};

const EMBEDDERS: [&str; 5] = ["bert", "bert-dense", "xlm-roberta", "modernbert", "qwen3"];

/// The tolerance against the reference, relative to the largest number of the vector.
const TOLERANCE: f32 = 2e-5;

const ROOM: StepRoom = StepRoom {
    tokens: 512,
    sequences: 16,
};

#[derive(Deserialize)]
struct Expected {
    cases: Vec<Case>,
    texts: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    tokens: Vec<u32>,
    embedding: Vec<f32>,
}

fn expected(name: &str) -> Expected {
    let text = std::fs::read_to_string(encoder(name).join("expected.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

fn one_text(tokens: &[u32]) -> WholeSequence {
    WholeSequence::of_one_text(tokens.to_vec())
}

fn load(name: &str, quantization: Quantization) -> (Embedder, OpenEmbedder) {
    let open = OpenEmbedder::open(&encoder(name)).unwrap();
    let options = WeightOptions {
        quantization,
        ..WeightOptions::exact()
    };
    let mut weights = open.weights(options, |_| Ok(()));
    let head = |folder: &str, name: &str, shape: &[usize]| open.head_tensor(folder, name, shape);
    let model = Embedder::try_new(&open.backbone, &open.head, &mut weights, &head, ROOM);
    let model = model.unwrap();
    drop(weights);
    (model, open)
}

/// The largest difference, relative to the largest number of `want`.
fn distance(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let largest = want
        .iter()
        .fold(0.0_f32, |most, number| most.max(number.abs()));
    let differences = got.iter().zip(want).map(|(got, want)| (got - want).abs());
    differences.fold(0.0, f32::max) / largest
}

#[test]
fn embeddings_are_those_of_the_reference() {
    for name in EMBEDDERS {
        let (mut model, open) = load(name, Quantization::None);
        let Expected { cases, texts } = expected(name);
        assert!(cases.len() > 3 && texts.len() > 3, "{name}");
        for case in cases.iter().chain(&texts) {
            let got = model.forward(&[&one_text(&case.tokens)]).unwrap().remove(0);
            assert_eq!(got.len(), open.width(), "{name}");
            let far = distance(&got, &case.embedding);
            let len = case.tokens.len();
            assert!(far < TOLERANCE, "{name}: {len} tokens are {far} off");
        }
    }
}

#[test]
fn a_batch_is_its_parts_bit_for_bit() {
    for name in EMBEDDERS {
        let Expected { cases, texts } = expected(name);
        let all = cases.iter().chain(&texts);
        let inputs: Vec<WholeSequence> = all.map(|case| one_text(&case.tokens)).collect();
        for quantization in [Quantization::None, Quantization::Q8_0] {
            let (mut model, _) = load(name, quantization);
            let alone: Vec<Vec<f32>> = (inputs.iter())
                .map(|input| model.forward(&[input]).unwrap().remove(0))
                .collect();
            let mut inputs: Vec<&WholeSequence> = inputs.iter().collect();
            let together = model.forward(&inputs).unwrap();
            assert_eq!(together, alone, "{name} {quantization:?}");
            inputs.reverse();
            let mut backwards = model.forward(&inputs).unwrap();
            backwards.reverse();
            assert_eq!(backwards, alone, "{name} {quantization:?} backwards");
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_and_the_model_goes_on() {
    let (mut model, _) = load("bert", Quantization::None);
    let long = vec![7; ROOM.tokens + 17 * BLOCK_SIZE];
    for bad in [&long[..], &[7, 96], &[]] {
        let bad = one_text(bad);
        assert!(
            model.forward(&[&bad]).is_err(),
            "{} tokens",
            bad.tokens.len()
        );
    }
    assert!(model.forward(&[&one_text(&[7])]).is_ok());
}
