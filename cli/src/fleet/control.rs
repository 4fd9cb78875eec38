//! `genset control`: sends requests other than generation to the workers of an endpoint.

use clap::{Args, Subcommand, ValueEnum};
use futures_util::future::join_all;
use genset_backend_common::{
    EngineError,
    controls::{Adapter, ControlReply, ControlRequest, SleepLevel},
    handles::Load,
};
use genset_runtime::{ControlClient, EndpointName, InstanceId, LoadClient, Runtime};
use serde::Serialize;
use serde_json::{Value, json};

use super::top::load_in_words;
use super::{FAILED, FIND_TIMEOUT, FleetArgs, error_in_json, with_runtime};
use crate::bench::progress::telling_if_long;
use crate::input::{escaped, note, print};

pub(crate) const HELP: &str = "\
Examples:
  genset control dyn://genset.backend.generate sleep --level weights
  genset control dyn://genset.backend.generate clear-prefix-cache --instance 1e3d82719a4443
  genset control dyn://genset.backend.generate load-adapter french ./adapters/french
  genset control dyn://genset.backend.generate log-level info,genset_runtime=debug

Workers that other machines can reach require a secret: give it to the worker and to this command by --control-secret-file.

Exit codes: 0 every worker did it, 1 one did not, no worker was found or discovery is away, 2 usage.";

#[derive(Debug, Args)]
pub(crate) struct ControlArgs {
    /// Endpoint of the workers: dyn://NAMESPACE.COMPONENT.ENDPOINT, as `genset models` lists it
    endpoint: EndpointName,
    #[command(subcommand)]
    operation: Operation,
    /// This worker alone, by its id [default: all of the endpoint]
    #[arg(long, value_name = "ID")]
    instance: Option<InstanceId>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    #[command(flatten, next_help_heading = "Network")]
    pub(crate) fleet: FleetArgs,
}

#[derive(Debug, Subcommand)]
enum Operation {
    /// Free device memory until woken
    Sleep {
        /// Memory to free: KV blocks, or the weights too
        #[arg(long, value_enum, default_value = "kv-cache")]
        level: Level,
    },
    /// Take back what sleep freed
    Wake,
    /// Drop every reusable KV block
    #[command(alias = "clear_prefix_cache")]
    ClearPrefixCache,
    /// List the adapters
    #[command(aliases = ["list_adapters", "list-adapters"])]
    Adapters,
    /// Make an adapter available
    #[command(alias = "load_adapter")]
    LoadAdapter {
        /// The name that requests use
        name: String,
        /// Where the engine finds it: for out=candle and out=vllm a folder on the worker's machine
        source: String,
    },
    /// Make an adapter unavailable
    #[command(alias = "unload_adapter")]
    UnloadAdapter {
        /// Its name
        name: String,
    },
    /// Replace the weights
    #[command(alias = "update_weights")]
    UpdateWeights {
        /// Source of the weights, as JSON that the engine documents
        #[arg(value_parser = json_of)]
        source: Value,
    },
    /// Begin to record a profile
    #[command(alias = "start_profile")]
    StartProfile,
    /// End the profile, and say where it was written
    #[command(alias = "stop_profile")]
    StopProfile,
    /// Change what the worker's process logs
    #[command(alias = "log_level")]
    LogLevel {
        /// The new filter in RUST_LOG syntax, such as debug or info,genset_runtime=trace
        filter: String,
    },
    /// Show the load of the workers
    #[command(aliases = ["load_metrics", "load-metrics"])]
    Load,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Level {
    KvCache,
    Weights,
}

fn json_of(text: &str) -> Result<Value, serde_json::Error> {
    serde_json::from_str(text)
}

impl Operation {
    /// The request for the `control` endpoint; `None` if another endpoint answers.
    fn request(&self) -> Option<ControlRequest> {
        Some(match self {
            Self::Sleep { level } => ControlRequest::Sleep {
                level: match level {
                    Level::KvCache => SleepLevel::KvCache,
                    Level::Weights => SleepLevel::Weights,
                },
            },
            Self::Wake => ControlRequest::Wake,
            Self::ClearPrefixCache => ControlRequest::ClearPrefixCache,
            Self::Adapters => ControlRequest::ListAdapters,
            Self::LoadAdapter { name, source } => ControlRequest::LoadAdapter {
                adapter: Adapter {
                    name: name.clone(),
                    source: source.clone(),
                },
            },
            Self::UnloadAdapter { name } => ControlRequest::UnloadAdapter { name: name.clone() },
            Self::UpdateWeights { source } => ControlRequest::UpdateWeights {
                source: source.clone(),
            },
            Self::StartProfile => ControlRequest::StartProfile,
            Self::StopProfile => ControlRequest::StopProfile,
            Self::LogLevel { filter } => ControlRequest::LogLevel {
                filter: filter.clone(),
            },
            Self::Load => return None,
        })
    }
}

/// The result of one worker.
type Outcome = (InstanceId, Result<Answer, EngineError>);

/// The answer of a worker.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Answer {
    Reply(ControlReply),
    Load(Load),
}

