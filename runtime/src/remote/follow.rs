//! Republishes the KV events of a remote engine's worker.

use std::time::Duration;

use futures_util::StreamExt;
use genset_backend_common::RequestContext;
use genset_backend_common::kv::{BlockChain, KvEventData, KvEventPublisher, chains};
use tokio::sync::oneshot;

use crate::client::Client;
use crate::names::InstanceId;
use crate::registrar::KvItem;

/// Pause before resubscribing to an event stream that ended.
const RESUBSCRIBE_PAUSE: Duration = Duration::from_millis(500);

/// Notifies `told` after the worker's cache contents have been published for the first time.
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
                    // A cancelled start does not listen.
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
            for BlockChain { parent, blocks } in chains(snapshot.blocks) {
                publisher.publish(KvEventData::Stored { parent, blocks });
            }
        }
    }
}
