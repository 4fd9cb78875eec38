//! Faults that the checks of ER catch.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use genset_backend_common::{
    EngineConfig, EngineError, ErrorKind, GenerateRequest, HealthReporter, Input, LLMEngine,
    OutputStream, RequestContext, StartContext, async_trait,
};
use parking_lot::Mutex;
use tokio::sync::watch;

use super::cut::{Then, cut};
use super::fault::{Fault, with_fault};
use super::slotted::{Habits, SlotFault, with_habits, without_probe};
use super::{Clean, Mutant};
use crate::subject::{Probe, Scenario, Subject};

pub(super) const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "client-mistake-is-internal",
        stands_for: "every refusal reported as 500: clients retry for ever what can never succeed",
        killed_by: &["ER01"],
        build: |clean, scenario| remote(clean, scenario, limits_are_internal),
    },
    Mutant {
        name: "token-ids-wrap",
        stands_for: "an embedding look-up without a bound, which reads what is not the model's",
        killed_by: &["ER02"],
        build: |clean, scenario| remote(clean, scenario, wraps_token_ids),
    },
    Mutant {
        name: "refusals-use-up-places",
        stands_for: "a place taken before the request is checked and not given back: a client's mistakes fill the worker",
        killed_by: &["ER04"],
        build: |clean, scenario| remote(clean, scenario, keeps_places),
    },
    Mutant {
        name: "odd-stop-list-panics",
        stands_for: "a stop list made into a map that must not hold a key twice: one client's list takes the worker down",
        killed_by: &["ER05"],
        build: |clean, scenario| with_fault(clean, scenario, PanicsAtDoubles),
    },
    Mutant {
        name: "adapter-ignored",
        stands_for: "an adapter that is not loaded, and the base model answers in its place",
        killed_by: &["DT09", "ER06"],
        build: |clean, scenario| remote(clean, scenario, ignores_adapter),
    },
    Mutant {
        name: "request-in-message",
        stands_for: "an error that prints the whole request, prompt and all, into the client's and the operator's log",
        killed_by: &["ER07"],
        build: |clean, scenario| remote(clean, scenario, prints_request),
    },
    Mutant {
        name: "inputs-to-embed-are-generated-from",
        stands_for: "inputs to embed that a model without embeddings goes on from, instead of saying that it cannot (as images left out of a prompt)",
        killed_by: &["ER08"],
        build: |clean, scenario| remote(clean, scenario, takes_inputs),
    },
    Mutant {
        name: "media-left-out-of-chats",
        stands_for: "a server whose model sees nothing, and that answers a chat with an image as if there were none",
        killed_by: &["ER08"],
        build: |clean, scenario| remote(clean, scenario, leaves_media_out),
    },
    Mutant {
        name: "refused-in-the-queue-keeps-its-turn",
        stands_for: "a request that is queued before it is looked at: the turn of one that was refused comes, and nobody takes it",
        killed_by: &["ER09"],
        build: |clean, scenario| {
            without_probe(clean, scenario, four(SlotFault::KeepsTurnOfRefused)).checking_itself()
        },
    },
    Mutant {
        name: "refused-keeps-kv",
        stands_for: "KV blocks allocated for a prompt that is refused afterwards: invisible until the cache is full",
        killed_by: &["ER09"],
        build: |clean, scenario| {
            with_habits(clean, scenario, four(SlotFault::KeepsKvOfRefused)).checking_itself()
        },
    },
    Mutant {
        name: "crash-hangs-streams",
        stands_for: "a scheduler thread that dies and takes the ends of its streams with it, so that clients wait",
        killed_by: &["ER03"],
        build: |clean, scenario| crashing(clean, scenario, Then::Hang, true),
    },
    Mutant {
        name: "crash-looks-complete",
        stands_for: "a lost engine process whose truncated answers are read as complete",
        killed_by: &["ER03", "RD02"],
        build: |clean, scenario| crashing(clean, scenario, Then::Finish, true),
    },
    Mutant {
        name: "crash-is-healthy",
        stands_for: "a dead engine that is still listed, to which the router sends more and more",
        killed_by: &["ER03"],
        build: |clean, scenario| crashing(clean, scenario, lost_device(), false),
    },
];

/// Engines without a fault: they prove that the checks accept a good crash.
pub(super) const CONTROLS: &[Mutant] = &[Mutant {
    name: "crashes-in-order",
    stands_for: "nothing: a lost device, told to every client and to the Worker",
    killed_by: &[],
    build: |clean, scenario| crashing(clean, scenario, lost_device(), true),
}];

/// An engine of four slots with `fault`.
const fn four(fault: SlotFault) -> Habits {
    Habits { slots: 4, fault }
}

/// Checks a request on the engine's side, wrongly. The number counts refusals so far.
type Check = fn(&EngineConfig, &mut GenerateRequest, u32) -> Result<(), EngineError>;

/// A worker in another process, which checks requests itself.
fn remote(clean: &Clean, scenario: &Scenario, check: Check) -> Subject {
    let remote = Remote {
        check,
        config: Mutex::new(None),
        refused: AtomicU32::new(0),
    };
    with_fault(clean, scenario, remote).checking_itself()
}

struct Remote {
    check: Check,
    config: Mutex<Option<EngineConfig>>,
    refused: AtomicU32,
}

#[async_trait]
impl Fault for Remote {
    async fn start(
        &self,
        inner: &Arc<dyn LLMEngine>,
        ctx: StartContext,
    ) -> Result<EngineConfig, EngineError> {
        let config = inner.start(ctx).await?;
        *self.config.lock() = Some(config.clone());
        Ok(config)
    }

