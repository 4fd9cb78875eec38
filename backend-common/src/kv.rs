//! KV blocks as the world outside an engine sees them: their [hashes](BlockHash) and the [events](KvEvent) of a prefix
//! cache. Routers match prompts to instances with the first and keep their index with the second.

mod chains;
mod events;
mod hash;

pub use chains::{BlockChain, chains};
pub use events::{
    KvEvent, KvEventData, KvEventGap, KvEventPublisher, KvEventSubscription, KvSnapshot,
    StoredBlock,
};
pub use hash::{BlockHash, BlockHasher, Xxh3BlockHasher, hash_blocks, salt_root, sequence_root};
