//! The kit's requests, as an engine sees them: they include every length and every mixture that the guide names. Otherwise a
//! check could stop using a length unnoticed, since the broken engines prove each check at one length.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod clean;

use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock};

use genset_backend_common::{EngineError, GenerateRequest, Input};
use genset_conformance::mutants::fault::{Call, Fault, faulty};
use genset_conformance::{Scenario, run_conformance};
use parking_lot::Mutex;

use self::clean::clean;

type Seen = Arc<Mutex<Vec<GenerateRequest>>>;

/// Records the requests of an engine.
struct Remembers(Seen);

impl Fault for Remembers {
    fn ask(&self, call: &mut Call) -> Result<(), EngineError> {
        self.0.lock().push(call.request.clone());
        Ok(())
    }
}

/// The requests of a run of the kit on the clean engine, and the engine's context length.
static ASKED: LazyLock<(Vec<GenerateRequest>, u32)> = LazyLock::new(|| {
    let (clean, seen) = (clean(), Seen::default());
    let remembered = Arc::clone(&seen);
    let report = run_conformance(move |scenario: &Scenario| {
        faulty(clean.build(scenario), Remembers(Arc::clone(&remembered)))
    });
    report.assert_conformant();
    let seen = seen.lock().clone();
    let longest = seen.iter().map(prompt_len).max().unwrap_or(0);
    // The longest possible prompt is one token shorter than the context.
    (seen, longest + 1)
});

fn prompt_len(request: &GenerateRequest) -> u32 {
    request.prompt_tokens().unwrap_or(0)
}

#[test]
fn every_length_is_asked_for() {
    let (seen, context) = (&ASKED.0, ASKED.1);
    let set = |of: fn(&GenerateRequest) -> u32| seen.iter().map(of).collect::<BTreeSet<u32>>();
    let missing = |name: &str, of: BTreeSet<u32>, wanted: &[u32]| {
        let missing: Vec<&u32> = wanted.iter().filter(|len| !of.contains(len)).collect();
        assert!(
            missing.is_empty(),
            "nobody asks for {name} of {missing:?}: {of:?}"
        );
    };
    missing(
        "prompts",
        set(prompt_len),
        &[1, 65, 130, 300, 1000, context / 2, context - 1],
    );
    let len = |count: usize| u32::try_from(count).unwrap();
    let stops = seen
        .iter()
        .map(|request| len(request.stop.stop_token_ids.len()));
    missing("stop lists", stops.collect(), &[1, 3, 9, 64]);
    let ends = seen
        .iter()
        .map(|request| len(request.stop.eos_token_ids.len()));
    missing("end-of-sequence lists", ends.collect(), &[1, 3]);
    missing(
        "answers",
        set(|request| request.stop.max_tokens.unwrap_or(0)),
        &[0, 1, 130, 264, 300, 600],
    );
    missing(
        "min_tokens",
        set(|request| request.stop.min_tokens),
        &[0, 1, 2, 5, 6, 260],
    );
}

#[test]
fn every_sort_of_end_is_asked_for() {
    let (seen, context) = (&ASKED.0, ASKED.1);
    type Holds = fn(&GenerateRequest, u32) -> bool;
    let sorts: [(&str, Holds); 7] = [
        ("no max_tokens", |request, _| {
            request.stop.max_tokens.is_none()
        }),
        ("both lists in one request", |request, _| {
            !request.stop.stop_token_ids.is_empty() && !request.stop.eos_token_ids.is_empty()
        }),
        ("a stop token that the prompt has", |request, _| {
            let Input::Tokens(prompt) = &request.input else {
                return false;
            };
            request
                .stop
                .stop_token_ids
                .iter()
                .any(|token| prompt.contains(token))
        }),
        ("the room exactly used", |request, context| {
            request
                .stop
                .max_tokens
                .is_some_and(|most| prompt_len(request) + most == context)
        }),
        ("more than the room", |request, context| {
            request
                .stop
                .max_tokens
                .is_some_and(|most| prompt_len(request) + most > context)
        }),
        ("a prompt of the context less one", |request, context| {
            prompt_len(request) + 1 == context
        }),
        ("a salt of its own", |request, _| {
            request.cache_salt.is_some()
        }),
    ];
    for (name, holds) in sorts {
        let is_asked = seen.iter().any(|request| holds(request, context));
        assert!(is_asked, "nobody asks for {name}");
    }
}

/// An earlier prompt is sent again, whole and in part, and with another beginning.
#[test]
fn prompts_of_several_blocks_are_sent_again() {
    let seen = &ASKED.0;
    let prompts: Vec<&[u32]> = seen
        .iter()
        .filter_map(|request| match &request.input {
            Input::Tokens(prompt) if prompt.len() >= 3 * 16 => Some(&***prompt),
            Input::Tokens(_)
            | Input::Text(_)
            | Input::Chat(_)
            | Input::Embed(_)
            | Input::Score(_) => None,
        })
        .collect();
    let mut whole = 0;
    let mut same_tail = 0;
    for (place, later) in prompts.iter().enumerate() {
        let before = &prompts[..place];
        whole += usize::from(before.contains(later));
        let has_tail_of = |earlier: &&[u32]| {
            let tail = later.len() * 2 / 3;
            earlier.len() == later.len()
                && earlier[0] != later[0]
                && earlier[earlier.len() - tail..] == later[later.len() - tail..]
        };
        same_tail += usize::from(before.iter().any(has_tail_of));
    }
    assert!(
        whole > 0 && same_tail > 0,
        "{whole} again, {same_tail} with another head"
    );
}
