//! Migration costs no allocation per token: only when the capacity for kept tokens doubles.
//!
//! A separate test binary, because it sets its own allocator.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../../frontend/tests/allocations/counting.rs"]
#[allow(dead_code, reason = "the frontend's tests need the rest")]
mod counting;

#[path = "ready/mod.rs"]
mod ready;

use genset_backend_common::ports::Generate;

use self::ready::{Ready, migrating, read};

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting;

/// Counts the allocations of a request for `tokens` tokens.
fn allocations(engine: &dyn Generate, tokens: u32) -> u64 {
    let before = counting::allocations();
    assert_eq!(read(engine, tokens), tokens);
    counting::allocations() - before
}

#[test]
fn a_token_of_a_request_that_may_move_allocates_nothing() {
    let layer = migrating();
    let extra = |tokens| allocations(&layer, tokens) - allocations(&Ready, tokens);
    // Six more doublings for thousands of tokens.
    let (few, many) = (extra(64), extra(4096));
    assert_eq!(many - few, 6, "{few} and {many}");
    assert!(few < 8, "{few}");
}
