//! The controls of a remote engine: each is forwarded to its worker.

use async_trait::async_trait;
use genset_backend_common::ports::Control;
use genset_backend_common::{
    EngineError,
    controls::{ControlReply, ControlRequest},
};

use super::RemoteEngine;

#[async_trait]
impl Control for RemoteEngine {
    async fn control(&self, request: ControlRequest) -> Result<ControlReply, EngineError> {
        let remote = self.state.get()?;
        let instance = match self.config.instance {
            Some(instance) => instance,
            None => remote.only_instance()?,
        };
        remote.control.workers(self.config.wait).await?;
        remote.control.ask(instance, request).await
    }
}
