//! An epoch's sequences, packed into batches.
//!
//! A batch is packed: its sequences are concatenated without padding, and the model knows where each begins.

use std::sync::Arc;

use rand::seq::{IndexedRandom as _, SliceRandom as _};
use rand::{Rng, RngExt as _};

use crate::encode::{Encoder, Role, Sequence};
use crate::practice;
use crate::text::{Conversation, Text};
use crate::tools::Kinds;
use crate::wording::{Twins, any_name, ask, wants_name, with_name};

/// A conversation longer than this is not joined with others.
const MAX_JOINED_TOKENS: usize = 700;

/// System messages that do not change the answers.
const SYSTEM_MESSAGES: [&str; 6] = [
    "You are a helpful assistant.",
    "You are tiny-chat, a very small language model.",
    "You are a friendly assistant. Answer in one sentence.",
    "Be brief.",
    "You answer questions about Genset and about the world.",
    "Answer the question.",
];

/// Sequences that the model processes together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Batch {
    pub(crate) tokens: Vec<u32>,
    /// The length of each sequence in tokens.
    pub(crate) lengths: Arc<Vec<usize>>,
    /// Rows that precede a learned token.
    pub(crate) rows: Vec<u32>,
    /// That token, for each of the rows.
    pub(crate) targets: Vec<u32>,
}

impl Batch {
    /// # Errors
    /// If there are more tokens than a row number can represent.
    pub(crate) fn pack(sequences: &[Sequence]) -> anyhow::Result<Self> {
        let mut batch = Self {
            tokens: Vec::new(),
            lengths: Arc::new(sequences.iter().map(Sequence::len).collect()),
            rows: Vec::new(),
            targets: Vec::new(),
        };
        for sequence in sequences {
            let first_row = batch.tokens.len();
            batch.tokens.extend_from_slice(&sequence.tokens);
            let next = sequence.tokens.iter().zip(&sequence.learned).skip(1);
            for (before, (&token, &learned)) in next.enumerate() {
                if learned {
                    batch.rows.push(u32::try_from(first_row + before)?);
                    batch.targets.push(token);
                }
            }
        }
        Ok(batch)
    }
}

/// Packs sequences in order, up to `budget_tokens` per batch; a longer sequence gets its own batch.
///
/// # Errors
/// As [`Batch::pack`].
pub(crate) fn pack_all(sequences: &[Sequence], budget_tokens: usize) -> anyhow::Result<Vec<Batch>> {
    let mut batches = Vec::new();
    let (mut begin, mut tokens) = (0, 0);
    for (end, sequence) in sequences.iter().enumerate() {
        if end > begin && tokens + sequence.len() > budget_tokens {
            batches.push(Batch::pack(&sequences[begin..end])?);
            (begin, tokens) = (end, 0);
        }
        tokens += sequence.len();
    }
    if begin < sequences.len() {
        batches.push(Batch::pack(&sequences[begin..])?);
    }
    Ok(batches)
}

/// What an epoch draws in addition to the written text.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Drawn {
    /// Conversations with tools.
    pub(crate) calls: usize,
    /// Tools and a question, up to the first call.
    pub(crate) choices: usize,
    /// Sums, words to repeat, facts and JSON.
    pub(crate) exercises: usize,
    /// Random tokens to repeat.
    pub(crate) drills: usize,
}

/// Draws new sequences.
///
/// # Errors
/// If a text cannot be tokenized.
pub(crate) fn drawn(
    counts: Drawn,
    text: &Text,
    kinds: &Kinds,
    encoder: &Encoder,
    rng: &mut impl Rng,
) -> anyhow::Result<Vec<Sequence>> {
    let mut sequences = Vec::new();
    for _ in 0..counts.calls {
        let (messages, known) = kinds.conversation(text, rng);
        let mut sequence = encoder.messages(&messages)?;
        let begin = encoder.messages(&messages[..known])?.len();
        sequence.learned[..begin].fill(false);
        sequences.push(sequence);
    }
    for _ in 0..counts.choices {
        sequences.push(encoder.messages(&kinds.choice(text, rng))?);
    }
    for _ in 0..counts.exercises {
        sequences.push(encoder.messages(&practice::exercise(text, &kinds.values, rng))?);
    }
    for _ in 0..counts.drills {
        sequences.push(practice::drill(encoder.vocabulary(), rng));
    }
    Ok(sequences)
}

