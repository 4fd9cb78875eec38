//! `genset models`: lists what a fleet serves, from discovery.

use std::collections::BTreeMap;

use clap::Args;
use genset_backend_common::EngineError;
use genset_runtime::discovery::{Entry, InstanceRecord, all_instances};
use genset_runtime::{EndpointName, InstanceId, LiveModel, ModelDirectory, Runtime};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::{FIND_TIMEOUT, FleetArgs, table, with_runtime};
use crate::input::{escaped, print};

/// The message for an empty fleet.
pub(super) const NONE_SERVED: &str =
    "no model is served; `genset run in=dyn out=ENGINE MODEL` starts a worker\n";

#[derive(Debug, Args)]
pub(crate) struct ModelsArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten, next_help_heading = "Network")]
    pub(crate) fleet: FleetArgs,
}

/// The user data that workers publish, by endpoint and instance; without workers that publish none.
type UserData = BTreeMap<(EndpointName, InstanceId), Value>;

/// Prints each model, with one line for each role of its workers.
///
/// # Errors
/// A network setting is wrong, or discovery is unreachable.
pub(crate) fn models(args: &ModelsArgs) -> Result<u8, EngineError> {
    let (models, user_data) = with_runtime(&args.fleet.network, async |runtime| {
        let models = directory(runtime).await?.subscribe();
        let found: Vec<LiveModel> = models.borrow().values().cloned().collect();
        Ok((found, user_data(runtime).await?))
    })?;
    let shown = |model| in_json(model, &user_data);
    print(&match args.json {
        true => format!("{:#}\n", models.iter().map(shown).collect::<Value>()),
        false => escaped(&in_words(&models)),
    });
    Ok(0)
}

/// A directory with the current listing of discovery.
pub(super) async fn directory(runtime: &Runtime) -> Result<ModelDirectory, EngineError> {
    let directory = ModelDirectory::follow(runtime);
    let listed = runtime.discovery().get(all_instances()).await?;
    // Without a model, as of services in Python alone, the directory would never change.
    let has_model = |entry: &Entry| {
        InstanceRecord::try_from_entry(entry).is_ok_and(|record| record.card.is_some())
    };
    if listed.iter().any(has_model) {
        let _changed = timeout(FIND_TIMEOUT, directory.subscribe().changed()).await;
    }
    Ok(directory)
}

async fn user_data(runtime: &Runtime) -> Result<UserData, EngineError> {
    let entries = runtime.discovery().get(all_instances()).await?;
    let records = entries.iter().filter_map(|entry| {
        let record = InstanceRecord::try_from_entry(entry).ok()?;
        Some(((record.endpoint, record.instance), record.card?.user_data))
    });
    Ok(records.filter(|(_, data)| !data.is_null()).collect())
}

/// The most ids of a pool's workers that a line shows.
const SHOWN_IDS: usize = 8;

/// The first ids, and the number of the others.
fn ids(instances: &[InstanceId]) -> String {
    let shown = instances.iter().take(SHOWN_IDS).map(ToString::to_string);
    let mut text = shown.collect::<Vec<String>>().join(" ");
    if let Some(more @ 1..) = instances.len().checked_sub(SHOWN_IDS) {
        text.push_str(&format!(" and {more} more"));
    }
    text
}

