//! [`Scheduler`]: the waiting and the running sequences, and what the next step computes of them.
//!
//! Sequences are ranked: larger priority first, then first come, first served. A step has room for a number of tokens. Decode
//! rows (one token each) take theirs first, then prompts that are being computed, in chunks as large as the room, then
//! waiting sequences as long as the KV cache has blocks for all they have so far.
//!
//! A sequence that grows into a new block when none is left takes the blocks of others: first of those whose readers are
//! behind, then of the lowest rank. Who loses its blocks waits, at its old rank, and is computed again later. As the
//! highest rank can take from all others, some sequence always goes on; one that no longer fits the cache even alone is
//! reported as [`Step::outgrown`].
//!
//! What is left of a step and of the blocks may take [drafts](Scheduler::reserve_drafts) then.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use genset_backend_common::TokenId;
use genset_backend_common::kv::KvEventData;

use crate::error::{AddError, LimitsError};
use crate::pool::{BlockId, KvBlockPool};
use crate::sequence::{NewSequence, Receipt, Sequence, SequenceId};

/// What a step and the queue may hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Sequences that run at once, at least 1.
    pub max_num_seqs: usize,
    /// Tokens of all sequences in one step, at least `max_num_seqs`.
    pub max_num_batched_tokens: usize,
    /// Sequences that wait, at least 1, beside as many as there are free places among those that run.
    pub max_waiting: usize,
}

impl Limits {
    /// Whether a scheduler can keep them: for those who make one late, behind something that takes long.
    ///
    /// # Errors
    /// A limit is zero, or a step has no room for a token of each running sequence.
    pub fn check(&self) -> Result<(), LimitsError> {
        let Self {
            max_num_seqs,
            max_num_batched_tokens,
            max_waiting,
        } = *self;
        if max_num_seqs == 0 {
            return Err(LimitsError::Zero("max_num_seqs"));
        }
        if max_waiting == 0 {
            return Err(LimitsError::Zero("max_waiting"));
        }
        if max_num_batched_tokens < max_num_seqs {
            return Err(LimitsError::BudgetTooSmall {
                max_num_batched_tokens,
                max_num_seqs,
            });
        }
        Ok(())
    }
}

/// One step's work. Without rows there is nothing to compute; plan again if it is not [empty](Step::is_empty).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Step {
    /// What to compute, a sequence at most once.
    pub rows: Vec<Scheduled>,
    /// Sequences that lost their blocks and wait now.
    pub preempted: Vec<SequenceId>,
    /// Sequences that have blocks now, and wait for what [comes from elsewhere](Scheduler::add_receiving).
    pub receiving: Vec<SequenceId>,
    /// Sequences that have grown larger than the whole KV cache. They are gone from the scheduler.
    pub outgrown: Vec<Outgrown>,
}

/// A sequence that has grown larger than the whole KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Outgrown {
    /// The sequence.
    pub id: SequenceId,
    /// As [`Sequence::cached_tokens`].
    pub cached_tokens: usize,
}

impl Step {
    /// Whether nothing was decided: no sequence can go on before something else happens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
            && self.preempted.is_empty()
            && self.receiving.is_empty()
            && self.outgrown.is_empty()
    }
}

/// The tokens of one sequence that a step computes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scheduled {
    /// The sequence.
    pub id: SequenceId,
    /// Places in [`Sequence::tokens`]; everything before is in its blocks.
    pub tokens: Range<usize>,
    /// Whether the last of them is the sequence's last, so that the next token is chosen from its logits.
    pub wants_token: bool,
    /// Tokens that may follow the last one, computed behind it; the logits of each are wanted too. None but those that
    /// [`Scheduler::set_drafts`] puts here.
    pub drafts: Vec<TokenId>,
}

/// What came of one sequence's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    /// The sequence.
    pub id: SequenceId,
    /// What happened.
    pub outcome: Outcome,
}

/// How a sequence goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Its tokens were computed, and no token was chosen.
    Computed,
    /// This token was chosen; it counts only where the row wanted one.
    Sampled(TokenId),
    /// Its tokens were computed, and it has ended.
    Finished,
    /// Its tokens were computed, and it has ended; its blocks are [held](Scheduler::held) for others.
    Held,
}

