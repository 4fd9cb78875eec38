//! Maps administrative requests to the engine's typed controls.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Weak};

use async_trait::async_trait;
use futures_util::FutureExt;
use tokio::sync::watch;

use super::adapter::panic_text;
use super::adapters::AdapterBoard;
use super::lifecycle::State;
use super::operations::EngineCalls;
use crate::controls::{Adapter, ControlReply, ControlRequest, missing};
use crate::engine::LLMEngine;
use crate::error::{EngineError, ErrorKind};
use crate::ports::Control;

/// The engine's controls, if any, with panics contained. A started operation completes and is published even if the caller
/// leaves, unless the engine's cleanup comes first.
#[derive(Clone)]
pub(super) struct ControlAdapter {
    pub(super) engine: Arc<dyn LLMEngine>,
    pub(super) adapters: AdapterBoard,
    pub(super) calls: EngineCalls,
}

#[async_trait]
impl Control for ControlAdapter {
    async fn control(&self, request: ControlRequest) -> Result<ControlReply, EngineError> {
        let op = request.op();
        tracing::info!(op, "administrative request");
        let asked = self.clone();
        let performed = self.calls.beside(async move {
            AssertUnwindSafe(asked.perform(request))
                .catch_unwind()
                .await
        });
        match performed.await {
            Ok(Some(Ok(reply))) => reply,
            Ok(Some(Err(panic))) => {
                tracing::error!(
                    op,
                    panic = panic_text(&*panic),
                    "the engine panicked in an administrative request"
                );
                Err(EngineError::internal(format!("the engine failed in {op}")))
            }
            Ok(None) => {
                tracing::warn!(
                    op,
                    "an administrative request was given up: the worker stops"
                );
                Err(EngineError::engine_shutdown(format!(
                    "the worker stops, and {op} was given up"
                )))
            }
            Err(_) => Err(EngineError::internal(format!(
                "the runtime ended during {op}"
            ))),
        }
    }
}

impl ControlAdapter {
    async fn perform(&self, request: ControlRequest) -> Result<ControlReply, EngineError> {
        let op = request.op();
        let controls = self.engine.controls().ok_or_else(|| missing(op))?;
        match request {
            ControlRequest::Sleep { level } => controls.sleep(level).await?,
            ControlRequest::Wake => controls.wake().await?,
            ControlRequest::ClearPrefixCache => controls.clear_prefix_cache().await?,
            ControlRequest::LoadAdapter { adapter } => {
                self.adapters.check(&adapter)?;
                let loaded = controls.load_adapter(adapter.clone()).await;
                let new = loaded.is_ok().then_some(adapter);
                let add = |known: &mut Vec<Adapter>| known.extend(new);
                self.adapters.publish(controls, add).await;
                loaded?;
            }
            ControlRequest::UnloadAdapter { name } => {
                let unloaded = controls.unload_adapter(&name).await;
                let is_gone = |it: &Adapter| unloaded.is_ok() && it.name == name;
                let remove = |known: &mut Vec<Adapter>| known.retain(|it| !is_gone(it));
                self.adapters.publish(controls, remove).await;
                unloaded?;
            }
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
            ControlRequest::LogLevel { .. } => return Err(missing(op)),
        }
        Ok(ControlReply::Done)
    }
}

/// The engine's controls for the holder of the worker's handle. It holds the engine weakly, and calls it only while it serves.
#[derive(Debug, Clone)]
pub(super) struct HandleControl {
    pub(super) engine: Weak<dyn LLMEngine>,
    pub(super) state: watch::Receiver<State>,
    pub(super) adapters: AdapterBoard,
    pub(super) calls: EngineCalls,
}

impl HandleControl {
    /// Returns the engine while requests may reach it.
    fn serving(&self) -> Option<Arc<dyn LLMEngine>> {
        match *self.state.borrow() {
            State::Serving(_) | State::Suspended(_) | State::Draining { .. } => {
                self.engine.upgrade()
            }
            State::Created
            | State::Starting
            | State::Registering(_)
            | State::CleaningUp { .. }
            | State::Stopped(_) => None,
        }
    }
}

#[async_trait]
impl Control for HandleControl {
    async fn control(&self, request: ControlRequest) -> Result<ControlReply, EngineError> {
        let engine = self.serving().ok_or_else(|| {
            EngineError::new(
                ErrorKind::Unavailable,
                "the worker does not serve yet, or not any more",
            )
        })?;
        let control = ControlAdapter {
            engine,
            adapters: self.adapters.clone(),
            calls: self.calls.clone(),
        };
        control.control(request).await
    }
}
