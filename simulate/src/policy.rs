//! [`Policy`]: how an instance is chosen; [`Way`], the layers between a request and the workers.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use genset_backend_common::output::OutputStream;
use genset_backend_common::ports::Generate;
use genset_backend_common::{EngineError, GenerateRequest, RequestContext};
use genset_router::{KvConfig, Layers, RouterConfig, RouterMode, connect};
use genset_runtime::selection::Candidate;
use genset_runtime::{GenerateClient, LiveModel, ModelDirectory, SelectionMode};
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
        let bad = |problem: String| EngineError::invalid_argument("--policies", problem);
        match text.parse() {
            Ok(RouterMode::Plain(SelectionMode::PowerOfTwo)) => {
                let problem =
                    "power-of-two draws without a seed, so that no two runs would be alike";
                Err(EngineError::unsupported("--policies", problem))
            }
            Ok(mode) => Ok(Self::Router(mode)),
            Err(problem) => Err(bad(format!("{problem}, {ORACLE}"))),
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

/// The layers between a request and the workers.
pub(crate) enum Way {
    Router(Arc<dyn Generate>),
    Random(GenerateClient, Mutex<Random>),
    Oracle(GenerateClient, Oracle),
}

/// An answer, and its route until its first output.
pub(crate) struct Begun {
    pub(crate) outputs: OutputStream,
    pub(crate) pending: Option<Pending>,
}

impl Way {
    /// Builds the layers that a policy needs. `seed` is its random seed.
    pub(crate) async fn connect(
        policy: Policy,
        plan: &Plan,
        seed: u64,
        fleet: &Arc<Fleet>,
        directory: &ModelDirectory,
        model: &LiveModel,
    ) -> Result<Self, EngineError> {
        let runtime = directory.runtime();
        let plain = SelectionMode::RoundRobin;
        Ok(match policy {
            Policy::Router(mode) => {
                let kv = KvConfig {
                    seed: Some(seed),
                    ..plan.kv.clone()
                };
                let config = RouterConfig {
                    mode,
                    kv,
                    ..RouterConfig::default()
                };
                let layers = Layers::register(runtime.metrics(), config);
                Self::Router(connect(directory, model, &layers, PATIENCE).await?)
            }
            Policy::Random => {
                let client = directory.client(model, plain, PATIENCE).await?;
                Self::Random(client, Mutex::new(Random::new(seed, 2)))
            }
            Policy::Oracle => {
                let client = directory.client(model, plain, PATIENCE).await?;
                let block_size = model.card.kv_block_size;
                Self::Oracle(client, Oracle::new(Arc::clone(fleet), block_size))
            }
        })
    }

    /// Sends a request.
    pub(crate) async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<Begun, EngineError> {
        let mut pending = None;
        let outputs = match self {
            Self::Router(layers) => layers.generate(request, ctx).await?,
            Self::Random(client, random) => {
                let mut choose = |_: &mut GenerateRequest, candidates: &[Candidate]| {
                    let count = u64::try_from(candidates.len()).unwrap_or(u64::MAX);
                    usize::try_from(random.lock().below(count)).ok()
                };
                client
                    .route_by(&mut choose, request, ctx, &[])
                    .await?
                    .outputs
            }
            Self::Oracle(client, oracle) => {
                let mut choose = |request: &mut GenerateRequest, candidates: &[Candidate]| {
                    let (place, chosen) = oracle.choose(request, candidates)?;
                    pending = Some(chosen);
                    Some(place)
                };
                client
                    .route_by(&mut choose, request, ctx, &[])
                    .await?
                    .outputs
            }
        };
        Ok(Begun { outputs, pending })
    }
}
