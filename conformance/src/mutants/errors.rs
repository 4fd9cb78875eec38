//! Faults that the checks of ER catch.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use genset_backend_common::{
    EngineConfig, EngineError, ErrorKind, GenerateRequest, HealthReporter, Input, OutputStream,
    StartContext,
};
use parking_lot::Mutex;
use tokio::sync::watch;

use super::cut::{Then, cut};
use super::fault::{Call, Fault, mending, remote, with_fault};
use super::slotted::{SlotFault, with_slots, without_probe};
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
        build: |clean, scenario| mending(clean, scenario, wrap_token_ids),
    },
    Mutant {
        name: "refusals-use-up-places",
        stands_for: "a place taken before the request is checked and not given back: a client's mistakes fill the worker",
        killed_by: &["ER04"],
        build: |clean, scenario| {
            let refused = AtomicU32::new(0);
            remote(clean, scenario, move |config, request| {
                let checked = match refused.load(Ordering::Acquire) {
                    0..PLACES => config.check(request),
                    _ => Err(EngineError::new(
                        ErrorKind::Overloaded,
                        "every place is taken; try again later",
                    )),
                };
                refused.fetch_add(u32::from(checked.is_err()), Ordering::AcqRel);
                checked
            })
        },
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
        build: |clean, scenario| mending(clean, scenario, |_, request| request.adapter = None),
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
        build: |clean, scenario| mending(clean, scenario, take_inputs),
    },
    Mutant {
        name: "media-left-out-of-chats",
        stands_for: "a server whose model sees nothing, and that answers a chat with an image as if there were none",
        killed_by: &["ER08"],
        build: |clean, scenario| mending(clean, scenario, leave_media_out),
    },
    Mutant {
        name: "refused-in-the-queue-keeps-its-turn",
        stands_for: "a request that is queued before it is looked at: the turn of one that was refused comes, and nobody takes it",
        killed_by: &["ER09"],
        build: |clean, scenario| {
            without_probe(clean, scenario, 4, SlotFault::KeepsTurnOfRefused).checking_itself()
        },
    },
    Mutant {
        name: "refused-keeps-kv",
        stands_for: "KV blocks allocated for a prompt that is refused afterwards: invisible until the cache is full",
        killed_by: &["ER09"],
        build: |clean, scenario| {
            with_slots(clean, scenario, 4, SlotFault::KeepsKvOfRefused).checking_itself()
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

/// More than any other check sends, and fewer than ER04 sends.
const PLACES: u32 = 48;

fn limits_are_internal(
    config: &EngineConfig,
    request: &mut GenerateRequest,
) -> Result<(), EngineError> {
    if request.stop.min_tokens > request.stop.max_tokens.unwrap_or(u32::MAX) {
        return Err(EngineError::internal("the sampler failed"));
    }
    config.check(request)
}

fn wrap_token_ids(config: &EngineConfig, request: &mut GenerateRequest) {
    if let (Input::Tokens(tokens), Some(vocab_size)) = (&mut request.input, config.vocab_size) {
        tokens.iter_mut().for_each(|token| *token %= vocab_size);
    }
}

fn prints_request(config: &EngineConfig, request: &mut GenerateRequest) -> Result<(), EngineError> {
    config.check(request).map_err(|error| {
        let message = format!("{error} in {request:?}");
        EngineError::new(error.kind(), message).with_details(error.details().clone())
    })
}

fn take_inputs(_: &EngineConfig, request: &mut GenerateRequest) {
    if let Input::Embed(inputs) = &request.input {
        request.input = Input::Tokens(inputs.concat().into());
    }
    if let Input::Score(pairs) = &request.input {
        let tokens = pairs.iter().flat_map(|pair| &pair.token_ids);
        request.input = Input::Tokens(tokens.copied().collect());
    }
}

fn leave_media_out(_: &EngineConfig, request: &mut GenerateRequest) {
    let has_parts = matches!(&request.input, Input::Chat(chat) if chat.parts().next().is_some());
    if has_parts {
        request.input = Input::Tokens([0].into());
    }
}

struct PanicsAtDoubles;

impl Fault for PanicsAtDoubles {
    fn ask(&self, call: &mut Call) -> Result<(), EngineError> {
        let mut stops = call.request.stop.stop_token_ids.clone();
        stops.sort_unstable();
        stops.dedup();
        assert_eq!(
            stops.len(),
            call.request.stop.stop_token_ids.len(),
            "a stop token is there twice"
        );
        Ok(())
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
        health: Mutex::default(),
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
    health: Mutex<HealthReporter>,
    tells_health: bool,
}

impl Probe for Device {
    fn crash(&self) -> bool {
        self.is_lost.send_replace(true);
        if self.tells_health {
            self.health.lock().report_dead("the device is lost");
        }
        true
    }
}

struct Crashes {
    device: Arc<Device>,
    then: Then,
}

impl Fault for Crashes {
    fn begin(&self, ctx: &StartContext) {
        *self.device.health.lock() = ctx.health.clone();
    }

    fn answer(&self, _call: &Call, outputs: OutputStream) -> OutputStream {
        cut(outputs, &self.device.is_lost, self.then.clone())
    }
}
