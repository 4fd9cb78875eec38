//! What workers publish of their prefix caches, as the router's index reads it.

use genset_backend_common::kv::{BlockHash, hash_blocks};
use genset_router::index::{IndexWriter, Lookup, index};

/// The target whose blocks only it may change.
const HONEST: u32 = 9;

/// Events: a byte for kind and target, one for the parent, one for the number of blocks, and one per block; from 128 on
/// they are blocks of an honest worker. Whatever the events, the honest worker's entries stay, and all can be removed again.
pub fn kv_events(mut input: &[u8]) {
    let (mut writer, reader) = index();
    let tokens: Vec<u32> = (0..128 * 16).collect();
    let size = genset_backend_common::card::DEFAULT_KV_BLOCK_SIZE;
    let honest = hash_blocks(None, &tokens, size);
    writer.store(HONEST, None, &honest).unwrap();
    let block = |byte: u8| match byte.checked_sub(128) {
        Some(index) => honest[usize::from(index)],
        None => BlockHash(u64::from(byte)),
    };
    let mut lookup = Lookup::default();
    while let [kind, parent, count, rest @ ..] = input {
        let (blocks, rest) = rest.split_at(usize::from(*count).min(rest.len()));
        input = rest;
        let blocks: Vec<BlockHash> = blocks.iter().copied().map(block).collect();
        let target = u32::from(kind >> 2 & 3);
        // Refusing an invalid event is no finding.
        let _ = match kind & 3 {
            0 => writer.store(target, None, &blocks),
            1 => writer.store(target, Some(block(*parent)), &blocks),
            2 => writer.remove(target, &blocks),
            _ => {
                remove(&mut writer, target);
                Ok(())
            }
        };
        reader.find(&blocks, &mut lookup);
        assert!(
            lookup
                .overlaps()
                .iter()
                .all(|overlap| usize::try_from(overlap.blocks).unwrap() <= blocks.len())
        );
        reader.find(&honest, &mut lookup);
        let found = lookup
            .overlaps()
            .iter()
            .find(|overlap| overlap.target == HONEST);
        assert_eq!(found.map(|overlap| overlap.blocks), Some(128));
    }
    for target in 0..=HONEST {
        remove(&mut writer, target);
    }
    assert_eq!((writer.runs(), reader.held_blocks()), (0, 0));
}

fn remove(writer: &mut IndexWriter, target: u32) {
    let mut from = Some(0);
    while let Some(run) = from {
        from = writer.remove_target(target, run, 7);
    }
}
