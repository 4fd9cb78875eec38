//! The task that serves one request of a slotted engine.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::StreamExt;
use genset_backend_common::output::{Finished, TokenSink};
use genset_backend_common::{EngineError, Output, OutputStream};
use tokio::sync::{oneshot, watch};

use super::slots::Slot;
use super::{Counters, SlotFault};
use crate::mutants::fault::finish_of;

pub(super) struct Job {
    pub outputs: OutputStream,
    pub sink: TokenSink,
    pub slot: oneshot::Receiver<Slot>,
    pub stop: watch::Receiver<bool>,
    pub counters: Arc<Counters>,
    pub fault: SlotFault,
    /// Whether the prompt takes a while.
    pub is_long: bool,
    /// Whether its first token belongs to another request.
    pub finds_row: bool,
}

/// How a request ended.
enum End {
    Finished(Box<Finished>),
    Failed(EngineError),
    /// Cancelled, or its stream dropped.
    Unwanted,
}

pub(super) async fn serve(mut job: Job) {
    let counters = Arc::clone(&job.counters);
    let active = Counted::new(&counters, |counters| &counters.active);
    let end = tokio::select! {
        biased;
        _ = stopped(job.stop.clone()) => {
            if job.fault == SlotFault::ForgetsWaiters && waits(&mut job.slot) {
                std::mem::forget(job);
                return;
            }
            End::Failed(shutdown())
        }
        end = queue_and_run(&mut job) => end,
    };
    match end {
        End::Finished(finished) => job.sink.finish(finish_of(*finished)),
        End::Failed(error) => job.sink.fail(error),
        End::Unwanted => {
            let before = counters.unwanted.fetch_add(1, Ordering::Relaxed);
            let lingers = job.fault == SlotFault::LeaksTaskOnCancel
                || (job.fault == SlotFault::LeaksTaskOnSixthCancel && before.is_multiple_of(6));
            let stop = job.stop.clone();
            drop((job, active));
            if lingers {
                stopped(stop).await;
            }
        }
    }
}

/// Whether a request has not received its slot yet.
fn waits(slot: &mut oneshot::Receiver<Slot>) -> bool {
    match slot.try_recv() {
        Ok(slot) => {
            // The next in the queue must not receive it now.
            std::mem::forget(slot);
            false
        }
        Err(error) => error == oneshot::error::TryRecvError::Empty,
    }
}

async fn queue_and_run(job: &mut Job) -> End {
    let is_deaf = job.fault == SlotFault::DeafInQueue;
    let slot = tokio::select! {
        biased;
        () = job.sink.closed(), if !is_deaf => return End::Unwanted,
        slot = &mut job.slot => slot,
    };
    let counters = Arc::clone(&job.counters);
    let kv = Counted::new(&counters, |counters| &counters.kv_used);
    let is_deaf = is_deaf && job.sink.context().is_cancelled();
    let computes_on = is_deaf || job.fault == SlotFault::ComputesOnAfterCancel;
    let mut computed = 0;
    let end = run(job, computes_on, &mut computed).await;
    let is_dropped = matches!(end, End::Unwanted) && !job.sink.context().is_cancelled();
    let is_prefilling = job.is_long && computed < 2;
    if is_dropped && is_prefilling && job.fault == SlotFault::KeepsSlotInPrefill {
        std::mem::forget(slot);
        return end;
    }
    if is_dropped && job.fault == SlotFault::KeepsSlotOnDrop {
        std::mem::forget(slot);
    }
    if is_dropped && job.fault == SlotFault::KeepsKvOnDrop {
        std::mem::forget(kv);
    }
    end
}

/// Passes tokens on until the answer ends or is no longer wanted.
async fn run(job: &mut Job, computes_on: bool, computed: &mut u64) -> End {
    loop {
        let item = tokio::select! {
            biased;
            () = unwanted(&job.sink, computes_on) => return End::Unwanted,
            item = job.outputs.next() => item,
        };
        let mut chunk = match item {
            Some(Ok(Output::Tokens(chunk))) => chunk,
            Some(Ok(Output::Finished(finished))) => return End::Finished(finished),
            Some(Err(error)) => return End::Failed(error),
            Some(Ok(other)) => {
                return End::Failed(EngineError::internal(format!("cannot pass on {other:?}")));
            }
            None => return End::Unwanted,
        };
        if std::mem::take(&mut job.finds_row) {
            chunk.token_ids.iter_mut().for_each(|token| *token ^= 1);
        }
        let count = u64::from(chunk.len());
        *computed += count;
        job.counters.produced.fetch_add(count, Ordering::Relaxed);
        tokio::select! {
            biased;
            () = unwanted(&job.sink, computes_on) => return End::Unwanted,
            // If it did not arrive, the next iteration notices that nobody reads.
            _ = job.sink.send(chunk) => {}
        }
    }
}

/// Waits until the rest of the answer is no longer wanted.
async fn unwanted(sink: &TokenSink, computes_on: bool) {
    sink.closed().await;
    if computes_on && sink.context().is_cancelled() {
        std::future::pending::<()>().await;
    }
}

async fn stopped(mut stop: watch::Receiver<bool>) {
    // The sender lives as long as the engine; without it there is nothing to serve.
    drop(stop.wait_for(|is_stopped| *is_stopped).await);
}

fn shutdown() -> EngineError {
    EngineError::engine_shutdown("the engine was stopped while it served the request")
}

/// Increments a counter while it lives.
struct Counted {
    counters: Arc<Counters>,
    which: fn(&Counters) -> &AtomicU64,
}

impl Counted {
    fn new(counters: &Arc<Counters>, which: fn(&Counters) -> &AtomicU64) -> Self {
        which(counters).fetch_add(1, Ordering::Relaxed);
        counters.tell();
        Self {
            counters: Arc::clone(counters),
            which,
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        (self.which)(&self.counters).fetch_sub(1, Ordering::Relaxed);
        self.counters.tell();
    }
}
