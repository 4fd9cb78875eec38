//! Request planes: the common behaviour suite, tests of each plane, and malicious peers.

mod control;
mod floods;
mod hostile_callees;
mod hostile_callers;
mod log;
mod losses;
mod memory;
#[cfg(feature = "nats")]
mod nats;
mod processes;
mod scripted;
mod strangers;
mod suite;
mod tcp;
#[cfg(feature = "tls")]
mod tls;
mod victim;

pub(crate) use self::log::Log;
#[cfg(feature = "nats")]
pub(crate) use self::nats::NatsServer;
pub(crate) use self::suite::border::{deaf, wary};
pub(crate) use self::suite::{name, serve, sevens};
