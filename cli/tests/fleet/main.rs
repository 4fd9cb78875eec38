//! Fleets of real processes, with faults: workers that die, hang and are replaced, and outages of discovery and NATS.
//!
//! One list of cases runs for several ways in which processes can meet. Each discovery and each transport has all of them: etcd
//! with NATS, a directory with TCP. With etcd and TCP, those in which discovery has a part run again. `docs/guide/faults.md` lists
//! what clients see.

#![expect(
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test fails by panicking, also in its helpers, and tells its times"
)]

mod answers;
mod cases;
#[cfg(feature = "etcd")]
mod etcd;
mod fleet;
mod launched;
mod load;
mod meeting;
#[cfg(feature = "nats")]
mod nats;
#[cfg(any(feature = "etcd", feature = "nats"))]
mod ports;
#[path = "../cli/support.rs"]
#[allow(dead_code, reason = "the other tests of the binary need the rest")]
mod support;
mod worker;

use self::cases::fleet_cases;

fleet_cases!(file_and_tcp, crate::meeting::Directory::new());

#[cfg(feature = "etcd")]
fleet_cases!(etcd_and_tcp, crate::etcd::Etcd::start().await, discovery);

#[cfg(all(feature = "etcd", feature = "nats"))]
fleet_cases!(etcd_and_nats, crate::nats::EtcdAndNats::start().await, nats);
