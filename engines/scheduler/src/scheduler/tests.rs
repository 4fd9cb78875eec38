use genset_backend_common::kv::sequence_root;

use super::*;

fn limits(max_num_seqs: usize, max_num_batched_tokens: usize) -> Limits {
    Limits {
        max_num_seqs,
        max_num_batched_tokens,
        max_waiting: 4,
    }
}

/// Blocks of two tokens.
fn scheduler(limits: Limits, num_blocks: usize) -> Scheduler {
    Scheduler::try_new(limits, num_blocks, 2).unwrap()
}

fn new(id: u64, prompt: Vec<TokenId>) -> NewSequence {
    NewSequence {
        id: SequenceId(id),
        prompt,
        priority: 0,
        root: None,
    }
}

/// A prompt that shares no token with the prompts of other ids.
fn add_with(
    scheduler: &mut Scheduler,
    id: u64,
    prompt_tokens: u32,
    priority: i32,
) -> Result<(), AddError> {
    let first = u32::try_from(id).unwrap() * 1000;
    let prompt = (first..first + prompt_tokens).collect();
    scheduler.add(NewSequence {
        priority,
        ..new(id, prompt)
    })
}

fn add(scheduler: &mut Scheduler, id: u64, prompt_tokens: u32) {
    add_with(scheduler, id, prompt_tokens, 0).unwrap();
}

/// Plans and computes a step; returns ids and numbers of tokens.
fn run(scheduler: &mut Scheduler) -> Vec<(u64, usize)> {
    let step = scheduler.plan();
    let reports: Vec<Report> = step
        .rows
        .iter()
        .map(|row| Report {
            id: row.id,
            outcome: outcome(row, 7),
        })
        .collect();
    scheduler.commit(&reports);
    step.rows
        .iter()
        .map(|row| (row.id.0, row.tokens.len()))
        .collect()
}

fn finish(scheduler: &mut Scheduler, id: u64) {
    let (id, outcome) = (SequenceId(id), Outcome::Finished);
    scheduler.commit(&[Report { id, outcome }]);
}

fn outcome(row: &Scheduled, token: TokenId) -> Outcome {
    if row.wants_token {
        Outcome::Sampled(token)
    } else {
        Outcome::Computed
    }
}

#[test]
fn prompts_are_computed_in_chunks_beside_decode_rows() {
    let mut scheduler = scheduler(limits(4, 4), 32);
    add(&mut scheduler, 1, 3);
    add(&mut scheduler, 2, 6);
    assert_eq!(run(&mut scheduler), [(1, 3), (2, 1)]);
    assert_eq!(run(&mut scheduler), [(1, 1), (2, 3)]);
    assert_eq!(run(&mut scheduler), [(1, 1), (2, 2)]);
    assert_eq!(run(&mut scheduler), [(1, 1), (2, 1)]);
    assert_eq!(
        scheduler
            .sequence(SequenceId(2))
            .unwrap()
            .generated_tokens(),
        2
    );
}

#[test]
fn larger_priority_runs_first_and_equals_as_they_came() {
    let mut scheduler = scheduler(limits(2, 16), 32);
    for (id, priority) in [(1, 0), (2, 0), (3, 5)] {
        add_with(&mut scheduler, id, 2, priority).unwrap();
    }
    assert_eq!(run(&mut scheduler), [(3, 2), (1, 2)]);
}

#[test]
fn a_larger_priority_takes_the_place_of_a_smaller_one() {
    let mut scheduler = scheduler(limits(1, 16), 32);
    add(&mut scheduler, 1, 4);
    run(&mut scheduler);
    add(&mut scheduler, 2, 4);
    add_with(&mut scheduler, 3, 4, 1).unwrap();
    let step = scheduler.plan();
    assert_eq!(
        (step.preempted.as_slice(), step.rows[0].id),
        ([SequenceId(1)].as_slice(), SequenceId(3))
    );
    finish(&mut scheduler, 3);
    // No other sequence took its blocks, so only the token after them is computed again.
    assert_eq!(run(&mut scheduler), [(1, 1)]);
    assert_eq!(
        scheduler.sequence(SequenceId(1)).unwrap().cached_tokens(),
        0,
        "nothing was reused at first"
    );
}

#[test]
fn nobody_yields_to_a_newcomer_that_does_not_fit_all_the_same() {
    // With and without a free place for it.
    for max_num_seqs in [3, 2] {
        let mut scheduler = scheduler(limits(max_num_seqs, 16), 4);
        add_with(&mut scheduler, 1, 3, 1).unwrap();
        add(&mut scheduler, 2, 1);
        assert_eq!(run(&mut scheduler), [(1, 3), (2, 1)]);
        // It needs three blocks. The first sequence, which stays, has two of four.
        add_with(&mut scheduler, 3, 5, 1).unwrap();
        let step = scheduler.plan();
        assert_eq!((step.preempted.len(), step.rows.len()), (0, 2));
    }
}

