//! Continuous batching and paged KV blocks as pure decisions: which sequences compute which tokens in the next step, and in
//! which KV blocks.
//!
//! The crate does not compute, wait or read the clock, so an engine, a mocker and a property test drive it alike. Call
//! [`Scheduler::add`] and [`Scheduler::cancel`] at any time. Otherwise repeat: [`Scheduler::plan`], the work itself,
//! [`Scheduler::commit`]. [`Scheduler::take_events`] returns the changes of the prefix cache for publication.
//!
//! - [`KvBlockPool`] tracks the holders of each block, and finds reusable full blocks by their hash.
//! - [`Scheduler`] has the queues, and decides about admission and preemption.
//! - [`Scheduler::set_drafts`] adds draft tokens behind a sequence's last token for a step to verify.
//! - [`HeldSequence`] and [`FreedSequences`] track the blocks of an ended sequence until other instances have fetched them.
//! - [`ReceivingPlace`] names the destination of KV blocks that arrive from another instance.
//! - [`SchedulerMetrics`] exports the metrics of an engine's schedulers.
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
