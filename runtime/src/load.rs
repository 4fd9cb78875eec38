//! Following the load that workers publish.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use genset_backend_common::{RequestContext, handles::Load};
use tokio_util::task::AbortOnDropHandle;

use crate::client::Client;
use crate::component::Runtime;
use crate::discovery::InstanceRecord;
use crate::instances::Instances;
use crate::names::InstanceId;

/// Pause before resubscribing to a stream that ended.
const RESUBSCRIBE_PAUSE: Duration = Duration::from_millis(500);

/// Forwards every load that `instance` publishes, forever, and `None` when its stream ends.
pub(crate) async fn follow_load(
    client: Arc<Client<(), Load>>,
    instance: InstanceId,
    publish: impl Fn(Option<Load>) + Send,
) {
    loop {
        let ctx = RequestContext::new("load");
        if let Ok(mut loads) = client.direct(instance, (), ctx).await {
            while let Some(Ok(load)) = loads.next().await {
                publish(Some(load));
            }
        }
        publish(None);
        tokio::time::sleep(RESUBSCRIBE_PAUSE).await;
    }
}

/// Keeps the published load of every instance up to date, as instances come and go.
pub(crate) async fn follow_loads(
    runtime: Runtime,
    instances: Instances,
    client: Arc<Client<(), Load>>,
) {
    let all = instances.clone();
    for_each_instance(runtime, instances, move |record| {
        let id = record.instance;
        let all = all.clone();
        let publish = move |load: Option<Load>| {
            if let Some(instance) = all.get(id) {
                instance.publish(load);
            }
        };
        follow_load(Arc::clone(&client), id, publish)
    })
    .await;
}

/// Runs a task for every live instance, and drops it when the instance goes away.
pub(crate) async fn for_each_instance<F>(
    runtime: Runtime,
    instances: Instances,
    task: impl Fn(&InstanceRecord) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let mut live = instances.subscribe();
    let mut tasks: HashMap<InstanceId, AbortOnDropHandle<()>> = HashMap::new();
    loop {
        let now = live.borrow_and_update().clone();
        tasks.retain(|id, _| now.contains_key(id));
        for (id, instance) in now.iter() {
            tasks
                .entry(*id)
                .or_insert_with(|| runtime.spawn(task(&instance.record)));
        }
        if live.changed().await.is_err() {
            return;
        }
    }
}