    async fn generate(
        &self,
        inner: &Arc<dyn LLMEngine>,
        mut request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let config = self.config.lock().clone();
        if let Some(config) = config {
            let refused = self.refused.load(Ordering::Acquire);
            (self.check)(&config, &mut request, refused).inspect_err(|_| {
                self.refused.fetch_add(1, Ordering::AcqRel);
            })?;
        }
        inner.generate(request, ctx).await
    }
}

fn limits_are_internal(
    config: &EngineConfig,
    request: &mut GenerateRequest,
    _refused: u32,
) -> Result<(), EngineError> {
    if request.stop.min_tokens > request.stop.max_tokens.unwrap_or(u32::MAX) {
        return Err(EngineError::internal("the sampler failed"));
    }
    config.check(request)
}

fn wraps_token_ids(
    config: &EngineConfig,
    request: &mut GenerateRequest,
    _refused: u32,
) -> Result<(), EngineError> {
    if let (Input::Tokens(tokens), Some(vocab_size)) = (&mut request.input, config.vocab_size) {
        tokens.iter_mut().for_each(|token| *token %= vocab_size);
    }
    config.check(request)
}

/// More than any other check sends, and fewer than ER04 sends.
const PLACES: u32 = 48;

fn keeps_places(
    config: &EngineConfig,
    request: &mut GenerateRequest,
    refused: u32,
) -> Result<(), EngineError> {
    if refused >= PLACES {
        let message = "every place is taken; try again later";
        return Err(EngineError::new(ErrorKind::Overloaded, message));
    }
    config.check(request)
}

fn ignores_adapter(
    config: &EngineConfig,
    request: &mut GenerateRequest,
    _refused: u32,
) -> Result<(), EngineError> {
    request.adapter = None;
    config.check(request)
}

fn prints_request(
    config: &EngineConfig,
    request: &mut GenerateRequest,
    _refused: u32,
) -> Result<(), EngineError> {
    config.check(request).map_err(|error| {
        let message = format!("{error} in {request:?}");
        EngineError::new(error.kind(), message).with_details(error.details().clone())
    })
}

fn takes_inputs(
    config: &EngineConfig,
    request: &mut GenerateRequest,
    _refused: u32,
) -> Result<(), EngineError> {
    if let Input::Embed(inputs) = &request.input {
        request.input = Input::Tokens(inputs.concat().into());
    }
    if let Input::Score(pairs) = &request.input {
        let tokens = pairs.iter().flat_map(|pair| &pair.token_ids);
        request.input = Input::Tokens(tokens.copied().collect());
    }
    config.check(request)
}

fn leaves_media_out(
    config: &EngineConfig,
    request: &mut GenerateRequest,
    _refused: u32,
) -> Result<(), EngineError> {
    let has_parts = matches!(&request.input, Input::Chat(chat) if chat.parts().next().is_some());
    if has_parts {
        request.input = Input::Tokens([0].into());
    }
    config.check(request)
}

struct PanicsAtDoubles;

#[async_trait]
impl Fault for PanicsAtDoubles {
    async fn generate(
        &self,
        inner: &Arc<dyn LLMEngine>,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let mut stops = request.stop.stop_token_ids.clone();
        stops.sort_unstable();
        stops.dedup();
        assert_eq!(
            stops.len(),
            request.stop.stop_token_ids.len(),
            "a stop token is there twice"
        );
        inner.generate(request, ctx).await
    }
}

fn lost_device() -> Then {
    let message = "the engine lost its device; send the request again";
    Then::Fail(EngineError::new(ErrorKind::Disconnected, message))
}

/// An engine that can be crashed, and what its streams do then.
fn crashing(clean: &Clean, scenario: &Scenario, then: Then, tells_health: bool) -> Subject {
    let device = Arc::new(Device {
        is_lost: watch::Sender::new(false),
        health: Mutex::new(None),
        tells_health,
    });
    let fault = Crashes {
        device: Arc::clone(&device),
        then,
    };
    with_fault(clean, scenario, fault).with_probe(device)
}

struct Device {
    is_lost: watch::Sender<bool>,
    health: Mutex<Option<HealthReporter>>,
    tells_health: bool,
}

impl Probe for Device {
    fn crash(&self) -> bool {
        self.is_lost.send_replace(true);
        if let Some(health) = self.health.lock().as_ref().filter(|_| self.tells_health) {
            health.report_dead("the device is lost");
        }
        true
    }
}

struct Crashes {
    device: Arc<Device>,
    then: Then,
}

#[async_trait]
impl Fault for Crashes {
    async fn start(
        &self,
        inner: &Arc<dyn LLMEngine>,
        ctx: StartContext,
    ) -> Result<EngineConfig, EngineError> {
        *self.device.health.lock() = Some(ctx.health.clone());
        inner.start(ctx).await
    }

    async fn generate(
        &self,
        inner: &Arc<dyn LLMEngine>,
        request: GenerateRequest,
        ctx: RequestContext,
    ) -> Result<OutputStream, EngineError> {
        let outputs = inner.generate(request, ctx).await?;
        let mut is_lost = self.device.is_lost.subscribe();
        let lost = async move {
            if is_lost.wait_for(|is_lost| *is_lost).await.is_err() {
                std::future::pending().await
            }
        };
        Ok(cut(outputs, lost, self.then.clone()))
    }
}
