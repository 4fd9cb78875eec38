//! The training itself.

use std::path::Path;

use genset_devtools::checkout::Config;
use rand::SeedableRng as _;
use rand::rngs::StdRng;

use crate::batch::{Batch, epoch, pack_all};
use crate::encode::{Encoder, Role, Sequence};
use crate::model::Model;
use crate::ops::CrossEntropy;
use crate::optimizer::Optimizer;
use crate::progress::Progress;
use crate::text::Text;
use crate::wording::{Twins, with_name};

/// The name in conversations that have a place for one, when it is checked what the model knows.
const NAME: &str = "Anna";

/// What can be chosen.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    /// How often every answer is seen.
    pub(crate) epochs: usize,
    /// Of the first weights, the order and the wordings.
    pub(crate) seed: u64,
    /// Tokens in a batch.
    pub(crate) batch_tokens: usize,
    /// The highest learning rate.
    pub(crate) learning_rate: f64,
}

/// Trains a model of the folder's configuration on the folder's text.
///
/// # Errors
/// When a file cannot be read or the training fails.
pub(crate) fn train(folder: &Path, plan: &Plan, encoder: &Encoder) -> anyhow::Result<Model> {
    let text = Text::read(folder)?;
    let twins = Twins::find(&text.conversations);
    let mut rng = StdRng::seed_from_u64(plan.seed);
    let model = Model::random(Config::read(folder)?, &mut rng)?;
    // All batches are made before the first step, so that the learning rate knows how many there are.
    let mut epochs = Vec::new();
    for _ in 0..plan.epochs {
        let sequences = epoch(&text, &twins, encoder, &mut rng)?;
        epochs.push(pack_all(&sequences, plan.batch_tokens)?);
    }
    let steps = epochs.iter().map(Vec::len).sum();
    describe(&model, &text, &epochs, steps);
    let mut optimizer = Optimizer::try_new(&model, plan.learning_rate, steps)?;
    let progress = Progress::start(plan.epochs, steps);
    for (number, batches) in (1..).zip(&epochs) {
        let mut sum = 0.0;
        for batch in batches {
            sum += step(&model, &mut optimizer, batch)?;
            progress.step();
        }
        progress.epoch(number, sum / batches.len().max(1) as f32);
    }
    progress.finish();
    Ok(model)
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

/// One step; returns the loss before it.
fn step(model: &Model, optimizer: &mut Optimizer, batch: &Batch) -> anyhow::Result<f32> {
    let logits = model.forward(&batch.tokens, &batch.lengths, &batch.rows)?;
    let targets = batch.targets.clone();
    let loss = logits.apply_op1(CrossEntropy { targets })?;
    optimizer.descend(&loss)?;
    Ok(loss.to_scalar()?)
}

/// How many of the conversations, asked as they are written, the model answers word for word; and how many there are.
///
/// # Errors
/// When a file cannot be read or the model cannot be run.
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
        right += count_known(model, &sequences)?;
    }
    Ok((right, total))
}

/// The sequences in which each learned token is the model's likeliest: greedy decoding writes the same.
fn count_known(model: &Model, sequences: &[Sequence]) -> anyhow::Result<usize> {
    let batch = Batch::pack(sequences)?;
    let logits = model.forward(&batch.tokens, &batch.lengths, &batch.rows)?;
    let best: Vec<u32> = logits.argmax(1)?.to_vec1()?;
    let mut is_right = best.iter().zip(&batch.targets).map(|(a, b)| a == b);
    let known = |sequence: &&Sequence| {
        let learned = sequence.learned.iter().skip(1).filter(|&&it| it).count();
        is_right.by_ref().take(learned).filter(|&it| it).count() == learned
    };
    Ok(sequences.iter().filter(known).count())
}
