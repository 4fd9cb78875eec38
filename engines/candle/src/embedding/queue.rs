//! [`Queue`]: chooses the inputs that the next step computes.
//!
//! Each step goes round the waiting requests, oldest first, and takes one fitting input of each, until nothing more fits.
//! Requests that were served move to the end of the queue. So a small request does not wait for a large one, and a long
//! input is the first of its step once its request is at the front: no request starves.

use std::collections::VecDeque;

use genset_backend_common::EngineError;
use tokio::sync::oneshot;

use crate::model::embedder::{StepRoom, WholeSequence};

/// The sender of a request's vectors.
pub(super) type Reply = oneshot::Sender<Result<Vec<Vec<f32>>, EngineError>>;

/// A request that is not answered yet.
#[derive(Debug)]
pub(super) struct Pending {
    sequences: Vec<WholeSequence>,
    /// The vectors of the first sequences, in order.
    vectors: Vec<Vec<f32>>,
    /// The number of sequences after those that the step under way computes.
    in_step: usize,
    reply: Reply,
}

impl Pending {
    pub(super) fn new(sequences: Vec<WholeSequence>, reply: Reply) -> Self {
        Self {
            sequences,
            vectors: Vec::new(),
            in_step: 0,
            reply,
        }
    }

    /// Ends the request with an error.
    pub(super) fn end(self, error: EngineError) {
        answer(self.reply, Err(error));
    }

    /// The number of sequences without a vector.
    fn left(&self) -> usize {
        self.sequences.len() - self.vectors.len()
    }

    fn in_step(&self) -> &[WholeSequence] {
        &self.sequences[self.vectors.len()..][..self.in_step]
    }
}

/// Requests that are not answered yet.
#[derive(Debug)]
pub(super) struct Queue {
    room: StepRoom,
    /// The most sequences that may wait.
    max_waiting: usize,
    requests: VecDeque<Pending>,
}