/// Returns every conversation and paragraph once, in a new order and wording; some conversations are joined into longer ones.
///
/// # Errors
/// If a text cannot be tokenized.
pub(crate) fn written(
    text: &Text,
    twins: &Twins,
    encoder: &Encoder,
    rng: &mut impl Rng,
) -> anyhow::Result<Vec<Sequence>> {
    let mut sequences = Vec::new();
    for paragraph in &text.paragraphs {
        sequences.push(encoder.document(paragraph)?);
    }
    for turn in text.conversations.iter().flat_map(|it| &it.turns) {
        if rng.random_bool(0.1) && !wants_name(&turn.answer) {
            sequences.push(encoder.document(&turn.answer)?);
        }
    }
    let mut order: Vec<&Conversation> = text.conversations.iter().collect();
    order.shuffle(rng);
    let mut rest = order.as_slice();
    while !rest.is_empty() {
        let (joined, after) = rest.split_at(joined_count(rng).min(rest.len()));
        rest = after;
        sequences.extend(join(joined, twins, encoder, rng)?);
    }
    Ok(sequences)
}

/// How many conversations are joined: mostly one, sometimes many.
fn joined_count(rng: &mut impl Rng) -> usize {
    match rng.random_range(0..100) {
        0..70 => 1,
        70..85 => 2,
        85..95 => 3,
        _ => rng.random_range(5..10),
    }
}

/// Joins the conversations into one, or several if they are too long for one or begin with a system message.
fn join(
    conversations: &[&Conversation],
    twins: &Twins,
    encoder: &Encoder,
    rng: &mut impl Rng,
) -> anyhow::Result<Vec<Sequence>> {
    let mut sequences: Vec<Sequence> = Vec::new();
    for conversation in conversations {
        let name = any_name(rng);
        let said = conversation.turns.iter().map(|turn| {
            let question = ask(turn, twins, &name, rng);
            (question, with_name(&turn.answer, &name))
        });
        let words: Vec<(String, String)> = said.collect();
        let mut messages = Vec::new();
        let open = sequences
            .last_mut()
            .filter(|it| conversation.system.is_none() && it.len() < MAX_JOINED_TOKENS);
        if let Some(system) = &conversation.system {
            messages.push((Role::System, system.as_str()));
        } else if open.is_none() && rng.random_bool(0.2) {
            messages.extend(SYSTEM_MESSAGES.choose(rng).map(|it| (Role::System, *it)));
        }
        for (question, answer) in &words {
            messages.push((Role::User, question));
            messages.push((Role::Assistant, answer));
        }
        let part = encoder.conversation(&messages)?;
        match open {
            Some(sequence) => {
                sequence.tokens.extend(part.tokens);
                sequence.learned.extend(part.learned);
            }
            None => sequences.push(part),
        }
    }
    Ok(sequences)
}

#[cfg(test)]
mod tests {
    use genset_devtools::tiny_chat::folder;
    use rand::SeedableRng as _;
    use rand::rngs::StdRng;

    use super::*;

    fn sequence(tokens: &[u32], learned: &[bool]) -> Sequence {
        Sequence {
            tokens: tokens.to_vec(),
            learned: learned.to_vec(),
        }
    }

    #[test]
    fn rows_point_at_the_token_before_the_learned_one() {
        let first = sequence(&[10, 11, 12], &[false, false, true]);
        let second = sequence(&[20, 21], &[true, true]);
        let batch = Batch::pack(&[first, second]).unwrap();
        assert_eq!(batch.tokens, [10, 11, 12, 20, 21]);
        assert_eq!(*batch.lengths, [3, 2]);
        // 20 is learned, but nothing precedes it; 12 must not predict it.
        assert_eq!(batch.rows, [1, 3]);
        assert_eq!(batch.targets, [12, 21]);
    }

    #[test]
    fn batches_keep_to_the_budget_and_lose_nothing() {
        let sequences: Vec<Sequence> = [4, 4, 3, 20, 1]
            .map(|length| sequence(&vec![7; length], &vec![true; length]))
            .to_vec();
        let batches = pack_all(&sequences, 8).unwrap();
        let lengths: Vec<Vec<usize>> = batches.iter().map(|it| it.lengths.to_vec()).collect();
        assert_eq!(lengths, [vec![4, 4], vec![3], vec![20], vec![1]]);
    }

    #[test]
    fn an_epoch_has_every_answer_once_and_follows_the_seed() {
        let encoder = Encoder::read(folder()).unwrap();
        let mut text = Text::default();
        text.add("Q: One?\nA: Yes.\n\nS: Be kind.\nQ: Two?\nA: No.\nQ: Three?\nA: Maybe.\n")
            .unwrap();
        let twins = Twins::find(&text.conversations);
        let of_seed =
            |seed| written(&text, &twins, &encoder, &mut StdRng::seed_from_u64(seed)).unwrap();
        for seed in 0..50 {
            let sequences = of_seed(seed);
            let ends = sequences
                .iter()
                .flat_map(|it| it.tokens.iter().zip(&it.learned))
                .filter(|&(&token, &learned)| learned && token == encoder.message_end)
                .count();
            assert_eq!(ends, 3);
            assert_eq!(sequences, of_seed(seed));
        }
        assert_ne!(of_seed(1), of_seed(2));
    }
}
