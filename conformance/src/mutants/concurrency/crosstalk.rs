//! Answers that depend on another request, or go to another request.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::StreamExt;
use genset_backend_common::output::TokenIds;
use genset_backend_common::{EngineError, Output, OutputStream};
use parking_lot::Mutex;

use crate::mutants::fault::{Call, Fault, at_tokens, others, raw};

/// The last tokens of each running request, by row.
#[derive(Default)]
struct Table {
    next_place: AtomicU64,
    rows: Mutex<Vec<(u64, TokenIds)>>,
}

/// A running request's row.
struct Row {
    table: Arc<Table>,
    place: u64,
}

impl Row {
    fn new(table: &Arc<Table>) -> Self {
        let mut rows = table.rows.lock();
        let place = table.next_place.fetch_add(1, Ordering::Relaxed);
        rows.push((place, TokenIds::default()));
        Self {
            table: Arc::clone(table),
            place,
        }
    }

    /// Writes this request's tokens. Returns those of the next request if it has as many.
    fn exchange(&self, own: TokenIds) -> TokenIds {
        let mut rows = self.table.rows.lock();
        let len = own.len();
        for (place, tokens) in rows.iter_mut() {
            if *place == self.place {
                *tokens = own.clone();
            }
        }
        let after = rows.iter().find(|(place, _)| *place > self.place);
        let next = after.or_else(|| rows.first());
        match next {
            Some((_, tokens)) if tokens.len() == len => tokens.clone(),
            _ => own,
        }
    }
}

impl Drop for Row {
    fn drop(&mut self) {
        let mut rows = self.table.rows.lock();
        rows.retain(|(place, _)| *place != self.place);
    }
}

#[derive(Default)]
pub(super) struct NeighboursTokens {
    table: Arc<Table>,
}

impl Fault for NeighboursTokens {
    fn answer(&self, _call: &Call, outputs: OutputStream) -> OutputStream {
        let row = Row::new(&self.table);
        at_tokens(outputs, move |chunk| {
            let own = std::mem::take(&mut chunk.token_ids);
            chunk.token_ids = row.exchange(own);
        })
    }
}

/// Beside other requests, tokens differ from this position on.
const DIFFERS_FROM: u32 = 5;

#[derive(Default)]
pub(super) struct BatchVariant {
    active: Arc<()>,
}

impl Fault for BatchVariant {
    fn answer(&self, _call: &Call, outputs: OutputStream) -> OutputStream {
        let own = Arc::clone(&self.active);
        let mut streamed = 0;
        at_tokens(outputs, move |chunk| {
            if streamed >= DIFFERS_FROM && others(&own) > 1 {
                chunk.token_ids.iter_mut().for_each(|token| *token ^= 1);
            }
            streamed += chunk.len();
        })
    }
}

/// One session per id: the last request that opens it has it.
#[derive(Default)]
pub(super) struct SessionsById {
    sessions: Arc<Mutex<BTreeMap<String, u64>>>,
    next: AtomicU64,
}

impl Fault for SessionsById {
    fn answer(&self, call: &Call, outputs: OutputStream) -> OutputStream {
        let id = call.ctx.id().to_owned();
        let mine = self.next.fetch_add(1, Ordering::Relaxed);
        self.sessions.lock().insert(id.clone(), mine);
        let sessions = Arc::clone(&self.sessions);
        raw(outputs.map(move |item| {
            if sessions.lock().get(&id) == Some(&mine) {
                item
            } else {
                Err(EngineError::internal("the session belongs to another"))
            }
        }))
    }
}

/// The prompt length from which on a prefill takes several steps.
const CHUNKED: u32 = 32;

/// The request whose answer is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Victim {
    Short,
    Long,
}

/// Mixes up a long prompt in prefill and a short one that arrives meanwhile.
pub(super) struct MixedPrefill {
    victim: Victim,
    /// Counts long prompts without a token yet.
    prefilling: Arc<()>,
    short_prompts: Arc<AtomicU64>,
}

impl MixedPrefill {
    pub(super) fn wrong_for(victim: Victim) -> Self {
        Self {
            victim,
            prefilling: Arc::default(),
            short_prompts: Arc::default(),
        }
    }
}

impl Fault for MixedPrefill {
    fn answer(&self, call: &Call, outputs: OutputStream) -> OutputStream {
        let is_long = call.request.prompt_tokens() >= Some(CHUNKED);
        let victim = self.victim;
        let short_prompts = Arc::clone(&self.short_prompts);
        short_prompts.fetch_add(u64::from(!is_long), Ordering::Relaxed);
        let before = short_prompts.load(Ordering::Relaxed);
        let is_joined = !is_long && others(&self.prefilling) > 0;
        let mut prefill = is_long.then(|| Arc::clone(&self.prefilling));
        let mut is_first = true;
        raw(outputs.map(move |mut item| {
            let is_mixed = match victim {
                Victim::Short => is_joined,
                Victim::Long => is_long && short_prompts.load(Ordering::Relaxed) > before,
            };
            drop(prefill.take());
            if std::mem::take(&mut is_first)
                && is_mixed
                && let Ok(Output::Tokens(chunk)) = &mut item
            {
                chunk.token_ids.iter_mut().for_each(|token| *token ^= 1);
            }
            item
        }))
    }
}
