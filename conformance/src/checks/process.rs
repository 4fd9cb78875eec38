//! SP: engines in separate processes, and their supervisors.
//!
//! Two things are judged. The process is the author's: the kit talks to it as a worker does, frame by frame ([`worker`]), and
//! runs it under the subject's own supervisor. The supervisor receives processes that misbehave; shell scripts play them.
//!
//! Changed from the catalogue, with the reason:
//! - SP02: the kit cannot make an engine print. It asks the process to log everything; the socket must carry only frames.
//! - SP07 judges both sides: either may be the older one.
//! - SP09 to SP14 are additional: what a process must do so that a worker can cancel its requests, tell that it is not hung, be
//!   slower than it, be newer than it, and stop it.

mod child;
mod supervisor;
mod tracks;
mod worker;

use std::sync::Arc;

use crate::check::{Check, Stop, check, skip};
use crate::subject::Supervise;
use crate::trial::Trial;

pub(super) const CHECKS: &[Check] = &[
    check!("SP01", Core, Subprocess, "a process that is killed ends every request with an error that may go on elsewhere, and health says so",
        clause: "docs/subprocess-protocol.md, Failures; HealthReporter::report_dead",
        breaks: "clients hang on a dead engine, and the router sends more", supervisor::killed_process),
    check!("SP02", Core, Subprocess, "the socket carries frames and nothing else, however much is logged",
        clause: "docs/subprocess-protocol.md, The process",
        breaks: "a library's print in the middle of a frame: the worker reads garbage and kills the engine", child::only_frames),
    check!("SP03", Core, Subprocess, "when cleanup returns, the process is reaped, and what it started is gone",
        clause: "docs/subprocess-protocol.md, How it ends",
        breaks: "zombies, and helpers that hold the device after their engine: the next one finds no memory", supervisor::nothing_stays),
    check!("SP04", Core, Subprocess, "a process whose worker is gone ends soon, with all that it started",
        clause: "docs/subprocess-protocol.md, How it ends",
        breaks: "a worker that was killed leaves its engine on the device, where nobody can reach it", child::ends_with_its_worker),
    check!("SP05", Core, Subprocess, "a process that does not greet or start in time is given up, with a typed error",
        clause: "docs/subprocess-protocol.md, Failures: TooLate",
        breaks: "a load that hangs blocks the rollout, and nobody is told", supervisor::late_start),
    check!("SP06", Strict, Subprocess, "the error of a process that died carries its last lines on standard error",
        clause: "docs/subprocess-protocol.md, The process",
        breaks: "an operator who reads \"exited with code 1\", and nothing of why", supervisor::last_lines),
    check!("SP07", Core, Subprocess, "neither end goes on with a version that it does not speak",
        clause: "docs/subprocess-protocol.md, Connecting",
        breaks: "an upgrade of one half: frames that are misread, and answers that are not what was asked", child::other_version),
    check!("SP08", Strict, Subprocess, "a process that breaks off in a frame, or sends what is none, fails as disconnected",
        clause: "docs/subprocess-protocol.md, Failures: HalfFrame, Protocol",
        breaks: "a crash in the middle of a write that counts as an engine's bug, and whose requests go nowhere else", supervisor::broken_frames),
    check!("SP09", Core, Subprocess, "after cleanup and GoAway the process exits by itself, with code 0",
        clause: "docs/subprocess-protocol.md, How it ends",
        breaks: "every orderly stop waits for the kill, and counts as a crash", child::exits_by_itself),
    check!("SP10", Core, Subprocess, "Ping is answered with its payload while a request is under way",
        clause: "docs/subprocess-protocol.md, Connecting",
        breaks: "an engine that works is taken for a hung one, and killed", child::answers_ping),
    check!("SP11", Core, Subprocess, "a cancelled stream is ended by the process, soon, and no other is",
        clause: "docs/subprocess-protocol.md, Streams",
        breaks: "requests of clients that left are computed to their end, and their streams pile up", child::ends_cancelled),
    check!("SP12", Core, Subprocess, "no item is sent without credit, and who waits for credit holds up nobody else",
        clause: "docs/subprocess-protocol.md, Streams",
        breaks: "one slow client fills the worker's memory, or stops the answers of all", child::keeps_to_credit),
    check!("SP13", Core, Subprocess, "frames, fields and endpoints that a later version adds do no harm",
        clause: "docs/wire-protocol.md, Unknown things",
        breaks: "a newer worker cannot run the engine, although the protocol says that it can", child::takes_later_versions),
    check!("SP14", Core, Subprocess, "an answer is outputs with tokens of the vocabulary, one terminal, and End",
        clause: "docs/subprocess-protocol.md, Failures",
        breaks: "answers that fail as internal errors, one by one", child::whole_answers),
];

/// How the subject runs its process; the runner has checked that it does.
fn supervise(trial: &Trial) -> Result<Arc<dyn Supervise>, Stop> {
    let subject = trial.build();
    match subject.process {
        Some(process) => Ok(process),
        None => skip!(NotDeclared, "the engine has no process of its own"),
    }
}