/// Counts, all but the first six since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Sequences that wait.
    pub waiting: usize,
    /// Sequences that run.
    pub running: usize,
    /// KV blocks in all.
    pub total_blocks: usize,
    /// KV blocks that sequences hold.
    pub used_blocks: usize,
    /// KV blocks of ended sequences that are held for others, among those used.
    pub held_blocks: usize,
    /// KV blocks that hold nothing worth keeping.
    pub free_blocks: usize,
    /// Sequences that lost their blocks.
    pub preemptions: u64,
    /// Prompt tokens of sequences that began.
    pub prompt_tokens: u64,
    /// Those of them that were in the prefix cache.
    pub cached_tokens: u64,
}

/// Best first: priority, then arrival. The id is carried along.
type Rank = (Reverse<i32>, u64, SequenceId);

type Queue = BTreeMap<Rank, Sequence>;

type Ranks = HashMap<SequenceId, Rank>;

/// The waiting and the running sequences, and their KV blocks.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    /// Whether a prompt may be computed in several steps.
    is_chunking: bool,
    watermark_blocks: usize,
    pool: KvBlockPool,
    waiting: Queue,
    running: Queue,
    /// Where each sequence is in its queue.
    ranks: Ranks,
    /// The blocks of ended sequences that others may still want.
    held: HashMap<SequenceId, Vec<BlockId>>,
    /// Tokens that the step under way has room for.
    spare_tokens: usize,
    arrivals: u64,
    preemptions: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
}

/// A step while it is planned.
struct Planning {
    step: Step,
    budget: usize,
}

impl Planning {
    fn schedule(&mut self, id: SequenceId, sequence: &mut Sequence, tokens: usize) {
        sequence.planned = tokens;
        self.budget -= tokens;
        let range = sequence.computed..sequence.computed + tokens;
        let wants_token = range.end == sequence.tokens().len();
        self.step.rows.push(Scheduled {
            id,
            tokens: range,
            wants_token,
            drafts: Vec::new(),
        });
    }
}

impl Scheduler {
    /// A scheduler without sequences, over `num_blocks` KV blocks of `block_size` tokens.
    ///
    /// # Errors
    /// As [`Limits::check`], and where a size is zero.
    pub fn try_new(
        limits: Limits,
        num_blocks: usize,
        block_size: usize,
    ) -> Result<Self, LimitsError> {
        limits.check()?;
        Ok(Self {
            limits,
            is_chunking: true,
            watermark_blocks: 0,
            pool: KvBlockPool::try_new(num_blocks, block_size)?,
            waiting: Queue::new(),
            running: Queue::new(),
            ranks: Ranks::new(),
            held: HashMap::new(),
            spare_tokens: 0,
            arrivals: 0,
            preemptions: 0,
            prompt_tokens: 0,
            cached_tokens: 0,
        })
    }

    /// Switches the prefix cache off: each sequence computes all of its tokens, and there are no events.
    #[must_use]
    pub fn without_prefix_caching(mut self) -> Self {
        self.pool = self.pool.without_prefix_caching();
        self
    }

    /// Computes each prompt in one step, which must have room for all of it: prompts of more tokens than a step has are refused.
    /// A sequence that was preempted after it had grown beyond that is [outgrown](Step::outgrown).
    #[must_use]
    pub fn without_chunked_prefill(mut self) -> Self {
        self.is_chunking = false;
        self
    }

    /// Leaves at least `blocks` blocks to those that run whenever another sequence is admitted beside them.
    #[must_use]
    pub fn with_watermark(mut self, blocks: usize) -> Self {
        self.watermark_blocks = blocks;
        self
    }

    /// Puts a sequence among those that wait.
    ///
    /// # Errors
    /// It can never run, too many wait already, or its id is in use.
    pub fn add(&mut self, new: NewSequence) -> Result<(), AddError> {
        self.enqueue(new, Receipt::None)
    }

