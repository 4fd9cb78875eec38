//! The weights that training begins with: random ones, and among them heads that copy.
//!
//! What a small model learns last is to repeat a word that it reads for the first time. Two layers of attention can do it: a
//! head of the first tells every token which one came before it, and heads of the second look for a token that the present
//! one came before, and write what they find. A training of minutes does not find these two by chance, so it begins with
//! them; where they look and what they write is then learned as everything else is.
//!
//! # Source
//! Olsson et al., "In-context Learning and Induction Heads"; Trockman and Kolter, "Mimetic Initialization of
//! Self-Attention Layers", for the idea to begin with what a training would find.

use std::collections::HashMap;

use anyhow::ensure;
use candle_core::{DType, Device, Tensor};
use genset_devtools::checkout::{Config, EMBEDDING, NamedTensors};
use rand::{Rng, RngExt as _};

/// The deviation of what a block adds to the stream of a layer that nothing was put into.
const INTO_STREAM: f32 = 0.0015;
/// Pairs of a head's values that turn fast: they tell neighbours apart.
const FAST_PAIRS: usize = 8;
/// Pairs that turn slowly: what they hold is compared over hundreds of tokens.
const SLOW_PAIRS: usize = 16;
/// In the stream, one value in this many is the same for all tokens.
const BLOCK: usize = 32;
/// Of each block, the values that hold the token before.
const BEFORE: std::ops::RangeInclusive<usize> = 1..=8;
/// Of each block, the value that says whether a token begins with a space.
const SPACE: usize = 31;
/// How much of its meaning a token that begins with a space has from the one without it: copies go from one to the other.
const SHARED: f32 = 0.9;

/// One matrix `[rows, columns]`.
struct Matrix {
    columns: usize,
    values: Vec<f32>,
}

impl Matrix {
    fn random(shape: &[usize], deviation: f32, rng: &mut impl Rng) -> Self {
        let count = shape.iter().product();
        Self {
            columns: shape.last().copied().unwrap_or(1),
            values: (0..count).map(|_| normal(rng) * deviation).collect(),
        }
    }

    fn set(&mut self, row: usize, column: usize, value: f32) {
        self.values[row * self.columns + column] = value;
    }

    fn clear_row(&mut self, row: usize) {
        self.values[row * self.columns..][..self.columns].fill(0.0);
    }
}

/// Which values of the stream hold what.
struct Stream {
    constant: Vec<usize>,
    before: Vec<usize>,
    space: Vec<usize>,
    content: Vec<usize>,
}

impl Stream {
    fn new(width: usize) -> Self {
        let of = |wanted: fn(usize) -> bool| (0..width).filter(|it| wanted(it % BLOCK)).collect();
        Self {
            constant: of(|it| it == 0),
            before: of(|it| BEFORE.contains(&it)),
            space: of(|it| it == SPACE),
            content: of(|it| it > *BEFORE.end() && it < SPACE),
        }
    }
}

/// The weights, by their names in a Hugging Face checkpoint. `spaced` are the tokens that begin with a space, each with the token
/// of the same letters without it.
///
/// # Errors
/// When the configuration has too few layers, or heads of another width than these heads that copy.
pub(crate) fn first_weights(
    config: &Config,
    spaced: &[(usize, Option<usize>)],
    rng: &mut impl Rng,
) -> anyhow::Result<NamedTensors> {
    ensure!(
        config.num_hidden_layers >= 2 && config.head_dim == 64 && config.num_key_value_heads == 2,
        "the heads that copy need two layers and two KV heads of 64"
    );
    let mut matrices = HashMap::new();
    let mut tensors = HashMap::new();
    for (name, shape) in config.tensors() {
        if shape.len() == 1 {
            tensors.insert(name, Tensor::ones(shape, DType::F32, &Device::Cpu)?);
            continue;
        }
        let deviation = if name.contains("o_proj") || name.contains("down_proj") {
            INTO_STREAM
        } else {
            (config.hidden_size as f32).sqrt().recip()
        };
        let matrix = Matrix::random(&shape, deviation, rng);
        matrices.insert(name, (shape, matrix));
    }
    Copying {
        stream: Stream::new(config.hidden_size),
        deviation: (config.hidden_size as f32).sqrt().recip(),
        group: config.num_attention_heads / config.num_key_value_heads,
        width: config.head_dim,
        theta: config.rope_theta,
    }
    .put(&mut matrices, spaced, rng);
    for (name, (shape, matrix)) in matrices {
        tensors.insert(name, Tensor::from_vec(matrix.values, shape, &Device::Cpu)?);
    }
    Ok(tensors)
}

type Matrices = HashMap<String, (Vec<usize>, Matrix)>;

/// The heads that copy.
struct Copying {
    stream: Stream,
    /// Of the embedding.
    deviation: f32,
    /// Query heads of one KV head.
    group: usize,
    width: usize,
    theta: f32,
}

impl Copying {
    fn put(&self, matrices: &mut Matrices, spaced: &[(usize, Option<usize>)], rng: &mut impl Rng) {
        self.embed(matrices, spaced);
        // What is compared: as many mixtures of a token's values as there is room for the token before.
        let mix = (self.stream.content.len() as f32).sqrt().recip();
        let mixtures: Vec<Vec<f32>> = (0..self.stream.before.len())
            .map(|_| {
                self.stream
                    .content
                    .iter()
                    .map(|_| normal(rng) * mix)
                    .collect()
            })
            .collect();
        self.look_one_back(matrices, &mixtures);
        self.look_for_the_same(matrices, &mixtures);
    }

