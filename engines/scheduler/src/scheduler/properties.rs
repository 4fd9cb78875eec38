//! Invariants under every order of events: a random driver, compared with a naive model.

use std::collections::{BTreeMap, HashMap, HashSet};

use genset_backend_common::kv::{BlockHash, StoredBlock};
use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Operation {
    Add {
        family: u32,
        prompt_tokens: u32,
        priority: i32,
    },
    Cancel(u64),
    Pause(u64, bool),
    Clear,
    /// `drafts`: the number wanted behind each row.
    Plan {
        drafts: usize,
    },
    /// `ends`: one in `ends` tokens ends its sequence.
    Commit {
        ends: u32,
    },
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    let operation = prop_oneof![
        4 => (0..3u32, 1..20u32, 0..3i32)
            .prop_map(|(family, prompt_tokens, priority)| Operation::Add { family, prompt_tokens, priority }),
        1 => (0..40u64).prop_map(Operation::Cancel),
        2 => (0..40u64, any::<bool>()).prop_map(|(id, is_paused)| Operation::Pause(id, is_paused)),
        1 => Just(Operation::Clear),
        8 => (0..7usize).prop_map(|drafts| Operation::Plan { drafts }),
        8 => (2..12u32).prop_map(|ends| Operation::Commit { ends }),
    ];
    prop::collection::vec(operation, 1..160)
}

/// The settings of a scheduler beside its limits.
#[derive(Debug, Clone, Copy)]
struct Rules {
    is_chunking: bool,
    is_caching: bool,
    watermark_blocks: usize,
}

type Setup = (Limits, usize, usize, Rules);

fn setups() -> impl Strategy<Value = Setup> {
    let rules = (any::<bool>(), any::<bool>(), 0..6usize).prop_map(|rules| Rules {
        is_chunking: rules.0,
        is_caching: rules.1,
        watermark_blocks: rules.2,
    });
    let sizes = (1..5usize, 0..12usize, 1..24usize, 1..5usize);
    (sizes, rules).prop_map(|((seqs, more, blocks, size), rules)| {
        let limits = Limits {
            max_num_seqs: seqs,
            max_num_batched_tokens: seqs + more,
            max_waiting: 12,
        };
        (limits, blocks, size, rules)
    })
}

fn scheduler((limits, blocks, size, rules): Setup) -> Scheduler {
    let mut scheduler = Scheduler::try_new(limits, blocks, size)
        .unwrap()
        .with_watermark(rules.watermark_blocks);
    if !rules.is_chunking {
        scheduler = scheduler.without_chunked_prefill();
    }
    if !rules.is_caching {
        scheduler = scheduler.without_prefix_caching();
    }
    scheduler
}

/// The scheduler, and the state that it must agree with.
struct Driver {
    scheduler: Scheduler,
    limits: Limits,
    rules: Rules,
    /// The tokens of each sequence, as the driver sampled them.
    histories: HashMap<SequenceId, Vec<TokenId>>,
    planned: Vec<Scheduled>,
    /// The prefix cache, replayed from its events.
    replayed: BTreeMap<BlockHash, Option<BlockHash>>,
    next_id: u64,
    next_token: TokenId,
}

impl Driver {
    fn new(setup: Setup) -> Self {
        Self {
            scheduler: scheduler(setup),
            limits: setup.0,
            rules: setup.3,
            histories: HashMap::new(),
            planned: Vec::new(),
            replayed: BTreeMap::new(),
            next_id: 0,
            next_token: 0,
        }
    }

    fn perform(&mut self, operation: &Operation) {
        match operation {
            Operation::Add {
                family,
                prompt_tokens,
                priority,
            } => self.add(*family, *prompt_tokens, *priority),
            Operation::Cancel(id) => self.forget(SequenceId(*id)),
            Operation::Pause(id, is_paused) => {
                self.scheduler.set_paused(SequenceId(*id), *is_paused)
            }
            Operation::Clear => self.scheduler.clear_prefix_cache(),
            Operation::Plan { drafts } => drop(self.plan(*drafts)),
            Operation::Commit { ends } => self.commit(*ends),
        }
        self.check();
    }

