//! [`Graphs`]: steps of decode rows as CUDA graphs. Such a step is hundreds of short kernels. For a small model the CPU takes
//! longer to queue them one by one than the GPU to run them. A graph is recorded once and queued with one call.
//!
//! The parts that differ between steps (tokens, positions, slots and KV blocks) are in one array of words at a fixed address,
//! which is written before the graph runs. The rest is the same for steps of one [`Shape`]: the number of rows, rounded up
//! with rows of an unused block, and the longest context, also rounded up.
//!
//! The first step of a shape runs kernel by kernel, which loads what a recording cannot; the second is recorded. A mixture of
//! experts returns to the CPU in the middle of a step and is never recorded; nor are quantized weights. If a recording is
//! disturbed, for example by another engine that opens the GPU, the step runs kernel by kernel, and a later one is recorded.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::sys::{
    CUgraphInstantiate_flags, CUstreamCaptureMode,
};
use candle_core::cuda_backend::cudarc::driver::{CudaGraph, CudaStream};
use candle_core::cuda_backend::{CudaDType, WrapErr};
use candle_core::{
    CpuStorage, CudaDevice, CudaStorage, DType, Device, InplaceOp1, Layout, Result, Tensor,
};

use super::attention::plan::{Places, Plan};
use super::batch::{Piece, StepBatch};
use super::decoder::{ForwardError, Model};
use super::gpu::{self, Recordings};
use super::kernels::narrow;
use super::kv_cache::KvCache;

/// With more rows, the GPU is busy for longer than queueing takes.
const MOST_ROWS: usize = 256;
/// The most graphs kept; the least recently used one is dropped.
const MOST_GRAPHS: usize = 64;
/// Contexts are rounded up to this or to a larger power of two.
const SHORTEST_CONTEXT: usize = 256;
/// Consecutive failures after which recording is given up.
const MOST_FAILURES: u32 = 4;
/// The initial room, in words.
const FEWEST_WORDS: usize = 1 << 16;

/// The parameters that all steps of a graph share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    rows: usize,
    longest_context: usize,
}

impl Shape {
    /// `None` for a step that no graph can serve: with prompts, adapters, or rows without wanted logits.
    fn of(batch: &StepBatch) -> Option<Self> {
        let rows = batch.tokens.len();
        let is_decode = batch.sequences.len() == rows
            && batch.adapters.is_empty()
            && batch.logit_rows.iter().copied().eq(0..narrow(rows).ok()?);
        if !is_decode || !(1..=MOST_ROWS).contains(&rows) {
            return None;
        }
        let longest = batch
            .sequences
            .iter()
            .map(|sequence| sequence.context_len)
            .max()?;
        Some(Self {
            rows: match rows {
                ..=8 => rows.next_power_of_two(),
                _ => rows.next_multiple_of(8),
            },
            longest_context: longest.next_power_of_two().max(SHORTEST_CONTEXT),
        })
    }
}

/// A recorded step.
struct Recorded {
    graph: CudaGraph,
    /// Its output, `[rows, vocab_size]`.
    logits: Tensor,
    /// The last step that used it.
    used: u64,
}

#[expect(unsafe_code, reason = "graphs are addresses to Rust")]
// SAFETY: any thread may use a graph, but only one at a time: its owner.
unsafe impl Send for Recorded {}

/// Recorded steps, and the shapes seen once.
#[derive(Default)]
pub(crate) struct Graphs {
    is_off: bool,
    /// The source of tokens and plans.
    words: Option<Tensor>,
    recorded: HashMap<Shape, Option<Recorded>>,
    steps: u64,
    /// Failed recordings since the last successful one.
    failures: u32,
}

impl Graphs {
    /// Records nothing if `is_off`.
    pub(crate) fn new(is_off: bool) -> Self {
        Self {
            is_off,
            ..Self::default()
        }
    }

