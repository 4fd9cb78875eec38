//! CT: operations on an engine besides generation. LR: adapters.
//!
//! An engine supports an operation if it returns anything but `Unsupported`; then the operation must work.

use std::time::Duration;

use genset_backend_common::{
    EngineControls, EngineError, ErrorKind, GenerateRequest,
    controls::{Adapter, SleepLevel},
};
use serde_json::Value;

use crate::answer::Generated;
use crate::check::{Check, CheckResult, Stop, check, ensure, fail, skip};
use crate::trial::{Live, Trial};

pub(super) const CHECKS: &[Check] = &[
    check!("CT01", Core, Controls, "an engine that slept answers as before, and meanwhile answers nobody wrongly",
        clause: "EngineControls::sleep",
        breaks: "a worker that wakes with half its weights, or fails the requests that came while it slept for good", sleeps_and_wakes),
    check!("CT02", Strict, Controls, "what an operator asks in vain is refused, and changes nothing",
        clause: "EngineControls",
        breaks: "an operator's slip that takes the engine out of service", asked_in_vain),
    check!("CT03", Strict, Controls, "a profile that was begun can be ended, and says where it is",
        clause: "EngineControls::stop_profile",
        breaks: "a profile that nobody finds, or one that slows the engine until its end", profiles),
    check!("LR01", Core, Adapters, "an adapter is used by those who name it, from its load to its unload",
        clause: "EngineControls::load_adapter",
        breaks: "customers answered by the base model, or by another customer's adapter", used_by_name),
    check!("LR02", Core, Adapters, "requests go on whose adapter is unloaded",
        clause: "EngineControls::unload_adapter",
        breaks: "answers cut in the middle whenever adapters are exchanged", unloaded_in_use),
    check!("LR03", Strict, Adapters, "an adapter that is not there cannot be loaded, and is not listed",
        clause: "EngineControls::adapters",
        breaks: "an adapter's name that routers know and no engine can answer under", missing_adapter),
    check!("LR04", Core, Adapters, "an adapter's answer is the same, whatever the base model was asked before",
        clause: "GenerateRequest::adapter",
        breaks: "KV blocks of the base model under an adapter: answers that are a bit of both", cache_kept_apart),
    check!("LR05", Core, Adapters, "requests of an adapter and of the base model answer together as each does alone",
        clause: "GenerateRequest::adapter",
        breaks: "an adapter for a whole batch: its neighbours are answered by it too", beside_others),
    check!("LR06", Core, Adapters, "an adapter that was unloaded can be loaded again, and answers as before",
        clause: "EngineControls::unload_adapter",
        breaks: "a name that is taken for good: an adapter cannot be replaced without a restart", loaded_again),
];

/// The number of tokens that distinguishes the answers of two models.
const ANSWER_TOKENS: u32 = 8;

fn plain(live: &Live) -> GenerateRequest {
    live.greedy(live.prompt(live.several_blocks(), 1), ANSWER_TOKENS)
}

async fn answer_to(live: &Live, request: GenerateRequest) -> Result<Generated, Stop> {
    let answer = live.answer(request).await?;
    match answer.error() {
        None => Ok(answer.generated()),
        Some(error) => fail!("a request ended with {error} ({})", error.kind()),
    }
}

/// The answer to a plain request; `None` if it varies, which DT01 judges.
async fn known_answer(live: &Live) -> Result<Option<Generated>, Stop> {
    let first = answer_to(live, plain(live)).await?;
    let second = answer_to(live, plain(live)).await?;
    Ok((first == second).then_some(first))
}

async fn ensure_as_before(live: &Live, known: Option<&Generated>, when: &str) -> CheckResult {
    let now = answer_to(live, plain(live)).await?;
    ensure!(
        known.is_none_or(|known| *known == now),
        "{when} a request is answered by {now:?}, before by {known:?}"
    );
    Ok(())
}

fn controls(live: &Live) -> Result<&dyn EngineControls, Stop> {
    match live.subject.engine.controls() {
        Some(controls) => Ok(controls),
        None => skip!(NotDeclared, "the engine has no controls"),
    }
}

