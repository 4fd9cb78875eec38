//! [`Flow`]: counts what one end of a virtual connection has sent and consumed, and so what it may send. Does no I/O.

use super::message::Position;

/// Why a virtual connection cannot continue.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Broken {
    /// NATS delivers a message at most once.
    #[error("a message was lost on its way through NATS: number {got} came where {due} was due")]
    Lost { got: u64, due: u64 },
    #[error("the peer took {taken} messages of the {sent} there are")]
    TookTooMany { taken: u64, sent: u64 },
    #[error("the peer sent more than the {window} messages that it may have before us")]
    SentTooMany { window: u64 },
}

/// The counters of one end.
#[derive(Debug)]
pub(super) struct Flow {
    /// Data messages sent.
    sent: u64,
    /// Of these, the number that the peer consumed.
    taken_by_peer: u64,
    /// The number of unconsumed messages that the peer may hold.
    peer_window: u64,
    /// Data messages received from the peer.
    come: u64,
    /// Of these, the number consumed.
    taken: u64,
    /// Of these, the number acknowledged to the peer.
    told: u64,
    /// The number of unconsumed messages that we may hold.
    window: u64,
}

impl Flow {
    pub(super) fn new(window: u32, peer_window: u32) -> Self {
        Self {
            sent: 0,
            taken_by_peer: 0,
            // A peer with a window of zero would never hear from us.
            peer_window: u64::from(peer_window.max(1)),
            come: 0,
            taken: 0,
            told: 0,
            window: u64::from(window),
        }
    }

    /// Whether the peer has room for a data message.
    pub(super) fn has_room(&self) -> bool {
        self.sent - self.taken_by_peer < self.peer_window
    }

    /// Whether an acknowledgement is due, before the peer has to wait for it.
    pub(super) fn owes(&self) -> bool {
        self.taken - self.told >= (self.window / 4).max(1)
    }

    /// The position for a message sent now.
    pub(super) fn position(&mut self) -> Position {
        self.told = self.taken;
        Position {
            sent: self.sent,
            taken: self.taken,
        }
    }

    /// The position for a data message sent now.
    pub(super) fn next_data(&mut self) -> Position {
        let position = self.position();
        self.sent += 1;
        position
    }

    /// Takes in the position of the peer's next message.
    ///
    /// # Errors
    /// [`Broken`]: messages before it were lost, or the peer's count is impossible.
    pub(super) fn hear(&mut self, position: Position) -> Result<(), Broken> {
        if position.sent != self.come {
            return Err(Broken::Lost {
                got: position.sent,
                due: self.come,
            });
        }
        if position.taken > self.sent {
            return Err(Broken::TookTooMany {
                taken: position.taken,
                sent: self.sent,
            });
        }
        self.taken_by_peer = self.taken_by_peer.max(position.taken);
        Ok(())
    }

    /// Takes in the position of the peer's next data message, which now waits to be consumed.
    ///
    /// # Errors
    /// Same as [`Self::hear`]; also [`Broken`] if the message exceeds the window.
    pub(super) fn hear_data(&mut self, position: Position) -> Result<(), Broken> {
        self.hear(position)?;
        self.come += 1;
        if self.come - self.taken > self.window {
            return Err(Broken::SentTooMany {
                window: self.window,
            });
        }
        Ok(())
    }

    /// Consumes one waiting message: the peer may send one more.
    pub(super) fn take(&mut self) {
        self.taken += 1;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_full_window_waits_for_the_peer() {
        let (mut ours, mut theirs) = (Flow::new(4, 4), Flow::new(4, 4));
        let sent: Vec<_> = (0..4).map(|_| ours.next_data()).collect();
        assert!(!ours.has_room());
        theirs.hear_data(sent[0]).unwrap();
        assert!(!theirs.owes());
        theirs.take();
        assert!(theirs.owes());
        ours.hear(theirs.position()).unwrap();
        assert!(ours.has_room());
        assert!(!theirs.owes());
    }

    #[test]
    fn a_lost_a_repeated_and_a_late_message_end_the_connection() {
        let (mut ours, mut theirs) = (Flow::new(8, 8), Flow::new(8, 8));
        let (first, second) = (ours.next_data(), ours.next_data());
        let lost = theirs.hear_data(second).unwrap_err();
        assert_eq!(lost, Broken::Lost { got: 1, due: 0 });
        theirs.hear_data(first).unwrap();
        let repeated = theirs.hear_data(first).unwrap_err();
        assert_eq!(repeated, Broken::Lost { got: 0, due: 1 });
        // A message without data also shows that one with data is missing.
        assert!(theirs.hear(ours.position()).is_err());
    }

    #[test]
    fn a_peer_cannot_send_more_than_the_window() {
        let (mut ours, mut theirs) = (Flow::new(1, 2), Flow::new(1, 1));
        theirs.hear_data(ours.next_data()).unwrap();
        let error = theirs.hear_data(ours.next_data()).unwrap_err();
        assert_eq!(error, Broken::SentTooMany { window: 1 });
    }

    #[test]
    fn a_peer_cannot_take_what_was_not_sent() {
        let position = Position { sent: 0, taken: 1 };
        let error = Flow::new(8, 8).hear(position).unwrap_err();
        assert_eq!(error, Broken::TookTooMany { taken: 1, sent: 0 });
    }

    proptest! {
        /// Two ends that send, consume and acknowledge in any order: never more than the window in transit, no false loss, and
        /// no deadlock.
        #[test]
        fn whatever_the_order_the_window_holds_and_nobody_starves(
            window in 1u32..20,
            steps in prop::collection::vec(0u8..3, 0..400),
        ) {
            let (mut sender, mut taker) = (Flow::new(window, window), Flow::new(window, window));
            let mut on_its_way = VecDeque::new();
            let mut acknowledgements = VecDeque::new();
            for step in steps {
                match step {
                    0 if sender.has_room() => on_its_way.push_back(sender.next_data()),
                    1 => if let Some(position) = on_its_way.pop_front() {
                        taker.hear_data(position).unwrap();
                        taker.take();
                        if taker.owes() {
                            acknowledgements.push_back(taker.position());
                        }
                    },
                    _ => if let Some(position) = acknowledgements.pop_front() {
                        sender.hear(position).unwrap();
                    },
                }
                prop_assert!(on_its_way.len() <= window as usize);
            }
            while let Some(position) = on_its_way.pop_front() {
                taker.hear_data(position).unwrap();
                taker.take();
                if taker.owes() {
                    acknowledgements.push_back(taker.position());
                }
            }
            for position in acknowledgements {
                sender.hear(position).unwrap();
            }
            prop_assert!(sender.has_room());
        }
    }
}
