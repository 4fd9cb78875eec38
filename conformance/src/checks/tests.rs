//! Checks with the limits of real time, on a paused clock: correct but slow engines pass.

#![cfg(feature = "mutants")]

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use genset_backend_common::{EngineConfig, EngineError, OutputStream, async_trait};
use genset_engine_sample::{SampleArgs, SampleEngine};
use tokio::sync::{Mutex, Semaphore};

use super::find;
use crate::check::CheckResult;
use crate::limits::Limits;
use crate::mutants::Clean;
use crate::mutants::fault::{Call, Fault, Inner, faulty, held_to_end};
use crate::mutants::slotted::slotted;
use crate::subject::{Factory, Scenario, Subject};
use crate::trial::{Trial, Variation};

/// The time per item.
const ITEM: Duration = Duration::from_millis(30);

/// The number of items of the warm-up requests, including their ends.
const WARM_UP_ITEMS: u32 = 15;

/// Computes one token at a time, however many requests run. Requests beyond the engine's seats wait inside `generate`.
struct Turns {
    seats: Option<u32>,
    free: Arc<Semaphore>,
    device: Arc<Mutex<()>>,
}

/// The sample engine, which takes turns.
fn turns(seats: Option<u32>) -> Subject {
    let args = SampleArgs {
        vocab_size: 1000,
        token_delay_ms: 0,
    };
    let free = seats.and_then(|seats| usize::try_from(seats).ok());
    let turns = Turns {
        seats,
        free: Arc::new(Semaphore::new(free.unwrap_or(Semaphore::MAX_PERMITS))),
        device: Arc::default(),
    };
    faulty(SampleEngine::from_args(&args).into(), turns)
}

#[async_trait]
impl Fault for Turns {
    fn declare(&self, config: &mut EngineConfig) {
        config.max_num_seqs = self.seats;
    }

    async fn generate(&self, inner: &Inner, call: Call) -> Result<OutputStream, EngineError> {
        let seat = Arc::clone(&self.free).acquire_owned().await.ok();
        let outputs = inner.generate(call.request, call.ctx).await?;
        let device = Arc::clone(&self.device);
        let items = outputs.then(move |item| {
            let device = Arc::clone(&device);
            async move {
                let _turn = device.lock().await;
                tokio::time::sleep(ITEM).await;
                item
            }
        });
        let items = OutputStream::from_raw(Box::pin(items));
        Ok(held_to_end(items, seat))
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
    let clean: Clean = Arc::new(|_: &Scenario| turns(None));
    let queue = move |scenario: &Scenario| slotted(&clean, scenario);
    assert_eq!(tried("CC12", queue).await, Ok(()));
    let seats = |_: &Scenario| turns(Some(32));
    assert_eq!(tried("MT06", seats).await, Ok(()));
}
