//! The initial weights for training: random ones, with heads that copy, and that choose what to copy.
//!
//! What a small model learns last is to repeat a word that it sees for the first time, and to find which of several tools a
//! question asks for. A training of minutes does not discover that by chance, so it begins with [heads] that do both. Their
//! attention and output are then trained like everything else.
//!
//! # Source
//! Olsson et al., "In-context Learning and Induction Heads"; Trockman and Kolter, "Mimetic Initialization of Self-Attention
//! Layers", for the idea of initializing with what training would find.

mod heads;

use std::collections::HashMap;

use anyhow::ensure;
use candle_core::{DType, Device, Tensor};
use genset_devtools::checkout::{Config, EMBEDDING, NamedTensors};
use genset_devtools::tiny_chat::MESSAGE_START;
use rand::{Rng, RngExt as _};

use self::heads::Heads;
use crate::encode::{Encoder, Role, Spelling};

/// The standard deviation of what a block without prepared heads adds to the residual stream.
const INTO_STREAM: f32 = 0.0015;
/// The share of a token's content that comes from the token with the same letters in lower case and without a space: copies
/// map one to the other.
const SHARED: f32 = 0.9;
/// The factor for dimensions that a head will write, and for the content of marks.
const FAINT: f32 = 0.1;
/// The size of the values that are constant for all tokens, in deviations of the embedding.
const CONSTANT: f32 = 2.0;

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

    fn row(&mut self, row: usize) -> &mut [f32] {
        &mut self.values[row * self.columns..][..self.columns]
    }
}

/// The matrices, with their shapes, by their names in a Hugging Face checkpoint.
type Matrices = HashMap<String, (Vec<usize>, Matrix)>;

/// The dimensions of the residual stream, by content.
struct Stream {
    /// Constant for all tokens.
    constant: Vec<usize>,
    /// The previous token, as mixtures of its content.
    before: Vec<usize>,
    /// The token itself.
    content: Vec<usize>,
    /// Set only by role marks.
    mark: Vec<usize>,
    /// How many of the last tokens the user said.
    fits: Vec<usize>,
    /// Whether the user said the same token.
    said: Vec<usize>,
    /// Whether the user is speaking.
    user: Vec<usize>,
    /// Whether the token has a capital letter.
    capital: Vec<usize>,
    /// Whether it begins with a space.
    space: Vec<usize>,
}

impl Stream {
    /// Each block of 32 dimensions has some of every kind.
    fn new(width: usize) -> Self {
        let of = |places: std::ops::Range<usize>| {
            (0..width)
                .filter(|it| places.contains(&(it % 32)))
                .collect()
        };
        Self {
            constant: of(0..1),
            before: of(1..9),
            content: of(9..26),
            mark: of(26..27),
            fits: of(27..28),
            said: of(28..29),
            user: of(29..30),
            capital: of(30..31),
            space: of(31..32),
        }
    }
}

/// Tokens with a special role in the initial weights.
pub(crate) struct Landmarks {
    spellings: Vec<Spelling>,
    /// Begins a message.
    message: usize,
    /// Follows it if the user speaks.
    user: usize,
    /// Ends a line.
    line: usize,
}

impl Landmarks {
    /// # Errors
    /// If one of them is not exactly one token.
    pub(crate) fn of(encoder: &Encoder) -> anyhow::Result<Self> {
        Ok(Self {
            spellings: encoder.spellings(),
            message: encoder.one(MESSAGE_START)?,
            user: encoder.one(Role::User.as_str())?,
            line: encoder.one("\n")?,
        })
    }
}

/// The initial weights, by their names in a Hugging Face checkpoint.
///
/// # Errors
/// If the configuration has too few layers, or heads of another width or number than required.
pub(crate) fn first_weights(
    config: &Config,
    landmarks: &Landmarks,
    rng: &mut impl Rng,
) -> anyhow::Result<NamedTensors> {
    ensure!(
        config.num_hidden_layers >= 4
            && config.head_dim == 64
            && config.num_attention_heads == 4
            && config.num_key_value_heads == 2,
        "the heads that copy need four layers, four heads of 64 and two KV heads"
    );
    let mut matrices = HashMap::new();
    let mut tensors = HashMap::new();
    let embedding_deviation = (config.hidden_size as f32).sqrt().recip();
    for (name, shape) in config.tensors() {
        if shape.len() == 1 {
            tensors.insert(name, Tensor::ones(shape, DType::F32, &Device::Cpu)?);
            continue;
        }
        let deviation = if name.contains("o_proj") || name.contains("down_proj") {
            INTO_STREAM
        } else {
            embedding_deviation
        };
        let matrix = Matrix::random(&shape, deviation, rng);
        matrices.insert(name, (shape, matrix));
    }
    let stream = Stream::new(config.hidden_size);
    if let Some((_, embedding)) = matrices.get_mut(EMBEDDING) {
        embed(embedding, &stream, embedding_deviation, landmarks);
    }
    Heads {
        matrices: &mut matrices,
        stream: &stream,
        deviation: embedding_deviation,
        width: config.head_dim,
        theta: config.rope_theta,
    }
    .put(rng);
    for (name, (shape, matrix)) in matrices {
        tensors.insert(name, Tensor::from_vec(matrix.values, shape, &Device::Cpu)?);
    }
    Ok(tensors)
}