/// The result of an operation; `None` if the engine does not support it. Weights may have to be loaded.
async fn asked<T>(
    live: &Live,
    what: &str,
    call: impl Future<Output = Result<T, EngineError>>,
) -> Result<Option<T>, Stop> {
    let limit = live.trial.limits().start;
    match live.trial.within(what, limit, call).await? {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == ErrorKind::Unsupported => Ok(None),
        Err(error) => fail!("{what} failed: {error} ({})", error.kind()),
    }
}

async fn sleeps_and_wakes(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let controls = controls(&live)?;
    let known = known_answer(&live).await?;
    let mut has_slept = false;
    for level in [SleepLevel::KvCache, SleepLevel::Weights] {
        if asked(&live, "sleep", controls.sleep(level))
            .await?
            .is_none()
        {
            continue;
        }
        has_slept = true;
        let again = asked(&live, "a second sleep", controls.sleep(level)).await?;
        ensure!(again.is_some(), "a second sleep is not supported");
        let request = plain(&live);
        let ctx = live.context(&request);
        let meanwhile = match live.try_generate(request, ctx).await? {
            Ok(running) => Some(running),
            Err(error) => {
                ensure_comes_again(&error)?;
                None
            }
        };
        for what in ["wake", "a second wake"] {
            let woken = asked(&live, what, controls.wake()).await?;
            ensure!(
                woken.is_some(),
                "the engine sleeps, and {what} is not supported"
            );
        }
        if let Some(running) = meanwhile {
            let answer = running.finish().await?;
            match answer.error() {
                Some(error) => ensure_comes_again(error)?,
                None => ensure!(
                    known
                        .as_ref()
                        .is_none_or(|known| *known == answer.generated()),
                    "a request that came while the engine slept is answered by {:?}, before by {known:?}",
                    answer.generated()
                ),
            }
        }
        ensure_as_before(&live, known.as_ref(), "after it slept").await?;
    }
    if !has_slept {
        skip!(NotDeclared, "the engine does not sleep");
    }
    Ok(())
}

/// The refusal of a request to a sleeping engine must be retryable.
fn ensure_comes_again(error: &EngineError) -> CheckResult {
    ensure!(
        error.policy().is_retryable,
        "a request that came while the engine slept is refused with {}, which no client sends again: {error}",
        error.kind()
    );
    Ok(())
}

/// A source at which no engine has weights or an adapter.
const NOWHERE: &str = "genset-conformance/nowhere";

async fn asked_in_vain(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let controls = controls(&live)?;
    let known = known_answer(&live).await?;
    let limit = trial.limits().start;
    let what = "an update to weights that are nowhere";
    let update = controls.update_weights(Value::from(NOWHERE));
    match trial.within(what, limit, update).await? {
        Ok(()) => fail!("{what} was done"),
        Err(error) => ensure_typed(what, &error)?,
    }
    let unload = controls.unload_adapter(NOWHERE);
    let what = "the unload of an adapter that is not loaded";
    if let Err(error) = trial.within(what, limit, unload).await? {
        ensure_typed(what, &error)?;
    }
    let what = "the end of a profile that was not begun";
    if let Err(error) = trial.within(what, limit, controls.stop_profile()).await? {
        ensure_typed(what, &error)?;
    }
    ensure_as_before(&live, known.as_ref(), "after that").await
}

/// An operator's mistake must not be reported as the engine's fault.
fn ensure_typed(what: &str, error: &EngineError) -> CheckResult {
    let is_typed = error.kind() != ErrorKind::Internal;
    ensure!(
        is_typed,
        "{what} is refused as {}, which says that the engine failed: {error}",
        error.kind()
    );
    Ok(())
}

