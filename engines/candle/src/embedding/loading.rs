//! [`CheckoutLoader`]: loads an embedder from a checkout folder to its device.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use genset_backend_common::{
    Capabilities, EngineConfig, EngineError, StartContext,
    config::{Deviation, InputKind},
};

use crate::args::CandleArgs;
use crate::engine::forward::ForwardError;
use crate::engine::real::{loading_progress, narrow, set_isa, set_threads, weight_options, wide};
use crate::engine::thread::Loader;
use crate::load::{OpenEmbedder, Purpose, available_memory};
use crate::model::embedder::{Embedder, StepRoom, WholeSequence};

/// The longest input unless `--max-num-batched-tokens` is set. An input is computed in one step, and a step's memory grows
/// with its tokens.
const LONGEST_INPUT: usize = 8192;

/// Computes a vector for each input, in order. After an error the step's requests fail, and the engine continues.
pub(super) type MakeVectors =
    dyn FnMut(&[&WholeSequence]) -> Result<Vec<Vec<f32>>, ForwardError> + Send;

/// A model that is ready to compute.
pub(super) struct LoadedEmbedder {
    pub(super) model: Box<MakeVectors>,
    pub(super) config: EngineConfig,
    pub(super) room: StepRoom,
    pub(super) max_waiting: usize,
}

/// Loads a checkout folder.
#[derive(Debug)]
pub(super) struct CheckoutLoader {
    args: CandleArgs,
    model: PathBuf,
}

impl CheckoutLoader {
    pub(super) fn new(args: &CandleArgs, model: &Path) -> Self {
        Self {
            args: args.clone(),
            model: model.to_owned(),
        }
    }

    /// The size of a step: it holds any whole input up to the longest accepted one.
    fn room(&self, longest: usize, is_cpu: bool) -> StepRoom {
        let (tokens, sequences) = if is_cpu { (512, 64) } else { (16_384, 256) };
        let tokens = match self.args.max_num_batched_tokens {
            Some(asked) => wide(asked).max(1),
            None => tokens.max(longest.min(LONGEST_INPUT)),
        };
        StepRoom {
            tokens,
            sequences: self.args.max_num_seqs.map_or(sequences, wide).max(1),
        }
    }
}

impl Loader<LoadedEmbedder> for CheckoutLoader {
    fn load(
        &self,
        start: &StartContext,
        was_given_up: &dyn Fn() -> bool,
    ) -> Result<LoadedEmbedder, EngineError> {
        set_threads(self.args.threads)?;
        set_isa(self.args.isa)?;
        self.args.speculation.refuse_for_embedder()?;
        start.progress.report("reading the model's headers", None);
        let open = OpenEmbedder::open(&self.model)?;
        let options = weight_options(&self.args)?;
        let (device, dtype) = (options.device.clone(), options.dtype);
        let room = self.room(open.max_tokens, device.is_cpu());
        if let Some(available) = available_memory(&device) {
            open.check_memory(&options, room.tokens, available)?;
        }
        let mut weights = open.weights(options, loading_progress(start, was_given_up));
        let head =
            |folder: &str, name: &str, shape: &[usize]| open.head_tensor(folder, name, shape);
        let mut model = Embedder::try_new(&open.backbone, &open.head, &mut weights, &head, room)?;
        let config = engine_config(&open, room, device.is_cpu());
        let max_tokens = config.context_length_tokens;
        tracing::info!(
            model = open.name,
            ?device,
            ?dtype,
            max_tokens,
            width = open.width(),
            purpose = ?open.purpose,
            "the embedder is loaded"
        );
        Ok(LoadedEmbedder {
            model: Box::new(move |inputs| Ok(model.forward(inputs)?)),
            config,
            room,
            max_waiting: wide(self.args.max_waiting),
        })
    }
}

pub(super) fn engine_config(open: &OpenEmbedder, room: StepRoom, is_cpu: bool) -> EngineConfig {
    let longest = open.max_tokens.min(room.tokens);
    if longest < open.max_tokens {
        tracing::warn!(
            longest,
            of_model = open.max_tokens,
            "longer inputs are refused, for each is computed in one step; --max-num-batched-tokens raises it"
        );
    }
    let can = Capabilities {
        inputs: BTreeSet::from([match open.purpose {
            Purpose::Embed => InputKind::Embed,
            Purpose::Score => InputKind::Score,
        }]),
        // On a GPU, other kernels compute a row when the batch has more rows.
        deviations: (!is_cpu)
            .then_some(Deviation::BatchVariant)
            .into_iter()
            .collect(),
        ..Capabilities::default()
    };
    let mut config = EngineConfig::new(open.name.clone(), narrow(longest))
        .with_vocab_size(narrow(open.backbone.vocab_size()))
        .with_capabilities(can);
    config.max_num_seqs = Some(narrow(room.sequences));
    config.max_num_batched_tokens = Some(narrow(room.tokens));
    config
}
