//! Threads that all run one function at the same time.

#![expect(
    unsafe_code,
    reason = "workers run a function that lives on the caller's stack"
)]

use std::any::Any;
use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;

use parking_lot::Mutex;

/// Spins before a worker sleeps: some hundred microseconds, longer than the gaps within a step.
const SPINS: u32 = 10_000;

type Job<'a> = &'a (dyn Fn() + Sync);

/// The threads; they live as long as the process.
#[derive(Debug)]
pub(super) struct Pool {
    shared: Arc<Shared>,
    /// Held by the caller whose job runs; other callers run their jobs alone meanwhile.
    caller: Mutex<()>,
}

#[derive(Debug)]
struct Shared {
    gate: Gate,
    job: JobCell,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    workers: OnceLock<Vec<Thread>>,
}

/// Admits workers to the current job while there is work. The caller shuts it when its own part is done, and waits only for
/// workers inside. It does not wait for a worker that the system did not schedule in time, so on a loaded machine a job takes
/// only the time of its own work.
#[derive(Debug)]
struct Gate {
    /// The number of jobs so far, whether the last is open, and the number of workers inside.
    state: AtomicUsize,
}

/// One worker inside.
const ONE_INSIDE: usize = 1;
/// The bits of the number of workers inside, far more than needed.
const INSIDE: usize = (1 << 15) - 1;
/// The current job may be entered.
const OPEN: usize = 1 << 15;
/// One more job.
const ONE_JOB: usize = 1 << 16;

impl Gate {
    fn new() -> Self {
        Self {
            state: AtomicUsize::new(0),
        }
    }

    /// The number of the last job.
    fn job(&self) -> usize {
        self.state.load(Ordering::Acquire) / ONE_JOB
    }

    /// Opens for the next job. The gate must be empty, with a single caller.
    fn open(&self) {
        let next = self.state.load(Ordering::Relaxed).wrapping_add(ONE_JOB) | OPEN;
        self.state.store(next, Ordering::Release);
    }

    /// Enters `job`; returns `false` if it is over.
    fn enter(&self, job: usize) -> bool {
        let enter = |state: usize| {
            let may_enter = state / ONE_JOB == job && state & OPEN != 0;
            may_enter.then_some(state + ONE_INSIDE)
        };
        self.state
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, enter)
            .is_ok()
    }

    fn leave(&self) {
        self.state.fetch_sub(ONE_INSIDE, Ordering::Release);
    }

    /// Shuts the gate and waits for those inside.
    fn shut(&self) {
        self.state.fetch_and(!OPEN, Ordering::Relaxed);
        let mut spins = 0;
        while self.state.load(Ordering::Acquire) & INSIDE > 0 {
            // On a single processor, a worker that was not scheduled must get the processor.
            spins += 1;
            if spins < SPINS {
                spin_loop()
            } else {
                std::thread::yield_now()
            }
        }
    }
}

/// The current job.
struct JobCell(UnsafeCell<Job<'static>>);

// SAFETY: the caller writes it while the gate is empty, and opens the gate afterwards (release). Workers read it after they
// entered (acquire) and before they leave (release), and the caller waits for that (acquire).
unsafe impl Sync for JobCell {}

impl std::fmt::Debug for JobCell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JobCell")
    }
}

impl Pool {
    /// Starts `workers` threads, or fewer if the system has no more.
    pub(super) fn new(workers: usize) -> Self {
        let shared = Arc::new(Shared {
            gate: Gate::new(),
            job: JobCell(UnsafeCell::new(&|| ())),
            panic: Mutex::new(None),
            workers: OnceLock::new(),
        });
        let threads = (0..workers)
            .map_while(|index| {
                let shared = Arc::clone(&shared);
                let builder = std::thread::Builder::new().name(format!("genset-compute-{index}"));
                builder.spawn(move || shared.work()).ok()
            })
            .map(|handle| handle.thread().clone())
            .collect();
        shared.workers.get_or_init(|| threads);
        Self {
            shared,
            caller: Mutex::new(()),
        }
    }

    pub(super) fn num_workers(&self) -> usize {
        self.shared.threads().len()
    }

