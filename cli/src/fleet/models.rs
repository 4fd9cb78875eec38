//! `genset models`: what a fleet serves, as discovery lists it.

use clap::Args;
use genset_backend_common::EngineError;
use genset_runtime::discovery::all_instances;
use genset_runtime::{LiveModel, ModelDirectory, NetworkArgs, Runtime};
use serde_json::{Value, json};
use tokio::time::timeout;

use super::{FIND_TIMEOUT, table, with_runtime};
use crate::input::{escaped, print};

/// What is said of an empty fleet.
pub(super) const NONE_SERVED: &str =
    "no model is served; `genset run in=dyn out=ENGINE MODEL` starts a worker\n";

#[derive(Debug, Args)]
pub(crate) struct ModelsArgs {
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten, next_help_heading = "Network")]
    network: NetworkArgs,
}

/// Prints each model, a line for each role that workers of it play.
///
/// # Errors
/// A network setting is wrong, or discovery is away.
pub(crate) fn models(args: &ModelsArgs) -> Result<u8, EngineError> {
    let models: Vec<LiveModel> = with_runtime(&args.network, async |runtime| {
        let models = directory(runtime).await?.subscribe();
        let found = models.borrow().values().cloned().collect();
        Ok(found)
    })?;
    print(&match args.json {
        true => format!("{:#}\n", models.iter().map(in_json).collect::<Value>()),
        false => escaped(&in_words(&models)),
    });
    Ok(0)
}

/// A directory that knows what discovery lists now.
pub(super) async fn directory(runtime: &Runtime) -> Result<ModelDirectory, EngineError> {
    let directory = ModelDirectory::follow(runtime);
    let listed = runtime.discovery().get(all_instances()).await?;
    // Where nothing is listed, nothing would ever change.
    if !listed.is_empty() {
        let _changed = timeout(FIND_TIMEOUT, directory.subscribe().changed()).await;
    }
    Ok(directory)
}

fn in_words(models: &[LiveModel]) -> String {
    if models.is_empty() {
        return NONE_SERVED.into();
    }
    let mut rows = Vec::new();
    for model in models {
        for (role, pool) in &model.pools {
            let ids: Vec<String> = pool.instances.iter().map(ToString::to_string).collect();
            rows.push([
                model.card.name.clone(),
                role.to_string(),
                model.card.context_length_tokens.to_string(),
                format!("dyn://{}", pool.endpoint),
                ids.join(" "),
            ]);
        }
    }
    let mut text = table(["MODEL", "ROLE", "CONTEXT", "ENDPOINT", "WORKERS"], &rows);
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

fn in_json(model: &LiveModel) -> Value {
    let pool = |(role, pool): (&genset_backend_common::Role, &genset_runtime::Pool)| {
        let ids: Vec<String> = pool.instances.iter().map(ToString::to_string).collect();
        json!({"role": role.to_string(), "endpoint": pool.endpoint.to_string(), "workers": ids})
    };
    let left_out = |worker: &genset_runtime::LeftOutWorker| {
        json!({
            "worker": worker.instance.to_string(),
            "endpoint": worker.endpoint.to_string(),
            "differences": worker.differences,
        })
    };
    json!({
        "model": model.card.name,
        "context_length_tokens": model.card.context_length_tokens,
        "served": model.is_servable(),
        "pools": model.pools.iter().map(pool).collect::<Value>(),
        "adapters": model.adapters.keys().collect::<Vec<_>>(),
        "left_out_workers": model.left_out.iter().map(left_out).collect::<Value>(),
    })
}