    /// Some values are the same for all tokens, some are empty, and two tokens of the same letters are near each other.
    fn embed(&self, matrices: &mut Matrices, spaced: &[(usize, Option<usize>)]) {
        let Some((shape, embedding)) = matrices.get_mut(EMBEDDING) else {
            return;
        };
        for token in 0..shape[0] {
            for &column in &self.stream.constant {
                embedding.set(token, column, 2.0 * self.deviation);
            }
            for &column in &self.stream.before {
                embedding.values[token * embedding.columns + column] *= 0.1;
            }
            for &column in &self.stream.space {
                embedding.set(token, column, -self.deviation);
            }
        }
        let own = (1.0 - SHARED * SHARED).sqrt();
        for &(token, plain) in spaced {
            for &column in &self.stream.space {
                embedding.set(token, column, self.deviation);
            }
            let Some(plain) = plain else { continue };
            for &column in &self.stream.content {
                let at = |token: usize| token * embedding.columns + column;
                let (own_value, shared) =
                    (embedding.values[at(token)], embedding.values[at(plain)]);
                embedding.set(token, column, own * own_value + SHARED * shared);
            }
        }
    }

    /// Head 0 of layer 0: the query is the key of the position before, made of values that all tokens share.
    fn look_one_back(&self, matrices: &mut Matrices, mixtures: &[Vec<f32>]) {
        let half = self.width / 2;
        for pair in 0..half {
            let (sin, cos) = self
                .theta
                .powf(-(2.0 * pair as f32) / self.width as f32)
                .sin_cos();
            let strength = if pair < FAST_PAIRS { 0.35 } else { 0.0 };
            for (part, low, high) in [("q", cos, -sin), ("k", 1.0, 0.0)] {
                let matrix = attention(matrices, 0, part);
                for (row, value) in [(pair, low), (pair + half, high)] {
                    matrix.clear_row(row);
                    for &column in &self.stream.constant {
                        matrix.set(row, column, strength * value);
                    }
                }
            }
        }
        for (row, mixture) in mixtures.iter().enumerate() {
            self.read(attention(matrices, 0, "v"), row, mixture, 1.0);
            let into = attention(matrices, 0, "o");
            into.set(self.stream.before[row], row, 1.5 * self.deviation);
        }
    }

    /// The first head of each group in layer 1: looks for tokens that the present one came before, and writes them.
    fn look_for_the_same(&self, matrices: &mut Matrices, mixtures: &[Vec<f32>]) {
        let half = self.width / 2;
        let slow = half - SLOW_PAIRS..half;
        let rows: Vec<usize> = slow.clone().chain(slow.map(|pair| pair + half)).collect();
        for kv_head in 0..2 {
            let query_head = kv_head * self.group;
            for row in 0..self.width {
                attention(matrices, 1, "k").clear_row(kv_head * self.width + row);
                attention(matrices, 1, "q").clear_row(query_head * self.width + row);
            }
            for (at, row) in rows.iter().enumerate() {
                let at = kv_head * rows.len() + at;
                let keys = attention(matrices, 1, "k");
                keys.set(kv_head * self.width + row, self.stream.before[at], 1.0);
                let queries = attention(matrices, 1, "q");
                self.read(queries, query_head * self.width + row, &mixtures[at], 4.5);
            }
            for row in 0..self.width {
                let column = self.stream.content[kv_head * self.width + row];
                let values = attention(matrices, 1, "v");
                values.clear_row(kv_head * self.width + row);
                values.set(kv_head * self.width + row, column, 1.0);
                let into = attention(matrices, 1, "o");
                into.set(column, query_head * self.width + row, 3.7 * self.deviation);
            }
        }
    }

    /// The row reads a mixture of a token's own values and nothing else.
    fn read(&self, matrix: &mut Matrix, row: usize, mixture: &[f32], strength: f32) {
        matrix.clear_row(row);
        for (&column, value) in self.stream.content.iter().zip(mixture) {
            matrix.set(row, column, strength * value);
        }
    }
}

/// One of a layer's four matrices of attention, which every configuration has.
#[expect(
    clippy::expect_used,
    reason = "the configuration lists its own tensors"
)]
fn attention<'a>(matrices: &'a mut Matrices, layer: usize, part: &str) -> &'a mut Matrix {
    let name = format!("model.layers.{layer}.self_attn.{part}_proj.weight");
    let matrix = matrices.get_mut(&name).map(|(_, matrix)| matrix);
    matrix.expect("a matrix of attention")
}

/// A number of the standard normal distribution.
///
/// # Source
/// Box and Muller, "A Note on the Generation of Random Normal Deviates".
fn normal(rng: &mut impl Rng) -> f32 {
    let radius = (-2.0 * (1.0 - rng.random::<f32>()).ln()).sqrt();
    radius * (std::f32::consts::TAU * rng.random::<f32>()).cos()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rand::SeedableRng as _;
    use rand::rngs::StdRng;

    use crate::encode::Encoder;
    use crate::model::Model;
    use crate::practice::drill;
    use crate::train::Known;

    use super::*;

    #[test]
    fn tokens_are_copied_before_anything_is_learned() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tiny-chat");
        let mut rng = StdRng::seed_from_u64(1);
        let config = Config::read(&folder).unwrap();
        let vocabulary = config.vocab_size;
        let encoder = Encoder::read(&folder).unwrap();
        let model = Model::random(config, &encoder, &mut rng).unwrap();
        let drills: Vec<_> = (0..20).map(|_| drill(vocabulary, &mut rng)).collect();
        let known = Known::of(&model, &drills).unwrap();
        assert!(known.tokens_percent > 60, "{}", known.tokens_percent);
    }
}
