//! Continuous batching and paged KV blocks as pure decisions: which sequences compute which tokens in the next step, and in
//! which KV blocks.
//!
//! Nothing here computes, waits or asks for the time, so an engine, a mocker and a property test drive it alike:
//! [`Scheduler::add`] and [`Scheduler::cancel`] at any time, then in turn [`Scheduler::plan`], the work itself, and
//! [`Scheduler::commit`]. [`Scheduler::take_events`] gives the changes of the prefix cache for publication.
//!
//! - [`KvBlockPool`] knows who holds which block, and which full blocks can be reused by their hash.
//! - [`Scheduler`] has the queues, and decides about admission and preemption.
//! - [`Scheduler::set_drafts`] has a step compute guesses behind a sequence's last token.
//! - [`HeldSequence`] and [`FreedSequences`] say when the blocks of an ended sequence, which others fetch, are needed no more.
//! - [`ReceivingPlace`] says where the KV blocks go that come to a sequence from elsewhere.
//! - [`SchedulerMetrics`] shows what the schedulers of an engine do.
//!
//! # Examples
//! ```
//! use genset_scheduler::{Limits, NewSequence, Outcome, Report, Scheduler, SequenceId};
//!
//! let limits = Limits { max_num_seqs: 8, max_num_batched_tokens: 64, max_waiting: 100 };
//! let mut scheduler = Scheduler::try_new(limits, 32, 16).unwrap();
//! let id = SequenceId(1);
//! scheduler.add(NewSequence { id, prompt: vec![5, 6, 7], priority: 0, root: None }).unwrap();
//!
//! let step = scheduler.plan();
//! assert_eq!((step.rows[0].tokens.clone(), step.rows[0].wants_token), (0..3, true));
//! // The model computes the three tokens and chooses token 9.
//! scheduler.commit(&[Report { id, outcome: Outcome::Sampled(9) }]);
//! assert_eq!(scheduler.sequence(id).unwrap().tokens(), [5, 6, 7, 9]);
//! ```

mod error;
mod freed;
mod metrics;
mod pool;
mod scheduler;
mod sequence;

pub use error::{AddError, LimitsError};
pub use freed::{FreedSequences, HeldSequence};
pub use metrics::SchedulerMetrics;
pub use pool::{After, BlockId, KvBlockPool};
pub use scheduler::{Limits, Outcome, Outgrown, Report, Scheduled, Scheduler, Stats, Step};
pub use sequence::{NewSequence, ReceivingPlace, Sequence, SequenceId};
