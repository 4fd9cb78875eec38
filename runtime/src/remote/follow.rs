//! What a remote engine publishes: the KV events of its worker, passed on.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use futures_util::StreamExt;
use genset_backend_common::RequestContext;
use genset_backend_common::kv::{BlockHash, KvEventData, KvEventPublisher, StoredBlock};
use tokio::sync::oneshot;

use crate::client::Client;
use crate::names::InstanceId;
use crate::registrar::KvItem;

/// Pause before a stream of events that ended is asked for again.
const RESUBSCRIBE_PAUSE: Duration = Duration::from_millis(500);

/// `told` hears of it once what the worker's cache holds was published for the first time.
pub(super) async fn follow_kv_events(
    client: Client<(), KvItem>,
    instance: InstanceId,
    publisher: KvEventPublisher,
    told: oneshot::Sender<()>,
) {
    let mut told = Some(told);
    loop {
        if let Ok(mut items) = client
            .direct(instance, (), RequestContext::new("kv_events"))
            .await
        {
            while let Some(Ok(item)) = items.next().await {
                let is_snapshot = matches!(item, KvItem::Snapshot(_));
                publish(&publisher, item);
                if let Some(told) = told.take_if(|_| is_snapshot) {
                    // A start that was given up does not listen.
                    let _ = told.send(());
                }
            }
        }
        tokio::time::sleep(RESUBSCRIBE_PAUSE).await;
    }
}

fn publish(publisher: &KvEventPublisher, item: KvItem) {
    match item {
        KvItem::Change(event) => drop(publisher.publish(event.data)),
        KvItem::Snapshot(snapshot) => {
            publisher.publish(KvEventData::Cleared);
            for block in parents_first(snapshot.blocks) {
                publisher.publish(KvEventData::Stored {
                    parent: block.parent,
                    blocks: vec![block.hash],
                });
            }
        }
    }
}

/// The blocks in an order in which they may have been stored.
fn parents_first(blocks: Vec<StoredBlock>) -> Vec<StoredBlock> {
    let known: HashSet<BlockHash> = blocks.iter().map(|block| block.hash).collect();
    let (mut children, mut ordered) = (HashMap::<BlockHash, Vec<StoredBlock>>::new(), Vec::new());
    for block in blocks {
        match block.parent.filter(|parent| known.contains(parent)) {
            Some(parent) => children.entry(parent).or_default().push(block),
            None => ordered.push(block),
        }
    }
    let mut next = 0;
    while let Some(block) = ordered.get(next) {
        let after = children.remove(&block.hash).unwrap_or_default();
        ordered.extend(after);
        next += 1;
    }
    ordered
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_is_stored_parents_first_whatever_its_order() {
        let block = |hash, parent: Option<u64>| StoredBlock {
            hash: BlockHash(hash),
            parent: parent.map(BlockHash),
        };
        let blocks = vec![
            block(4, Some(3)),
            block(3, Some(1)),
            block(2, Some(1)),
            block(1, None),
            // Its parent was evicted.
            block(9, Some(8)),
        ];
        let ordered = parents_first(blocks.clone());
        assert_eq!(ordered.len(), blocks.len());
        let at = |hash| {
            ordered
                .iter()
                .position(|block| block.hash == BlockHash(hash))
        };
        assert!(at(1) < at(2) && at(1) < at(3) && at(3) < at(4) && at(9).is_some());
    }
}
