//! Faults that the checks of ST catch.

mod buffers;

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ThreadId;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use genset_backend_common::output::{Finish, TokenChunk};
use genset_backend_common::{
    EngineError, FinishReason, GenerateRequest, Output, OutputStream, async_trait,
};
use parking_lot::Mutex;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::time::Instant;

use super::Mutant;
use super::fault::{Call, Fault, Inner, raw, with_fault};

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "silent-on-a-whole-chunk",
        stands_for: "a prompt as long as a chunk of prefill leaves no token for the step that samples, and none comes",
        killed_by: &["ST01", "MG06"],
        build: |clean, scenario| with_fault(clean, scenario, Streamed(silent_on_a_whole_chunk)),
    },
    Mutant {
        name: "stop-and-length",
        stands_for: "two conditions met by one token, each of which reports the finish",
        killed_by: &["ST02"],
        build: |clean, scenario| with_fault(clean, scenario, Streamed(stop_and_length)),
    },
    Mutant {
        name: "token-after-terminal",
        stands_for: "a scheduler that flushes its last token after it reported the finish",
        killed_by: &["CN07", "CN12", "ST02", "ST03", "ST05"],
        build: |clean, scenario| with_fault(clean, scenario, Streamed(token_after_terminal)),
    },
    Mutant {
        name: "long-answers-lose-their-end",
        stands_for: "a terminal sent with try_send into a queue that the answer has filled",
        killed_by: &["FN14", "ST04", "US08"],
        build: |clean, scenario| with_fault(clean, scenario, Streamed(lose_the_end)),
    },
    Mutant {
        name: "tokens-after-error",
        stands_for: "a decode loop that reports its error and takes the next step all the same",
        killed_by: &["ST05"],
        build: |clean, scenario| with_fault(clean, scenario, TokensAfterError::default()),
    },
    Mutant {
        name: "padded-vocabulary",
        stands_for: "an embedding table padded to a round size, whose padding rows are sampled too",
        killed_by: &["RD01", "ST06"],
        build: |clean, scenario| with_fault(clean, scenario, PaddedVocabulary),
    },
    Mutant {
        name: "siblings-collide",
        stands_for: "requests kept by the client's id, so that the sequences of n > 1 take each other's place",
        killed_by: &["ST07"],
        build: |clean, scenario| with_fault(clean, scenario, SiblingsCollide::default()),
    },
    Mutant {
        name: "lossy-buffer",
        stands_for: "a ring buffer that overwrites what a slow client has not read",
        killed_by: &["RD02", "ST08"],
        build: |clean, scenario| with_fault(clean, scenario, Streamed(lose_while_stalled)),
    },
    Mutant {
        name: "unbounded-buffer",
        stands_for: "an unbounded queue to each client, filled at the speed of the engine",
        killed_by: &["ST09"],
        build: buffers::unbounded,
    },
    Mutant {
        name: "empty-chunks",
        stands_for: "an event for each step of the scheduler, whether or not it brought a token",
        killed_by: &["ST10"],
        build: |clean, scenario| with_fault(clean, scenario, Streamed(empty_chunk_before_end)),
    },
    Mutant {
        name: "bound-to-its-thread",
        stands_for: "a stream that holds an interpreter lock or thread-local state of the thread it was made on",
        killed_by: &["ST11"],
        build: |clean, scenario| with_fault(clean, scenario, Streamed(bind_to_thread)),
    },
    Mutant {
        name: "batches-output",
        stands_for: "the tokens of a long answer sent every 50 ms to save events, the first ones too",
        killed_by: &["ST12"],
        build: |clean, scenario| with_fault(clean, scenario, Streamed(buffers::batch)),
    },
];

/// A fault in the stream of a request.
struct Streamed(fn(&GenerateRequest, OutputStream) -> OutputStream);

impl Fault for Streamed {
    fn answer(&self, call: &Call, outputs: OutputStream) -> OutputStream {
        self.0(&call.request, outputs)
    }
}

/// The number of prompt tokens per step of the engine of [`silent_on_a_whole_chunk`].
const PREFILL_CHUNK: u32 = 40;

fn silent_on_a_whole_chunk(request: &GenerateRequest, outputs: OutputStream) -> OutputStream {
    if request.prompt_tokens() == Some(PREFILL_CHUNK) {
        return raw(stream::empty());
    }
    outputs
}

fn token_after_terminal(_: &GenerateRequest, outputs: OutputStream) -> OutputStream {
    raw(outputs.chain(stream::iter([Ok(Output::from(0))])))
}

