//! [`HandlerEngine`]: a Python handler as the engine of a Worker.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_core::Stream;
use futures_util::StreamExt;
use genset_backend_common::kv::KvEventData;
use genset_backend_common::output::Finish;
use genset_backend_common::ports::Control;
use genset_backend_common::{
    DrainContext, EngineConfig, EngineControls, EngineError, GenerateRequest, LLMEngine, Output,
    OutputStream, RequestContext, StartContext, async_trait,
    controls::{ControlReply, ControlRequest},
    error::At,
    handles::Load,
    series::{MetricSample, PublishedMetrics},
};
use genset_wire::{decode_payload, encode_payload};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::call::{Answer, CallHandler};

/// What a Python engine publishes.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Published {
    /// A change of its prefix cache.
    Kv(KvEventData),
    /// A change of the prefix cache of one data-parallel rank.
    KvRank {
        /// The rank.
        rank: u32,
        /// The change.
        data: KvEventData,
    },
    /// How busy it is.
    Load(Load),
    /// The current values of some of its series.
    Metrics(Vec<MetricSample>),
    /// It has computed a step.
    Step,
    /// It cannot continue.
    Dead {
        /// The reason.
        reason: String,
    },
}

/// An engine that Python has started already: `start` only returns its config.
#[derive(Debug)]
pub(crate) struct HandlerEngine {
    handler: CallHandler,
    /// Answers calls other than requests, if Python has an engine's other methods too.
    hooks: Option<CallHandler>,
    config: EngineConfig,
    metrics: PublishedMetrics,
    start: Mutex<Option<StartContext>>,
}

/// A call to the engine other than a request. `genset.backend.worker` answers it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Hook {
    Drain { deadline_ms: u64 },
    Control(ControlRequest),
}

impl HandlerEngine {
    pub(crate) fn new(
        handler: CallHandler,
        hooks: Option<CallHandler>,
        config: EngineConfig,
    ) -> Arc<Self> {
        Arc::new(Self {
            handler,
            hooks,
            config,
            metrics: PublishedMetrics::default(),
            start: Mutex::default(),
        })
    }

    /// Calls Python and waits until it is done; returns its answer, if it gives one.
    async fn ask(hooks: &CallHandler, hook: &Hook) -> Result<Option<Bytes>, EngineError> {
        let asked = encode_payload(hook).map_err(|error| {
            EngineError::internal("the question cannot be serialized").with_source(error)
        })?;
        let mut answer = hooks.begin(asked.into(), RequestContext::new("hook"))?;
        let mut given = None;
        while let Some(item) = answer.next().await {
            given = Some(item?.0);
        }
        Ok(given)
    }

    /// Forwards what Python publishes; has no effect before the Worker has started the engine.
    pub(crate) fn publish(&self, published: Published) {
        let start = self.start.lock();
        let Some(start) = &*start else { return };
        match published {
            Published::Kv(data) => {
                start.kv_events.publish(data);
            }
            Published::KvRank { rank, data } => match start.kv_events.known_rank(rank) {
                Some(cache) => drop(cache.publish(data)),
                None => tracing::debug!(rank, "KV events of a rank that was not declared"),
            },
            Published::Load(load) => start.load.publish(load),
            Published::Metrics(samples) => self.metrics.publish(samples),
            Published::Step => start.health.report_step(),
            Published::Dead { reason } => start.health.report_dead(reason),
        }
    }
}

#[async_trait]
impl LLMEngine for HandlerEngine {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        if self.config.capabilities.kv_ranks {
            for rank in 0..self.config.data_parallel_size {
                drop(ctx.kv_events.of_rank(rank));
            }
        }
        self.metrics.register_in(&ctx.metrics);
        *self.start.lock() = Some(ctx);
        Ok(self.config.clone())
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let body = encode_payload(&request).map_err(|error| {
            EngineError::internal("the request cannot be serialized").with_source(error)
        })?;
        let prompt_tokens = request.prompt_tokens().unwrap_or_default();
        let answer = self.handler.begin(body.into(), ctx.clone())?;
        Ok(OutputStream::from_raw(Box::pin(Outputs {
            answer: Some(answer),
            cancelled: Box::pin(ctx.cancelled_owned()),
            prompt_tokens,
            streamed_tokens: 0,
        })))
    }

    async fn drain(&self, ctx: DrainContext) -> Result<(), EngineError> {
        let Some(hooks) = &self.hooks else {
            return Ok(());
        };
        let deadline_ms = u64::try_from(ctx.deadline.as_millis()).unwrap_or(u64::MAX);
        Self::ask(hooks, &Hook::Drain { deadline_ms })
            .await
            .map(drop)
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        self.start.lock().take();
        Ok(())
    }

    fn controls(&self) -> Option<&dyn EngineControls> {
        self.hooks.as_ref().map(|_| self as &dyn EngineControls)
    }
}

#[async_trait]
impl Control for HandlerEngine {
    async fn control(&self, request: ControlRequest) -> Result<ControlReply, EngineError> {
        let Some(hooks) = &self.hooks else {
            let problem = format!("this engine does not support {}", request.op());
            return Err(EngineError::unsupported(At::other("op"), problem));
        };
        let reply = Self::ask(hooks, &Hook::Control(request)).await?;
        let reply = reply.ok_or_else(|| EngineError::internal("the engine gave no reply"))?;
        decode_payload(&reply).map_err(|error| {
            EngineError::internal("the engine's reply is none to a control request")
                .with_source(error)
        })
    }
}

/// Python's answer as outputs. A cancelled request ends here at once; the drop of its answer notifies Python.
struct Outputs {
    answer: Option<Answer>,
    cancelled: Pin<Box<dyn Future<Output = ()> + Send>>,
    prompt_tokens: u32,
    streamed_tokens: u32,
}

impl Outputs {
    fn read(&mut self, item: &[u8]) -> Result<Output, EngineError> {
        let output: Output = decode_payload(item).map_err(|error| {
            let problem = error.detail();
            EngineError::internal(format!(
                "the handler answered what is no output of an engine: {problem}"
            ))
            .with_source(error)
        })?;
        if output.is_terminal() {
            self.answer = None;
        } else {
            self.streamed_tokens = self.streamed_tokens.saturating_add(output.token_count());
        }
        Ok(output)
    }
}

impl Stream for Outputs {
    type Item = Result<Output, EngineError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let Some(answer) = &mut this.answer else {
            return Poll::Ready(None);
        };
        match answer.poll_next_unpin(cx) {
            Poll::Ready(Some(Ok(item))) => Poll::Ready(Some(this.read(&item.0))),
            Poll::Ready(Some(Err(error))) => {
                this.answer = None;
                Poll::Ready(Some(Err(error)))
            }
            Poll::Ready(None) => {
                this.answer = None;
                Poll::Ready(None)
            }
            Poll::Pending => {
                if this.cancelled.as_mut().poll(cx).is_pending() {
                    return Poll::Pending;
                }
                this.answer = None;
                let finished =
                    Finish::cancelled().into_finished(this.prompt_tokens, this.streamed_tokens);
                Poll::Ready(Some(Ok(Output::Finished(Box::new(finished)))))
            }
        }
    }
}
