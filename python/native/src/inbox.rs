//! [`Inbox`]: the events that wait for a Python program's event loop, and the socket that wakes it.
//!
//! Its length is bounded: items of a stream by their reader's credit, requests by their endpoint's limit, and all others by one
//! per request or operation.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use bytes::Bytes;
use genset_backend_common::EngineError;
use parking_lot::Mutex;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::call::Call;
use crate::error;

/// An event for the program. Python knows the kinds by these numbers: `_bridge.py`.
#[derive(Debug)]
pub(crate) enum Event {
    /// An operation is done: its number, and a number as result or the error.
    Done(u64, Result<Option<u64>, EngineError>),
    /// A request for the endpoint of this number.
    Called(u64, Arc<crate::call::CallState>),
    /// The reader of a call's answer grants credit for more items.
    Credit(u64, u32),
    /// A call was stopped, and why.
    Stopped(u64, &'static str),
    /// An item of an answer.
    Item(u64, Bytes),
    /// The end of an answer.
    Ended(u64, Option<EngineError>),
}

/// The events since the loop's last look. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Inbox(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    waiting: Mutex<Waiting>,
    /// The end that is written to, and the end that the loop watches.
    bell: (UnixStream, UnixStream),
}

#[derive(Debug, Default)]
struct Waiting {
    events: Vec<Event>,
    /// Whether the loop was woken for these events.
    has_rung: bool,
}

impl Inbox {
    pub(crate) fn open() -> std::io::Result<Self> {
        let bell = UnixStream::pair()?;
        bell.0.set_nonblocking(true)?;
        bell.1.set_nonblocking(true)?;
        Ok(Self(Arc::new(Shared {
            waiting: Mutex::default(),
            bell,
        })))
    }

    /// The file descriptor that becomes readable when there are events.
    pub(crate) fn fd(&self) -> RawFd {
        self.0.bell.1.as_raw_fd()
    }

    /// Adds an event, and wakes the loop unless it was woken already.
    pub(crate) fn put(&self, event: Event) {
        let has_rung = {
            let mut waiting = self.0.waiting.lock();
            waiting.events.push(event);
            std::mem::replace(&mut waiting.has_rung, true)
        };
        if !has_rung {
            // One byte always fits into an empty socket; a loop that is gone needs no waking.
            let rung = (&self.0.bell.0).write(&[1]);
            if let Err(error) = rung {
                tracing::debug!(%error, "the event loop cannot be woken");
            }
        }
    }

    /// Takes all events. Reads the bell first: a later event rings again.
    fn take(&self) -> Vec<Event> {
        let mut rings = [0; 8];
        loop {
            match (&self.0.bell.1).read(&mut rings) {
                Ok(8) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Ok(_) | Err(_) => break,
            }
        }
        let mut waiting = self.0.waiting.lock();
        waiting.has_rung = false;
        std::mem::take(&mut waiting.events)
    }

    /// All events as tuples of kind, number and two values.
    pub(crate) fn take_for<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let list = PyList::empty(py);
        for event in self.take() {
            match event {
                Event::Done(id, Ok(value)) => list.append((0, id, value, py.None()))?,
                Event::Done(id, Err(error)) => {
                    list.append((0, id, py.None(), bytes_of(py, &error)))?;
                }
                Event::Called(id, state) => list.append((1, id, Call(state), py.None()))?,
                Event::Credit(id, items) => list.append((2, id, items, py.None()))?,
                Event::Stopped(id, reason) => list.append((3, id, reason, py.None()))?,
                Event::Item(id, item) => {
                    list.append((4, id, PyBytes::new(py, &item), py.None()))?;
                }
                Event::Ended(id, None) => list.append((5, id, py.None(), py.None()))?,
                Event::Ended(id, Some(error)) => {
                    list.append((5, id, py.None(), bytes_of(py, &error)))?;
                }
            }
        }
        Ok(list)
    }
}

fn bytes_of<'py>(py: Python<'py>, error: &EngineError) -> Bound<'py, PyBytes> {
    PyBytes::new(py, &error::to_bytes(error))
}
