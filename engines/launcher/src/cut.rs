//! [`Cut`]: ends an answer by the request's own rules, whatever the server does. Pure.

use genset_backend_common::output::{Finish, TokenChunk};
use genset_backend_common::{GenerateRequest, StopConditions};

/// Checks the tokens of one answer.
#[derive(Debug)]
pub(crate) struct Cut {
    stop: StopConditions,
    max_tokens: u32,
    generated: u32,
}

impl Cut {
    pub(crate) fn new(request: &GenerateRequest, max_tokens: Option<u32>) -> Self {
        Self {
            stop: request.stop.clone(),
            max_tokens: max_tokens.unwrap_or(u32::MAX),
            generated: 0,
        }
    }

    /// Removes tokens that are not part of the answer. Returns the finish, if the answer ends here.
    pub(crate) fn take(&mut self, chunk: &mut TokenChunk) -> Option<Finish> {
        for (place, token) in chunk.token_ids.iter().copied().enumerate() {
            let end = if self.generated >= self.max_tokens {
                Finish::length()
            } else if self.stop.is_stop(token, self.generated) {
                Finish::stop_token(token)
            } else {
                self.generated += 1;
                continue;
            };
            chunk.token_ids.truncate(place);
            chunk.logprobs.truncate(place);
            return Some(end);
        }
        None
    }

    /// Whether the answer continues after the server ended it at its own end-of-sequence token, which counted as an ordinary
    /// token. If the request names no such tokens, the server's end is final.
    pub(crate) fn goes_on(&self) -> bool {
        let has_own = !self.stop.ignore_eos && self.stop.eos_token_ids.is_empty();
        !has_own || self.generated <= self.stop.min_tokens
    }

    /// The number of tokens that may still be generated; `None` if only the server limits it.
    pub(crate) fn remaining(&self) -> Option<u32> {
        (self.max_tokens < u32::MAX).then(|| self.max_tokens.saturating_sub(self.generated))
    }

    /// Whether the answer has reached its limit.
    pub(crate) fn is_full(&self) -> bool {
        self.generated >= self.max_tokens
    }
}

#[cfg(test)]
mod tests {
    use genset_backend_common::FinishReason;

    use super::*;

    fn cut(max_tokens: u32, change: impl FnOnce(&mut StopConditions)) -> Cut {
        let mut request = GenerateRequest::from_tokens("m", vec![1]);
        request.stop.eos_token_ids = [9].into();
        change(&mut request.stop);
        Cut::new(&request, Some(max_tokens))
    }

    fn take(cut: &mut Cut, ids: &[u32]) -> (Vec<u32>, Option<(FinishReason, Option<u32>)>) {
        let mut chunk: TokenChunk = ids.iter().copied().collect();
        let end = cut
            .take(&mut chunk)
            .map(|finish| (finish.reason, finish.stop_token));
        (chunk.token_ids.to_vec(), end)
    }

    #[test]
    fn an_answer_ends_before_its_stop_token() {
        let mut cut = cut(8, |_| {});
        assert_eq!(take(&mut cut, &[1, 2]), (vec![1, 2], None));
        assert_eq!(
            take(&mut cut, &[3, 9, 4]),
            (vec![3], Some((FinishReason::Stop, Some(9))))
        );
    }

    #[test]
    fn stop_tokens_before_min_tokens_and_ignored_ones_are_tokens() {
        let mut early = cut(8, |stop| stop.min_tokens = 2);
        assert_eq!(
            take(&mut early, &[9, 9, 9]),
            (vec![9, 9], Some((FinishReason::Stop, Some(9))))
        );
        let mut ignoring = cut(8, |stop| stop.ignore_eos = true);
        assert_eq!(take(&mut ignoring, &[9, 9]), (vec![9, 9], None));
    }

    #[test]
    fn an_answer_goes_on_behind_an_end_that_is_none() {
        let goes_on = |change: fn(&mut StopConditions)| {
            let mut cut = cut(8, change);
            let (taken, end) = take(&mut cut, &[4, 2]);
            assert_eq!((taken, end), (vec![4, 2], None));
            assert_eq!(cut.remaining(), Some(6));
            cut.goes_on()
        };
        // Token 2 is an end only for the server.
        assert!(goes_on(|_| {}));
        assert!(goes_on(|stop| stop.ignore_eos = true));
        assert!(!goes_on(|stop| stop.eos_token_ids = [].into()));
        assert!(goes_on(|stop| {
            stop.eos_token_ids = [].into();
            stop.min_tokens = 2;
        }));
    }

    #[test]
    fn a_server_that_goes_on_past_the_limit_is_cut() {
        let mut cut = cut(2, |_| {});
        assert_eq!(take(&mut cut, &[1, 2]), (vec![1, 2], None));
        assert!(cut.is_full());
        assert_eq!(
            take(&mut cut, &[3]),
            (vec![], Some((FinishReason::Length, None)))
        );
    }
}
