//! The controls of a remote engine: each travels to its worker.

use async_trait::async_trait;
use genset_backend_common::{
    Adapter, ControlReply, ControlRequest, EngineControls, EngineError, SleepLevel,
};

use super::RemoteEngine;

impl RemoteEngine {
    async fn control(&self, request: ControlRequest) -> Result<ControlReply, EngineError> {
        let remote = self.state.get()?;
        let instance = match self.config.instance {
            Some(instance) => instance,
            None => remote.only_instance()?,
        };
        remote.control.workers(self.config.wait).await?;
        remote.control.ask(instance, request).await
    }

    async fn done(&self, request: ControlRequest) -> Result<(), EngineError> {
        match self.control(request).await? {
            ControlReply::Done => Ok(()),
            reply @ (ControlReply::Adapters { .. } | ControlReply::Profile { .. }) => {
                Err(unexpected(&reply))
            }
        }
    }
}

fn unexpected(reply: &ControlReply) -> EngineError {
    EngineError::internal(format!(
        "the worker gave a reply to another request: {reply:?}"
    ))
}

#[async_trait]
impl EngineControls for RemoteEngine {
    async fn sleep(&self, level: SleepLevel) -> Result<(), EngineError> {
        self.done(ControlRequest::Sleep { level }).await
    }

    async fn wake(&self) -> Result<(), EngineError> {
        self.done(ControlRequest::Wake).await
    }

    async fn clear_prefix_cache(&self) -> Result<(), EngineError> {
        self.done(ControlRequest::ClearPrefixCache).await
    }

    async fn load_adapter(&self, adapter: Adapter) -> Result<(), EngineError> {
        self.done(ControlRequest::LoadAdapter { adapter }).await
    }

    async fn unload_adapter(&self, name: &str) -> Result<(), EngineError> {
        let name = name.to_owned();
        self.done(ControlRequest::UnloadAdapter { name }).await
    }

    async fn adapters(&self) -> Result<Vec<Adapter>, EngineError> {
        match self.control(ControlRequest::ListAdapters).await? {
            ControlReply::Adapters { adapters } => Ok(adapters),
            reply @ (ControlReply::Done | ControlReply::Profile { .. }) => Err(unexpected(&reply)),
        }
    }

    async fn update_weights(&self, source: serde_json::Value) -> Result<(), EngineError> {
        self.done(ControlRequest::UpdateWeights { source }).await
    }

    async fn start_profile(&self) -> Result<(), EngineError> {
        self.done(ControlRequest::StartProfile).await
    }

    async fn stop_profile(&self) -> Result<String, EngineError> {
        match self.control(ControlRequest::StopProfile).await? {
            ControlReply::Profile { location } => Ok(location),
            reply @ (ControlReply::Done | ControlReply::Adapters { .. }) => Err(unexpected(&reply)),
        }
    }
}
