//! Proves that the checks of SP detect faults. A good process under a good supervisor passes them. Exactly the listed checks
//! catch each process and each supervisor with one fault, and every check of SP catches at least one.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    unreachable_pub,
    reason = "a test fails by panicking"
)]

mod support;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use genset_backend_common::output::Finish;
use genset_backend_common::{
    EngineConfig, EngineError, ErrorKind, GenerateRequest, LLMEngine, Output, OutputStream,
    RequestContext, StartContext, async_trait,
};
use genset_conformance::{
    CheckReport, ChildCommand, Level, Options, Profile, Scenario, Subject, Supervise, Verdict,
    catalogue, run_conformance_with,
};
use genset_engine_subprocess::{SubprocessConfig, SubprocessEngine, SupervisedProcess};

/// Faults of a process: the name in `faulty.py`, the meaning, and exactly the checks that catch it.
const PROCESSES: &[(&str, &str, &[&str])] = &[
    (
        "prints_at_the_end",
        "standard output put where the socket is, as for protocols on standard streams, and a farewell printed",
        &["SP02", "SP09"],
    ),
    (
        "helper_of_its_own_session",
        "a pool of workers that is started as daemons, so that no signal reaches it",
        &["SP03", "SP04", "SP09"],
    ),
    (
        "outlives_its_worker",
        "the end of the socket taken for a pause: nobody else will come",
        &["SP04"],
    ),
    (
        "takes_any_version",
        "a Hello that is read and not compared",
        &["SP07"],
    ),
    (
        "stays",
        "a thread that is no daemon keeps the interpreter alive after the last line",
        &["SP04", "SP09"],
    ),
    (
        "exits_with_1",
        "an exception at exit that nobody sees, but for the code",
        &["SP09"],
    ),
    (
        "cleanup_fails",
        "resources freed twice at cleanup",
        &["SP02", "SP09"],
    ),
    (
        "no_pong_while_busy",
        "heartbeats answered by the loop only while it has nothing else to do",
        &["SP10"],
    ),
    (
        "pong_without_payload",
        "a Pong that answers no Ping in particular",
        &["SP10"],
    ),
    (
        "computes_at_once",
        "a model called on the loop for a whole answer: neither Ping nor Cancel is heard",
        &["SP10", "SP11"],
    ),
    (
        "deaf_to_cancel",
        "a Cancel that is parsed and dropped",
        &["SP11"],
    ),
    (
        "deaf_while_computing",
        "a Cancel seen only where an answer waits for credit, and an answer that is over before a call would be",
        &["SP11"],
    ),
    (
        "deaf_while_waiting",
        "a Cancel seen between tokens only, and no token comes without credit",
        &["SP11"],
    ),
    (
        "cancel_hits_all",
        "a Cancel that clears the table of streams",
        &["SP11"],
    ),
    (
        "token_after_cancel",
        "a step that was under way sends its token after the End",
        &["SP11"],
    ),
    (
        "ignores_credit",
        "items written as they come, however slow the reader is",
        &["SP12"],
    ),
    (
        "one_waits_all_wait",
        "a send that waits for credit in the loop that serves all",
        &["SP11", "SP12"],
    ),
    (
        "dies_of_unknown_frames",
        "an enum of frame kinds without a place for others",
        &["SP13"],
    ),
    (
        "strict_about_fields",
        "a schema that allows no further fields",
        &["SP13"],
    ),
    (
        "dies_of_unknown_endpoints",
        "a look-up in the table of endpoints without a default",
        &["SP13"],
    ),
    (
        "answers_unknown_endpoints",
        "an empty answer to what is not known, which the worker takes for a success",
        &["SP13"],
    ),
    (
        "after_terminal",
        "a step's last token flushed after the finish was reported",
        &["SP02", "SP09", "SP11", "SP13", "SP14"],
    ),
    (
        "token_out_of_range",
        "an embedding table padded to a round size, whose padding rows are sampled too",
        &["SP14"],
    ),
    (
        "empty_chunk",
        "an item for each step, whether or not it brought a token",
        &["SP14"],
    ),
    (
        "terminal_that_is_no_output",
        "a terminal of the author's own design",
        &["SP02", "SP09", "SP11", "SP12", "SP13", "SP14"],
    ),
    (
        "forgets_end",
        "the terminal item taken for the end of the stream",
        &["SP02", "SP03", "SP09", "SP11", "SP12", "SP13", "SP14"],
    ),
];

