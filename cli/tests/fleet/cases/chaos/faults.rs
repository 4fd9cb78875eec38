//! The faults of a chaos run.

use std::time::Duration;

use rand::Rng;
use rand::seq::SliceRandom as _;
use rustix::process::Signal;

use crate::fleet::Fleet;
use crate::meeting::{Meeting, Outage};
use crate::worker::Worker;

/// How long a worker is stopped: longer than the silence after which its peers consider it dead.
const FROZEN: Duration = Duration::from_secs(6);

/// How long a worker gets only a tenth of its CPU time.
const SLOWED: Duration = Duration::from_secs(3);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Fault {
    /// SIGKILL; a replacement is started.
    Killed,
    /// Stopped and then continued.
    Frozen,
    /// Drained with less time than its answers need; a replacement is started.
    Drained,
    /// All its connections are closed at once.
    Cut,
    /// Gets very little CPU time.
    Slowed,
    /// Discovery goes down and comes back.
    Unlisted,
}

impl Fault {
    /// `count` faults of all kinds, in equal numbers.
    pub(super) fn random(count: usize, random: &mut impl Rng) -> Vec<Self> {
        let mut kinds = [
            Self::Killed,
            Self::Frozen,
            Self::Drained,
            Self::Cut,
            Self::Slowed,
            Self::Unlisted,
        ];
        let mut faults = Vec::new();
        while faults.len() < count {
            kinds.shuffle(random);
            faults.extend(kinds);
        }
        faults.truncate(count);
        faults
    }

    /// Injects the fault, and repairs it before it returns. `start` starts a replacement for `worker`; an outage of discovery
    /// lasts `away`.
    pub(super) async fn strike<M: Meeting>(
        self,
        fleet: &mut Fleet<M>,
        worker: Worker,
        start: impl AsyncFn(&Fleet<M>) -> Worker,
        away: Duration,
    ) -> Worker {
        match self {
            Self::Killed => {
                worker.kill().await;
                return start(fleet).await;
            }
            Self::Drained => {
                // The replacement starts before the old one exits.
                let (next, ()) = tokio::join!(start(fleet), worker.leave());
                return next;
            }
            Self::Frozen => {
                worker.signal(Signal::STOP);
                tokio::time::sleep(FROZEN).await;
                worker.signal(Signal::CONT);
            }
            Self::Slowed => {
                for _ in 0..SLOWED.as_millis() / 100 {
                    worker.signal(Signal::STOP);
                    tokio::time::sleep(Duration::from_millis(90)).await;
                    worker.signal(Signal::CONT);
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
            Self::Cut => assert!(worker.cut_connections() > 0, "it has connections"),
            Self::Unlisted => {
                fleet.meeting.interrupt(Outage::Gone).await;
                tokio::time::sleep(away).await;
                fleet.meeting.resume(Outage::Gone).await;
            }
        }
        worker
    }
}