/// Some dimensions are constant for all tokens, some are left to the heads, and tokens with the same letters are close to
/// each other.
fn embed(embedding: &mut Matrix, stream: &Stream, deviation: f32, landmarks: &Landmarks) {
    let fill = |row: &mut [f32], columns: &[usize], value: f32| {
        columns.iter().for_each(|&it| row[it] = value * deviation);
    };
    let fade = |row: &mut [f32], columns: &[usize]| {
        columns.iter().for_each(|&it| row[it] *= FAINT);
    };
    for token in 0..embedding.values.len() / embedding.columns {
        let row = embedding.row(token);
        fill(row, &stream.constant, CONSTANT);
        fade(row, &stream.before);
        for columns in [&stream.mark, &stream.fits, &stream.said, &stream.user] {
            fill(row, columns, 0.0);
        }
    }
    // The role marks; the user's is a little stronger, because it follows the mark that begins a message.
    for (token, user, mark) in [(landmarks.message, -2.0, 2.0), (landmarks.user, 2.0, 2.04)] {
        fill(embedding.row(token), &stream.user, user);
        fill(embedding.row(token), &stream.mark, mark);
    }
    // It means nothing that the user ended a line too, and the norms of marks should be alike.
    for token in [landmarks.message, landmarks.user, landmarks.line] {
        fade(embedding.row(token), &stream.content);
    }
    let own = (1.0 - SHARED * SHARED).sqrt();
    for spelling in &landmarks.spellings {
        let sign = |is: bool| if is { 1.0 } else { -1.0 };
        let row = embedding.row(spelling.token);
        fill(row, &stream.space, sign(spelling.has_space));
        fill(row, &stream.capital, sign(spelling.is_capital));
        let Some(like) = spelling.like else { continue };
        let shared: Vec<f32> = embedding.row(like).to_vec();
        let row = embedding.row(spelling.token);
        for &column in &stream.content {
            row[column] = own * row[column] + SHARED * shared[column];
        }
    }
}

/// A number from the standard normal distribution.
///
/// # Source
/// Box and Muller, "A Note on the Generation of Random Normal Deviates".
fn normal(rng: &mut impl Rng) -> f32 {
    let radius = (-2.0 * (1.0 - rng.random::<f32>()).ln()).sqrt();
    radius * (std::f32::consts::TAU * rng.random::<f32>()).cos()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use genset_devtools::tiny_chat::folder;
    use rand::SeedableRng as _;
    use rand::rngs::StdRng;

    use crate::model::Model;
    use crate::practice::drill;
    use crate::text::Text;
    use crate::tools::Kinds;
    use crate::train::Known;

    use super::*;

    fn model(encoder: &Encoder, rng: &mut StdRng) -> Model {
        Model::random(Config::read(folder()).unwrap(), encoder, rng).unwrap()
    }

    /// The tool that a line or a call names.
    fn named(text: &str) -> Option<String> {
        let (_, rest) = text.split_once("\"name\": \"")?;
        Some(rest.split_once('"')?.0.to_owned())
    }

    #[test]
    fn tokens_are_copied_before_anything_is_learned() {
        let mut rng = StdRng::seed_from_u64(1);
        let encoder = Encoder::read(folder()).unwrap();
        let model = model(&encoder, &mut rng);
        let drills: Vec<_> = (0..20)
            .map(|_| drill(encoder.vocabulary(), &mut rng))
            .collect();
        let known = Known::of(&model, &drills).unwrap();
        assert!(known.tokens_percent > 80, "{}", known.tokens_percent);
    }

    #[test]
    fn the_tool_that_fits_is_preferred_before_anything_is_learned() {
        let mut rng = StdRng::seed_from_u64(1);
        let encoder = Encoder::read(folder()).unwrap();
        let model = model(&encoder, &mut rng);
        let (kinds, text) = (
            Kinds::read(folder(), &encoder).unwrap(),
            Text::read(folder()).unwrap(),
        );
        let (mut asked, mut right, mut by_chance) = (0.0, 0.0, 0.0);
        while asked < 100.0 {
            let mut messages = kinds.choice(&text, &mut rng);
            if messages.len() != 3 {
                // Two calls: the second is a different case.
                continue;
            }
            let lines: Vec<String> = messages[1].1.lines().map(str::to_owned).collect();
            let call = messages[2].1.clone();
            // The call up to where its name begins, followed by a name.
            let mut begun = |name: &str| {
                messages[2].1 = format!("<tool_call>\n{{\"name\": \"{name}");
                let mut tokens = encoder.messages(&messages).unwrap().tokens;
                // Its end, and the line's.
                tokens.truncate(tokens.len() - 2);
                tokens
            };
            let tokens = begun("");
            let names: Vec<String> = lines.iter().filter_map(|it| named(it)).collect();
            let mut firsts: Vec<u32> = names.iter().map(|it| begun(it)[tokens.len()]).collect();
            let Some(wanted) = named(&call).map(|it| begun(&it)[tokens.len()]) else {
                continue;
            };
            let count = firsts.len();
            firsts.sort_unstable();
            firsts.dedup();
            if firsts.len() < count || count == 1 {
                continue;
            }
            let last = u32::try_from(tokens.len() - 1).unwrap();
            let lengths = Arc::new(vec![tokens.len()]);
            let logits = model.forward(&tokens, &lengths, &[last]).unwrap();
            let logits: Vec<Vec<f32>> = logits.to_vec2().unwrap();
            let logit = |token: &u32| logits[0][usize::try_from(*token).unwrap()];
            let best = firsts.iter().max_by(|a, b| logit(a).total_cmp(&logit(b)));
            asked += 1.0;
            right += f64::from(u8::from(best == Some(&wanted)));
            by_chance += 1.0 / f64::from(u32::try_from(count).unwrap());
        }
        assert!(right > 1.25 * by_chance, "{right}, by chance {by_chance}");
    }
}
