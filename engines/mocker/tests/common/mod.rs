//! A mocker for tests: a small cache, so that it fills up, and steps of a millisecond.

use genset_engine_mocker::{MockerArgs, MockerEngine, MockerModel, TimeModel};

/// The settings.
pub(crate) fn args() -> MockerArgs {
    MockerArgs {
        num_gpu_blocks: 512,
        max_num_seqs: 16,
        max_num_batched_tokens: 512,
        prefill_ms: TimeModel::constant(1.0),
        decode_ms: TimeModel::constant(1.0),
        ..MockerArgs::default()
    }
}

/// An engine with a vocabulary of a thousand tokens.
pub(crate) fn engine(args: MockerArgs) -> MockerEngine {
    MockerEngine::try_new(args, MockerModel::new(1000, 4096)).unwrap()
}
