//! The whole conformance kit on the mocker, with one rank and with several.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod common;

use std::sync::Arc;

use genset_conformance::{Options, Probe, Scenario, Subject, run_conformance_with};
use genset_engine_mocker::{MockerArgs, MockerEngine};

use crate::common::{args, engine};

/// The engine's counters for the kit.
struct Counters(Arc<MockerEngine>);

impl Probe for Counters {
    fn active_requests(&self) -> Option<u64> {
        Some(self.0.stats().active_requests)
    }

    fn produced_tokens(&self) -> Option<u64> {
        Some(self.0.stats().produced_tokens)
    }

    fn kv_used_blocks(&self) -> Option<u64> {
        Some(self.0.stats().kv_used_blocks)
    }

    fn crash(&self) -> bool {
        self.0.crash("its device is lost")
    }
}

fn subject(args: MockerArgs) -> Subject {
    probed(engine(args))
}

fn probed(engine: MockerEngine) -> Subject {
    let engine = Arc::new(engine);
    Subject::of(engine.clone()).with_probe(Arc::new(Counters(engine)))
}

mod each_check {
    genset_conformance::suite!(
        |_: &genset_conformance::Scenario| super::subject(super::args()),
        skips: super::UNDECLARED
    );
}

/// As many KV blocks as one sequence of the whole context needs, and prompts that are computed in one step.
mod with_little_memory {
    use genset_engine_mocker::{MockerArgs, MockerEngine, MockerModel};

    use super::Subject;

    const BLOCK_TOKENS: u32 = 16;
    const BLOCKS: u32 = 32;

    fn subject() -> Subject {
        let args = MockerArgs {
            block_size: BLOCK_TOKENS,
            num_gpu_blocks: BLOCKS,
            enable_chunked_prefill: false,
            ..super::args()
        };
        let model = MockerModel::new(1000, BLOCK_TOKENS * BLOCKS);
        super::probed(MockerEngine::try_new(args, model).unwrap())
    }

    genset_conformance::suite!(|_: &genset_conformance::Scenario| { subject() });
}

/// Sampling options that need logits, grammars, processes, embeddings, scores, controls other than that of the prefix cache,
/// adapters, ranks, bodies, and roles that the mocker does not have.
const UNDECLARED: [&str; 18] = [
    "DT", "GD", "SP", "EM", "SC", "CT", "LR", "RK", "WB", "MG04", "MG07", "MG09", "MG10", "MG11",
    "MG12", "ER06", "FN16", "LC07",
];

/// Sequential requests find the first rank idle, so the kit's checks of one cache apply to it.
#[test]
fn ranks_keep_the_contract_together() {
    let options = Options::default();
    let ranks = || MockerArgs {
        dp_size: 3,
        num_gpu_blocks: 256,
        ..args()
    };
    run_conformance_with(move |_: &Scenario| subject(ranks()), &options).assert_conformant();
}

/// Valid but unusual behaviour, which the kit must not report as a fault.
mod unusual {
    use genset_conformance::{Level, Options, Scenario, catalogue, run_conformance_with};
    use genset_engine_mocker::{MockerArgs, MockerEngine, MockerModel, TimeModel};

    use super::{args, probed};

    fn is_conformant(change: fn(&mut MockerArgs)) {
        let mut args = args();
        change(&mut args);
        is_conformant_by(&Options::default(), &args, 1000, 4096);
    }

    /// The ids in `only`, or of all checks if it is empty, without the checks that only repeat until a leak would show.
    fn of_prompts(only: &[String]) -> Vec<String> {
        let is_wanted = |id: &&str| only.is_empty() || only.iter().any(|wanted| wanted == id);
        let ids = catalogue().map(|check| check.id).filter(is_wanted);
        let ids = ids.filter(|id| !["CN11", "SH13"].contains(id));
        ids.map(str::to_owned).collect()
    }

    fn is_conformant_by(options: &Options, args: &MockerArgs, vocab_size: u32, context: u32) {
        for seed in 0..=5 {
            let args = args.clone();
            let options = Options {
                // This level has the checks of all others.
                level: Level::Soak,
                seed,
                // The seed varies the prompts.
                only: match seed {
                    0 => options.only.clone(),
                    _ => of_prompts(&options.only),
                },
                is_measuring: false,
                ..options.clone()
            };
            let subject = move |_: &Scenario| {
                let model = MockerModel::new(vocab_size, context);
                probed(MockerEngine::try_new(args.clone(), model).unwrap())
            };
            run_conformance_with(subject, &options).assert_conformant();
        }
    }

    #[test]
    fn one_seat() {
        is_conformant(|args| args.max_num_seqs = 1);
    }

    #[test]
    fn two_seats() {
        is_conformant(|args| args.max_num_seqs = 2);
    }

    #[test]
    fn a_vocabulary_of_ten() {
        is_conformant_by(&Options::default(), &args(), 10, 4096);
    }

    #[test]
    fn blocks_of_32() {
        is_conformant(|args| args.block_size = 32);
    }

    #[test]
    fn a_fifth_of_a_second_for_a_token() {
        is_conformant(|args| {
            args.prefill_ms = TimeModel::constant(200.0);
            args.decode_ms = TimeModel::constant(200.0);
        });
    }

    #[test]
    fn a_context_of_64() {
        is_conformant_by(&Options::default(), &args(), 1000, 64);
    }

    /// On the paused clock only: the checks with several threads would take real seconds.
    #[test]
    fn ten_seconds_to_the_first_token() {
        let args = MockerArgs {
            prefill_ms: TimeModel::constant(10_000.0),
            ..args()
        };
        let on_one_thread = catalogue().filter(|check| !check.is_multi_thread);
        let options = Options {
            only: on_one_thread.map(|check| check.id.to_owned()).collect(),
            ..Options::default()
        };
        is_conformant_by(&options, &args, 1000, 4096);
    }
}