    /// Prompts of one family share a prefix.
    fn add(&mut self, family: u32, prompt_tokens: u32, priority: i32) {
        let id = SequenceId(self.next_id);
        let prompt: Vec<TokenId> = (0..prompt_tokens)
            .map(|place| family * 100 + place / 7)
            .collect();
        let new = NewSequence {
            id,
            prompt: prompt.clone(),
            priority,
            root: None,
        };
        if self.scheduler.add(new).is_ok() {
            self.next_id += 1;
            self.histories.insert(id, prompt);
        }
    }

    fn forget(&mut self, id: SequenceId) {
        assert_eq!(
            self.scheduler.cancel(id),
            self.histories.remove(&id).is_some()
        );
    }

    /// The most blocks that the running sequences can need in the next step.
    fn growth(&self) -> usize {
        let pool = self.scheduler.pool();
        let growth = self.scheduler.running.values().map(|sequence| {
            let needed = pool.blocks_for(sequence.tokens().len());
            needed.saturating_sub(sequence.blocks().len())
        });
        growth.sum()
    }

    /// All held sequences have been fetched.
    fn fetch_held(&mut self) {
        for id in self.scheduler.held.keys().copied().collect::<Vec<_>>() {
            assert!(self.scheduler.free_held(id));
        }
    }

    fn plan(&mut self, drafts: usize) -> Step {
        self.fetch_held();
        let all_can_grow = self.growth() <= self.scheduler.pool().available();
        let ran: HashSet<_> = self.scheduler.running.keys().map(|rank| rank.2).collect();
        let mut step = self.scheduler.plan();
        if all_can_grow && !step.preempted.is_empty() {
            let has_come = |row: &Scheduled| !ran.contains(&row.id);
            assert!(
                step.rows.iter().any(has_come),
                "nobody yields to one that does not come in"
            );
        }
        for row in &mut step.rows {
            let room = self.scheduler.reserve_drafts(row.id, drafts);
            assert!(room <= drafts && (room == 0 || row.wants_token));
            let drafts = (0..5).cycle().take(room).collect();
            self.scheduler.set_drafts(row, drafts);
            assert_eq!(row.drafts.len(), room);
        }
        let size = |row: &Scheduled| row.tokens.len() + row.drafts.len();
        let tokens: usize = step.rows.iter().map(size).sum();
        assert!(
            tokens <= self.limits.max_num_batched_tokens,
            "the budget is kept"
        );
        let distinct: HashSet<_> = step.rows.iter().map(|row| row.id).collect();
        assert_eq!(
            distinct.len(),
            step.rows.len(),
            "a sequence is in a step once"
        );
        for row in &step.rows {
            let sequence = self.scheduler.sequence(row.id).unwrap();
            assert!(!row.tokens.is_empty() && row.tokens.start == sequence.computed);
            let slots = sequence.blocks().len() * self.scheduler.pool().block_size();
            assert!(row.tokens.end + row.drafts.len() <= slots);
            assert!(self.rules.is_chunking || row.wants_token);
            assert!(
                !step.preempted.contains(&row.id),
                "who lost its blocks computes nothing"
            );
        }
        for Outgrown { id, .. } in &step.outgrown {
            let tokens = self.histories.remove(id).unwrap().len();
            let blocks = self.scheduler.pool().blocks_for(tokens);
            let is_too_long_for_a_step =
                !self.rules.is_chunking && tokens > self.limits.max_num_batched_tokens;
            assert!(is_too_long_for_a_step || blocks > self.scheduler.pool().total());
        }
        self.planned.clone_from(&step.rows);
        step
    }

