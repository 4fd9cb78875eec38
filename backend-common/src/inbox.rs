//! [`Inbox`]: an ordered queue for one reader, with an end.
//!
//! A writer never waits: it learns whether the reader is behind, and decides what to do. For writers that wait for room, see
//! [`output::channel`](crate::output::channel).

use std::collections::VecDeque;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

/// Items of type `T` for one reader, then an end of type `E`.
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

/// The result of a read.
#[derive(Debug)]
pub enum Taken<T, E> {
    /// The next item.
    Item {
        /// The item.
        item: T,
        /// Whether the end is already in the inbox.
        has_ended: bool,
        /// Whether the reader was behind and has now taken all items.
        has_caught_up: bool,
    },
    /// The end; nothing follows.
    End(E),
}

impl<T, E> Inbox<T, E> {
    /// Creates an empty inbox. Its reader is behind from the time `behind_at` items wait until it has taken all of them.
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

    /// Adds an item. Returns the waker of a waiting reader, and whether the reader is behind.
    pub fn push(&self, item: T) -> (Option<Waker>, bool) {
        let mut state = self.state.lock();
        state.items.push_back(item);
        state.is_behind |= state.items.len() >= self.behind_at;
        (state.reader.take(), state.is_behind)
    }

    /// Like [`Self::push`], and wakes the reader. Returns whether the reader is behind.
    pub fn push_and_wake(&self, item: T) -> bool {
        let (reader, is_behind) = self.push(item);
        wake(reader);
        is_behind
    }

    /// Adds the end after the items; the first end wins. Returns the waker of a waiting reader.
    pub fn end(&self, end: E) -> Option<Waker> {
        let mut state = self.state.lock();
        state.end.get_or_insert(end);
        state.reader.take()
    }

    /// Like [`Self::end`], and wakes the reader.
    pub fn end_and_wake(&self, end: E) {
        wake(self.end(end));
    }

    /// Returns whether the reader is behind.
    #[must_use]
    pub fn is_behind(&self) -> bool {
        self.state.lock().is_behind
    }

    /// Takes the next item, or the end after the last item; otherwise registers the reader's waker.
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
