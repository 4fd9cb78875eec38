//! [`Load`]: the requests and their times. A request's prompt is its session's conversation so far, and new text. This crate
//! sends it to a simulated fleet in virtual time; benchmarks of real servers can send the same requests.

use std::time::Duration;

use genset_backend_common::{TokenId, random::mix};

use crate::lengths::Single;
use crate::random::Random;
use crate::trace::Trace;

/// Token ids are below this.
pub(crate) const VOCAB_SIZE: u32 = 32_000;

/// A piece of text. Equal ids mean equal tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Identifies its content.
    pub id: u64,
    /// Its length.
    pub tokens: u32,
}

impl Piece {
    /// Appends its tokens, each below 32,000.
    pub fn write(self, prompt: &mut Vec<TokenId>) {
        let base = mix(self.id);
        prompt.extend((0..u64::from(self.tokens)).map(|place| {
            let below = mix(base.wrapping_add(place)) % u64::from(VOCAB_SIZE);
            TokenId::try_from(below).unwrap_or(0)
        }));
    }
}

/// One request of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    /// The time since the previous answer.
    pub after: Duration,
    /// What the prompt adds to the conversation so far.
    pub pieces: Vec<Piece>,
    /// Tokens of the answer, at least 1.
    pub max_tokens: u32,
}

/// Consecutive requests, each with the whole conversation before it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    /// When it begins.
    pub at: Duration,
    /// At least one.
    pub turns: Vec<Turn>,
}

/// The requests and their times.
#[derive(Debug, Clone)]
pub enum Load {
    /// Conversations, generated from a seed.
    Synthetic(Synthetic),
    /// Independent requests, generated from a seed.
    Single(Single),
    /// Recorded requests; see [`Load::read_trace`].
    Trace(Trace),
}

/// Conversations, generated from a seed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Synthetic {
    /// Their kind.
    pub kind: Kind,
    /// The mean rate at which conversations begin, per second, as a Poisson process. Finite and above 0.
    pub sessions_per_s: f64,
    /// Requests in all, at least 1.
    pub requests: u64,
}

/// The kind of conversations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Human chats: one of 128 system prompts of 2,048 tokens, some much more common than others; a few turns, seconds apart.
    Chat,
    /// Agents: one of 16 prompts of 6,144 tokens; many turns with tool results, a second apart.
    Agent,
}

/// The parameters of a kind.
struct Shape {
    prompts: u64,
    prompt_tokens: u32,
    turns: (u32, u32),
    turn_tokens: (u32, u32),
    answer_tokens: (u32, u32),
    turns_per_s: f64,
}

impl Kind {
    fn shape(self) -> Shape {
        match self {
            Self::Chat => Shape {
                prompts: 128,
                prompt_tokens: 2048,
                turns: (1, 6),
                turn_tokens: (20, 200),
                answer_tokens: (50, 250),
                turns_per_s: 0.1,
            },
            Self::Agent => Shape {
                prompts: 16,
                prompt_tokens: 6144,
                turns: (4, 20),
                turn_tokens: (50, 800),
                answer_tokens: (20, 120),
                turns_per_s: 1.0,
            },
        }
    }
}

impl Load {
    /// The sessions, in the order in which they begin.
    #[must_use]
    pub fn sessions(&self, seed: u64) -> Box<dyn Iterator<Item = Session> + Send + '_> {
        match self {
            Self::Synthetic(synthetic) => Box::new(Conversations::new(*synthetic, seed)),
            Self::Single(single) => Box::new(single.sessions(seed)),
            Self::Trace(trace) => Box::new(trace.sessions()),
        }
    }

    /// The number of requests.
    #[must_use]
    pub fn requests(&self) -> u64 {
        match self {
            Self::Synthetic(synthetic) => synthetic.requests,
            Self::Single(single) => single.requests,
            Self::Trace(trace) => trace.requests(),
        }
    }

    /// The name in reports.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Synthetic(synthetic) => match synthetic.kind {
                Kind::Chat => "chat",
                Kind::Agent => "agent",
            },
            Self::Single(_) => "single",
            Self::Trace(_) => "trace",
        }
    }
}

struct Conversations {
    load: Synthetic,
    shape: Shape,
    random: Random,
    at: Duration,
    left: u64,
    /// Ids of unshared pieces begin after those of system prompts.
    next_piece: u64,
}

impl Conversations {
    fn new(load: Synthetic, seed: u64) -> Self {
        let shape = load.kind.shape();
        Self {
            random: Random::new(seed, 1),
            at: Duration::ZERO,
            left: load.requests,
            next_piece: shape.prompts,
            load,
            shape,
        }
    }

    /// Draws a system prompt; squaring makes the first ones common.
    fn system_prompt(&mut self) -> Piece {
        let squared = self.random.unit().powi(2);
        let scaled = squared * f64::from(u32::try_from(self.shape.prompts).unwrap_or(u32::MAX));
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "below the number of prompts"
        )]
        let id = scaled as u64;
        Piece {
            id,
            tokens: self.shape.prompt_tokens,
        }
    }

    fn own_piece(&mut self) -> Piece {
        self.next_piece += 1;
        Piece {
            id: self.next_piece,
            tokens: self.random.between(self.shape.turn_tokens),
        }
    }
}

impl Iterator for Conversations {
    type Item = Session;

    fn next(&mut self) -> Option<Session> {
        if self.left == 0 {
            return None;
        }
        self.at += seconds(self.random.gap_s(self.load.sessions_per_s));
        let count = u64::from(self.random.between(self.shape.turns)).min(self.left);
        self.left -= count;
        let mut turns = Vec::new();
        for number in 0..count {
            let mut pieces = Vec::new();
            let mut after = Duration::ZERO;
            if number == 0 {
                pieces.push(self.system_prompt());
            } else {
                after = seconds(self.random.gap_s(self.shape.turns_per_s));
            }
            pieces.push(self.own_piece());
            turns.push(Turn {
                after,
                pieces,
                max_tokens: self.random.between(self.shape.answer_tokens),
            });
        }
        Some(Session { at: self.at, turns })
    }
}

/// A drawn time as a duration.
pub(crate) fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::ZERO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversations_are_those_of_their_seed_and_as_many_as_asked_for() {
        let load = |kind| {
            Load::Synthetic(Synthetic {
                kind,
                sessions_per_s: 5.0,
                requests: 1000,
            })
        };
        for kind in [Kind::Chat, Kind::Agent] {
            let first: Vec<Session> = load(kind).sessions(1).collect();
            assert_eq!(first, load(kind).sessions(1).collect::<Vec<_>>());
            assert!(first != load(kind).sessions(2).collect::<Vec<_>>());
            let turns: usize = first.iter().map(|session| session.turns.len()).sum();
            assert_eq!(turns, 1000);
            assert!(first.is_sorted_by_key(|session| session.at));
        }
    }

    #[test]
    fn a_piece_is_its_id() {
        let write = |id, tokens| {
            let mut prompt = Vec::new();
            Piece { id, tokens }.write(&mut prompt);
            prompt
        };
        assert_eq!(write(3, 8)[..4], write(3, 4));
        assert!(write(3, 8) != write(4, 8));
        assert!(write(9, 1000).iter().all(|token| *token < VOCAB_SIZE));
    }
}
