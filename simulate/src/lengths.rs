//! [`Single`]: independent requests, and [`Lengths`]: the lengths of their prompts and answers.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use genset_backend_common::EngineError;

use crate::load::{Piece, Session, Turn, seconds};
use crate::random::Random;

/// The longest prompt or answer that can be asked for.
const MOST: u32 = 1_000_000;

/// The longest prompt or answer drawn for ShareGPT: benchmarks omit longer ones.
const SHAREGPT_MOST: f64 = 2048.0;

/// Mean tokens of the prompts of ShareGPT.
///
/// # Source
/// W. Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023, figure 11.
const SHAREGPT_PROMPT: f64 = 161.0;

/// Mean tokens of its answers; same source.
const SHAREGPT_ANSWER: f64 = 338.0;

/// The distribution of prompt or answer lengths in tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lengths {
    /// This length always, at least 1.
    Fixed(u32),
    /// A uniform distribution over this range; both ends are at least 1.
    Uniform(u32, u32),
    /// As in ShareGPT's conversations: log-normal, mostly short, with a few very long ones.
    ShareGpt,
}

impl Lengths {
    /// Draws a length; `sharegpt` is the mean of [`ShareGpt`](Self::ShareGpt).
    fn draw(self, random: &mut Random, sharegpt: f64) -> u32 {
        match self {
            Self::Fixed(tokens) => tokens,
            Self::Uniform(least, most) => random.between((least, most)),
            Self::ShareGpt => {
                // The mean of this distribution is its median times e^(1/2).
                let tokens = sharegpt * (random.normal() - 0.5).exp();
                #[expect(
                    clippy::cast_possible_truncation,
                    clippy::cast_sign_loss,
                    reason = "from 1 to 2048"
                )]
                let tokens = tokens.clamp(1.0, SHAREGPT_MOST) as u32;
                tokens
            }
        }
    }
}

impl FromStr for Lengths {
    type Err = EngineError;

    /// `128`, `100-400` or `sharegpt`; at most a million tokens.
    fn from_str(text: &str) -> Result<Self, EngineError> {
        let number = |text: &str| {
            let tokens = text.trim().parse::<u32>().ok();
            tokens.filter(|tokens| (1..=MOST).contains(tokens))
        };
        let lengths = match text.split_once('-') {
            _ if text == "sharegpt" => Some(Self::ShareGpt),
            None => number(text).map(Self::Fixed),
            Some((least, most)) => (number(least).zip(number(most)))
                .filter(|(least, most)| least <= most)
                .map(|(least, most)| Self::Uniform(least, most)),
        };
        lengths.ok_or_else(|| {
            let problem = format!(
                "{text:?} is no length: give a number of tokens up to {MOST}, a range such as 100-400, or sharegpt"
            );
            EngineError::invalid_argument("lengths", problem)
        })
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(tokens) => write!(f, "{tokens}"),
            Self::Uniform(least, most) => write!(f, "{least}-{most}"),
            Self::ShareGpt => f.write_str("sharegpt"),
        }
    }
}

/// Independent requests, generated from a seed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Single {
    /// The number of requests, at least 1.
    pub requests: u64,
    /// The mean arrival rate per second of a Poisson process. Finite and above 0.
    pub requests_per_s: f64,
    /// Prompt tokens after the prefix.
    pub input: Lengths,
    /// Tokens of an answer.
    pub output: Lengths,
    /// Tokens of the prefix that each prompt shares with others.
    pub prefix_tokens: u32,
    /// The number of different prefixes, equally likely; at least 1.
    pub prefixes: u64,
}

impl Single {
    pub(crate) fn sessions(self, seed: u64) -> impl Iterator<Item = Session> + Send {
        let mut random = Random::new(seed, 2);
        let mut at = Duration::ZERO;
        (0..self.requests).map(move |number| {
            at += seconds(random.gap_s(self.requests_per_s));
            let prefix = Piece {
                id: random.below(self.prefixes),
                tokens: self.prefix_tokens,
            };
            let own = Piece {
                id: self.prefixes + number,
                tokens: self.input.draw(&mut random, SHAREGPT_PROMPT),
            };
            let turn = Turn {
                after: Duration::ZERO,
                pieces: vec![prefix, own],
                max_tokens: self.output.draw(&mut random, SHAREGPT_ANSWER),
            };
            Session {
                at,
                turns: vec![turn],
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOAD: Single = Single {
        requests: 20_000,
        requests_per_s: 10.0,
        input: Lengths::ShareGpt,
        output: Lengths::Uniform(3, 5),
        prefix_tokens: 64,
        prefixes: 4,
    };

    #[test]
    fn requests_come_at_their_rate_with_their_lengths() {
        let all: Vec<Session> = LOAD.sessions(1).collect();
        assert_eq!(all, LOAD.sessions(1).collect::<Vec<_>>());
        assert!(all != LOAD.sessions(2).collect::<Vec<_>>());
        let last = all[all.len() - 1].at.as_secs_f64();
        assert!((1900.0..2100.0).contains(&last), "{last}");
        let turns = || all.iter().map(|session| &session.turns[0]);
        let mean = turns()
            .map(|turn| f64::from(turn.pieces[1].tokens))
            .sum::<f64>()
            / 20_000.0;
        assert!((150.0..170.0).contains(&mean), "{mean}");
        assert!(turns().all(|turn| (3..=5).contains(&turn.max_tokens)));
        for id in 0..4 {
            let count = turns().filter(|turn| turn.pieces[0].id == id).count();
            assert!((4500..5500).contains(&count), "{id}: {count}");
        }
    }

    #[test]
    fn lengths_are_read_as_they_are_written() {
        for text in ["128", "100-400", "sharegpt"] {
            assert_eq!(text.parse::<Lengths>().unwrap().to_string(), text);
        }
        for text in ["", "0", "0-4", "9-3", "-5", "share", "1-2-3"] {
            let error = text.parse::<Lengths>().unwrap_err();
            assert!(error.message().contains("100-400"), "{error}");
        }
    }
}