/// Faults of a supervisor, in the same form.
const SUPERVISORS: &[(&str, Fault, &[&str])] = &[
    (
        "a process that is gone looks like the end of its answers",
        Fault::EndsAsComplete,
        &["SP01"],
    ),
    (
        "nobody is told that the process died",
        Fault::KeepsDeathToItself,
        &["SP01"],
    ),
    (
        "the process is left to itself at cleanup",
        Fault::ForgetsTheProcess,
        &["SP03"],
    ),
    (
        "a start without a limit, since models take long",
        Fault::WaitsForEver,
        &["SP05"],
    ),
    (
        "standard error that goes nowhere",
        Fault::ThrowsStderrAway,
        &["SP06"],
    ),
    (
        "every failure of a start is the engine's own",
        Fault::CallsAllInternal,
        &["SP05", "SP07", "SP08"],
    ),
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    EndsAsComplete,
    KeepsDeathToItself,
    ForgetsTheProcess,
    WaitsForEver,
    ThrowsStderrAway,
    CallsAllInternal,
}

fn process(fault: &str) -> SubprocessConfig {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/children/faulty.py");
    let mut config = support::program(&script).with_args([fault]);
    // Less than the checks wait for `cleanup` at any scale: a process that does not exit is killed in time for them.
    config.exit_timeout = Duration::from_secs(1);
    config
}

/// The ids of the checks of SP that `subject` fails.
fn caught(subject: impl Fn(&Scenario) -> Subject + Send + Sync + 'static) -> BTreeSet<String> {
    let options = Options {
        only: vec!["SP".into()],
        level: Level::Soak,
        ..Options::default()
    };
    let report = run_conformance_with(subject, &options);
    // The rules of streams are left out: their own matrix shows what they catch.
    let of_group = report
        .failures()
        .filter(|check| check.profile == Profile::Subprocess);
    of_group.map(|check| check.id.clone()).collect()
}

fn listed(ids: &[&str]) -> BTreeSet<String> {
    ids.iter().map(ToString::to_string).collect()
}

#[test]
fn a_good_process_under_a_good_supervisor_passes() {
    let options = Options {
        only: vec!["SP".into()],
        level: Level::Soak,
        ..Options::default()
    };
    let report = run_conformance_with(
        |_: &Scenario| SupervisedProcess::new(process("none")).subject(),
        &options,
    );
    report.assert_conformant();
    let is_skipped = |check: &&CheckReport| {
        check.profile == Profile::Subprocess && check.verdict != Verdict::Pass
    };
    let skipped: Vec<_> = report.checks.iter().filter(is_skipped).collect();
    assert!(skipped.is_empty(), "{skipped:?}");
}

#[test]
fn a_good_process_of_one_seat_passes() {
    let options = Options {
        only: vec!["SP01".into(), "SP11".into(), "SP12".into()],
        ..Options::default()
    };
    run_conformance_with(
        |_: &Scenario| SupervisedProcess::new(process("one_seat")).subject(),
        &options,
    )
    .assert_conformant();
}

#[test]
fn a_process_that_ends_before_it_has_started_is_quoted() {
    let options = Options {
        only: vec!["SP02".into()],
        ..Options::default()
    };
    let report = run_conformance_with(
        |_: &Scenario| SupervisedProcess::new(process("needs_a_leash")).subject(),
        &options,
    );
    let seen: Vec<_> = report.failures().map(|check| &check.verdict).collect();
    let [Verdict::Fail { reason }] = seen[..] else {
        panic!("{seen:?}");
    };
    assert!(reason.contains("GENSET_ENGINE_LEASH_FD"), "{reason}");
}

/// Its answers may be over before the kit kills it or cancels them.
#[test]
fn a_good_process_with_a_small_context_passes_however_fast_it_is() {
    let options = Options {
        only: ["SP01", "SP10", "SP11", "SP12", "SP14"]
            .map(String::from)
            .to_vec(),
        ..Options::default()
    };
    run_conformance_with(
        |_: &Scenario| SupervisedProcess::new(process("swift")).subject(),
        &options,
    )
    .assert_conformant();
}

