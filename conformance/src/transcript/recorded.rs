//! [`recorded`] wraps an engine and records every call in the transcript. The reader of a stream records its items.

use std::sync::Arc;

use genset_backend_common::{
    DrainContext, EngineConfig, EngineControls, EngineError, GenerateRequest, LLMEngine,
    OutputStream, RequestContext, StartContext, async_trait,
};

use super::Recorder;

/// Wraps the engine to record its calls, if transcripts are enabled.
pub(crate) fn recorded(inner: Arc<dyn LLMEngine>, recorder: &Arc<Recorder>) -> Arc<dyn LLMEngine> {
    if !recorder.is_on() {
        return inner;
    }
    let recorder = Arc::clone(recorder);
    Arc::new(Recorded { inner, recorder })
}

struct Recorded {
    inner: Arc<dyn LLMEngine>,
    recorder: Arc<Recorder>,
}

/// A call in progress; recorded as dropped if its future is dropped.
struct Call<'a> {
    recorder: &'a Recorder,
    request: Option<&'a str>,
    what: &'static str,
    is_over: bool,
}

impl Call<'_> {
    fn ended<T>(mut self, result: Result<T, &EngineError>) {
        self.is_over = true;
        self.recorder.note(self.request, || match result {
            Ok(_) => format!("{} returned", self.what),
            Err(error) => format!("{} failed: {}", self.what, error.kind()),
        });
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            let dropped = || format!("the call of {} was dropped", self.what);
            self.recorder.note(self.request, dropped);
        }
    }
}

impl Recorded {
    fn call<'a>(&'a self, request: Option<&'a str>, what: &'static str) -> Call<'a> {
        Call {
            recorder: &self.recorder,
            request,
            what,
            is_over: false,
        }
    }
}

#[async_trait]
impl LLMEngine for Recorded {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        self.recorder
            .note(None, || format!("start as {}", ctx.role));
        let call = self.call(None, "start");
        let started = self.inner.start(ctx).await;
        call.ended(started.as_ref());
        started
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let id = ctx.id().to_owned();
        let mut call = self.call(Some(&id), "generate");
        let generated = self.inner.generate(request, ctx).await;
        // The caller records the request and its refusal.
        call.is_over = true;
        generated
    }

    async fn abort(&self, ctx: &RequestContext) {
        self.recorder.note(Some(ctx.id()), || "abort".to_owned());
        let call = self.call(Some(ctx.id()), "abort");
        self.inner.abort(ctx).await;
        call.ended(Ok(()));
    }

    async fn drain(&self, ctx: DrainContext) -> Result<(), EngineError> {
        self.recorder.note(None, || "drain".to_owned());
        let call = self.call(None, "drain");
        let drained = self.inner.drain(ctx).await;
        call.ended(drained.as_ref());
        drained
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        self.recorder.note(None, || "cleanup".to_owned());
        let call = self.call(None, "cleanup");
        let cleaned = self.inner.cleanup().await;
        call.ended(cleaned.as_ref());
        cleaned
    }

    fn controls(&self) -> Option<&dyn EngineControls> {
        self.inner.controls()
    }
}
