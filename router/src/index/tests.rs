//! Checks the index against a simple model: for each target the set of its blocks.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};

use genset_backend_common::kv::BlockHash;
use genset_backend_common::random::{STEP, mix};
use proptest::prelude::*;

use super::index::{IndexReader, IndexWriter, Lookup, Odd, Overlap, Target, index};

/// Returns the hash of a block that follows `parent` with content `local`, well mixed.
fn chain(parent: u64, local: u64) -> u64 {
    mix(parent.rotate_left(17) ^ local.wrapping_mul(STEP))
}

/// Returns the prompt whose blocks have these contents.
fn prompt(locals: &[u8]) -> Vec<BlockHash> {
    let mut parent = 1;
    let next = |local: &u8| {
        parent = chain(parent, u64::from(*local) + 1);
        BlockHash(parent)
    };
    locals.iter().map(next).collect()
}

fn found(reader: &IndexReader, prompt: &[BlockHash]) -> Vec<(Target, u32)> {
    let mut lookup = Lookup::default();
    reader.find(prompt, &mut lookup);
    let pair = |overlap: &Overlap| (overlap.target, overlap.blocks);
    lookup.overlaps().iter().map(pair).collect()
}

#[test]
fn a_target_holds_no_more_than_one_may_and_others_are_untouched() {
    let (mut writer, reader) = index();
    writer.bound_targets(10);
    let long = prompt(&[0; 30]);
    let short = prompt(&[1; 8]);
    writer.store(1, None, &short).unwrap();
    assert_eq!(writer.store(2, None, &long), Err(Odd::TooMany));
    assert_eq!(found(&reader, &long), [(2, 10)]);
    // Neither new blocks nor blocks of another target.
    assert_eq!(writer.store(2, None, &short), Err(Odd::TooMany));
    assert_eq!(
        writer.store(2, Some(long[9]), &long[10..]),
        Err(Odd::TooMany)
    );
    assert_eq!((reader.held_blocks(), writer.runs()), (18, 2));
    assert_eq!(found(&reader, &short), [(1, 8)]);
    // Removed blocks make room.
    writer.remove(2, &long[7..10]).unwrap();
    writer.store(2, Some(long[6]), &long[7..9]).unwrap();
    assert_eq!(found(&reader, &long), [(2, 9)]);
    remove_all(&mut writer, 2);
    writer.store(2, None, &short).unwrap();
    assert_eq!(found(&reader, &short), [(1, 8), (2, 8)]);
}

/// Returns a block of the tangle, by its kind and number.
fn tangled(kind: u64, number: u64) -> BlockHash {
    BlockHash(kind * 1000 + number)
}

/// A hundred runs, each branching off the middle of the one before, and a hundred orphans that wait for the block after the last.
fn tangle() -> (IndexWriter, IndexReader) {
    let (mut writer, reader) = index();
    for number in 0..100_u64 {
        let before = number.checked_sub(1).map(|before| tangled(1, before));
        let run = [tangled(1, number), tangled(2, number)];
        writer.store(1, before, &run).unwrap();
        let waiting = [tangled(3, number)];
        writer.store(1, Some(tangled(4, 0)), &waiting).unwrap();
    }
    (writer, reader)
}

#[test]
fn what_waits_for_a_block_is_linked_by_one_look_up_the_runs_and_counts() {
    let next = [tangled(4, 0), tangled(4, 1)];
    let last = Some(tangled(1, 99));
    // A hundred links are followed, and a hundred created.
    for (max_links, stored) in [(0, 1), (150, 1), (300, 2)] {
        let (mut writer, reader) = tangle();
        let part = writer.store_part(1, last, &next, max_links);
        assert_eq!(part, Ok(stored), "{max_links}");
        let trunk = (0..100).map(|number| tangled(1, number));
        let whole: Vec<_> = trunk.chain([next[0], tangled(3, 50)]).collect();
        assert_eq!(found(&reader, &whole), [(1, 102)]);
    }
}

fn remove_all(writer: &mut IndexWriter, target: Target) {
    let mut from = Some(0);
    while let Some(run) = from {
        from = writer.remove_target(target, run, 3);
    }
}