/// Runs several at once, since most of the time is spent waiting.
fn all_wrong<T: Sync>(faults: &[T], wrong: impl Fn(&T) -> Option<String> + Sync) -> Vec<String> {
    let places = std::sync::atomic::AtomicUsize::new(0);
    let run = || {
        let mut found = Vec::new();
        loop {
            let place = places.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let Some(fault) = faults.get(place) else {
                return found;
            };
            found.extend(wrong(fault));
        }
    };
    std::thread::scope(|scope| {
        let runs: Vec<_> = (0..4).map(|_| scope.spawn(run)).collect();
        runs.into_iter()
            .flat_map(|run| run.join().unwrap())
            .collect()
    })
}

#[test]
fn each_faulty_process_is_caught_by_exactly_its_checks() {
    let wrong = all_wrong(PROCESSES, |(fault, _, ids)| {
        let caught = caught(|_: &Scenario| SupervisedProcess::new(process(fault)).subject());
        (caught != listed(ids)).then(|| format!("{fault}: listed {ids:?}, caught by {caught:?}"))
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn each_faulty_supervisor_is_caught_by_exactly_its_checks() {
    let wrong = all_wrong(SUPERVISORS, |(what, fault, ids)| {
        let fault = *fault;
        let caught = caught(move |_: &Scenario| faulty_supervisor(fault));
        (caught != listed(ids)).then(|| format!("{what}: listed {ids:?}, caught by {caught:?}"))
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn every_check_of_the_group_catches_a_fault() {
    let processes = PROCESSES.iter().flat_map(|(_, _, ids)| ids.iter());
    let supervisors = SUPERVISORS.iter().flat_map(|(_, _, ids)| ids.iter());
    let killers: BTreeSet<&str> = processes.chain(supervisors).copied().collect();
    let group: BTreeSet<&str> = catalogue()
        .filter(|check| check.profile == Profile::Subprocess)
        .map(|check| check.id)
        .collect();
    assert_eq!(killers, group);
}

fn faulty_supervisor(fault: Fault) -> Subject {
    let supervised = SupervisedProcess::new(process("none"));
    let faulty = FaultySupervisor(supervised.clone(), fault);
    supervised.subject().with_process(Arc::new(faulty))
}

/// The good supervisor with one fault.
struct FaultySupervisor(SupervisedProcess, Fault);

impl Supervise for FaultySupervisor {
    fn command(&self) -> ChildCommand {
        self.0.command()
    }

    fn supervise(&self, command: ChildCommand, patience: Duration) -> Arc<dyn LLMEngine> {
        let mut config = self.0.config_for(command, patience);
        match self.1 {
            Fault::WaitsForEver => {
                config.hello_timeout = Duration::from_secs(3600);
                config.start_timeout = Duration::from_secs(3600);
            }
            Fault::ThrowsStderrAway => config.stderr_lines = 0,
            Fault::EndsAsComplete
            | Fault::KeepsDeathToItself
            | Fault::ForgetsTheProcess
            | Fault::CallsAllInternal => {}
        }
        Arc::new(Faulty {
            inner: Arc::new(SubprocessEngine::new(config)),
            fault: self.1,
        })
    }
}

struct Faulty {
    inner: Arc<SubprocessEngine>,
    fault: Fault,
}

#[async_trait]
impl LLMEngine for Faulty {
    async fn start(&self, mut ctx: StartContext) -> Result<EngineConfig, EngineError> {
        if self.fault == Fault::KeepsDeathToItself {
            ctx.health = StartContext::detached(1).health;
        }
        let started = self.inner.start(ctx).await;
        if self.fault != Fault::CallsAllInternal {
            return started;
        }
        started.map_err(|error| EngineError::new(ErrorKind::Internal, error.message().to_owned()))
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let outputs = self.inner.generate(request, ctx).await?;
        if self.fault != Fault::EndsAsComplete {
            return Ok(outputs);
        }
        let complete = outputs.map(|item| {
            item.or_else(|_| {
                Ok(Output::Finished(Box::new(
                    Finish::length().into_finished(0, 0),
                )))
            })
        });
        Ok(OutputStream::from_raw(Box::pin(complete)))
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        if self.fault == Fault::ForgetsTheProcess {
            std::mem::forget(Arc::clone(&self.inner));
            return Ok(());
        }
        self.inner.cleanup().await
    }
}
