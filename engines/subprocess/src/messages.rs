//! The payloads of the small endpoints, for both ends of the socket: `engine` and `launch` are the worker's, `serve` the process's.

use genset_backend_common::{EngineConfig, Role};
use serde::{Deserialize, Serialize};

/// The request of the endpoint `start`.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct StartRequest {
    pub(crate) worker_id: u64,
    #[serde(default)]
    pub(crate) role: Role,
}

/// An item of the endpoint `start`; the last one is the config.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StartItem {
    Progress {
        stage: String,
        #[serde(default)]
        fraction: Option<f32>,
    },
    Config(Box<EngineConfig>),
}

/// The request of the endpoint `drain`.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct DrainRequest {
    pub(crate) deadline_ms: u64,
}