/// An operation on the index and on the model.
#[derive(Debug, Clone)]
enum Step {
    /// A target stores the blocks of a prompt between two positions.
    Store(Target, Vec<u8>, usize, usize),
    /// A target loses blocks of a prompt.
    Remove(Target, Vec<u8>, Vec<usize>),
    /// A target loses everything.
    RemoveTarget(Target),
}

fn locals() -> impl Strategy<Value = Vec<u8>> {
    // Few contents, so that prompts share prefixes and branch; sometimes a long one.
    prop_oneof![
        4 => prop::collection::vec(0_u8..2, 1..12),
        1 => prop::collection::vec(0_u8..1, 20..90),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0_u32..5, locals(), 0_usize..6, 1_usize..90)
            .prop_map(|(target, locals, from, count)| Step::Store(target, locals, from, count)),
        3 => (0_u32..5, locals(), prop::collection::vec(0_usize..90, 1..8))
            .prop_map(|(target, locals, which)| Step::Remove(target, locals, which)),
        1 => (0_u32..5).prop_map(Step::RemoveTarget),
    ]
}

#[derive(Default)]
struct Model(BTreeMap<Target, BTreeSet<BlockHash>>);

impl Model {
    fn find(&self, prompt: &[BlockHash]) -> Vec<(Target, u32)> {
        let leading = |held: &BTreeSet<BlockHash>| {
            let count = prompt
                .iter()
                .take_while(|block| held.contains(block))
                .count();
            u32::try_from(count).unwrap()
        };
        let all = self.0.iter().map(|(target, held)| (*target, leading(held)));
        all.filter(|(_, blocks)| *blocks > 0).collect()
    }

    fn held(&self) -> u64 {
        self.0.values().map(|held| held.len() as u64).sum()
    }

