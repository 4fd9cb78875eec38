//! The load of an engine that declares KV blocks and does not publish them.

use std::num::NonZeroU32;

use super::fakes::{CONTEXT_LENGTH, MODEL, VOCAB_SIZE, World, config, serving, stop_cleanly};
use crate::config::EngineConfig;
use crate::handles::Load;

#[tokio::test(start_paused = true)]
async fn the_declared_kv_blocks_are_those_of_every_load_without_any() {
    let world = World::new();
    let mut declared = EngineConfig::new(MODEL, CONTEXT_LENGTH).with_vocab_size(VOCAB_SIZE);
    declared.kv_block_size = NonZeroU32::new(16);
    declared.kv_total_blocks = Some(64);
    world.declare(declared);
    let handle = serving(&world, config()).await;
    let publisher = world.offer().load;
    let load = publisher.subscribe();
    assert_eq!(load.borrow().kv_total_blocks, 64, "nothing is published");
    for (published, seen) in [(0, 64), (32, 32), (0, 64)] {
        publisher.publish(Load {
            running_requests: 1,
            kv_total_blocks: published,
            ..Load::default()
        });
        assert_eq!(load.borrow().kv_total_blocks, seen, "{published}");
    }
    stop_cleanly(&handle).await;
}