    /// Runs `job` on this thread and on the workers that join before this thread's part is done; returns when all of them are done.
    /// So a job must hand out its work in pieces, and end when no piece is left. If the workers are busy with another job, or with
    /// the one that makes this call, the job runs on this thread alone.
    ///
    /// # Panics
    /// If `job` panics on any thread.
    pub(super) fn run(&self, job: Job<'_>) {
        let Some(_caller) = self.caller.try_lock() else {
            return job();
        };
        // A panic left over from a caller that was unwinding itself.
        *self.shared.panic.lock() = None;
        // SAFETY: only the lifetime changes. `Shut` below keeps this function from ending, also by a panic, before every worker
        // inside has finished the job, and no other may enter.
        let job: Job<'static> = unsafe { std::mem::transmute::<Job<'_>, Job<'static>>(job) };
        // SAFETY: the lock is held, and the gate is shut and empty, so nobody else reads or writes.
        unsafe { *self.shared.job.0.get() = job };
        self.shared.gate.open();
        let shut = Shut(&self.shared.gate);
        self.shared.threads().iter().for_each(Thread::unpark);
        job();
        drop(shut);
        if let Some(payload) = self.shared.panic.lock().take() {
            resume_unwind(payload);
        }
    }
}

/// Ends the job when dropped.
struct Shut<'a>(&'a Gate);

impl Drop for Shut<'_> {
    fn drop(&mut self) {
        self.0.shut();
    }
}

impl Shared {
    fn threads(&self) -> &[Thread] {
        self.workers.get().map_or(&[], Vec::as_slice)
    }

    /// The loop of a worker.
    fn work(&self) {
        let mut seen = 0;
        loop {
            seen = self.next_job(seen);
            if !self.gate.enter(seen) {
                continue;
            }
            // SAFETY: see `JobCell`.
            let job = unsafe { *self.job.0.get() };
            if let Err(payload) = catch_unwind(AssertUnwindSafe(job)) {
                *self.panic.lock() = Some(payload);
            }
            self.gate.leave();
        }
    }

    /// Waits for another job than `seen`.
    fn next_job(&self, seen: usize) -> usize {
        let mut spins = 0;
        loop {
            let job = self.gate.job();
            if job != seen {
                return job;
            }
            spins += 1;
            if spins < SPINS {
                spin_loop();
            } else {
                std::thread::park();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits inside a job until `count` threads have joined it.
    fn meet(calls: &AtomicUsize, count: usize) {
        calls.fetch_add(1, Ordering::Relaxed);
        while calls.load(Ordering::Relaxed) < count {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_thread_runs_a_job_once_and_every_thread_may_come() {
        let pool = Pool::new(3);
        for _ in 0..200 {
            let calls = AtomicUsize::new(0);
            pool.run(&|| meet(&calls, 4));
            assert_eq!(calls.load(Ordering::Relaxed), 4);
        }
    }

    #[test]
    fn a_worker_that_comes_late_is_not_let_in() {
        let pool = Pool::new(0);
        // As on a loaded machine: the worker comes when the caller is done.
        let gate = &pool.shared.gate;
        gate.open();
        let late = gate.job();
        gate.shut();
        assert!(!gate.enter(late), "the job is over");
        gate.open();
        assert!(!gate.enter(late), "this is another job");
        assert!(gate.enter(gate.job()), "this one is open");
        gate.leave();
        gate.shut();
    }

    #[test]
    fn pieces_are_done_once_whoever_comes() {
        let pool = Pool::new(3);
        for _ in 0..200 {
            let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
            pool.run(&|| {
                while next.fetch_add(1, Ordering::Relaxed) < 64 {
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
            assert_eq!(done.load(Ordering::Relaxed), 64);
        }
    }

    #[test]
    fn a_job_in_a_job_runs_alone() {
        let pool = Pool::new(2);
        let calls = AtomicUsize::new(0);
        pool.run(&|| pool.run(&|| meet(&calls, 3)));
        assert_eq!(calls.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives() {
        let pool = Pool::new(2);
        let (turn, all) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let one_panics = || {
            meet(&all, 3);
            assert!(turn.fetch_add(1, Ordering::Relaxed) != 1, "the second");
        };
        assert!(catch_unwind(AssertUnwindSafe(|| pool.run(&one_panics))).is_err());
        let calls = AtomicUsize::new(0);
        pool.run(&|| meet(&calls, 3));
        assert_eq!(calls.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn no_workers_is_no_trouble() {
        let pool = Pool::new(0);
        let calls = AtomicUsize::new(0);
        pool.run(&|| _ = calls.fetch_add(1, Ordering::Relaxed));
        assert_eq!(calls.load(Ordering::Relaxed), 1);
    }
}
