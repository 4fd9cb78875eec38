//! A fleet in one process, in virtual time: what a policy of routing does to TTFT, ITL and prefix hits, without a GPU.
//!
//! Workers are [mockers](genset_engine_mocker); [`Worker`](genset_backend_common::worker::Worker), request plane, discovery and
//! [router](genset_router) are those of production. The clock stands still while anything can go on, so that an hour of a
//! fleet takes as long as its decisions do, and the same plan gives the same figures.
//!
//! - [`Load`]: which requests come when: a [trace](Load::read_trace), [conversations](Synthetic) or [single requests](Single) made up
//!   from a seed. Real servers may be sent the same ([`Load::sessions`]).
//! - [`Quantiles`] and [`Curves`]: times, as a report tells of them and plots them.
//! - [`Fault`]: what happens to workers and frontends meanwhile.
//! - [`Policy`]: how an instance is chosen.
//! - [`simulate`]: a [`Plan`] becomes a [`Report`], which is a table, JSON, or a [plot](Report::svg). A policy may serve the same load
//!   with fleets that have prefill and decode apart, too.

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
pub use run::{Plan, simulate};
pub use timeline::Moment;
pub use trace::Trace;
