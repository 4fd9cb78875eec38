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

/// Turns of the waiting loop before a worker sleeps: some hundred microseconds, longer than the gaps within a step.
const SPINS: u32 = 10_000;

type Job<'a> = &'a (dyn Fn() + Sync);

/// The threads; they live as long as the process.
#[derive(Debug)]
pub(super) struct Pool {
    shared: Arc<Shared>,
    /// Held by the caller whose job runs; others run theirs alone meanwhile.
    caller: Mutex<()>,
}

#[derive(Debug)]
struct Shared {
    /// Jobs given so far.
    generation: AtomicUsize,
    /// Workers that have not finished the job.
    running: AtomicUsize,
    job: JobCell,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    workers: OnceLock<Vec<Thread>>,
}

/// The job of this generation.
struct JobCell(UnsafeCell<Job<'static>>);

// SAFETY: the caller writes it while no worker runs, and raises `generation` (release) afterwards; workers read it after
// they have seen that (acquire), and before they lower `running` (release), on which the caller waits (acquire).
unsafe impl Sync for JobCell {}

impl std::fmt::Debug for JobCell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JobCell")
    }
}

impl Pool {
    /// Starts `workers` threads; fewer when the system gives no more.
    pub(super) fn new(workers: usize) -> Self {
        let shared = Arc::new(Shared {
            generation: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
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

    /// Runs `job` on this thread and all workers, and returns when all are done. When the workers are busy with
    /// another's job, or with the one that calls this, it runs on this thread alone; so it must not rely on the number.
    ///
    /// # Panics
    /// If `job` does, on any thread.
    pub(super) fn run(&self, job: Job<'_>) {
        let Some(_caller) = self.caller.try_lock() else {
            return job();
        };
        let threads = self.shared.threads();
        // One that came while the caller of then was unwinding itself.
        *self.shared.panic.lock() = None;
        // SAFETY: only the lifetime changes; `Finish` below does not let this function end, not even by a panic, before
        // every worker has finished the job.
        let job: Job<'static> = unsafe { std::mem::transmute::<Job<'_>, Job<'static>>(job) };
        // SAFETY: the lock is held and `running` is 0, so nobody else reads or writes.
        unsafe { *self.shared.job.0.get() = job };
        self.shared.running.store(threads.len(), Ordering::Relaxed);
        self.shared.generation.fetch_add(1, Ordering::Release);
        let finish = Finish(&self.shared);
        threads.iter().for_each(Thread::unpark);
        job();
        drop(finish);
        if let Some(payload) = self.shared.panic.lock().take() {
            resume_unwind(payload);
        }
    }
}

/// Waits for the workers when dropped.
struct Finish<'a>(&'a Shared);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        let mut spins = 0;
        while self.0.running.load(Ordering::Acquire) > 0 {
            // A worker that the system has not let run must get the processor, if there is only this one.
            spins += 1;
            if spins < SPINS {
                spin_loop()
            } else {
                std::thread::yield_now()
            }
        }
    }
}

impl Shared {
    fn threads(&self) -> &[Thread] {
        self.workers.get().map_or(&[], Vec::as_slice)
    }

    /// A worker's life.
    fn work(&self) {
        let mut seen = 0;
        loop {
            seen = self.next_generation(seen);
            // SAFETY: see `JobCell`.
            let job = unsafe { *self.job.0.get() };
            if let Err(payload) = catch_unwind(AssertUnwindSafe(job)) {
                *self.panic.lock() = Some(payload);
            }
            self.running.fetch_sub(1, Ordering::Release);
        }
    }

    /// Waits until there is another job than `seen`.
    fn next_generation(&self, seen: usize) -> usize {
        let mut spins = 0;
        loop {
            let generation = self.generation.load(Ordering::Acquire);
            if generation != seen {
                return generation;
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

    #[test]
    fn every_thread_runs_every_job() {
        let pool = Pool::new(3);
        let calls = AtomicUsize::new(0);
        for job in 1..=200 {
            pool.run(&|| _ = calls.fetch_add(1, Ordering::Relaxed));
            assert_eq!(calls.load(Ordering::Relaxed), 4 * job);
        }
    }

    #[test]
    fn a_job_in_a_job_runs_alone() {
        let pool = Pool::new(2);
        let calls = AtomicUsize::new(0);
        pool.run(&|| pool.run(&|| _ = calls.fetch_add(1, Ordering::Relaxed)));
        assert_eq!(calls.load(Ordering::Relaxed), 3);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives() {
        let pool = Pool::new(2);
        let turn = AtomicUsize::new(0);
        let one_panics = || assert!(turn.fetch_add(1, Ordering::Relaxed) != 1, "the second");
        assert!(catch_unwind(AssertUnwindSafe(|| pool.run(&one_panics))).is_err());
        let calls = AtomicUsize::new(0);
        pool.run(&|| _ = calls.fetch_add(1, Ordering::Relaxed));
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