async fn profiles(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let controls = controls(&live)?;
    if asked(&live, "start_profile", controls.start_profile())
        .await?
        .is_none()
    {
        skip!(NotDeclared, "the engine does not profile");
    }
    answer_to(&live, plain(&live)).await?;
    match asked(&live, "stop_profile", controls.stop_profile()).await? {
        Some(location) => ensure!(!location.trim().is_empty(), "the profile is nowhere"),
        None => fail!("a profile was begun, and stop_profile is not supported"),
    }
    answer_to(&live, plain(&live)).await?;
    Ok(())
}

/// The subject's adapter, ready for use.
struct Loaded {
    adapter: Adapter,
    /// Whether it is there from start to end.
    is_static: bool,
}

impl Loaded {
    async fn load(live: &Live) -> Result<Self, Stop> {
        let Some(adapter) = live.subject.adapter.clone() else {
            skip!(
                NoProbe,
                "the subject names no adapter that can be loaded (with_adapter)"
            );
        };
        let load = async {
            match live.subject.engine.controls() {
                Some(controls) => {
                    let load = controls.load_adapter(adapter.clone());
                    asked(live, "load_adapter", load).await
                }
                None => Ok(None),
            }
        };
        let is_static = load.await?.is_none();
        Ok(Self { adapter, is_static })
    }

    fn request(&self, live: &Live) -> GenerateRequest {
        let mut request = plain(live);
        request.adapter = Some(self.adapter.name.clone());
        request
    }

    async fn unload(&self, live: &Live) -> CheckResult {
        let unload = controls(live)?.unload_adapter(&self.adapter.name);
        let unloaded = asked(live, "unload_adapter", unload).await?;
        ensure!(
            unloaded.is_some(),
            "adapters are loaded, and unload_adapter is not supported"
        );
        Ok(())
    }

    async fn ensure_listed(&self, live: &Live, is_wanted: bool, when: &str) -> CheckResult {
        let Some(controls) = live.subject.engine.controls() else {
            return Ok(());
        };
        let Some(listed) = asked(live, "adapters", controls.adapters()).await? else {
            return Ok(());
        };
        let name = &self.adapter.name;
        let is_listed = listed.iter().any(|adapter| adapter.name == *name);
        ensure!(
            is_listed == is_wanted,
            "{when} the adapters are {:?}",
            listed
                .iter()
                .map(|adapter| &adapter.name)
                .collect::<Vec<_>>()
        );
        Ok(())
    }
}

async fn ensure_unknown(live: &Live, request: GenerateRequest, when: &str) -> CheckResult {
    let error = live.refusal(request).await?;
    ensure!(
        error.kind() == ErrorKind::NotFound,
        "{when} a request for it is refused with {}, not as not_found: {error}",
        error.kind()
    );
    Ok(())
}

async fn used_by_name(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let known = known_answer(&live).await?;
    let loaded = Loaded::load(&live).await?;
    let named = loaded.request(&live);
    loaded
        .ensure_listed(&live, true, "with an adapter loaded")
        .await?;
    answer_to(&live, named.clone()).await?;
    ensure_as_before(&live, known.as_ref(), "beside an adapter").await?;
    if loaded.is_static {
        return Ok(());
    }
    loaded.unload(&live).await?;
    let when = "after the adapter was unloaded";
    loaded.ensure_listed(&live, false, when).await?;
    ensure_unknown(&live, named, when).await?;
    ensure_as_before(&live, known.as_ref(), when).await
}

/// The number of tokens of an answer during which its adapter is unloaded.
const LONG_TOKENS: u32 = 64;

async fn unloaded_in_use(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let loaded = Loaded::load(&live).await?;
    if loaded.is_static {
        skip!(NotDeclared, "the engine does not unload adapters");
    }
    let mut request = live.request(4, live.affordable_answer(4, LONG_TOKENS));
    request.adapter = Some(loaded.adapter.name.clone());
    let wanted = request.stop.max_tokens;
    let mut running = live.generate(request).await?;
    let before = running.read_tokens(1).await?.len();
    // Read the answer meanwhile, since an engine may let the unload wait for it.
    let (unloaded, answer) =
        futures_util::future::join(loaded.unload(&live), running.finish()).await;
    unloaded?;
    let answer = answer?;
    let tokens = before + answer.generated().len();
    ensure!(
        u32::try_from(tokens).ok() == wanted && answer.finished().is_some(),
        "a request whose adapter was unloaded ended after {tokens} of {wanted:?} tokens: {:?}",
        answer.error()
    );
    Ok(())
}

