//! [`Inbox`]: what waits for a reader, in order, and the end behind it.
//!
//! Whoever writes never waits: it is told when the reader is behind, and what follows from that is its own. For a writer that
//! waits for room there is [`output::channel`](crate::output::channel).

use std::collections::VecDeque;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

/// Items of type `T` for one reader, and an end of type `E`.
///
/// # Examples
/// ```
/// use std::task::{Context, Poll, Waker};
/// use genset_backend_common::inbox::{Inbox, Taken};
///
/// let inbox = Inbox::new(64);
/// inbox.push("item");
/// inbox.end("end");
/// let mut cx = Context::from_waker(Waker::noop());
/// assert!(matches!(inbox.poll_take(&mut cx), Poll::Ready(Taken::Item { item: "item", .. })));
/// assert!(matches!(inbox.poll_take(&mut cx), Poll::Ready(Taken::End("end"))));
/// ```
#[derive(Debug)]
pub struct Inbox<T, E> {
    state: Mutex<State<T, E>>,
    behind_at: usize,
}

#[derive(Debug)]
struct State<T, E> {
    items: VecDeque<T>,
    is_behind: bool,
    end: Option<E>,
    reader: Option<Waker>,
}

/// What a reader takes.
#[derive(Debug)]
pub enum Taken<T, E> {
    /// The next item.
    Item {
        /// The item.
        item: T,
        /// Whether the end is there already.
        has_ended: bool,
        /// Whether the reader was behind, and has now taken all.
        has_caught_up: bool,
    },
    /// The end; nothing follows.
    End(E),
}

impl<T, E> Inbox<T, E> {
    /// An empty inbox, whose reader is behind once `behind_at` items wait, until it has taken all.
    #[must_use]
    pub fn new(behind_at: usize) -> Self {
        let state = State {
            items: VecDeque::new(),
            is_behind: false,
            end: None,
            reader: None,
        };
        Self {
            state: Mutex::new(state),
            behind_at,
        }
    }

    /// Adds an item. Returns the reader, to be woken if it waits, and whether it is behind.
    pub fn push(&self, item: T) -> (Option<Waker>, bool) {
        let mut state = self.state.lock();
        state.items.push_back(item);
        state.is_behind |= state.items.len() >= self.behind_at;
        (state.reader.take(), state.is_behind)
    }

    /// As [`Self::push`], and wakes the reader. Whether it is behind.
    pub fn push_and_wake(&self, item: T) -> bool {
        let (reader, is_behind) = self.push(item);
        wake(reader);
        is_behind
    }

    /// Puts the end behind the items; the first one stays. Returns the reader, to be woken if it waits.
    pub fn end(&self, end: E) -> Option<Waker> {
        let mut state = self.state.lock();
        state.end.get_or_insert(end);
        state.reader.take()
    }

    /// As [`Self::end`], and wakes the reader.
    pub fn end_and_wake(&self, end: E) {
        wake(self.end(end));
    }

    /// Whether the reader is behind.
    #[must_use]
    pub fn is_behind(&self) -> bool {
        self.state.lock().is_behind
    }

    /// Takes the next item, or the end behind the last; else the reader waits.
    pub fn poll_take(&self, cx: &mut Context<'_>) -> Poll<Taken<T, E>> {
        let mut state = self.state.lock();
        if let Some(item) = state.items.pop_front() {
            return Poll::Ready(Taken::Item {
                item,
                has_ended: state.end.is_some(),
                has_caught_up: state.items.is_empty() && std::mem::take(&mut state.is_behind),
            });
        }
        if let Some(end) = state.end.take() {
            return Poll::Ready(Taken::End(end));
        }
        state.reader = Some(cx.waker().clone());
        Poll::Pending
    }
}

fn wake(reader: Option<Waker>) {
    if let Some(reader) = reader {
        reader.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take<T, E>(inbox: &Inbox<T, E>) -> Poll<Taken<T, E>> {
        inbox.poll_take(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn a_reader_that_was_behind_has_caught_up_once_it_took_all() {
        let inbox = Inbox::<u32, ()>::new(2);
        assert!(!inbox.push(1).1);
        assert!(inbox.push(2).1);
        let caught_up = |taken| match taken {
            Poll::Ready(Taken::Item { has_caught_up, .. }) => has_caught_up,
            Poll::Ready(Taken::End(())) | Poll::Pending => panic!("no item"),
        };
        assert!(!caught_up(take(&inbox)));
        assert!(inbox.is_behind() && inbox.push(3).1);
        assert!(!caught_up(take(&inbox)));
        assert!(caught_up(take(&inbox)));
        assert!(!inbox.is_behind());
    }

    #[test]
    fn the_first_end_stays_and_comes_behind_the_items() {
        let inbox = Inbox::new(64);
        assert!(take(&inbox).is_pending());
        assert!(inbox.push('a').0.is_some());
        assert!(inbox.end("first").is_none());
        inbox.end("second");
        let Poll::Ready(Taken::Item {
            item, has_ended, ..
        }) = take(&inbox)
        else {
            panic!("no item");
        };
        assert_eq!((item, has_ended), ('a', true));
        assert!(matches!(take(&inbox), Poll::Ready(Taken::End("first"))));
        assert!(take(&inbox).is_pending());
    }
}
