//! The flags of speculation, and their settings.

use std::num::NonZeroU32;
use std::path::PathBuf;

use genset_backend_common::EngineError;

/// The default number of drafts per step.
const DEFAULT_TOKENS: usize = 4;
/// The largest number of drafts: each costs a row of a forward pass, and late drafts are seldom right.
const MOST_TOKENS: usize = 32;

/// The flags about speculation.
#[derive(Debug, Clone, Default)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
pub struct SpeculationArgs {
    /// Guess tokens, so that one pass of the model checks several: ngram takes them from the sequence's own tokens, draft-model
    /// from --draft-model; off [default: draft-model with --draft-model, else off]
    #[cfg_attr(feature = "cli", arg(long, value_name = "METHOD"))]
    pub speculate: Option<SpeculateChoice>,
    /// Checkout folder or GGUF file of a smaller model with the same vocabulary, which guesses tokens; for the command genset also
    /// a model of the Hugging Face Hub
    #[cfg_attr(feature = "cli", arg(long, value_name = "MODEL"))]
    pub draft_model: Option<PathBuf>,
    /// Tokens that are guessed for a sequence and step at most, up to 32 [default: 4]
    #[cfg_attr(feature = "cli", arg(long, value_name = "COUNT"))]
    pub num_speculative_tokens: Option<NonZeroU32>,
}

genset_backend_common::named! {
    /// Whether tokens are guessed, and how.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum SpeculateChoice: FromStr {
        /// Not at all.
        Off = "off",
        /// From the sequence's own tokens: prompt lookup.
        Ngram = "ngram",
        /// By a smaller model.
        DraftModel = "draft-model",
    }
}

/// The checked flags.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SpeculationSettings {
    /// The most drafts per sequence and step, at least 1.
    pub(crate) num_tokens: usize,
    /// The path of the draft model. `None` drafts from the sequence's own tokens.
    pub(crate) draft_model: Option<PathBuf>,
}

impl SpeculationArgs {
    /// Checks the flags; returns `None` without speculation.
    ///
    /// # Errors
    /// `InvalidArgument`, which names the flag that conflicts with the others.
    pub(crate) fn settings(&self) -> Result<Option<SpeculationSettings>, EngineError> {
        use SpeculateChoice as Choice;
        let draft_model = self.draft_model.clone();
        let draft_model = match (self.speculate, draft_model) {
            (None | Some(Choice::Off), None) => {
                return match self.num_speculative_tokens {
                    None => Ok(None),
                    Some(_) => Err(EngineError::invalid_argument(
                        "--num-speculative-tokens",
                        "it has no effect without speculation; add --speculate ngram or --draft-model, or leave it out",
                    )),
                };
            }
            (None | Some(Choice::DraftModel), Some(path)) => Some(path),
            (Some(Choice::Ngram), None) => None,
            (Some(Choice::DraftModel), None) => {
                let problem = "draft-model needs a smaller model; name it with --draft-model";
                return Err(EngineError::invalid_argument("--speculate", problem));
            }
            (Some(choice @ (Choice::Off | Choice::Ngram)), Some(_)) => {
                let problem =
                    format!("--speculate {choice} has no use for it; leave out one of the two");
                return Err(EngineError::invalid_argument("--draft-model", problem));
            }
        };
        let asked = self.num_speculative_tokens.map(NonZeroU32::get);
        let num_tokens = asked.map_or(DEFAULT_TOKENS, |tokens| {
            usize::try_from(tokens).unwrap_or(usize::MAX)
        });
        if num_tokens > MOST_TOKENS {
            let problem = format!("must be at most {MOST_TOKENS}, not {num_tokens}");
            return Err(EngineError::invalid_argument(
                "--num-speculative-tokens",
                problem,
            ));
        }
        Ok(Some(SpeculationSettings {
            num_tokens,
            draft_model,
        }))
    }

    /// Rejects speculation for a model that does not generate.
    ///
    /// # Errors
    /// `InvalidArgument`, which names the flag; also if flags conflict.
    pub(crate) fn refuse_for_embedder(&self) -> Result<(), EngineError> {
        let Some(settings) = self.settings()? else {
            return Ok(());
        };
        let flag = match settings.draft_model {
            Some(_) => "--draft-model",
            None => "--speculate",
        };
        let problem = "an embedder generates no tokens that could be guessed; leave it out";
        Err(EngineError::invalid_argument(flag, problem))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(method: &str, draft_model: &str, tokens: u32) -> SpeculationArgs {
        SpeculationArgs {
            speculate: method.parse().ok(),
            draft_model: Some(draft_model)
                .filter(|path| !path.is_empty())
                .map(PathBuf::from),
            num_speculative_tokens: NonZeroU32::new(tokens),
        }
    }

    fn settings(num_tokens: usize, draft_model: &str) -> Option<SpeculationSettings> {
        Some(SpeculationSettings {
            num_tokens,
            draft_model: Some(draft_model)
                .filter(|path| !path.is_empty())
                .map(PathBuf::from),
        })
    }

    #[test]
    fn flags_that_go_together_are_taken() {
        assert_eq!(args("", "", 0).settings().unwrap(), None);
        assert_eq!(args("off", "", 0).settings().unwrap(), None);
        assert_eq!(args("ngram", "", 0).settings().unwrap(), settings(4, ""));
        assert_eq!(args("ngram", "", 32).settings().unwrap(), settings(32, ""));
        for method in ["", "draft-model"] {
            assert_eq!(
                args(method, "small", 3).settings().unwrap(),
                settings(3, "small")
            );
        }
    }

    #[test]
    fn flags_that_do_not_are_refused_by_name() {
        for (args, flag, fix) in [
            (args("draft-model", "", 0), "--speculate", "--draft-model"),
            (
                args("ngram", "small", 0),
                "--draft-model",
                "--speculate ngram",
            ),
            (args("off", "small", 0), "--draft-model", "--speculate off"),
            (
                args("", "", 3),
                "--num-speculative-tokens",
                "--speculate ngram",
            ),
            (
                args("off", "", 3),
                "--num-speculative-tokens",
                "--draft-model",
            ),
            (
                args("ngram", "", 33),
                "--num-speculative-tokens",
                "at most 32",
            ),
        ] {
            let error = args.settings().unwrap_err();
            assert_eq!(error.at().map(|at| at.name()), Some(flag), "{args:?}");
            assert!(error.message().contains(fix), "{error}");
        }
    }

    #[test]
    fn an_embedder_takes_none_of_them() {
        args("off", "", 0).refuse_for_embedder().unwrap();
        let refused = |args: SpeculationArgs| {
            let error = args.refuse_for_embedder().unwrap_err();
            error.at().map(|at| at.name().to_owned())
        };
        assert_eq!(
            refused(args("ngram", "", 0)).as_deref(),
            Some("--speculate")
        );
        assert_eq!(
            refused(args("", "small", 0)).as_deref(),
            Some("--draft-model")
        );
    }
}
