//! Simulates a fleet in one process, in virtual time: the effect of a routing policy on TTFT, ITL and prefix hits, without a
//! GPU.
//!
//! Workers are [mockers](genset_engine_mocker); [`Worker`](genset_backend_common::worker::Worker), request plane, discovery
//! and [router](genset_router) are the production code. The clock stands still while any task can run. So an hour of a fleet
//! takes only as long as its decisions, and the same plan yields the same figures.
//!
//! - [`Load`]: the requests and their times: a [trace](Load::read_trace), or [conversations](Synthetic) or [single
//!   requests](Single) generated from a seed. Real servers can be sent the same load ([`Load::sessions`]).
//! - [`Quantiles`] and [`Curves`]: distributions of times, for reports and plots.
//! - [`Fault`]: an event during a run that affects a worker or a frontend.
//! - [`Policy`]: how an instance is chosen.
//! - [`simulate`]: turns a [`Plan`] into a [`Report`], which is a table, JSON, or a [plot](Report::svg). A policy can also
//!   serve the same load with disaggregated fleets (separate prefill and decode workers).

mod faults;
mod fleet;
mod frontends;
mod lengths;
mod load;
mod oracle;
mod plot;
mod policy;
mod quantiles;
mod random;
mod report;
mod run;
mod timeline;
mod trace;

pub use faults::{Action, Fault, What};
pub use lengths::{Lengths, Single};
pub use load::{Kind, Load, Piece, Session, Synthetic, Turn};
pub use plot::Curves;
pub use policy::Policy;
pub use quantiles::Quantiles;
pub use report::{Report, Row};
pub use run::{Plan, simulate, simulate_counted};
pub use timeline::Moment;
pub use trace::Trace;