    /// As [`Model::forward`], for steps that a graph can serve; `None` for others. The logits are valid until the next step
    /// begins.
    ///
    /// # Errors
    /// Those of [`Model::forward`].
    pub(crate) fn forward(
        &mut self,
        model: &Model,
        kv: &mut KvCache,
        batch: &StepBatch,
    ) -> std::result::Result<Option<Tensor>, ForwardError> {
        let shape = Shape::of(batch).filter(|_| !self.is_off && model.can_be_recorded());
        let device = kv.device_with_kernels().cloned();
        let (Some(shape), Some(Device::Cuda(device))) = (shape, device) else {
            return Ok(None);
        };
        model.check(kv, batch)?;
        let filled = filled(batch, shape.rows, kv)?;
        let Some((plan, places)) = model.plan(kv, &filled)? else {
            return Ok(None);
        };
        let words = self.write(&[filled.tokens.as_slice(), &plan].concat(), &device)?;
        // Data that operations copy to the GPU during a recording would be read again from this process's memory. This cache keeps
        // it on the GPU.
        let _cache = device.enable_cuda_graph_htod_cache();
        let step = Step {
            model,
            batch: &filled,
            words,
            places: places.for_contexts_of(shape.longest_context),
        };
        let logits = self.run(shape, &step, kv, &device)?;
        Ok(Some(logits.narrow(0, 0, batch.tokens.len())?))
    }

    /// Writes words where recorded steps read them.
    fn write(&mut self, words: &[u32], device: &CudaDevice) -> Result<Tensor> {
        let place = match self.words.take() {
            Some(place) if place.elem_count() >= words.len() => place,
            _ => {
                // Recorded graphs read the old address.
                self.recorded.clear();
                let len = words.len().next_power_of_two().max(FEWEST_WORDS);
                Tensor::zeros(len, DType::U32, &Device::Cuda(device.clone()))?
            }
        };
        place.inplace_op1(&Write(words))?;
        self.words = Some(place.clone());
        Ok(place)
    }

    fn run(
        &mut self,
        shape: Shape,
        step: &Step<'_>,
        kv: &mut KvCache,
        device: &CudaDevice,
    ) -> Result<Tensor> {
        self.steps += 1;
        match self.recorded.get_mut(&shape) {
            None => {
                self.recorded.insert(shape, None);
                return step.run(kv);
            }
            Some(Some(recorded)) => {
                recorded.used = self.steps;
                recorded.graph.launch().w()?;
                return Ok(recorded.logits.clone());
            }
            Some(None) => {}
        }
        let Some(alone) = gpu::try_recording() else {
            return step.run(kv);
        };
        let recorded = step.record(kv, device, alone);
        self.count_failures(&recorded);
        let Ok(mut recorded) = recorded else {
            return step.run(kv);
        };
        recorded.used = self.steps;
        recorded.graph.launch().w()?;
        let logits = recorded.logits.clone();
        self.make_room();
        self.recorded.insert(shape, Some(recorded));
        Ok(logits)
    }

    fn count_failures(&mut self, recorded: &Result<Recorded>) {
        let Err(error) = recorded else {
            self.failures = 0;
            return;
        };
        self.failures += 1;
        self.is_off = self.failures >= MOST_FAILURES;
        if self.is_off {
            tracing::warn!(%error, "steps cannot be recorded as CUDA graphs; their kernels are queued one by one");
        } else {
            tracing::debug!(%error, "a step could not be recorded as a CUDA graph");
        }
    }

    /// The number of steps recorded so far.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.recorded.values().flatten().count()
    }

    fn make_room(&mut self) {
        let graphs = self.recorded.iter();
        let graphs = graphs.filter_map(|(shape, it)| it.as_ref().map(|it| (it.used, *shape)));
        let graphs: Vec<_> = graphs.collect();
        if graphs.len() >= MOST_GRAPHS
            && let Some((_, oldest)) = graphs.into_iter().min_by_key(|(used, _)| *used)
        {
            self.recorded.remove(&oldest);
        }
    }
}