#[test]
fn a_newcomer_leaves_others_a_block_to_grow_into() {
    let mut scheduler = scheduler(limits(2, 16), 2);
    add(&mut scheduler, 1, 2);
    add(&mut scheduler, 2, 2);
    assert_eq!(run(&mut scheduler), [(1, 2)]);
}

#[test]
fn growth_preempts_the_newest_which_goes_on_later() {
    let mut scheduler = scheduler(limits(2, 16), 4);
    add(&mut scheduler, 1, 2);
    add(&mut scheduler, 2, 1);
    assert_eq!(run(&mut scheduler), [(1, 2), (2, 1)]);
    assert_eq!(run(&mut scheduler), [(1, 1), (2, 1)]);
    assert_eq!(run(&mut scheduler), [(1, 1), (2, 1)]);
    // Each holds two blocks, and the first sequence needs a third for its fifth token.
    let step = scheduler.plan();
    assert_eq!(step.preempted, [SequenceId(2)]);
    assert_eq!(step.rows.len(), 1);
    finish(&mut scheduler, 1);
    let step = scheduler.plan();
    assert_eq!(
        scheduler.sequence(SequenceId(2)).unwrap().tokens(),
        [2000, 7, 7, 7]
    );
    assert_eq!(step.rows[0].tokens, 2..4, "its full block was still there");
}

#[test]
fn a_sequence_larger_than_the_cache_is_reported_and_gone() {
    let mut scheduler = scheduler(limits(2, 16), 2);
    assert_eq!(
        add_with(&mut scheduler, 1, 5, 0),
        Err(AddError::NeverFits {
            prompt_tokens: 5,
            capacity_tokens: 4
        })
    );
    // The second time, its first block is cached.
    for cached_tokens in [0, 2] {
        add(&mut scheduler, 2, 4);
        assert_eq!(run(&mut scheduler), [(2, 4 - cached_tokens)]);
        let step = scheduler.plan();
        let outgrown = Outgrown {
            id: SequenceId(2),
            cached_tokens,
        };
        assert_eq!((step.outgrown, step.rows.len()), (vec![outgrown], 0));
        assert!(scheduler.is_idle() && scheduler.pool().used() == 0);
    }
}

#[test]
fn a_paused_sequence_makes_nothing_and_yields_first() {
    let mut scheduler = scheduler(limits(1, 16), 32);
    add(&mut scheduler, 1, 2);
    run(&mut scheduler);
    scheduler.set_paused(SequenceId(1), true);
    assert!(scheduler.plan().is_empty());
    add(&mut scheduler, 2, 2);
    let step = scheduler.plan();
    assert_eq!(
        (step.preempted[0], step.rows[0].id),
        (SequenceId(1), SequenceId(2))
    );
    finish(&mut scheduler, 2);
    assert!(scheduler.plan().is_empty());
    scheduler.set_paused(SequenceId(1), false);
    assert_eq!(run(&mut scheduler), [(1, 1)]);
}

/// Equal prompts share blocks only if salt and adapter are equal too, and each sees only its own.
#[test]
fn sequences_of_different_roots_share_no_block() {
    let mut scheduler = scheduler(limits(1, 16), 32);
    let roots = [
        sequence_root(Some("a"), None),
        sequence_root(Some("b"), None),
        sequence_root(None, Some("a")),
        sequence_root(Some("a"), Some("a")),
        None,
    ];
    let expected = roots.map(|root| (root, 0)).into_iter();
    let expected = expected.chain(roots.map(|root| (root, 4)));
    for (id, (root, cached)) in (1..).zip(expected) {
        let sequence = NewSequence {
            root,
            ..new(id, vec![1, 2, 3, 4, 5])
        };
        scheduler.add(sequence).unwrap();
        run(&mut scheduler);
        let sequence = scheduler.sequence(SequenceId(id)).unwrap();
        assert_eq!(sequence.cached_tokens(), cached, "{root:?}");
        scheduler.cancel(SequenceId(id));
    }
}

#[test]
fn a_cached_prompt_still_computes_its_last_token() {
    let mut scheduler = scheduler(limits(2, 16), 32);
    for id in [1, 2] {
        scheduler.add(new(id, vec![1, 2, 3, 4])).unwrap();
        let step = scheduler.plan();
        let cached = if id == 1 { 0 } else { 2 };
        assert_eq!(step.rows[0].tokens, cached..4);
        assert_eq!(
            scheduler.sequence(SequenceId(id)).unwrap().cached_tokens(),
            cached
        );
        finish(&mut scheduler, id);
    }
    let stats = scheduler.stats();
    assert_eq!(
        (stats.prompt_tokens, stats.cached_tokens, stats.used_blocks),
        (8, 2, 0)
    );
}

