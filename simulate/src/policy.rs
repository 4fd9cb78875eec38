//! [`Policy`]: how an instance is chosen, and the layers between a request and the workers.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use futures_util::StreamExt;
use genset_backend_common::output::OutputStream;
use genset_backend_common::ports::Generate;
use genset_backend_common::{
    EngineError, GenerateRequest, RequestContext, async_trait, spelling::none_of,
};
use genset_router::{
    KvConfig, Layers, Migrating, MigrationConfig, Migrations, Route, Routed, RouterConfig,
    RouterMode, connect,
};
use genset_runtime::selection::Candidate;
use genset_runtime::{GenerateClient, InstanceId, LiveModel, ModelDirectory, SelectionMode};
use parking_lot::Mutex;

use crate::fleet::{Fleet, PATIENCE};
use crate::oracle::{Oracle, Pending};
use crate::random::Random;
use crate::run::Plan;

/// How an instance is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// A mode of the router, with the layers that a frontend uses for it.
    Router(RouterMode),
    /// A random one, from the plan's seed.
    Random,
    /// The best one by the true state of every cache and queue at the moment, which no real router knows.
    Oracle,
}

impl Policy {
    /// Whether it supports disaggregated fleets (separate prefill and decode workers).
    pub(crate) fn knows_roles(self) -> bool {
        match self {
            Self::Router(_) => true,
            Self::Random | Self::Oracle => false,
        }
    }
}

const RANDOM: &str = "random";
const ORACLE: &str = "oracle";

impl FromStr for Policy {
    type Err = EngineError;

    fn from_str(text: &str) -> Result<Self, EngineError> {
        match text {
            RANDOM => return Ok(Self::Random),
            ORACLE => return Ok(Self::Oracle),
            _ => {}
        }
        match text.parse() {
            Ok(RouterMode::Plain(SelectionMode::PowerOfTwo)) => {
                let problem =
                    "power-of-two draws without a seed, so that no two runs would be alike";
                Err(EngineError::unsupported("--policies", problem))
            }
            Ok(mode) => Ok(Self::Router(mode)),
            Err(_) => {
                let modes = SelectionMode::ALL.into_iter();
                let modes = modes.filter(|mode| *mode != SelectionMode::PowerOfTwo);
                let mut known: Vec<String> = modes.map(|mode| mode.to_string()).collect();
                known.extend([RouterMode::Kv.to_string(), ORACLE.to_owned()]);
                let problem = none_of(text, known.iter().map(String::as_str));
                Err(EngineError::invalid_argument("--policies", problem))
            }
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Router(mode) => mode.fmt(f),
            Self::Random => f.write_str(RANDOM),
            Self::Oracle => f.write_str(ORACLE),
        }
    }
}

impl Policy {
    /// Builds the layers between the requests of a frontend and the workers. `seed` is their random seed.
    pub(crate) async fn connect(
        self,
        plan: &Plan,
        seed: u64,
        fleet: &Arc<Fleet>,
        directory: &ModelDirectory,
        model: &LiveModel,
    ) -> Result<Arc<dyn Generate>, EngineError> {
        let metrics = directory.runtime().metrics();
        let route: Arc<dyn Route> = match self {
            Self::Router(mode) => {
                let kv = KvConfig {
                    seed: Some(seed),
                    ..plan.kv.clone()
                };
                let config = RouterConfig {
                    mode,
                    kv,
                    ..RouterConfig::default()
                };
                let layers = Layers::register(metrics, config);
                return connect(directory, model, &layers, PATIENCE).await;
            }
            Self::Random => Arc::new(RandomRoute {
                client: client(directory, model).await?,
                random: Mutex::new(Random::new(seed, 2)),
            }),
            Self::Oracle => Arc::new(OracleRoute {
                client: client(directory, model).await?,
                oracle: Oracle::new(Arc::clone(fleet), model.card.kv_block_size),
            }),
        };
        // The router has this layer too, so policies differ in their choices alone.
        let migrations = Migrations::register(metrics, MigrationConfig::default());
        Ok(Arc::new(Migrating::new(route, &model.card, migrations)))
    }
}

/// A client of every worker, below a layer that waits for one.
async fn client(
    directory: &ModelDirectory,
    model: &LiveModel,
) -> Result<GenerateClient, EngineError> {
    let client = directory.client(model, SelectionMode::RoundRobin, PATIENCE);
    Ok(client.await?.without_wait())
}

/// Chooses instances at random.
struct RandomRoute {
    client: GenerateClient,
    random: Mutex<Random>,
}

#[async_trait]
impl Route for RandomRoute {
    async fn route(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
        left_out: &[InstanceId],
    ) -> Result<Routed, EngineError> {
        let mut choose = |_: &mut GenerateRequest, candidates: &[Candidate]| {
            let count = u64::try_from(candidates.len()).unwrap_or(u64::MAX);
            usize::try_from(self.random.lock().below(count)).ok()
        };
        let routed = self.client.route_by(&mut choose, request, ctx, left_out);
        routed.await
    }
}

/// Chooses instances as the oracle says.
struct OracleRoute {
    client: GenerateClient,
    oracle: Oracle,
}

#[async_trait]
impl Route for OracleRoute {
    async fn route(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
        left_out: &[InstanceId],
    ) -> Result<Routed, EngineError> {
        let mut pending = None;
        let mut choose = |request: &mut GenerateRequest, candidates: &[Candidate]| {
            let (place, chosen) = self.oracle.choose(request, candidates)?;
            pending = Some(chosen);
            Some(place)
        };
        let routed = self.client.route_by(&mut choose, request, ctx, left_out);
        let Routed {
            holder,
            began,
            outputs,
        } = routed.await?;
        Ok(Routed {
            holder,
            began,
            outputs: until_first_token(outputs, pending),
        })
    }
}

/// Drops `pending` at the first token of `outputs`, or with them.
fn until_first_token(outputs: OutputStream, mut pending: Option<Pending>) -> OutputStream {
    let watched = outputs.inspect(move |item| {
        if item.as_ref().is_ok_and(|output| output.token_count() > 0) {
            drop(pending.take());
        }
    });
    OutputStream::from_raw(Box::pin(watched))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_policy_is_answered_with_those_that_are() {
        for (given, near) in [("kvv", "kv"), ("orcle", "oracle")] {
            let error = given.parse::<Policy>().unwrap_err().to_string();
            let expected = format!(
                "{given:?} is none of round-robin, random, least-loaded, kv, oracle; did you mean {near:?}?"
            );
            assert!(error.ends_with(&expected), "{error}");
        }
    }
}
