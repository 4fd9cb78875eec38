use genset_backend_common::kv::hash_block;

use super::*;

const SIZE: usize = 2;

fn pool(total: usize) -> KvBlockPool {
    KvBlockPool::try_new(total, SIZE).unwrap()
}

/// Allocates and stores a whole sequence.
fn fill(pool: &mut KvBlockPool, tokens: &[TokenId]) -> (Vec<BlockId>, Vec<BlockHash>) {
    let mut blocks = pool.allocate(tokens.len() / SIZE).unwrap();
    let mut hashes: Vec<BlockHash> = Vec::new();
    for (block, tokens) in blocks.iter_mut().zip(tokens.chunks_exact(SIZE)) {
        let before = hashes.last().copied();
        let after = before.map_or(After::Start(None), After::Block);
        let hash = hash_block(after.hash(), tokens);
        *block = pool.store(*block, after, hash, tokens).unwrap();
        hashes.push(hash);
    }
    (blocks, hashes)
}

#[test]
fn a_released_prefix_is_found_again_and_held_only_once_asked() {
    let mut pool = pool(4);
    let (blocks, hashes) = fill(&mut pool, &[1, 2, 3, 4]);
    pool.release(&blocks);
    assert_eq!((pool.used(), pool.free(), pool.available()), (0, 2, 4));
    assert_eq!(pool.find_prefix(None, &[1, 2, 3, 4, 5], &hashes), blocks);
    assert_eq!(pool.used(), 0);
    pool.hold(&blocks);
    assert_eq!((pool.used(), pool.available()), (2, 2));
}

#[test]
fn the_longest_unused_chain_goes_first_and_from_its_end() {
    let mut pool = pool(4);
    let (old, old_hashes) = fill(&mut pool, &[1, 2, 3, 4]);
    let (new, new_hashes) = fill(&mut pool, &[5, 6, 7, 8]);
    pool.release(&old);
    pool.release(&new);
    pool.take_events();
    assert_eq!(pool.allocate(1).unwrap(), [old[1]]);
    assert_eq!(pool.allocate(2).unwrap(), [old[0], new[1]]);
    let removed = [old_hashes[1], old_hashes[0], new_hashes[1]];
    assert_eq!(
        pool.take_events(),
        [KvEventData::Removed {
            blocks: removed.to_vec()
        }]
    );
    assert_eq!(pool.allocate(2), None, "one block is left");
}

#[test]
fn equal_blocks_become_one() {
    let mut pool = pool(4);
    let (first, _) = fill(&mut pool, &[1, 2, 3, 4]);
    let (second, _) = fill(&mut pool, &[1, 2, 3, 4]);
    assert_eq!(first, second);
    assert_eq!((pool.used(), pool.holders(first[0])), (2, 2));
    pool.release(&first);
    assert_eq!(pool.used(), 2);
    pool.release(&second);
    assert_eq!(pool.used(), 0);
}

#[test]
fn a_stored_chain_is_one_event() {
    let mut pool = pool(4);
    let (_, hashes) = fill(&mut pool, &[1, 2, 3, 4]);
    assert_eq!(
        pool.take_events(),
        [KvEventData::Stored {
            parent: None,
            blocks: hashes
        }]
    );
}

#[test]
fn a_hash_that_collides_is_not_reused() {
    let mut pool = pool(4);
    let (_, hashes) = fill(&mut pool, &[1, 2]);
    let other = pool.allocate(1).unwrap();
    let start = After::Start(None);
    assert_eq!(pool.store(other[0], start, hashes[0], &[9, 9]), None);
    assert!(pool.find_prefix(None, &[9, 9], &hashes).is_empty());
    let root = Some(BlockHash(7));
    assert!(
        pool.find_prefix(root, &[1, 2], &hashes).is_empty(),
        "of another salt"
    );
}

#[test]
fn clearing_forgets_but_takes_nothing_away() {
    let mut pool = pool(4);
    let (held, hashes) = fill(&mut pool, &[1, 2]);
    let (idle, _) = fill(&mut pool, &[3, 4]);
    pool.release(&idle);
    pool.take_events();
    pool.clear();
    assert_eq!(
        (pool.used(), pool.free(), pool.reusable().count()),
        (1, 3, 0)
    );
    assert!(pool.find_prefix(None, &[1, 2], &hashes).is_empty());
    pool.release(&held);
    assert_eq!(pool.free(), 4);
    assert_eq!(pool.take_events(), [KvEventData::Cleared]);
}

#[test]
fn a_pool_without_a_prefix_cache_has_no_events() {
    let mut pool = pool(4).without_prefix_caching();
    pool.clear();
    assert_eq!(pool.take_events(), []);
}

#[test]
fn empty_pools_and_blocks_are_refused() {
    assert!(KvBlockPool::try_new(0, 1).is_err());
    assert!(KvBlockPool::try_new(1, 0).is_err());
}