/// Fills a step up to the rows of its shape. The added rows compute the first token of a sequence in the last KV block, which
/// the scheduler does not have.
fn filled(batch: &StepBatch, rows: usize, kv: &KvCache) -> Result<StepBatch> {
    let spec = kv.spec();
    let spare = narrow(spec.num_blocks - 1)?;
    let mut filled = batch.clone();
    for _ in batch.tokens.len()..rows {
        let piece = Piece {
            tokens: &[0],
            start: 0,
            blocks: vec![spare],
            wanted: 1,
        };
        filled.push(spec.block_size, piece);
    }
    Ok(filled)
}

/// A step whose words are written.
struct Step<'a> {
    model: &'a Model,
    batch: &'a StepBatch,
    /// Tokens, then the plan.
    words: Tensor,
    places: Places,
}

impl Step<'_> {
    /// Queues its kernels, or records them.
    fn run(&self, kv: &mut KvCache) -> Result<Tensor> {
        let rows = self.batch.tokens.len();
        let tokens = self.words.narrow(0, 0, rows)?;
        let plan = self.words.narrow(0, rows, self.words.elem_count() - rows)?;
        let plan = Plan::at(plan, self.places.clone());
        self.model.forward_by(&tokens, plan, kv, self.batch)
    }

    fn record(&self, kv: &mut KvCache, device: &CudaDevice, alone: Recordings) -> Result<Recorded> {
        let shape = (self.batch.tokens.len(), self.model.vocab_size());
        let logits = Tensor::zeros(shape, DType::F32, &Device::Cuda(device.clone()))?;
        let recording = Recording::begin(device.cuda_stream(), alone)?;
        // Allocations during the step become part of the graph, and repeat with each run.
        logits.slice_set(&self.run(kv)?, 0, 0)?;
        Ok(Recorded {
            graph: recording.end()?,
            logits,
            used: 0,
        })
    }
}

/// A stream whose kernels are recorded instead of run. Dropping it ends the recording, also after an error or a panic.
struct Recording {
    /// `None` once it has ended.
    stream: Option<Arc<CudaStream>>,
    _alone: Recordings,
}

impl Recording {
    fn begin(stream: Arc<CudaStream>, alone: Recordings) -> Result<Self> {
        // The mode ignores what other threads do on other streams of the GPU.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream.begin_capture(mode).w()?;
        Ok(Self {
            stream: Some(stream),
            _alone: alone,
        })
    }

    fn end(mut self) -> Result<CudaGraph> {
        let graph = self.stream.take().map(end);
        let graph = graph.transpose()?.flatten();
        graph.ok_or_else(|| candle_core::Error::Msg("nothing was recorded".into()))
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take() {
            // The cause is reported by whoever gave up.
            let _ = end(stream);
        }
    }
}

fn end(stream: Arc<CudaStream>) -> Result<Option<CudaGraph>> {
    // An error while tensors were dropped is kept for the next call, which would then only return it.
    let dropped = stream.context().check_err();
    let graph = stream.end_capture(CUgraphInstantiate_flags(0));
    let ended = stream.context().check_err();
    dropped.w()?;
    ended.w()?;
    graph.w()
}

/// Words to write to the start of a tensor.
struct Write<'a>(&'a [u32]);

impl InplaceOp1 for Write<'_> {
    fn name(&self) -> &'static str {
        "write-words"
    }

    fn cpu_fwd(&self, _storage: &mut CpuStorage, _layout: &Layout) -> Result<()> {
        candle_core::bail!("steps are recorded on GPUs alone")
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _layout: &Layout) -> Result<()> {
        let stream = storage.device.cuda_stream();
        let place = u32::as_cuda_slice_mut(storage)?;
        let mut place = place.slice_mut(..self.0.len());
        stream.memcpy_htod(self.0, &mut place).w()
    }
}
