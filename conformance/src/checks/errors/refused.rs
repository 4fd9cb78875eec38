//! ER09: a refused request holds nothing. ER04 sends mistakes to an idle engine and expects one good answer. Here the engine is
//! full as well, so a request may queue before it is checked; afterwards every slot must be free.

use futures_util::future::join_all;
use genset_backend_common::{
    CancelReason, GenerateRequest, GuidedDecoding, Input,
    config::{GuidedKind, InputKind},
};
use tokio::time::timeout;

use super::{OUT_OF_RANGE, first_tokens};
use crate::check::{CheckResult, Stop};
use crate::checks::pressure::{
    Crowd, crowd, end_of_cancelled, ensure_nothing_held, pace, patience, serve_first_token, slots,
};
use crate::trial::{Live, Trial};

/// Good requests beyond the engine's slots, which a bounded queue refuses.
const BEYOND: u32 = 4;

pub(super) async fn hold_nothing(trial: Trial) -> CheckResult {
    let live = trial.start().await?;
    let pace = pace(&live).await?;
    let kv_before = live.kv_used();
    send_mistakes(&live).await?;
    let full = crowd(&live, slots(&live) + BEYOND).await?;
    let capacity = full.running.len();
    send_mistakes(&live).await?;
    send_away(&live, full).await?;
    ensure_nothing_held(&live, kv_before).await?;
    // Without a probe: as many run at once as before.
    let mut running = Vec::new();
    for seed in (0_u64..).take(capacity) {
        let when = format!(
            "of {capacity} at once, {} of which run, after refusals",
            running.len()
        );
        running.push(serve_first_token(&live, seed, patience(&live, pace), &when).await?);
    }
    Ok(())
}

/// Sends every mistake that a client can make with what the engine declares. Other checks judge how each is refused. Leaves a
/// request that is not refused in a moment because the engine checks it only in its turn.
async fn send_mistakes(live: &Live) -> Result<(), Stop> {
    let moment = live.trial.limits().cancel / 4;
    let sent = mistakes(live)
        .into_iter()
        .map(|request| timeout(moment, first_tokens(live, request)));
    for refused in join_all(sent).await.into_iter().flatten() {
        drop(refused?);
    }
    Ok(())
}

fn mistakes(live: &Live) -> Vec<GenerateRequest> {
    let can = &live.config.capabilities;
    let with = |change: &dyn Fn(&mut GenerateRequest)| {
        let mut request = live.request(4, 4);
        change(&mut request);
        request
    };
    let mut mistakes: Vec<_> = OUT_OF_RANGE
        .iter()
        .map(|(_, change)| with(change))
        .collect();
    mistakes.push(with(&|r| {
        r.adapter = Some("genset-conformance-no-such-adapter".into())
    }));
    if can.guided.contains(&GuidedKind::Regex) {
        mistakes.push(with(&|r| {
            r.guided = Some(GuidedDecoding::Regex("(".into()).into())
        }));
    }
    if can.inputs.contains(&InputKind::Tokens) {
        mistakes.push(with(&|r| r.input = Input::Tokens(vec![u32::MAX].into())));
        if let Ok(context) = u16::try_from(live.config.context_length_tokens) {
            let too_long = vec![0; usize::from(context) + 1];
            mistakes.push(with(&|r| r.input = Input::Tokens(too_long.clone().into())));
        }
    }
    mistakes
}

/// Cancels the requests that filled the engine. An engine that ignores the cancel fails here as well as in CN05.
async fn send_away(live: &Live, crowd: Crowd) -> Result<(), Stop> {
    let all = crowd.running.into_iter().chain(crowd.waiting);
    for request in all {
        request.ctx.cancel(CancelReason::Client);
        end_of_cancelled(live, request).await?;
    }
    Ok(())
}