fn stop_and_length(request: &GenerateRequest, outputs: OutputStream) -> OutputStream {
    let max_tokens = request.stop.max_tokens;
    raw(outputs.flat_map(move |item| {
        let mut items = vec![item];
        if let [Ok(Output::Finished(finished))] = items.as_slice()
            && finished.reason == FinishReason::Stop
            && Some(finished.usage.completion_tokens + 1) == max_tokens
        {
            let usage = finished.usage;
            let twice =
                Finish::length().into_finished(usage.prompt_tokens, usage.completion_tokens);
            items.push(Ok(Output::Finished(Box::new(twice))));
        }
        stream::iter(items)
    }))
}

/// The capacity of the queue of the engine of [`lose_the_end`], in items.
const QUEUE: u32 = 64;

fn lose_the_end(_: &GenerateRequest, outputs: OutputStream) -> OutputStream {
    raw(outputs.filter(|item| {
        let is_lost = matches!(item, Ok(Output::Finished(finished))
            if finished.reason == FinishReason::Length && finished.usage.completion_tokens > QUEUE);
        std::future::ready(!is_lost)
    }))
}

fn empty_chunk_before_end(_: &GenerateRequest, outputs: OutputStream) -> OutputStream {
    raw(outputs.flat_map(|item| {
        let is_end = matches!(&item, Ok(output) if output.is_terminal());
        let empty = is_end.then(|| Ok(Output::Tokens(TokenChunk::default())));
        stream::iter(empty.into_iter().chain([item]))
    }))
}

/// How long a reader may take before the buffer of [`lose_while_stalled`] wraps around.
const PATIENCE: Duration = Duration::from_secs(1);

fn lose_while_stalled(_: &GenerateRequest, outputs: OutputStream) -> OutputStream {
    raw(stream::unfold(
        (outputs, None),
        |(mut outputs, last_read)| async move {
            if last_read.is_some_and(|at: Instant| at.elapsed() > PATIENCE) {
                let _overwritten = outputs.next().await;
            }
            let item = outputs.next().await?;
            Some((item, (outputs, Some(Instant::now()))))
        },
    ))
}

fn bind_to_thread(_: &GenerateRequest, outputs: OutputStream) -> OutputStream {
    let home = Home::here();
    raw(outputs.inspect(move |_| {
        let _kept_with_the_stream = &home;
    }))
}

/// The thread on which a stream was made. Engines with this fault pin streams only on a current-thread runtime.
struct Home(Option<ThreadId>);

impl Home {
    fn here() -> Self {
        let is_single = Handle::try_current()
            .is_ok_and(|runtime| runtime.runtime_flavor() == RuntimeFlavor::CurrentThread);
        Self(is_single.then(|| std::thread::current().id()))
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let is_away = self
            .0
            .is_some_and(|home| home != std::thread::current().id());
        assert!(
            !is_away || std::thread::panicking(),
            "a stream was dropped on another thread"
        );
    }
}

#[derive(Default)]
struct TokensAfterError {
    is_gone: Arc<AtomicBool>,
}

#[async_trait]
impl Fault for TokensAfterError {
    fn answer(&self, _call: &Call, outputs: OutputStream) -> OutputStream {
        let is_gone = Arc::clone(&self.is_gone);
        raw(outputs.flat_map(move |item| {
            let error = is_gone
                .load(Ordering::Relaxed)
                .then(|| Err(EngineError::engine_shutdown("the engine has stopped")));
            stream::iter(error.into_iter().chain([item]))
        }))
    }

    async fn cleanup(&self, inner: &Inner) -> Result<(), EngineError> {
        self.is_gone.store(true, Ordering::Relaxed);
        inner.cleanup().await
    }
}

struct PaddedVocabulary;

impl Fault for PaddedVocabulary {
    fn answer(&self, call: &Call, outputs: OutputStream) -> OutputStream {
        let vocab_size = call.config.as_ref().and_then(|config| config.vocab_size);
        let vocab_size = vocab_size.map_or(0, NonZeroU32::get);
        raw(outputs.enumerate().map(move |(place, item)| match item {
            Ok(output) if place == 0 && output == Output::from(0) => Ok(Output::from(vocab_size)),
            item => item,
        }))
    }
}

#[derive(Default)]
struct SiblingsCollide {
    clients: Mutex<Vec<String>>,
}

impl Fault for SiblingsCollide {
    fn ask(&self, call: &mut Call) -> Result<(), EngineError> {
        if let Some(client) = client_of(call.ctx.id()) {
            let mut clients = self.clients.lock();
            match clients.iter().any(|known| known == client) {
                true => call.request.stop.max_tokens = Some(1),
                false => clients.push(client.to_owned()),
            }
        }
        Ok(())
    }
}

/// The common part of the ids of one client's sequences: a number, followed by theirs.
fn client_of(id: &str) -> Option<&str> {
    let (client, index) = id.rsplit_once('-')?;
    let (_, number) = client.rsplit_once('-')?;
    let are_numbers = number.parse::<u32>().is_ok() && index.parse::<u32>().is_ok();
    are_numbers.then_some(client)
}
