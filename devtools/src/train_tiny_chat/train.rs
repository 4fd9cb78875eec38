//! The training loop.

use std::path::Path;

use genset_devtools::checkout::{self, Config};
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rayon::prelude::*;

use crate::batch::{Batch, Drawn, drawn, pack_all, written};
use crate::encode::{Encoder, Role, Sequence};
use crate::golden::likeliest;
use crate::model::Model;
use crate::ops::CrossEntropy;
use crate::optimizer::Optimizer;
use crate::progress::Progress;
use crate::text::Text;
use crate::tools::Kinds;
use crate::wording::{Twins, with_name};

/// The name in conversations with a placeholder, for checks of what the model knows.
const NAME: &str = "Anna";

/// Parts of a step, computed in parallel. A constant, so that weights do not depend on the number of threads.
const PARTS: usize = 2;
/// Epochs between two checks on unseen conversations.
const EPOCHS_PER_LOOK: usize = 4;
/// Conversations of each kind in such a check.
const LOOKED_AT: usize = 100;

/// The settings of a training.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    /// How often every answer is seen.
    pub(crate) epochs: usize,
    /// The seed of the initial weights, the order and the wordings.
    pub(crate) seed: u64,
    /// Tokens per step.
    pub(crate) batch_tokens: usize,
    /// The highest learning rate.
    pub(crate) learning_rate: f64,
    /// What each epoch draws.
    pub(crate) drawn: Drawn,
}

/// Trains a model of the folder's configuration on the folder's text, starting from the initial weights or from those in the
/// folder `from`.
///
/// # Errors
/// If a file cannot be read or the training fails.
pub(crate) fn train(
    folder: &Path,
    from: Option<&Path>,
    plan: &Plan,
    encoder: &Encoder,
) -> anyhow::Result<Model> {
    let text = Text::read(folder)?;
    let kinds = Kinds::read(folder, encoder)?;
    let twins = Twins::find(&text.conversations);
    let mut rng = StdRng::seed_from_u64(plan.seed);
    let config = Config::read(folder)?;
    let model = match from {
        Some(from) => Model::from_tensors(config, &checkout::read_weights(from)?)?,
        None => Model::random(config, encoder, &mut rng)?,
    };
    // All batches are created before the first step, because the learning rate depends on their number.
    let mut epochs = Vec::new();
    for _ in 0..plan.epochs {
        let mut sequences = written(&text, &twins, encoder, &mut rng)?;
        sequences.extend(drawn(plan.drawn, &text, &kinds, encoder, &mut rng)?);
        sequences.shuffle(&mut rng);
        epochs.push(pack_all(&sequences, plan.batch_tokens / PARTS)?);
    }
    let steps = epochs.iter().map(|it| it.len().div_ceil(PARTS)).sum();
    describe(&model, &text, &epochs, steps);
    let mut optimizer = Optimizer::try_new(&model, plan.learning_rate, steps)?;
    let progress = Progress::start(plan.epochs, steps);
    progress.note(&look(&model, &text, &kinds, encoder, &mut rng)?);
    for (number, batches) in (1..).zip(&epochs) {
        let (mut sum, mut count) = (0.0, 0);
        for parts in batches.chunks(PARTS) {
            sum += step(&model, &mut optimizer, parts)?;
            count += 1;
            progress.step();
        }
        progress.epoch(number, sum / count.max(1) as f32);
        if number % EPOCHS_PER_LOOK == 0 {
            progress.note(&look(&model, &text, &kinds, encoder, &mut rng)?);
        }
    }
    progress.finish();
    Ok(model)
}

/// The share of unseen conversations that the model gets right.
fn look(
    model: &Model,
    text: &Text,
    kinds: &Kinds,
    encoder: &Encoder,
    rng: &mut StdRng,
) -> anyhow::Result<String> {
    let mut words = Vec::new();
    let none = Drawn {
        calls: 0,
        choices: 0,
        exercises: 0,
        drills: 0,
    };
    let calls = Drawn {
        calls: LOOKED_AT,
        ..none
    };
    let choices = Drawn {
        choices: LOOKED_AT,
        ..none
    };
    let exercises = Drawn {
        exercises: LOOKED_AT,
        ..none
    };
    let drills = Drawn {
        drills: LOOKED_AT,
        ..none
    };
    for (name, counts) in [
        ("tools", calls),
        ("choices", choices),
        ("exercises", exercises),
        ("drills", drills),
    ] {
        let sequences = drawn(counts, text, kinds, encoder, rng)?;
        let known = Known::of(model, &sequences)?;
        words.push(format!(
            "{name} {} % of tokens, {} of {LOOKED_AT} whole",
            known.tokens_percent,
            known.count()
        ));
    }
    Ok(format!("new ones: {}", words.join("; ")))
}