    fn commit(&mut self, ends: u32) {
        let mut reports = Vec::new();
        for row in std::mem::take(&mut self.planned) {
            self.next_token += 1;
            let token = self.next_token % 5;
            let most = row.drafts.len() + 1;
            let accepted = usize::try_from(self.next_token / 2).unwrap() % most;
            if let Some(history) = self.histories.get_mut(&row.id) {
                history.extend(&row.drafts[..accepted]);
            }
            self.scheduler.accept_drafts(row.id, accepted);
            let outcome = match (row.wants_token, self.next_token.is_multiple_of(ends)) {
                (false, _) => Outcome::Computed,
                (true, false) => Outcome::Sampled(token),
                (true, true) if token == 0 => Outcome::Held,
                (true, true) => Outcome::Finished,
            };
            reports.push(Report {
                id: row.id,
                outcome,
            });
            match outcome {
                Outcome::Computed => {}
                Outcome::Sampled(token) => self.histories.entry(row.id).or_default().push(token),
                Outcome::Finished | Outcome::Held => drop(self.histories.remove(&row.id)),
            }
            // A sequence cancelled between plan and commit has no history, and its report adds none.
            if self.scheduler.sequence(row.id).is_none() {
                self.histories.remove(&row.id);
            }
        }
        self.scheduler.commit(&reports);
        for Report { id, .. } in &reports {
            if let Some(sequence) = self.scheduler.sequence(*id) {
                let needed = self.scheduler.pool().blocks_for(sequence.tokens().len());
                assert!(
                    sequence.blocks().len() <= needed,
                    "blocks of drafts are given back"
                );
            }
        }
    }

    fn check(&mut self) {
        self.replay();
        let pool = self.scheduler.pool();
        let live: BTreeMap<_, _> = pool
            .reusable()
            .map(|StoredBlock { hash, parent }| (hash, parent))
            .collect();
        assert_eq!(live, self.replayed, "events replay to the pool's view");
        for parent in live.values().flatten() {
            assert!(
                live.contains_key(parent),
                "a reusable block's parent is reusable"
            );
        }
        let mut holders: HashMap<BlockId, u32> = HashMap::new();
        let all = self.scheduler.running.iter().chain(&self.scheduler.waiting);
        for ((.., id), sequence) in all {
            assert_eq!(
                sequence.tokens(),
                self.histories[id],
                "tokens are what was chosen"
            );
            assert!(sequence.computed < sequence.tokens().len());
            sequence
                .blocks()
                .iter()
                .for_each(|block| *holders.entry(*block).or_default() += 1);
        }
        for blocks in self.scheduler.held.values() {
            blocks
                .iter()
                .for_each(|block| *holders.entry(*block).or_default() += 1);
        }
        for block in (0..pool.total()).map(|block| BlockId(u32::try_from(block).unwrap())) {
            assert_eq!(
                pool.holders(block),
                holders.get(&block).copied().unwrap_or(0),
                "holders of {block:?}"
            );
        }
        assert_eq!(
            pool.used(),
            holders.len(),
            "blocks neither leak nor are they freed twice"
        );
        assert!(self.rules.is_caching || live.is_empty());
        let stats = self.scheduler.stats();
        assert_eq!(stats.waiting + stats.running, self.histories.len());
        assert!(stats.running <= self.limits.max_num_seqs);
        assert!(stats.used_blocks + stats.free_blocks <= stats.total_blocks);
    }

    fn replay(&mut self) {
        for event in self.scheduler.take_events() {
            match event {
                KvEventData::Stored { mut parent, blocks } => {
                    for block in blocks {
                        assert_eq!(self.replayed.insert(block, parent), None, "stored once");
                        parent = Some(block);
                    }
                }
                KvEventData::Removed { blocks } => {
                    for block in blocks {
                        assert!(
                            self.replayed.remove(&block).is_some(),
                            "removed after it was stored"
                        );
                    }
                }
                KvEventData::Cleared => self.replayed.clear(),
            }
        }
    }

    /// With all readers resumed, every sequence ends: each step advances some sequence, and none starves.
    fn run_to_the_end(&mut self) {
        for id in 0..self.next_id {
            self.scheduler.set_paused(SequenceId(id), false);
        }
        for _ in 0..20_000 {
            if self.scheduler.is_idle() {
                self.fetch_held();
                return;
            }
            let step = self.plan(2);
            assert!(!step.is_empty(), "something can go on");
            self.commit(7);
            self.check();
        }
        panic!("some sequence starves: {:?}", self.scheduler.stats());
    }
}

proptest! {
    #[test]
    fn counts_agree_after_any_order_of_events_and_nobody_starves(setup in setups(), operations in operations()) {
        let mut driver = Driver::new(setup);
        for operation in &operations {
            driver.perform(operation);
        }
        driver.run_to_the_end();
        assert_eq!(driver.scheduler.pool().used(), 0);
    }
}
