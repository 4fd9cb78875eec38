//! Passes what a Worker serves to the test, without a runtime or a socket.

use std::sync::Arc;

use genset_backend_common::ports::{Generate, Offer, Registrar, Registration};
use genset_backend_common::{
    EngineError, GenerateRequest, OutputStream, RequestContext, async_trait,
};
use tokio::sync::watch;

pub(crate) type Served = watch::Sender<Option<Arc<dyn Generate>>>;

/// A registrar that passes a Worker's offer to the test.
pub(crate) struct Door(pub(crate) Served);

#[async_trait]
impl Registrar for Door {
    async fn serve(&self, offer: Offer) -> Result<Box<dyn Registration>, EngineError> {
        self.0.send_replace(Some(Arc::clone(&offer.generate)));
        Ok(Box::new(Open(offer.generate)))
    }
}

struct Open(Arc<dyn Generate>);

#[async_trait]
impl Registration for Open {
    async fn probe(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        self.0.generate(request, ctx).await
    }

    async fn list(&self) -> Result<(), EngineError> {
        Ok(())
    }

    async fn unlist(&self) -> Result<(), EngineError> {
        Ok(())
    }

    async fn lost(&self) {
        std::future::pending().await
    }

    async fn close(&self) {}
}