    fn enqueue(&mut self, new: NewSequence, receipt: Receipt) -> Result<(), AddError> {
        if self.held.contains_key(&new.id) || self.ranks.contains_key(&new.id) {
            return Err(AddError::DuplicateId(new.id));
        }
        if new.prompt.is_empty() {
            return Err(AddError::EmptyPrompt);
        }
        let capacity_tokens = self.pool.total() * self.pool.block_size();
        if new.prompt.len() > capacity_tokens {
            return Err(AddError::NeverFits {
                prompt_tokens: new.prompt.len(),
                capacity_tokens,
            });
        }
        let step_tokens = self.limits.max_num_batched_tokens;
        if !self.is_chunking && new.prompt.len() > step_tokens {
            return Err(AddError::ExceedsStep {
                prompt_tokens: new.prompt.len(),
                step_tokens,
            });
        }
        if self.is_full() {
            let waiting = self.waiting.len();
            return Err(AddError::QueueFull { waiting });
        }
        self.arrivals += 1;
        let rank = (Reverse(new.priority), self.arrivals, new.id);
        self.ranks.insert(new.id, rank);
        let sequence = Sequence::new(new, receipt, &self.pool);
        self.waiting.insert(rank, sequence);
        Ok(())
    }

    /// Whether as many wait as may, so that no other is taken.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let places = self.limits.max_num_seqs.saturating_sub(self.running.len());
        self.waiting.len() >= self.limits.max_waiting.saturating_add(places)
    }

    /// Takes a sequence out, wherever it is, and frees its blocks at once. Whether it was here.
    pub fn cancel(&mut self, id: SequenceId) -> bool {
        let Some(mut sequence) = self.remove(id) else {
            return false;
        };
        self.pool.release(&sequence.give_up_blocks());
        true
    }

    fn remove(&mut self, id: SequenceId) -> Option<Sequence> {
        let rank = self.ranks.remove(&id)?;
        let running = self.running.remove(&rank);
        running.or_else(|| self.waiting.remove(&rank))
    }

    /// Says whether a sequence's reader is behind: it then keeps its place and makes no tokens, but is the first to lose
    /// its blocks and its place to others.
    pub fn set_paused(&mut self, id: SequenceId, is_paused: bool) {
        if let Some(rank) = self.ranks.get(&id) {
            let running = self.running.get_mut(rank);
            let sequence = running.or_else(|| self.waiting.get_mut(rank));
            sequence.into_iter().for_each(|it| it.is_paused = is_paused);
        }
    }

    /// Forgets every reusable block, also those that sequences hold.
    pub fn clear_prefix_cache(&mut self) {
        self.pool.clear();
        let all = self.running.values_mut().chain(self.waiting.values_mut());
        all.for_each(Sequence::stop_storing);
    }

    /// Decides what the next step computes. A plan that was not committed is void.
    pub fn plan(&mut self) -> Step {
        let mut planning = Planning {
            step: Step::default(),
            budget: self.limits.max_num_batched_tokens,
        };
        self.running.values_mut().for_each(Sequence::unplan);
        self.remove_outgrown(&mut planning);
        self.plan_running(&mut planning, |remaining| remaining == 1);
        self.plan_running(&mut planning, |remaining| remaining > 1);
        // What a sequence just lost is not handed to the next that waits, or the two would take turns.
        while planning.budget > 0
            && planning.step.preempted.is_empty()
            && self.admit_next(&mut planning)
        {}
        self.spare_tokens = planning.budget;
        planning.step
    }

    /// Takes note of what the planned step brought. Sequences that were cancelled meanwhile are passed over.
    pub fn commit(&mut self, reports: &[Report]) {
        for Report { id, outcome } in reports {
            let running = self
                .ranks
                .get(id)
                .and_then(|rank| self.running.get_mut(rank));
            let Some(sequence) = running.filter(|sequence| sequence.planned > 0) else {
                continue;
            };
            match outcome {
                Outcome::Computed => sequence.advance(None, &mut self.pool),
                Outcome::Sampled(token) => sequence.advance(Some(*token), &mut self.pool),
                Outcome::Finished => {
                    sequence.end(&mut self.pool);
                    self.cancel(*id);
                }
                Outcome::Held => {
                    sequence.end(&mut self.pool);
                    self.held.insert(*id, sequence.give_up_blocks());
                    self.remove(*id);
                }
            }
        }
    }

    /// What changed in the prefix cache since the last call, oldest first.
    pub fn take_events(&mut self) -> Vec<KvEventData> {
        self.pool.take_events()
    }

    /// A sequence that waits or runs.
    #[must_use]
    pub fn sequence(&self, id: SequenceId) -> Option<&Sequence> {
        let rank = self.ranks.get(&id)?;
        self.running.get(rank).or_else(|| self.waiting.get(rank))
    }

    /// The KV blocks.
    #[must_use]
    pub fn pool(&self) -> &KvBlockPool {
        &self.pool
    }

    /// Whether no sequence waits or runs.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.ranks.is_empty()
    }

    /// Counts of now and since the start.
    #[must_use]
    pub fn stats(&self) -> Stats {
        Stats {
            waiting: self.waiting.len(),
            running: self.running.len(),
            total_blocks: self.pool.total(),
            used_blocks: self.pool.used(),
            held_blocks: self.held.values().map(Vec::len).sum(),
            free_blocks: self.pool.free(),
            preemptions: self.preemptions,
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
        }
    }

    /// Ends the sequences that could not go on even if they had every block.
    fn remove_outgrown(&mut self, planning: &mut Planning) {
        let is_outgrown = |sequence: &Sequence| {
            let tokens = sequence.tokens().len();
            let is_too_long_for_a_step = !self.is_chunking
                && sequence.blocks.is_empty()
                && tokens > self.limits.max_num_batched_tokens;
            is_too_long_for_a_step || self.pool.blocks_for(tokens) > self.pool.total()
        };
        let all = self.running.iter().chain(&self.waiting);
        let outgrown = all.filter(|(_, sequence)| is_outgrown(sequence));
        let outgrown = outgrown.map(|(rank, sequence)| Outgrown {
            id: rank.2,
            cached_tokens: sequence.cached_tokens(),
        });
        planning.step.outgrown = outgrown.collect();
        planning.step.outgrown.sort();
        for outgrown in &planning.step.outgrown {
            self.cancel(outgrown.id);
        }
    }

    /// Plans the running sequences whose remaining tokens are of the `wanted` number, best rank first.
    fn plan_running(&mut self, planning: &mut Planning, wanted: fn(usize) -> bool) {
        for rank in self.running.keys().copied().collect::<Vec<_>>() {
            let Some(sequence) = self.running.get(&rank) else {
                // Preempted meanwhile.
                continue;
            };
            let remaining = sequence.remaining();
            let tokens = remaining.min(planning.budget);
            if !self.is_chunking && tokens < remaining {
                continue;
            }
            if tokens > 0 && !sequence.cannot_go_on() && wanted(remaining) {
                self.grow(rank, tokens, planning);
            }
        }
    }

    /// Schedules `tokens` tokens of a running sequence once its blocks suffice for them, or preempts it for want of a better
    /// one.
    fn grow(&mut self, rank: Rank, tokens: usize, planning: &mut Planning) {
        while let Some(sequence) = self.running.get_mut(&rank) {
            let needed = self.pool.blocks_for(sequence.computed + tokens);
            let missing = needed.saturating_sub(sequence.blocks.len());
            if let Some(blocks) = self.pool.allocate(missing) {
                sequence.blocks.extend(blocks);
                return planning.schedule(rank.2, sequence, tokens);
            }
            // The sequence itself is among them, so the loop ends.
            let running = self.running.iter();
            let first = running.max_by_key(|(rank, sequence)| yield_order(rank, sequence));
            let first = first.map_or(rank, |(rank, _)| *rank);
            self.preempt(first, planning);
        }
    }

    /// Takes the blocks of a running sequence, and its rows out of the step.
    fn preempt(&mut self, rank: Rank, planning: &mut Planning) {
        let Some(mut sequence) = self.running.remove(&rank) else {
            return;
        };
        planning.budget += sequence.planned;
        planning.step.rows.retain(|row| row.id != rank.2);
        planning.step.receiving.retain(|id| *id != rank.2);
        planning.step.preempted.push(rank.2);
        self.pool.release(&sequence.give_up_blocks());
        self.waiting.insert(rank, sequence);
        self.preemptions += 1;
    }
}

/// Larger for those that lose their blocks before others: one whose reader is behind, else the lowest rank.
fn yield_order(rank: &Rank, sequence: &Sequence) -> (bool, Rank) {
    (sequence.is_paused, *rank)
}

mod admission;
mod drafts;
mod transfer;

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tests;
