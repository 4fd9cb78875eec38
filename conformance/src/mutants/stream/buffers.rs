//! Faults in the buffering of tokens: without a limit, and for batching.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::{StreamExt, stream};
use genset_backend_common::{GenerateRequest, Output, OutputStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Duration, Instant, timeout_at};

use crate::mutants::Clean;
use crate::mutants::fault::{Call, Fault, raw, with_fault};
use crate::subject::{Probe, Scenario, Subject};

/// Room for more tokens than any answer has.
const NO_BOUND: usize = 1 << 24;

/// An engine that queues its tokens at its own speed, and reports their number.
pub(super) fn unbounded(clean: &Clean, scenario: &Scenario) -> Subject {
    let produced = Arc::new(Produced::default());
    let fault = Unbounded {
        produced: Arc::clone(&produced),
    };
    with_fault(clean, scenario, fault).with_probe(produced)
}

#[derive(Default)]
struct Produced(AtomicU64);

impl Probe for Produced {
    fn produced_tokens(&self) -> Option<u64> {
        Some(self.0.load(Ordering::Relaxed))
    }
}

struct Unbounded {
    produced: Arc<Produced>,
}

impl Fault for Unbounded {
    fn answer(&self, _call: &Call, mut outputs: OutputStream) -> OutputStream {
        let (queue, queued) = mpsc::channel(NO_BOUND);
        let produced = Arc::clone(&self.produced);
        let mut pump = JoinSet::new();
        pump.spawn(async move {
            while let Some(item) = outputs.next().await {
                let tokens = item.as_ref().map_or(0, Output::token_count);
                produced.0.fetch_add(u64::from(tokens), Ordering::Relaxed);
                if queue.send(item).await.is_err() {
                    return;
                }
            }
        });
        raw(stream::unfold(
            (queued, pump),
            |(mut queued, pump)| async move { queued.recv().await.map(|item| (item, (queued, pump))) },
        ))
    }
}

/// How long tokens wait to be batched.
const BATCH: Duration = Duration::from_millis(50);

/// The length of an answer for which batching events pays.
const LONG: u32 = 32;

pub(super) fn batch(request: &GenerateRequest, outputs: OutputStream) -> OutputStream {
    if request
        .stop
        .max_tokens
        .is_some_and(|max_tokens| max_tokens < LONG)
    {
        return outputs;
    }
    raw(stream::unfold(
        (outputs, None),
        |(mut outputs, waiting)| async move {
            let first = match waiting {
                Some(item) => item,
                None => outputs.next().await?,
            };
            let Ok(Output::Tokens(mut chunk)) = first else {
                return Some((first, (outputs, None)));
            };
            let until = Instant::now() + BATCH;
            let mut waiting = None;
            while let Ok(Some(item)) = timeout_at(until, outputs.next()).await {
                match item {
                    Ok(Output::Tokens(more)) => chunk.token_ids.extend(more.token_ids),
                    other => {
                        waiting = Some(other);
                        break;
                    }
                }
            }
            Some((Ok(Output::Tokens(chunk)), (outputs, waiting)))
        },
    ))
}