async fn missing_adapter(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let controls = controls(&live)?;
    let missing = Loaded {
        adapter: Adapter {
            name: "no-such-adapter".into(),
            source: NOWHERE.into(),
        },
        is_static: false,
    };
    let load = controls.load_adapter(missing.adapter.clone());
    let limit = trial.limits().start.max(Duration::from_secs(1));
    match trial.within("load_adapter", limit, load).await? {
        Ok(()) => fail!("an adapter was loaded from {NOWHERE:?}, where there is none"),
        Err(error) => ensure_typed("the load of an adapter that is not there", &error)?,
    }
    let when = "after a load that failed";
    missing.ensure_listed(&live, false, when).await?;
    ensure_unknown(&live, missing.request(&live), when).await?;
    answer_to(&live, plain(&live)).await?;
    Ok(())
}

async fn cache_kept_apart(trial: Trial) -> CheckResult {
    let fresh = trial.start().await?;
    let loaded = Loaded::load(&fresh).await?;
    let cold = answer_to(&fresh, loaded.request(&fresh)).await?;
    let is_known = answer_to(&fresh, loaded.request(&fresh)).await? == cold;
    fresh.put_away().await?;
    if !is_known {
        skip!(
            NotDeclared,
            "the engine answers one request in different ways"
        );
    }
    let live = trial.start().await?;
    let loaded = Loaded::load(&live).await?;
    answer_to(&live, plain(&live)).await?;
    let warm = answer_to(&live, loaded.request(&live)).await?;
    ensure!(
        warm == cold,
        "under the adapter a prompt is answered by {cold:?}, and by {warm:?} once the base model had the same one"
    );
    Ok(())
}

async fn beside_others(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let loaded = Loaded::load(&live).await?;
    if live.varies_with_batch() {
        skip!(
            NotDeclared,
            "the engine's answers depend on what else is in the batch"
        );
    }
    let requests = [loaded.request(&live), plain(&live)];
    let mut alone = Vec::new();
    for request in requests.iter().rev() {
        let first = answer_to(&live, request.clone()).await?;
        if answer_to(&live, request.clone()).await? != first {
            skip!(
                NotDeclared,
                "the engine answers one request in different ways"
            );
        }
        alone.push(first);
    }
    alone.reverse();
    let together = requests.iter().cycle().take(4);
    let together = together.map(|request| answer_to(&live, request.clone()));
    let together = futures_util::future::try_join_all(together).await?;
    for (place, (together, alone)) in together.iter().zip(alone.iter().cycle()).enumerate() {
        let whose = ["of the adapter", "of the base model"][place % 2];
        ensure!(
            together == alone,
            "a request {whose} is answered by {together:?} beside one of the other, and alone by {alone:?}"
        );
    }
    Ok(())
}

async fn loaded_again(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let loaded = Loaded::load(&live).await?;
    if loaded.is_static {
        skip!(NotDeclared, "the engine does not unload adapters");
    }
    let first = answer_to(&live, loaded.request(&live)).await?;
    let is_known = answer_to(&live, loaded.request(&live)).await? == first;
    loaded.unload(&live).await?;
    let load = controls(&live)?.load_adapter(loaded.adapter.clone());
    let what = "the load of an adapter that was unloaded";
    ensure!(
        asked(&live, what, load).await?.is_some(),
        "{what} is not supported, and its first load was"
    );
    loaded.ensure_listed(&live, true, "loaded again").await?;
    let again = answer_to(&live, loaded.request(&live)).await?;
    ensure!(
        !is_known || again == first,
        "loaded again, the adapter answers by {again:?}, before by {first:?}"
    );
    Ok(())
}