    /// Applies the step to both.
    fn perform(&mut self, writer: &mut IndexWriter, step: &Step) {
        match step {
            Step::Store(target, locals, from, count) => {
                let blocks = prompt(locals);
                let from = (*from).min(blocks.len() - 1);
                let to = (from + count).min(blocks.len());
                let parent = from.checked_sub(1).map(|parent| blocks[parent]);
                writer.store(*target, parent, &blocks[from..to]).unwrap();
                self.0.entry(*target).or_default().extend(&blocks[from..to]);
            }
            Step::Remove(target, locals, which) => {
                let blocks = prompt(locals);
                let held = self.0.entry(*target).or_default();
                for index in which {
                    let block = blocks[index % blocks.len()];
                    let expected = if held.remove(&block) {
                        Ok(())
                    } else {
                        Err(Odd::NotHeld)
                    };
                    assert_eq!(writer.remove(*target, &[block]), expected);
                }
            }
            Step::RemoveTarget(target) => {
                remove_all(writer, *target);
                self.0.remove(target);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn it_finds_what_the_model_finds_after_any_events(
        steps in prop::collection::vec(step(), 1..60),
        prompts in prop::collection::vec(locals(), 1..8),
    ) {
        let (mut writer, reader) = index();
        let mut model = Model::default();
        for step in &steps {
            model.perform(&mut writer, step);
            for locals in &prompts {
                let blocks = prompt(locals);
                prop_assert_eq!(found(&reader, &blocks), model.find(&blocks), "{:?}", step);
            }
        }
        for step in &steps {
            if let Step::Store(_, locals, ..) | Step::Remove(_, locals, _) = step {
                let blocks = prompt(locals);
                prop_assert_eq!(found(&reader, &blocks), model.find(&blocks));
            }
        }
        prop_assert_eq!(reader.held_blocks(), model.held());
        for target in 0..5 {
            remove_all(&mut writer, target);
        }
        prop_assert_eq!((writer.runs(), reader.held_blocks()), (0, 0));
    }

    #[test]
    fn nonsense_is_refused_or_taken_and_leaves_nothing_behind(
        events in prop::collection::vec(
            (0_u32..3, any::<bool>(), prop::option::of(0_u64..12), prop::collection::vec(0_u64..12, 0..6)),
            0..60,
        ),
    ) {
        let (mut writer, reader) = index();
        let honest = prompt(&[7; 40]);
        writer.store(9, None, &honest).unwrap();
        for (target, is_store, parent, blocks) in events {
            let blocks: Vec<_> = blocks.into_iter().map(BlockHash).collect();
            let _ = if is_store {
                writer.store(target, parent.map(BlockHash), &blocks)
            } else {
                writer.remove(target, &blocks)
            };
            found(&reader, &blocks);
            prop_assert_eq!(found(&reader, &honest), [(9, 40)]);
        }
        for target in 0..10 {
            remove_all(&mut writer, target);
        }
        prop_assert_eq!((writer.runs(), reader.held_blocks()), (0, 0));
    }
}

#[test]
fn a_long_chain_is_several_runs_and_found_whole() {
    let (mut writer, reader) = index();
    let blocks = prompt(&[3; 20_000]);
    for (index, chunk) in blocks.chunks(7).enumerate() {
        let parent = (index * 7).checked_sub(1).map(|parent| blocks[parent]);
        writer.store(1, parent, chunk).unwrap();
    }
    assert_eq!(found(&reader, &blocks), [(1, 20_000)]);
    assert_eq!(found(&reader, &blocks[..9_000]), [(1, 9_000)]);
    assert_eq!(writer.runs(), 3);
}

#[test]
fn a_thousand_targets_share_a_prefix() {
    let (mut writer, reader) = index();
    let shared = prompt(&[0; 64]);
    for target in 0..1000 {
        let blocks = usize::try_from(target % 64 + 1).unwrap();
        writer.store(target, None, &shared[..blocks]).unwrap();
    }
    let overlaps = found(&reader, &shared);
    assert_eq!(overlaps.len(), 1000);
    assert!(
        overlaps
            .iter()
            .all(|(target, blocks)| *blocks == target % 64 + 1)
    );
}

#[test]
fn what_was_given_back_is_used_again() {
    let (mut writer, reader) = index();
    let store_all = |writer: &mut IndexWriter, round: u8| {
        for local in 0..200 {
            writer
                .store(u32::from(round % 3), None, &prompt(&[local; 30]))
                .unwrap();
        }
    };
    store_all(&mut writer, 0);
    let filled = writer.used_bytes();
    for round in 0..20 {
        remove_all(&mut writer, u32::from(round % 3));
        assert_eq!(reader.held_blocks(), 0);
        store_all(&mut writer, round + 1);
    }
    assert!(
        writer.used_bytes() <= filled + filled / 4,
        "{filled} grew to {}",
        writer.used_bytes()
    );
}

/// A reader concurrent with the writer never sees a wrong overlap of blocks that do not change.
#[test]
fn readers_see_what_is_stable_while_the_rest_changes() {
    let (mut writer, reader) = index();
    let stable = prompt(&[1; 100]);
    writer.store(0, None, &stable).unwrap();
    let others: Vec<_> = (0..40)
        .map(|fork: u8| {
            let mut locals = vec![1; usize::from(fork) * 2 + 1];
            locals.extend([fork + 2; 20]);
            prompt(&locals)
        })
        .collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    let mut lookup = Lookup::default();
                    let mut complete = 0;
                    while !stop.load(Ordering::Relaxed) || complete < 100 {
                        reader.find(&stable, &mut lookup);
                        let target = |target| {
                            let mut all = lookup.overlaps().iter();
                            all.find(|overlap| overlap.target == target)
                                .map(|overlap| overlap.blocks)
                        };
                        assert!(lookup.overlaps().iter().all(|overlap| {
                            overlap.blocks <= if overlap.target == 0 { 100 } else { 79 }
                        }));
                        if lookup.is_complete() {
                            assert_eq!(target(0), Some(100));
                            complete += 1;
                        }
                        let fork = &others[complete % 40];
                        reader.find(fork, &mut lookup);
                        if lookup.is_complete() {
                            let held = lookup.overlaps().iter().find(|held| held.target == 0);
                            let shared = u32::try_from(fork.len() - 20).unwrap();
                            assert_eq!(held.map(|held| held.blocks), Some(shared));
                        }
                    }
                })
            })
            .collect();
        for round in 0..60_u32 {
            for (fork, target) in others.iter().zip(1..) {
                writer.store(target, None, fork).unwrap();
                if (round + target) % 3 == 0 {
                    writer.remove(target, &fork[fork.len() - 5..]).unwrap();
                }
            }
            for target in 1..41 {
                remove_all(&mut writer, target);
            }
        }
        stop.store(true, Ordering::Relaxed);
        for reader in readers {
            reader.join().unwrap();
        }
    });
}
