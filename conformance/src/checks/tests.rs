//! Checks with the limits of real time, on a paused clock: correct but slow engines pass.

#![cfg(feature = "mutants")]

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use genset_backend_common::{
    EngineConfig, EngineError, GenerateRequest, LLMEngine, OutputStream, RequestContext,
    StartContext, async_trait,
};
use genset_engine_sample::{SampleArgs, SampleEngine};
use tokio::sync::{Mutex, Semaphore};

use super::find;
use crate::check::CheckResult;
use crate::limits::Limits;
use crate::mutants::Clean;
use crate::mutants::slotted::slotted;
use crate::subject::{Factory, Scenario};
use crate::trial::{Trial, Variation};

/// The time per item.
const ITEM: Duration = Duration::from_millis(30);

/// The number of items of the warm-up requests, including their ends.
const WARM_UP_ITEMS: u32 = 15;

/// An engine that computes one token at a time, however many requests run. Requests beyond its seats wait inside `generate`.
struct Turns {
    inner: SampleEngine,
    seats: Option<u32>,
    free: Arc<Semaphore>,
    device: Arc<Mutex<()>>,
}

impl Turns {
    fn new(seats: Option<u32>) -> Self {
        let args = SampleArgs {
            vocab_size: 1000,
            token_delay_ms: 0,
        };
        let free = seats.and_then(|seats| usize::try_from(seats).ok());
        Self {
            inner: SampleEngine::from_args(&args),
            seats,
            free: Arc::new(Semaphore::new(free.unwrap_or(Semaphore::MAX_PERMITS))),
            device: Arc::default(),
        }
    }
}

#[async_trait]
impl LLMEngine for Turns {
    async fn start(&self, ctx: StartContext) -> Result<EngineConfig, EngineError> {
        let mut config = self.inner.start(ctx).await?;
        config.max_num_seqs = self.seats;
        Ok(config)
    }

    async fn generate(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let mut seat = Arc::clone(&self.free).acquire_owned().await.ok();
        let outputs = self.inner.generate(request, ctx).await?;
        let device = Arc::clone(&self.device);
        let items = outputs.then(move |item| {
            let is_last = !matches!(&item, Ok(output) if !output.is_terminal());
            let given_back = if is_last { seat.take() } else { None };
            let device = Arc::clone(&device);
            async move {
                let _turn = device.lock().await;
                tokio::time::sleep(ITEM).await;
                drop(given_back);
                item
            }
        });
        Ok(OutputStream::from_raw(Box::pin(items)))
    }

    async fn cleanup(&self) -> Result<(), EngineError> {
        self.inner.cleanup().await
    }
}

async fn tried(id: &str, factory: impl Factory) -> CheckResult {
    let check = find(id).unwrap();
    let limits = Limits::scaled(ITEM * WARM_UP_ITEMS);
    let trial = Trial::new(Arc::new(factory), check.id, limits, Variation::default());
    (check.run)(trial).await
}

#[tokio::test(start_paused = true)]
async fn who_waits_has_the_time_of_those_before() {
    let clean: Clean = Arc::new(|_: &Scenario| Turns::new(None));
    let queue = move |scenario: &Scenario| slotted(&clean, scenario);
    assert_eq!(tried("CC12", queue).await, Ok(()));
    let seats = |_: &Scenario| Turns::new(Some(32));
    assert_eq!(tried("MT06", seats).await, Ok(()));
}
