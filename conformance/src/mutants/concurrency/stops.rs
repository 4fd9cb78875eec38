//! Stop tokens of one request that end another.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::StreamExt;
use genset_backend_common::{
    EngineError, GenerateRequest, LLMEngine, OutputStream, RequestContext, TokenId, async_trait,
};
use parking_lot::Mutex;

use crate::mutants::fault::Fault;

/// A request that arrives while another runs also gets the stop tokens of the previous one.
#[derive(Default)]
pub(super) struct OfTheBatch {
    active: Arc<AtomicUsize>,
    last: Mutex<Vec<TokenId>>,
}

/// Counts a running request, until this is dropped.
struct Active(Arc<AtomicUsize>);

impl Drop for Active {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

#[async_trait]
impl Fault for OfTheBatch {
    async fn generate(
        &self,
        inner: &Arc<dyn LLMEngine>,
        mut request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let own = request.stop.stop_token_ids.to_vec();
        let before = std::mem::replace(&mut *self.last.lock(), own);
        if self.active.load(Ordering::Acquire) > 0 {
            request.stop.stop_token_ids.extend(before);
        }
        let outputs = inner.generate(request, ctx).await?;
        self.active.fetch_add(1, Ordering::AcqRel);
        let mut active = Some(Active(Arc::clone(&self.active)));
        let counted = outputs.inspect(move |item| {
            if !matches!(item, Ok(output) if !output.is_terminal()) {
                drop(active.take());
            }
        });
        Ok(OutputStream::from_raw(Box::pin(counted)))
    }
}
