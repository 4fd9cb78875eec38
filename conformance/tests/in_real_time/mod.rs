//! [`in_real_time`]: an engine whose waits take real time.

use genset_conformance::Subject;
use genset_conformance::mutants::fault::{Declares, faulty};

/// The same engine, without the declaration that its waits follow tokio's clock.
pub(crate) fn in_real_time(subject: Subject) -> Subject {
    let declares = Declares(|config| config.capabilities.virtual_time = false);
    faulty(subject, declares)
}
