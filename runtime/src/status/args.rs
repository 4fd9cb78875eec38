//! [`StatusArgs`]: the flags of the status port. Used by [`WorkerArgs`](crate::WorkerArgs) and by programs in other languages.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use clap::Args;
use genset_backend_common::EngineError;

use super::{ControlDoor, HealthSource, StatusServer};
use crate::component::Runtime;

/// Flags about the status port.
#[derive(Debug, Clone, Args)]
pub struct StatusArgs {
    /// Address of /live, /ready, /health, /metrics and /control
    #[arg(long, env = "GENSET_STATUS_HOST", default_value_t = IpAddr::V4(Ipv4Addr::LOCALHOST))]
    pub status_host: IpAddr,
    /// Port of /live, /ready, /health, /metrics and /control [default: none; 0 for any free one]
    #[arg(long, env = "GENSET_STATUS_PORT")]
    pub status_port: Option<u16>,
}

impl StatusArgs {
    /// Starts the process's status server if the flags ask for one; it serves `/control` if there is a worker.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the flags and the address, if it cannot be listened on.
    pub async fn listen(
        &self,
        runtime: &Runtime,
        health: HealthSource,
        control: Option<ControlDoor>,
    ) -> Result<Option<StatusServer>, EngineError> {
        let Some(port) = self.status_port else {
            return Ok(None);
        };
        let address = SocketAddr::new(self.status_host, port);
        let bound = StatusServer::bind(address, runtime, health, control).await;
        let server = bound.map_err(|error| {
            EngineError::invalid_argument(
                "--status-host, --status-port",
                format!("cannot listen on {address}: {error}"),
            )
        })?;
        tracing::info!("status on http://{}", server.address());
        Ok(Some(server))
    }
}