#[test]
fn after_clearing_blocks_of_running_sequences_are_not_reused() {
    let mut scheduler = scheduler(limits(2, 16), 32);
    add(&mut scheduler, 1, 4);
    run(&mut scheduler);
    scheduler.clear_prefix_cache();
    run(&mut scheduler);
    run(&mut scheduler);
    assert_eq!(scheduler.pool().reusable().count(), 0);
    scheduler.cancel(SequenceId(1));
    add(&mut scheduler, 1, 4);
    assert_eq!(scheduler.plan().rows[0].tokens, 0..4);
}

#[test]
fn a_token_that_was_not_chosen_is_asked_for_again() {
    let mut scheduler = scheduler(limits(2, 16), 32);
    add(&mut scheduler, 1, 4);
    let row = scheduler.plan().rows[0].clone();
    assert!(row.wants_token);
    scheduler.commit(&[Report {
        id: row.id,
        outcome: Outcome::Computed,
    }]);
    let step = scheduler.plan();
    assert_eq!(
        (step.rows[0].tokens.clone(), step.rows[0].wants_token),
        (3..4, true)
    );
}

#[test]
fn what_cannot_be_queued_is_refused() {
    let mut scheduler = scheduler(limits(1, 16), 32);
    assert_eq!(
        add_with(&mut scheduler, 1, 0, 0),
        Err(AddError::EmptyPrompt)
    );
    // Four wait, and there is one free place.
    for id in 1..=5 {
        add(&mut scheduler, id, 1);
    }
    assert_eq!(
        add_with(&mut scheduler, 1, 1, 0),
        Err(AddError::DuplicateId(SequenceId(1)))
    );
    let refused = |waiting| Err(AddError::QueueFull { waiting });
    assert_eq!(add_with(&mut scheduler, 6, 1, 0), refused(5));
    run(&mut scheduler);
    assert_eq!(add_with(&mut scheduler, 6, 1, 0), refused(4));
    scheduler.cancel(SequenceId(1));
    add(&mut scheduler, 6, 1);
    assert!(scheduler.is_full());
}

#[test]
fn limits_that_cannot_work_are_refused() {
    for (bad, blocks, size) in [
        (limits(0, 4), 4, 4),
        (limits(4, 3), 4, 4),
        (limits(1, 1), 0, 4),
        (limits(1, 1), 4, 0),
    ] {
        assert!(Scheduler::try_new(bad, blocks, size).is_err());
    }
    assert_eq!(limits(0, 4).check(), Err(LimitsError::Zero("max_num_seqs")));
    assert!(limits(4, 3).check().is_err() && limits(4, 4).check().is_ok());
}

#[test]
fn without_chunks_a_prompt_waits_for_a_step_that_holds_it_whole() {
    let mut scheduler = scheduler(limits(4, 8), 32).without_chunked_prefill();
    add(&mut scheduler, 1, 5);
    add(&mut scheduler, 2, 4);
    assert_eq!(run(&mut scheduler), [(1, 5)]);
    assert_eq!(run(&mut scheduler), [(1, 1), (2, 4)]);
    let refused = AddError::ExceedsStep {
        prompt_tokens: 9,
        step_tokens: 8,
    };
    assert_eq!(add_with(&mut scheduler, 3, 9, 0), Err(refused));
}

#[test]
fn without_chunks_what_outgrew_a_step_ends_when_it_lost_its_blocks() {
    let mut scheduler = scheduler(limits(2, 4), 5).without_chunked_prefill();
    add(&mut scheduler, 1, 3);
    for _ in 0..3 {
        run(&mut scheduler);
    }
    // Six tokens in three blocks. The newcomer has the other two, so the seventh token finds none.
    add_with(&mut scheduler, 2, 3, 1).unwrap();
    while scheduler.sequence(SequenceId(1)).is_some() {
        assert!(!scheduler.is_idle());
        run(&mut scheduler);
    }
    assert_eq!(scheduler.stats().preemptions, 1);
    assert!(scheduler.sequence(SequenceId(2)).is_some());
}

#[test]
fn without_prefix_caching_nothing_is_reused_or_published() {
    let mut scheduler = scheduler(limits(4, 64), 32).without_prefix_caching();
    for id in [1, 2] {
        scheduler.add(new(id, vec![5; 9])).unwrap();
        assert_eq!(run(&mut scheduler), [(id, 9)]);
        scheduler.cancel(SequenceId(id));
    }
    assert_eq!(scheduler.stats().cached_tokens, 0);
    assert_eq!(scheduler.stats().free_blocks, 32);
    assert_eq!(scheduler.take_events(), []);
}

#[test]
fn the_watermark_is_left_to_those_that_run() {
    let mut watermarked = scheduler(limits(4, 64), 10).with_watermark(4);
    let mut free = scheduler(limits(4, 64), 10);
    for scheduler in [&mut watermarked, &mut free] {
        // It needs more than the watermark leaves, but it is alone.
        add(scheduler, 1, 14);
        assert_eq!(run(scheduler), [(1, 14)]);
        add(scheduler, 2, 2);
    }
    assert_eq!(run(&mut watermarked), [(1, 1)]);
    assert_eq!(run(&mut free), [(1, 1), (2, 2)]);
}
