//! The limits of one step and of the queue, from the engine's flags.

use genset_backend_common::EngineError;
use genset_scheduler::{Limits, LimitsError};

use super::wide;
use crate::args::CandleArgs;

/// The limits from the flags, with defaults that suit the device.
///
/// # Errors
/// `InvalidArgument` for a flag that the scheduler rejects.
pub(super) fn limits(args: &CandleArgs, is_cpu: bool) -> Result<Limits, EngineError> {
    let (seqs, tokens) = if is_cpu { (32, 512) } else { (256, 4096) };
    let max_num_seqs = args.max_num_seqs.map_or(seqs, wide);
    let limits = Limits {
        max_num_seqs,
        // A larger number of sequences enlarges the step, unless both are given.
        max_num_batched_tokens: args
            .max_num_batched_tokens
            .map_or(tokens.max(max_num_seqs), wide),
        max_waiting: wide(args.max_waiting),
    };
    limits.check().map_err(refused)?;
    Ok(limits)
}

/// The most rows of logits in a step of at most `step_tokens`: one of each sequence, and one behind each of its drafts.
pub(super) fn logit_rows(limits: &Limits, drafts: usize, step_tokens: usize) -> usize {
    let rows = limits.max_num_seqs.saturating_mul(drafts.saturating_add(1));
    rows.min(step_tokens)
}

fn refused(error: LimitsError) -> EngineError {
    match error {
        LimitsError::Zero(name) => {
            let flag = format!("--{}", name.replace('_', "-"));
            EngineError::invalid_argument(flag, "must be at least 1")
        }
        LimitsError::BudgetTooSmall {
            max_num_batched_tokens,
            max_num_seqs,
        } => {
            let problem = format!(
                "must be at least --max-num-seqs ({max_num_seqs}), and is {max_num_batched_tokens}: \
                 each running sequence computes a token a step"
            );
            EngineError::invalid_argument("--max-num-batched-tokens", problem)
        }
        LimitsError::TooManyBlocks(_) => EngineError::invalid_argument("--kv-cache-memory", error),
    }
}

#[cfg(test)]
mod tests {
    use genset_backend_common::ErrorKind;

    use super::*;

    #[test]
    fn limits_that_cannot_work_are_refused_by_their_flag() {
        let flag = |args: &CandleArgs| {
            let error = limits(args, true).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            error.at().map(|at| at.name().to_owned())
        };
        let args = CandleArgs::default;
        assert!(limits(&args(), true).is_ok());
        let few_tokens = CandleArgs {
            max_num_batched_tokens: Some(16),
            ..args()
        };
        let flagged = flag(&few_tokens);
        assert_eq!(flagged.as_deref(), Some("--max-num-batched-tokens"));
        let few = CandleArgs {
            max_num_seqs: Some(16),
            ..few_tokens
        };
        assert!(limits(&few, true).is_ok());
        let no_sequence = CandleArgs {
            max_num_seqs: Some(0),
            ..args()
        };
        assert_eq!(flag(&no_sequence).as_deref(), Some("--max-num-seqs"));
        let nobody_waits = CandleArgs {
            max_waiting: 0,
            ..args()
        };
        assert_eq!(flag(&nobody_waits).as_deref(), Some("--max-waiting"));
    }
    #[test]
    fn each_draft_has_its_logits() {
        let limits = limits(&CandleArgs::default(), false).unwrap();
        let rows = |drafts| logit_rows(&limits, drafts, 4096);
        assert_eq!([0, 4, 32].map(rows), [256, 1280, 4096]);
    }
}
