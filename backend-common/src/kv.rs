//! KV blocks as seen outside an engine: their [hashes](BlockHash) and the [events](KvEvent) of a prefix cache. Routers use the
//! hashes to match prompts to instances, and the events to maintain their index.

mod chains;
mod events;
mod hash;

pub use chains::{BlockChain, chains};
pub use events::{
    KvEvent, KvEventData, KvEventGap, KvEventPublisher, KvEventSubscription, KvSnapshot,
    StoredBlock,
};
pub use hash::{BlockHash, hash_block, hash_blocks, salt_root, sequence_root};
