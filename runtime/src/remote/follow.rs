//! What a remote engine publishes: the KV events of its worker, passed on.

use std::time::Duration;

use futures_util::StreamExt;
use genset_backend_common::RequestContext;
use genset_backend_common::kv::{BlockChain, KvEventData, KvEventPublisher, chains};
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
            for BlockChain { parent, blocks } in chains(snapshot.blocks) {
                publisher.publish(KvEventData::Stored { parent, blocks });
            }
        }
    }
}
