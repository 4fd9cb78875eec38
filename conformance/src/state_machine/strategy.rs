//! Random sequences, which shrink to shorter ones and to smaller numbers.

use proptest::bool::weighted;
use proptest::collection::vec;
use proptest::prelude::{Just, Strategy};
use proptest::prop_oneof;

use super::operation::{Asked, Operation, Sequence};

/// The share of sequences that begin with a start; without one, little happens.
const STARTED: f64 = 0.9;

/// Sequences of up to `max_operations` that advance the clock by at most `longest_ms` at once.
pub(super) fn sequences(max_operations: usize, longest_ms: u64) -> impl Strategy<Value = Sequence> {
    let drafts = vec(draft(longest_ms), 0..=max_operations.saturating_sub(1));
    (weighted(STARTED), drafts).prop_map(|(is_started, drafts)| {
        let start = is_started.then_some(Operation::Start);
        Sequence::new(number(start.into_iter().chain(drafts)))
    })
}

/// An operation whose `request` is how many requests ago it was sent. So removing an earlier request while shrinking does not
/// affect later operations.
fn draft(longest_ms: u64) -> impl Strategy<Value = Operation> {
    let back = || 0..4_usize;
    prop_oneof![
        1 => Just(Operation::Cleanup),
        1 => Just(Operation::Drain),
        1 => Just(Operation::Start),
        1 => Just(Operation::Abort { request: None }),
        8 => (1..=40_u32, max_tokens(), 0..4_u64).prop_map(|(prompt_len, max_tokens, seed)| {
            Operation::Generate(Asked { request: 0, prompt_len, max_tokens, seed })
        }),
        8 => (back(), 1..=8_u64).prop_map(|(request, items)| Operation::Poll { request, items }),
        3 => back().prop_map(|request| Operation::Cancel { request }),
        3 => back().prop_map(|request| Operation::Drop { request }),
        2 => back().prop_map(|back| Operation::Abort { request: Some(back) }),
        2 => (0..=longest_ms).prop_map(|millis| Operation::Advance { millis }),
    ]
}

/// Few tokens, so that answers end; or so many that only a cancel or a drop ends the request.
fn max_tokens() -> impl Strategy<Value = u32> {
    prop_oneof![6 => 1..=8_u32, 2 => 9..=64_u32, 1 => 65..=2000_u32]
}

/// Numbers the requests. Drops operations on requests while there are none.
fn number(drafts: impl Iterator<Item = Operation>) -> Vec<Operation> {
    let mut requests = 0_usize;
    let mut operations = Vec::new();
    for mut operation in drafts {
        if let Operation::Generate(asked) = &mut operation {
            asked.request = requests;
            requests += 1;
        } else if let Some(back) = operation.request_mut() {
            let Some(last) = requests.checked_sub(1) else {
                continue;
            };
            *back = last - *back % requests;
        }
        operations.push(operation);
    }
    operations
}

#[cfg(test)]
mod tests {
    use proptest::{prop_assert_eq, proptest};

    use super::*;

    proptest! {
        #[test]
        fn a_text_reads_back_as_what_it_was_written_from(sequence in sequences(40, 1000)) {
            let text = sequence.to_string();
            prop_assert_eq!(text.parse::<Sequence>(), Ok(sequence));
        }

        #[test]
        fn what_is_left_without_an_operation_is_a_sequence(sequence in sequences(40, 1000), place in 0..40_usize) {
            let rest = sequence.without(place);
            prop_assert_eq!(rest.len() < sequence.len(), place < sequence.len());
            prop_assert_eq!(rest.to_string().parse::<Sequence>(), Ok(rest));
        }
    }

    #[test]
    fn bad_texts_are_refused_by_the_token() {
        for (text, token, problem) in [
            ("start; pol#0 1", "pol#0", "the operations are"),
            ("start; poll#0 1", "poll#0", "no generate#0 before it"),
            (
                "generate#1 len=1 max=1",
                "generate#1",
                "expected generate#0",
            ),
            ("generate#0 max=1", "generate#0", "len=N is missing"),
            ("generate#0 len=1", "generate#0", "max=N is missing"),
            ("generate#0 len=0 max=1", "len=0", "from 1 to"),
            (
                "generate#0 len=1 max=1000001",
                "max=1000001",
                "from 1 to 1000000",
            ),
            ("generate#0 len=1 max=1 seed=x", "seed=x", "of 64 bits"),
            ("generate#0 len=1 max=1 top=2", "top=2", "takes len=N"),
            ("generate#0 len=1 max=1; poll#0", "poll#0", "how many items"),
            ("generate#0 len=1 max=1; poll#0 no", "no", "number of items"),
            ("generate#0 len=1 max=1; poll#0 0", "0", "number of items"),
            ("generate#0 len=1 max=1; cancel#x", "cancel#x", "`x` is not"),
            ("cancel", "cancel", "which request"),
            ("start#0", "start#0", "not a request"),
            ("start now", "now", "nothing more"),
            ("advance", "advance", "how long"),
            ("advance 10", "10", "`10ms`"),
            ("advance 1000001ms", "1000001ms", "up to 1000000"),
            ("start;;drain", "", "no operation"),
        ] {
            let error = text.parse::<Sequence>().unwrap_err();
            assert_eq!(error.token, token, "{text}");
            assert!(error.problem.contains(problem), "{text}: {error}");
        }
    }
}