fn in_words(models: &[LiveModel]) -> String {
    if models.is_empty() {
        return NONE_SERVED.into();
    }
    let mut rows = Vec::new();
    for model in models {
        for (role, pool) in &model.pools {
            rows.push([
                model.card.name.clone(),
                role.to_string(),
                model.card.context_length_tokens.to_string(),
                format!("dyn://{}", pool.endpoint),
                ids(&pool.instances),
            ]);
        }
    }
    let mut text = table(["MODEL", "ROLE", "CONTEXT", "ENDPOINT", "WORKERS"], &rows);
    for LiveModel { card, .. } in models {
        let parsers = [
            ("tool", &card.tool_parser),
            ("reasoning", &card.reasoning_parser),
        ];
        let parsers = parsers.iter().filter_map(|(kind, name)| {
            let name = name.as_deref().filter(|name| *name != "none")?;
            Some(format!("{kind} parser {name}"))
        });
        let parsers: Vec<String> = parsers.collect();
        if !parsers.is_empty() {
            text.push_str(&format!("{}: {}\n", card.name, parsers.join(", ")));
        }
    }
    for model in models.iter().filter(|model| !model.is_servable()) {
        let line = format!("{}: not served: no decode worker\n", model.card.name);
        text.push_str(&line);
    }
    for model in models.iter().filter(|model| !model.adapters.is_empty()) {
        let names: Vec<&str> = model.adapters.keys().map(String::as_str).collect();
        let line = format!("{}: adapters {}\n", model.card.name, names.join(", "));
        text.push_str(&line);
    }
    for model in models {
        for worker in &model.left_out {
            let line = format!(
                "{}: worker {} gets no new requests, for it publishes something else: {}\n",
                model.card.name,
                worker.instance,
                worker.differences.join("; ")
            );
            text.push_str(&line);
        }
    }
    text
}

fn in_json(model: &LiveModel, user_data: &UserData) -> Value {
    let data_of = |endpoint: &EndpointName, instance: InstanceId| {
        let data = user_data.get(&(endpoint.clone(), instance));
        data.cloned().unwrap_or_default()
    };
    let pool = |(role, pool): (&genset_backend_common::Role, &genset_runtime::Pool)| {
        let ids: Vec<String> = pool.instances.iter().map(ToString::to_string).collect();
        let instances = pool.instances.iter();
        let data = instances.map(|id| (id.to_string(), data_of(&pool.endpoint, *id)));
        let data: serde_json::Map<String, Value> =
            data.filter(|(_, data)| !data.is_null()).collect();
        json!({
            "role": role.to_string(),
            "endpoint": pool.endpoint.to_string(),
            "workers": ids,
            "user_data": data,
        })
    };
    let left_out = |worker: &genset_runtime::LeftOutWorker| {
        json!({
            "worker": worker.instance.to_string(),
            "endpoint": worker.endpoint.to_string(),
            "differences": worker.differences,
            "user_data": data_of(&worker.endpoint, worker.instance),
        })
    };
    json!({
        "model": model.card.name,
        "context_length_tokens": model.card.context_length_tokens,
        "tool_parser": model.card.tool_parser,
        "reasoning_parser": model.card.reasoning_parser,
        "served": model.is_servable(),
        "pools": model.pools.iter().map(pool).collect::<Value>(),
        "adapters": model.adapters.keys().collect::<Vec<_>>(),
        "left_out_workers": model.left_out.iter().map(left_out).collect::<Value>(),
    })
}

#[cfg(test)]
mod tests {
    use genset_runtime::discovery::Address;
    use tokio::time::Instant;

    use super::*;

    #[test]
    fn of_many_workers_a_few_are_named() {
        let ids_of = |count: u64| ids(&(1..=count).map(InstanceId).collect::<Vec<_>>());
        assert_eq!(ids_of(200), ids_of(8) + " and 192 more");
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_for_models_that_no_instance_has() {
        let runtime = Runtime::in_process();
        let service = InstanceRecord {
            endpoint: EndpointName::default(),
            instance: InstanceId(1),
            address: Address {
                plane: "tcp".into(),
                location: "127.0.0.1:1/1".into(),
            },
            card: None,
            started_ms: 0,
        };
        let lease = runtime.discovery().lease().await.unwrap();
        lease.put(service.to_entry().unwrap()).await.unwrap();
        let begun = Instant::now();
        directory(&runtime).await.unwrap();
        assert_eq!(begun.elapsed(), std::time::Duration::ZERO);
    }
}