impl Queue {
    pub(super) fn new(room: StepRoom, max_waiting: usize) -> Self {
        Self {
            room,
            max_waiting,
            requests: VecDeque::new(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// The number of requests with and without a part in the step under way.
    pub(super) fn counts(&self) -> (usize, usize) {
        let is_running = |request: &&Pending| request.in_step > 0;
        let running = self.requests.iter().filter(is_running).count();
        (running, self.requests.len() - running)
    }

    /// Adds a request, or returns it if too many sequences wait. A single request may have any number, and abandoned ones do
    /// not count. Call it between steps.
    pub(super) fn add(&mut self, request: Pending) -> Result<(), Pending> {
        if !self.has_room_for(&request) {
            self.forget_left();
            if !self.has_room_for(&request) {
                return Err(request);
            }
        }
        self.requests.push_back(request);
        Ok(())
    }

    fn has_room_for(&self, request: &Pending) -> bool {
        let waiting: usize = self.requests.iter().map(Pending::left).sum();
        waiting == 0 || waiting.saturating_add(request.left()) <= self.max_waiting
    }

    /// Removes requests whose receivers are gone.
    fn forget_left(&mut self) {
        self.requests.retain(|request| !request.reply.is_closed());
    }

    /// Chooses what the next step computes, and removes abandoned requests. Each single sequence must fit the room.
    pub(super) fn plan(&mut self) {
        self.forget_left();
        let (mut tokens, mut sequences) = (0, 0);
        loop {
            let mut took_one = false;
            for request in &mut self.requests {
                let next = request.vectors.len() + request.in_step;
                let Some(sequence) = request.sequences.get(next) else {
                    continue;
                };
                let with_it = tokens + sequence.tokens.len();
                let is_first = sequences == 0;
                if !is_first && (with_it > self.room.tokens || sequences == self.room.sequences) {
                    continue;
                }
                (tokens, sequences) = (with_it, sequences + 1);
                request.in_step += 1;
                took_one = true;
            }
            if !took_one {
                return;
            }
        }
    }

    /// The step's sequences, in the order in which [`finish`](Self::finish) expects the vectors.
    pub(super) fn planned(&self) -> Vec<&WholeSequence> {
        self.requests.iter().flat_map(Pending::in_step).collect()
    }

    /// Adds the step's vectors, answers complete requests, and moves the other served ones to the end of the queue.
    pub(super) fn finish(&mut self, vectors: Vec<Vec<f32>>) {
        let mut vectors = vectors.into_iter();
        self.turn(|mut request| {
            request.vectors.extend(vectors.by_ref().take(request.in_step));
            request.in_step = 0;
            if let Some(place) = first_not_finite(&request.vectors) {
                let problem = format!(
                    "the model's vector of input {place} has numbers that are not finite; its weights may be broken"
                );
                answer(request.reply, Err(EngineError::internal(problem)));
                return None;
            }
            if request.left() == 0 {
                answer(request.reply, Ok(request.vectors));
                return None;
            }
            Some(request)
        });
    }

    /// Ends the requests of the step that failed.
    pub(super) fn fail(&mut self, error: &EngineError) {
        self.turn(|request| {
            answer(request.reply, Err(error.clone()));
            None
        });
    }

    /// Ends every request.
    pub(super) fn fail_all(&mut self, error: &EngineError) {
        for request in self.requests.drain(..) {
            answer(request.reply, Err(error.clone()));
        }
    }

    /// Passes the requests of the step to `served`, in order; those that it returns go to the end of the queue.
    fn turn(&mut self, mut served: impl FnMut(Pending) -> Option<Pending>) {
        let all = std::mem::take(&mut self.requests);
        let (in_step, mut others): (VecDeque<_>, VecDeque<_>) =
            all.into_iter().partition(|request| request.in_step > 0);
        others.extend(in_step.into_iter().filter_map(&mut served));
        self.requests = others;
    }
}

fn answer(reply: Reply, answer: Result<Vec<Vec<f32>>, EngineError>) {
    // The requester may be gone.
    drop(reply.send(answer));
}

fn first_not_finite(vectors: &[Vec<f32>]) -> Option<usize> {
    let is_broken = |vector: &Vec<f32>| vector.iter().any(|number| !number.is_finite());
    vectors.iter().position(is_broken)
}

#[cfg(test)]
mod tests {
    use super::*;

    type Replied = oneshot::Receiver<Result<Vec<Vec<f32>>, EngineError>>;

    fn request(lens: &[usize]) -> (Pending, Replied) {
        let (reply, replied) = oneshot::channel();
        let sequences = lens.iter().map(|len| vec![1; *len]);
        let sequences = sequences.map(WholeSequence::of_one_text);
        (Pending::new(sequences.collect(), reply), replied)
    }

    fn queue(requests: Vec<Pending>) -> Queue {
        let room = StepRoom {
            tokens: 10,
            sequences: 3,
        };
        let mut queue = Queue::new(room, 8);
        for request in requests {
            queue.add(request).unwrap();
        }
        queue
    }

    /// The lengths of a step's sequences; each vector is its length.
    fn step(queue: &mut Queue) -> Vec<usize> {
        queue.plan();
        let planned = queue.planned();
        let lens: Vec<usize> = (planned.iter()).map(|input| input.tokens.len()).collect();
        let number = |len: &usize| vec![f32::from(u16::try_from(*len).unwrap())];
        queue.finish(lens.iter().map(number).collect());
        lens
    }

    #[test]
    fn a_small_request_is_answered_beside_a_large_one() {
        let (large, mut large_replied) = request(&[4, 4, 4, 4]);
        let (small, mut small_replied) = request(&[2]);
        let mut queue = queue(vec![large, small]);
        assert_eq!(step(&mut queue), [4, 4, 2]);
        assert_eq!(small_replied.try_recv().unwrap().unwrap(), [[2.0]]);
        assert_eq!(step(&mut queue), [4, 4]);
        assert_eq!(large_replied.try_recv().unwrap().unwrap().len(), 4);
        assert!(queue.is_empty());
    }

    #[test]
    fn a_long_input_that_fits_no_rest_comes_to_the_front() {
        let (short, _short_replied) = request(&[6, 6, 6]);
        let (long, mut long_replied) = request(&[9]);
        let mut queue = queue(vec![short, long]);
        assert_eq!(step(&mut queue), [6]);
        assert_eq!(step(&mut queue), [9], "who waited goes first");
        assert_eq!(long_replied.try_recv().unwrap().unwrap(), [[9.0]]);
    }

    #[test]
    fn what_nobody_waits_for_is_not_computed() {
        let (left, replied) = request(&[1]);
        drop(replied);
        let mut queue = queue(vec![left]);
        assert_eq!(step(&mut queue), [0_usize; 0]);
        assert!(queue.is_empty());
    }

    #[test]
    fn too_many_waiting_sequences_are_refused_and_one_request_alone_is_not() {
        let (many, _replied) = request(&[1; 20]);
        let mut queue = queue(vec![many]);
        let (more, _more_replied) = request(&[1]);
        assert!(queue.add(more).is_err());
        queue.plan();
        assert_eq!(queue.counts(), (1, 0));
    }

    #[test]
    fn sequences_that_nobody_waits_for_keep_nobody_out() {
        let (left, replied) = request(&[1; 8]);
        let (waiting, _waiting_replied) = request(&[1; 2]);
        let mut queue = queue(vec![left]);
        drop(replied);
        assert!(queue.add(waiting).is_ok());
        let (more, _more_replied) = request(&[1; 7]);
        assert!(queue.add(more).is_err(), "somebody waits for the two");
    }

    #[test]
    fn a_failed_step_ends_its_requests_alone() {
        let (failing, mut failing_replied) = request(&[9]);
        let (other, mut other_replied) = request(&[9]);
        let mut queue = queue(vec![failing, other]);
        queue.plan();
        queue.fail(&EngineError::internal("no"));
        assert!(failing_replied.try_recv().unwrap().is_err());
        assert_eq!(step(&mut queue), [9]);
        assert!(other_replied.try_recv().unwrap().is_ok());
    }

    #[test]
    fn numbers_that_are_not_finite_are_an_error_of_their_request_alone() {
        let (broken, mut broken_replied) = request(&[1, 1]);
        let (sound, mut sound_replied) = request(&[1]);
        let mut queue = queue(vec![broken, sound]);
        queue.plan();
        queue.finish(vec![vec![1.0], vec![f32::NAN], vec![2.0]]);
        let error = broken_replied.try_recv().unwrap().unwrap_err();
        assert!(error.message().contains("input 1"), "{error}");
        assert_eq!(sound_replied.try_recv().unwrap().unwrap(), [[2.0]]);
    }
}
