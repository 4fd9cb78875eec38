//! [`Scheduler`]: the waiting and the running sequences, and the tokens that the next step computes.
//!
//! Sequences are ranked by priority, larger first, then by arrival. A step has a token budget. Decode rows (one token each)
//! take from it first. Then come prompts in progress, in chunks as large as the rest of the budget, then waiting sequences,
//! as long as the KV cache has blocks for all of a sequence's tokens.
//!
//! A sequence that needs a new block when none is left preempts others: first those whose readers are behind, then those
//! of the lowest rank. A preempted sequence waits at its old rank and is recomputed later. The highest rank can preempt all
//! others, so some sequence always makes progress. A sequence that does not fit the cache even alone is reported as
//! [`Step::outgrown`].
//!
//! The rest of the step's budget and of the blocks is available to [drafts](Scheduler::reserve_drafts).

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use genset_backend_common::TokenId;
use genset_backend_common::kv::KvEventData;

use crate::error::{AddError, LimitsError};
use crate::pool::{BlockId, KvBlockPool};
use crate::sequence::{NewSequence, Receipt, Sequence, SequenceId};

/// The limits of a step and of the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The most sequences that run at once, at least 1.
    pub max_num_seqs: usize,
    /// Tokens of all sequences in one step, at least `max_num_seqs`.
    pub max_num_batched_tokens: usize,
    /// The most sequences that wait, at least 1. Free places among the running sequences are added to it.
    pub max_waiting: usize,
}

impl Limits {
    /// Checks the limits. Use it to fail early if the scheduler itself is created only after slow work.
    ///
    /// # Errors
    /// A limit is zero, or a step has no room for one token of each running sequence.
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
    /// The rows to compute, at most one per sequence.
    pub rows: Vec<Scheduled>,
    /// Sequences that were preempted and wait again.
    pub preempted: Vec<SequenceId>,
    /// Sequences that have blocks now, and wait for [their content](Scheduler::add_receiving).
    pub receiving: Vec<SequenceId>,
    /// Sequences that have grown larger than the whole KV cache. The scheduler has removed them.
    pub outgrown: Vec<Outgrown>,
}

/// A sequence that has grown larger than the whole KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Outgrown {
    /// The sequence's id.
    pub id: SequenceId,
    /// As [`Sequence::cached_tokens`].
    pub cached_tokens: usize,
}

impl Step {
    /// Whether the plan decided nothing: no sequence can continue before another event.
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
    /// The sequence's id.
    pub id: SequenceId,
    /// A range of [`Sequence::tokens`]. The sequence's blocks hold all tokens before it.
    pub tokens: Range<usize>,
    /// Whether the range ends with the sequence's last token, so that the next token is sampled from its logits.
    pub wants_token: bool,
    /// Draft tokens behind the last token, computed in the same step; the logits of each are wanted too. Empty unless
    /// [`Scheduler::set_drafts`] was called.
    pub drafts: Vec<TokenId>,
}

/// The result of one sequence's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    /// The sequence's id.
    pub id: SequenceId,
    /// What happened.
    pub outcome: Outcome,
}

/// How a sequence continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Its tokens were computed, and no token was sampled.
    Computed,
    /// This token was sampled; it is ignored unless the row wanted one.
    Sampled(TokenId),
    /// Its tokens were computed, and it has ended.
    Finished,
    /// Its tokens were computed, and it has ended; its blocks are [held](Scheduler::held) for others.
    Held,
}

/// Counts. The first six are current, the others are since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stats {
    /// Waiting sequences.
    pub waiting: usize,
    /// Running sequences.
    pub running: usize,
    /// All KV blocks.
    pub total_blocks: usize,
    /// KV blocks that sequences hold.
    pub used_blocks: usize,
    /// KV blocks of ended sequences that are held for other instances; part of the used ones.
    pub held_blocks: usize,
    /// KV blocks without reusable content.
    pub free_blocks: usize,
    /// Preemptions.
    pub preemptions: u64,
    /// Prompt tokens of sequences that were admitted.
    pub prompt_tokens: u64,
    /// The part of them that was in the prefix cache.
    pub cached_tokens: u64,
}

