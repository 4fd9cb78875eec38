//! The layer that carries requests to engines: names and instances, discovery, request planes, selection, and the status server
//! of a process. It implements the ports of `genset-backend-common` and handles neither text nor OpenAI JSON.
//!
//! - [`Runtime`] is the entry point: `runtime.namespace("ns")?.component("c")?.endpoint("e")?`, then
//!   [`Endpoint::serve`] or [`Endpoint::client`].
//! - [`RuntimeRegistrar`] offers a Worker to clients; [`ModelDirectory`] finds the models that Workers serve;
//!   [`GenerateClient`] sends them requests.
//! - `run` and `WorkerArgs` (feature `cli`) implement a worker's whole `main`.

mod accepting;
mod client;
mod component;
mod controls;
pub mod discovery;
mod ejection;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod host_names;
mod instances;
mod kv_blocks;
#[cfg(feature = "cli")]
pub mod layers;
mod load;
#[cfg(feature = "cli")]
mod logging;
mod model_folder;
mod models;
mod names;
#[cfg(feature = "cli")]
mod network_args;
mod peers;
pub mod plane;
mod registrar;
mod remote;
pub mod selection;
mod status;
mod strangers;
mod telemetry;
mod tls_identity;
mod vital;
#[cfg(feature = "cli")]
mod worker_main;

pub use accepting::TcpAcceptor;
pub use client::{Choose, Client, GenerateClient, Holder, Routed};
pub use component::{Component, Endpoint, Namespace, Runtime, Serving};
pub use controls::ControlClient;
pub use ejection::{EjectionConfig, Ejections};
pub use host_names::unknown_host;
pub use kv_blocks::{KvBlocksClient, KvBlocksRequest};
pub use load::{LoadClient, WorkerLoad};
#[cfg(feature = "cli")]
pub use logging::{
    Logging, init_logging, init_logging_with_console, shows_colours, tokio_console_support,
};
pub use model_folder::{ModelFolder, ModelFolderError, replace_chat_template};
pub use models::{LeftOutWorker, LiveModel, ModelDirectory, Pool};
pub use names::{EndpointName, InstanceId, NameError, WorkerScope};
#[cfg(feature = "cli")]
pub use network_args::{
    DiscoveryBackend, NatsLoginArgs, NetworkArgs, Reach, RequestPlaneKind, WireTlsArgs, byte_count,
    in_bytes, in_seconds, positive_seconds, seconds, text_of_file,
};
pub use peers::peer_of;
pub use registrar::{ArtifactRequest, KvItem, RuntimeRegistrar, endpoints};
pub use remote::{RemoteConfig, RemoteEngine};
pub use selection::SelectionMode;
#[cfg(feature = "cli")]
pub use status::StatusArgs;
pub use status::{
    ControlDoor, Health, HealthSource, METRICS_CONTENT_TYPE, Readiness, StatusServer,
};
pub use telemetry::continue_trace;
pub use tls_identity::TlsIdentity;
pub use vital::VitalRuntime;
#[cfg(feature = "cli")]
pub use worker_main::{Signals, WorkerArgs, exit_code, parse, run, run_worker};
