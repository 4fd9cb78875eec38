//! Administrative requests on their way to the engine's typed controls.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use async_trait::async_trait;
use futures_util::FutureExt;

use super::adapter::panic_text;
use crate::controls::{ControlReply, ControlRequest, missing};
use crate::engine::LLMEngine;
use crate::error::EngineError;
use crate::ports::Control;

/// The engine's controls, or their absence, with panics contained.
pub(super) struct ControlAdapter {
    pub(super) engine: Arc<dyn LLMEngine>,
}

#[async_trait]
impl Control for ControlAdapter {
    async fn control(&self, request: ControlRequest) -> Result<ControlReply, EngineError> {
        let op = name(&request);
        tracing::info!(op, "administrative request");
        match AssertUnwindSafe(self.perform(request)).catch_unwind().await {
            Ok(reply) => reply,
            Err(panic) => {
                tracing::error!(
                    op,
                    panic = panic_text(&*panic),
                    "the engine panicked in an administrative request"
                );
                Err(EngineError::internal(format!("the engine failed in {op}")))
            }
        }
    }
}

impl ControlAdapter {
    async fn perform(&self, request: ControlRequest) -> Result<ControlReply, EngineError> {
        let controls = self
            .engine
            .controls()
            .ok_or_else(|| missing(name(&request)))?;
        match request {
            ControlRequest::Sleep { level } => controls.sleep(level).await?,
            ControlRequest::Wake => controls.wake().await?,
            ControlRequest::ClearPrefixCache => controls.clear_prefix_cache().await?,
            ControlRequest::LoadAdapter { adapter } => controls.load_adapter(adapter).await?,
            ControlRequest::UnloadAdapter { name } => controls.unload_adapter(&name).await?,
            ControlRequest::ListAdapters => {
                return Ok(ControlReply::Adapters {
                    adapters: controls.adapters().await?,
                });
            }
            ControlRequest::UpdateWeights { source } => controls.update_weights(source).await?,
            ControlRequest::StartProfile => controls.start_profile().await?,
            ControlRequest::StopProfile => {
                return Ok(ControlReply::Profile {
                    location: controls.stop_profile().await?,
                });
            }
        }
        Ok(ControlReply::Done)
    }
}

fn name(request: &ControlRequest) -> &'static str {
    match request {
        ControlRequest::Sleep { .. } => "sleep",
        ControlRequest::Wake => "wake",
        ControlRequest::ClearPrefixCache => "clear_prefix_cache",
        ControlRequest::LoadAdapter { .. } => "load_adapter",
        ControlRequest::UnloadAdapter { .. } => "unload_adapter",
        ControlRequest::ListAdapters => "list_adapters",
        ControlRequest::UpdateWeights { .. } => "update_weights",
        ControlRequest::StartProfile => "start_profile",
        ControlRequest::StopProfile => "stop_profile",
    }
}