/// Asks all workers concurrently, and prints each answer. The exit code says whether all succeeded.
///
/// # Errors
/// No worker is found, or the network settings are wrong.
pub(crate) fn control(args: &ControlArgs) -> Result<u8, EngineError> {
    let outcomes = with_runtime(&args.fleet.network, async |runtime| {
        ask(runtime, args).await
    })?;
    print(&match args.json {
        true => format!("{:#}\n", outcomes.iter().map(in_json).collect::<Value>()),
        false => escaped(&outcomes.iter().map(in_words).collect::<String>()),
    });
    let did_all = outcomes.iter().all(|(_, reply)| reply.is_ok());
    Ok(if did_all { 0 } else { FAILED })
}

async fn ask(runtime: &Runtime, args: &ControlArgs) -> Result<Vec<Outcome>, EngineError> {
    let client = ControlClient::try_new(runtime, &args.endpoint)?;
    let loads = LoadClient::new(runtime);
    let all = client.workers(FIND_TIMEOUT).await?;
    let workers = args.instance.map_or(all, |instance| vec![instance]);
    let each = workers.into_iter().map(async |worker| {
        let answer = match args.operation.request() {
            Some(request) => client.ask(worker, request).await.map(Answer::Reply),
            None => {
                let load = loads.of_worker(&args.endpoint, worker).await;
                load.map(Answer::Load)
            }
        };
        (worker, answer)
    });
    let each: Vec<_> = each.collect();
    let waits = match each.len() {
        1 => "waiting for the answer of a worker".to_owned(),
        count => format!("waiting for the answers of {count} workers"),
    };
    Ok(telling_if_long(join_all(each), || note(waits)).await)
}

fn in_words((worker, reply): &Outcome) -> String {
    match reply {
        Ok(Answer::Load(load)) => format!("{worker}  {}\n", load_in_words(load)),
        Ok(Answer::Reply(ControlReply::Done)) => format!("{worker}  done\n"),
        Ok(Answer::Reply(ControlReply::Profile { location })) => {
            format!("{worker}  profile in {location}\n")
        }
        Ok(Answer::Reply(ControlReply::Adapters { adapters })) if adapters.is_empty() => {
            format!("{worker}  no adapters\n")
        }
        Ok(Answer::Reply(ControlReply::Adapters { adapters })) => { adapters.iter() }
            .map(|adapter| format!("{worker}  {}  {}\n", adapter.name, adapter.source))
            .collect(),
        Err(error) => format!("{worker}  failed: {error}\n"),
    }
}

fn in_json((worker, reply): &Outcome) -> Value {
    let worker = worker.to_string();
    match reply {
        Ok(reply) => json!({"worker": worker, "reply": reply}),
        Err(error) => json!({"worker": worker, "error": error_in_json(error)}),
    }
}