fn describe(model: &Model, text: &Text, epochs: &[Vec<Batch>], steps: usize) {
    let batches = epochs.iter().flatten();
    let tokens: usize = batches.clone().map(|batch| batch.tokens.len()).sum();
    let learned: usize = batches.map(|batch| batch.targets.len()).sum();
    eprintln!(
        "{} parameters; {} conversations, {} paragraphs; {steps} steps, {tokens} tokens, {learned} of them learned",
        model.parameter_count(),
        text.conversations.len(),
        text.paragraphs.len(),
    );
}

/// Performs one step; returns the loss before it.
fn step(model: &Model, optimizer: &mut Optimizer, parts: &[Batch]) -> anyhow::Result<f32> {
    let all: usize = parts.iter().map(|part| part.targets.len()).sum();
    let results = parts
        .par_iter()
        .map(|part| {
            let logits = model.forward(&part.tokens, &part.lengths, &part.rows)?;
            let targets = part.targets.clone();
            let share = part.targets.len() as f64 / all as f64;
            let loss = (logits.apply_op1(CrossEntropy { targets })? * share)?;
            Ok((loss.backward()?, loss.to_scalar::<f32>()?))
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    let (gradients, losses): (Vec<_>, Vec<_>) = results.into_iter().unzip();
    optimizer.descend(&gradients)?;
    Ok(losses.iter().sum())
}

/// How many of the conversations the model answers word for word, asked in their usual wording; and how many there are.
///
/// # Errors
/// If a file cannot be read or the model cannot be run.
pub(crate) fn known(
    folder: &Path,
    model: &Model,
    encoder: &Encoder,
) -> anyhow::Result<(usize, usize)> {
    let text = Text::read(folder)?;
    let (mut right, mut total) = (0, 0);
    for conversations in text.conversations.chunks(32) {
        let mut sequences = Vec::new();
        for turns in conversations.iter().map(|it| (&it.system, &it.turns)) {
            let system = turns.0.iter().map(|it| (Role::System, it.as_str()));
            let said = turns.1.iter().flat_map(|turn| {
                let question = turn.questions.first().map_or("", String::as_str);
                [(Role::User, question), (Role::Assistant, &turn.answer)]
            });
            let said = system
                .chain(said)
                .map(|(role, text)| (role, with_name(text, NAME)));
            let said: Vec<(Role, String)> = said.collect();
            let said = said.iter().map(|(role, text)| (*role, text.as_str()));
            sequences.push(encoder.conversation(&said.collect::<Vec<_>>())?);
        }
        total += sequences.len();
        right += Known::of(model, &sequences)?.count();
    }
    Ok((right, total))
}

/// What the model knows of some sequences.
pub(crate) struct Known {
    /// For each sequence, whether every learned token is the likeliest, so that greedy decoding writes the same.
    pub(crate) sequences: Vec<bool>,
    /// The share of the learned tokens that are the likeliest.
    pub(crate) tokens_percent: usize,
    /// The smallest margin, over the learned tokens of known sequences, between the token's logit and the next best.
    pub(crate) least_margin: f32,
}

impl Known {
    /// Evaluates all tokens at once.
    ///
    /// # Errors
    /// If the model cannot be run.
    pub(crate) fn of(model: &Model, sequences: &[Sequence]) -> anyhow::Result<Self> {
        let batch = Batch::pack(sequences)?;
        let logits = model.forward(&batch.tokens, &batch.lengths, &batch.rows)?;
        // The margin of each learned token that is the likeliest.
        let margins = logits.to_vec2::<f32>()?.into_iter().zip(&batch.targets);
        let margins = margins.map(|(logits, target)| {
            let (token, margin) = likeliest(&logits)?;
            Ok((token == *target).then_some(margin))
        });
        let margins = margins.collect::<anyhow::Result<Vec<Option<f32>>>>()?;
        let right = margins.iter().flatten().count();
        let mut rest = margins.as_slice();
        let mut least_margin = f32::INFINITY;
        let known = |sequence: &Sequence| {
            let learned = sequence.learned.iter().skip(1).filter(|&&it| it).count();
            let (own, after) = rest.split_at(learned);
            rest = after;
            let mut own = own.iter().copied();
            let least = own.try_fold(f32::INFINITY, |least, margin| Some(least.min(margin?)));
            least_margin = least_margin.min(least.unwrap_or(f32::INFINITY));
            least.is_some()
        };
        let sequences = sequences.iter().map(known).collect();
        Ok(Self {
            sequences,
            tokens_percent: right * 100 / margins.len().max(1),
            least_margin,
        })
    }

    /// The number of known sequences.
    pub(crate) fn count(&self) -> usize {
        self.sequences.iter().filter(|&&it| it).count()
    }
}