/// The order of sequences, best first: priority, then arrival. The id is only carried along.
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
    /// The rank of each sequence, its key in the queues.
    ranks: Ranks,
    /// The blocks of ended sequences that other instances may still fetch.
    held: HashMap<SequenceId, Vec<BlockId>>,
    /// Tokens left in the budget of the step under way.
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
    /// Creates a scheduler without sequences, over `num_blocks` KV blocks of `block_size` tokens.
    ///
    /// # Errors
    /// As [`Limits::check`], and if a size is zero.
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

    /// Disables the prefix cache: each sequence computes all of its tokens, and there are no events.
    #[must_use]
    pub fn without_prefix_caching(mut self) -> Self {
        self.pool = self.pool.without_prefix_caching();
        self
    }

    /// Computes each prompt in one step. A prompt of more tokens than a step is then refused, and a sequence that is preempted
    /// after it has grown beyond a step is [outgrown](Step::outgrown).
    #[must_use]
    pub fn without_chunked_prefill(mut self) -> Self {
        self.is_chunking = false;
        self
    }

    /// Leaves at least `blocks` blocks to the running sequences when it admits another one beside them.
    #[must_use]
    pub fn with_watermark(mut self, blocks: usize) -> Self {
        self.watermark_blocks = blocks;
        self
    }

    /// Adds a sequence to the waiting ones.
    ///
    /// # Errors
    /// The sequence can never run, too many are waiting already, or its id is in use.
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

    /// Whether the queue is full, so that [`add`](Self::add) fails.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let places = self.limits.max_num_seqs.saturating_sub(self.running.len());
        self.waiting.len() >= self.limits.max_waiting.saturating_add(places)
    }

    /// Removes a waiting or running sequence and frees its blocks at once. Returns whether the scheduler had it.
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

    /// Sets whether a sequence's reader is behind. A paused sequence keeps its place and generates no tokens, but is the first
    /// to lose its blocks and its place to others.
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

    /// Decides what the next step computes. It replaces a plan that was not committed.
    pub fn plan(&mut self) -> Step {
        let mut planning = Planning {
            step: Step::default(),
            budget: self.limits.max_num_batched_tokens,
        };
        self.running.values_mut().for_each(Sequence::unplan);
        self.remove_outgrown(&mut planning);
        self.plan_running(&mut planning, |remaining| remaining == 1);
        self.plan_running(&mut planning, |remaining| remaining > 1);
        // Blocks of a preempted sequence do not go to the next waiting one, or the two would alternate.
        while planning.budget > 0
            && planning.step.preempted.is_empty()
            && self.admit_next(&mut planning)
        {}
        self.spare_tokens = planning.budget;
        planning.step
    }

    /// Applies the results of the planned step. Ignores sequences that were cancelled meanwhile.
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

    /// Returns the changes of the prefix cache since the last call, oldest first.
    pub fn take_events(&mut self) -> Vec<KvEventData> {
        self.pool.take_events()
    }

    /// Returns a waiting or running sequence.
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

    /// Returns current and total counts.
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

    /// Removes the sequences that could not continue even with every block.
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

    /// Plans the running sequences whose number of remaining tokens satisfies `wanted`, best rank first.
    fn plan_running(&mut self, planning: &mut Planning, wanted: fn(usize) -> bool) {
        for rank in self.running.keys().copied().collect::<Vec<_>>() {
            let Some(sequence) = self.running.get(&rank) else {
                // Preempted earlier in this plan.
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

    /// Schedules `tokens` tokens of a running sequence. Until it can get the blocks for them, preempts sequences in
    /// [`yield_order`], which may reach the sequence itself.
    fn grow(&mut self, rank: Rank, tokens: usize, planning: &mut Planning) {
        while let Some(sequence) = self.running.get_mut(&rank) {
            let needed = self.pool.blocks_for(sequence.computed + tokens);
            let missing = needed.saturating_sub(sequence.blocks.len());
            if let Some(blocks) = self.pool.allocate(missing) {
                sequence.blocks.extend(blocks);
                return planning.schedule(rank.2, sequence, tokens);
            }
            // The candidates include the sequence itself, so the loop ends.
            let running = self.running.iter();
            let first = running.max_by_key(|(rank, sequence)| yield_order(rank, sequence));
            let first = first.map_or(rank, |(rank, _)| *rank);
            self.preempt(first, planning);
        }
    }

    /// Preempts a running sequence: takes its blocks, and removes its rows from the step.
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

/// Sorts sequences for preemption, larger first: those whose readers are behind, then the lowest rank.
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
