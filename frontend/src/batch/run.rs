//! [`Batches`]: answers the requests of batches, with limited concurrency, through the server's own routes, with each
//! batch's API key.
//!
//! A run first validates the whole input, then answers its lines in any order and records each answer, then writes the
//! files of answers and of errors. It may be stopped anywhere: the server resumes it at its next start from the
//! recorded answers. Disk errors are retried.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Display;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::notes::NotesError;
use super::open::{OpenBatch, Unopened, Unread, line_of, unreadable_input};
use super::pauses::Pauses;
use super::places::{OwnersPlaces, Places};
use super::records::{BatchRecord, BatchStatus};
use super::request::{Attempt, BatchLine, OutputLine, ask_once, unasked_line};
use super::seen::SeenModels;
use super::store::{BatchStore, not_written};
use crate::clock::now;
use crate::error::ApiError;
use crate::http::LocalFrontend;
use crate::keys::ApiKeys;
use crate::model::Models;

/// The pause before it retries what the disk refused.
const DISK_PAUSE: Duration = Duration::from_secs(5);

/// The most batches that validate their inputs at once: each takes memory for its requests' names.
const MAX_OPENING: usize = 2;

/// How often old files and batches are removed.
const SWEEP_EVERY: Duration = Duration::from_secs(600);

/// How often it checks whether an awaited model is served.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Batches and the tasks that answer them. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct Batches {
    store: BatchStore,
    routes: LocalFrontend,
    models: Models,
    /// How long a resumed batch waits for a model that is not served yet.
    linger: Duration,
    /// `None` on a server without keys.
    keys: Option<ApiKeys>,
    /// The requests of all batches that run at once.
    places: Places,
    /// The batches that validate their inputs at once.
    opening: Arc<Semaphore>,
    stops: Stops,
}

/// When batches stop.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stops {
    pub(crate) tasks: TaskTracker,
    /// No new requests start.
    pub(crate) draining: CancellationToken,
    /// Running requests end.
    pub(crate) aborting: CancellationToken,
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// Every line is answered.
    Answered,
    /// Its time ran out.
    Expired,
    Cancelled,
    /// The server stops; the next one resumes.
    Stopped,
}

/// The outcome of one line.
#[derive(Debug)]
enum LineEnd {
    Noted,
    /// The server stops before it is recorded.
    Unnoted,
    /// No worker serves its model, which is awaited.
    Awaiting {
        index: usize,
        model: String,
    },
}

/// The outcome of one attempt at a line.
#[derive(Debug)]
enum LineAttempt {
    /// The line of the output.
    Answered(OutputLine),
    /// No worker serves its model, which is awaited.
    NoModel(String),
    /// The disk cannot read the line; the reason.
    NoDisk(String),
    /// Every worker is full, or there is no memory for the line; how long to wait, if known.
    Full(Option<Duration>),
}

/// Lines that wait for their models, by the models' names.
type AwaitingLines = BTreeMap<String, Vec<usize>>;

/// A running batch.
#[derive(Debug)]
struct BatchRun<'a> {
    record: &'a BatchRecord,
    batch: &'a Arc<Mutex<OpenBatch>>,
    places: OwnersPlaces,
    /// Any model that no worker serves is awaited until then.
    any_until: Instant,
    /// The models that were served since the batch began, which are awaited too.
    seen: SeenModels,
}

impl BatchRun<'_> {
    /// Whether it waits for a model that no worker serves.
    fn awaits(&self, model: &str) -> bool {
        Instant::now() < self.any_until || self.seen.has(model)
    }
}

impl Batches {
    pub(crate) fn new(
        store: BatchStore,
        (routes, models): (LocalFrontend, Models),
        linger: Duration,
        keys: Option<ApiKeys>,
        stops: Stops,
    ) -> Self {
        Self {
            places: Places::new(store.config().concurrency),
            store,
            routes,
            models,
            linger,
            keys,
            opening: Arc::new(Semaphore::new(MAX_OPENING)),
            stops,
        }
    }

    /// Resumes every unfinished batch, and removes old files and batches from now on.
    pub(crate) fn resume(&self) {
        for id in self.store.unfinished() {
            self.spawn(id, true);
        }
        let (store, draining) = (self.store.clone(), self.stops.draining.clone());
        self.stops.tasks.spawn(async move {
            loop {
                let sweeping = store.clone();
                drop(tokio::task::spawn_blocking(move || sweeping.sweep()).await);
                tokio::select! {
                    biased;
                    () = draining.cancelled() => return,
                    () = tokio::time::sleep(SWEEP_EVERY) => {}
                }
            }
        });
    }

    /// Runs `work` with the store on a thread that may block.
    ///
    /// # Errors
    /// The error of `work`; a 507 if there is no thread.
    pub(crate) async fn with_store<T: Send + 'static>(
        &self,
        work: impl FnOnce(&BatchStore) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let store = self.store.clone();
        let worked = tokio::task::spawn_blocking(move || work(&store)).await;
        worked.map_err(|error| not_written(&io::Error::other(error)))?
    }

    pub(crate) fn store(&self) -> &BatchStore {
        &self.store
    }

    /// Stores a new batch, and answers it in the background.
    ///
    /// # Errors
    /// As [`BatchStore::add_batch`].
    ///
    /// # Cancel safety
    /// If the future is dropped, a batch that is being stored is still stored and answered.
    pub(crate) async fn add(&self, record: BatchRecord) -> Result<(), ApiError> {
        let batches = self.clone();
        let add = move |store: &BatchStore| {
            let id = record.id.clone();
            store.add_batch(record)?;
            // Here, because the caller may be gone, and nobody else starts the batch before the next restart.
            batches.spawn(id, false);
            Ok(())
        };
        self.with_store(add).await
    }

    fn spawn(&self, id: String, goes_on: bool) {
        let batches = self.clone();
        self.stops.tasks.spawn(async move {
            let aborting = batches.stops.aborting.clone();
            tokio::select! {
                biased;
                () = aborting.cancelled() => {}
                () = batches.run(&id, goes_on) => {}
            }
        });
    }

    async fn run(&self, id: &str, goes_on: bool) {
        let Some((record, cancelled)) = self.store.run_of(id) else {
            return;
        };
        let Some(batch) = self.open(&record, &cancelled).await else {
            return;
        };
        let batch = Arc::new(Mutex::new(batch));
        let end = match record.status {
            BatchStatus::Cancelling => End::Cancelled,
            BatchStatus::Validating
            | BatchStatus::InProgress
            | BatchStatus::Finalizing
            | BatchStatus::Failed
            | BatchStatus::Completed
            | BatchStatus::Expired
            | BatchStatus::Cancelled => self.answer(&record, &batch, cancelled, goes_on).await,
        };
        if end != End::Stopped {
            self.finish(record, batch, end).await;
        }
    }

    /// Validates the whole input and reads earlier answers. `None` if the batch has ended, or the server stops.
    async fn open(&self, record: &BatchRecord, cancelled: &CancellationToken) -> Option<OpenBatch> {
        let is_cancelling = record.status == BatchStatus::Cancelling;
        loop {
            let place = tokio::select! {
                biased;
                () = self.stops.draining.cancelled() => return None,
                place = Arc::clone(&self.opening).acquire_owned() => place.ok()?,
            };
            let (store, known) = (self.store.clone(), record.clone());
            let opened = tokio::task::spawn_blocking(move || {
                let _place = place;
                OpenBatch::open(&store, &known)
            });
            let (status, errors) = match opened.await {
                Ok(Ok(batch)) => return Some(batch),
                Ok(Err(Unopened::Refused(errors))) => (BatchStatus::Failed, errors),
                Ok(Err(Unopened::Disk(_))) if is_cancelling || cancelled.is_cancelled() => {
                    (BatchStatus::Cancelled, Vec::new())
                }
                Ok(Err(Unopened::Disk(_))) if record.times.expires_at <= now() => {
                    (BatchStatus::Failed, vec![unreadable_input()])
                }
                Ok(Err(Unopened::Disk(problem))) => {
                    let goes_on = tokio::select! {
                        biased;
                        () = cancelled.cancelled() => true,
                        goes_on = self.pause(&record.id, &problem) => goes_on,
                    };
                    goes_on.then_some(())?;
                    continue;
                }
                // The thread panicked, or the runtime has no threads any more.
                Err(_) => return None,
            };
            let ended = self.changed(&record.id, move |record| {
                record.errors.clone_from(&errors);
                // Its owner was told that it will be cancelled.
                let is_cancelling = record.status == BatchStatus::Cancelling;
                record.enter(if is_cancelling {
                    BatchStatus::Cancelled
                } else {
                    status
                });
            });
            ended.await;
            return None;
        }
    }

    /// Answers the unanswered lines.
    async fn answer(
        &self,
        record: &BatchRecord,
        batch: &Arc<Mutex<OpenBatch>>,
        cancelled: CancellationToken,
        goes_on: bool,
    ) -> End {
        let unanswered = batch.lock().unanswered();
        if unanswered.is_empty() {
            return End::Answered;
        }
        let left = Duration::from_secs(record.times.expires_at.saturating_sub(now()));
        if left.is_zero() {
            return End::Expired;
        }
        let mut any_until = Instant::now();
        if goes_on {
            // When a server has just started, its models appear one by one.
            tokio::select! {
                biased;
                () = cancelled.cancelled() => return End::Cancelled,
                () = self.stops.draining.cancelled() => return End::Stopped,
                () = tokio::time::sleep(left) => return End::Expired,
                _ = self.models.any() => any_until = Instant::now() + self.linger,
            }
        }
        let run = BatchRun {
            record,
            batch,
            places: self.places.of(record.owner.as_deref()),
            any_until,
            seen: SeenModels::new(self.models.clone()),
        };
        tokio::select! {
            biased;
            () = cancelled.cancelled() => End::Cancelled,
            () = tokio::time::sleep(left) => End::Expired,
            is_answered = self.lines(&run, unanswered) => match is_answered {
                true => End::Answered,
                false => End::Stopped,
            },
        }
    }

    /// Answers lines with limited concurrency. Lines whose models are awaited do not hold up others: they are retried
    /// as soon as their models are served, or are no longer awaited. Returns whether all were recorded before the
    /// server stops.
    async fn lines(&self, run: &BatchRun<'_>, unanswered: Vec<usize>) -> bool {
        let at_once = self.store.config().concurrency.get();
        let mut next = VecDeque::from(unanswered);
        let mut awaiting = AwaitingLines::new();
        let mut under_way = FuturesUnordered::new();
        let mut looks = tokio::time::interval(LOOK_EVERY);
        let mut is_stopped = false;
        loop {
            is_stopped |= self.stops.draining.is_cancelled();
            while !is_stopped && under_way.len() < at_once {
                let Some(index) = next.pop_front() else {
                    break;
                };
                under_way.push(self.line(run, index));
            }
            if under_way.is_empty() && (is_stopped || awaiting.is_empty()) {
                return !is_stopped;
            }
            tokio::select! {
                Some(end) = under_way.next() => match end {
                    LineEnd::Noted => {}
                    LineEnd::Unnoted => is_stopped = true,
                    LineEnd::Awaiting { index, model } => {
                        awaiting.entry(model).or_default().push(index);
                    }
                },
                () = self.stops.draining.cancelled(), if !is_stopped => {}
                _ = looks.tick(), if !awaiting.is_empty() => {
                    // First, because they have waited.
                    for index in self.take_askable(run, &mut awaiting).into_iter().rev() {
                        next.push_front(index);
                    }
                }
            }
        }
    }

    /// Removes and returns the lines whose models are served, or no longer awaited.
    fn take_askable(&self, run: &BatchRun<'_>, awaiting: &mut AwaitingLines) -> Vec<usize> {
        let mut askable = Vec::new();
        awaiting.retain(|model, lines| {
            run.seen.look(model);
            let is_awaited = self.models.get(model).is_none() && run.awaits(model);
            if !is_awaited {
                askable.append(lines);
            }
            is_awaited
        });
        askable
    }

    /// Answers one line and records it, unless its model is awaited.
    ///
    /// The slot is held while the line is read, answered and recorded: no more lines and answers are in memory than
    /// there are slots. A pause releases it, so a line that waits for a quota, memory or the disk does not delay
    /// other batches.
    async fn line(&self, run: &BatchRun<'_>, index: usize) -> LineEnd {
        let mut pauses = Pauses::until(self.stops.draining.clone());
        loop {
            let Some(place) = run.places.take().await else {
                return LineEnd::Unnoted;
            };
            if self.stops.draining.is_cancelled() {
                return LineEnd::Unnoted;
            }
            match self.attempt(run, index).await {
                None => return LineEnd::Unnoted,
                Some(LineAttempt::NoModel(model)) => return LineEnd::Awaiting { index, model },
                Some(LineAttempt::NoDisk(problem)) => {
                    drop(place);
                    if !self.pause(&run.record.id, &problem).await {
                        return LineEnd::Unnoted;
                    }
                }
                Some(LineAttempt::Full(retry_after)) => {
                    drop(place);
                    if !pauses.wait(retry_after).await {
                        return LineEnd::Unnoted;
                    }
                }
                Some(LineAttempt::Answered(line)) => {
                    if self.stops.draining.is_cancelled() && !line.is_answer() {
                        // The shutdown alone may have failed it.
                        return LineEnd::Unnoted;
                    }
                    return match self.note(run, index, line).await {
                        true => LineEnd::Noted,
                        false => LineEnd::Unnoted,
                    };
                }
            }
        }
    }

    /// Reads one line and sends its request once. `None` if the server stops before.
    async fn attempt(&self, run: &BatchRun<'_>, index: usize) -> Option<LineAttempt> {
        let record = run.record;
        let id = format!("batch_req_{}_{}", record.stem(), index + 1);
        let (reading, memory) = (Arc::clone(run.batch), self.routes.memory());
        let with_model = |(line, memory): (BatchLine, _)| (line.model(), line, memory);
        let read = move || line_of(&reading, index, memory).map(with_model);
        let (model, line, _memory) = match tokio::task::spawn_blocking(read).await.ok()? {
            Ok(read) => read,
            Err(Unread::Disk(problem)) => return Some(LineAttempt::NoDisk(problem)),
            Err(Unread::Memory(pause)) => return Some(LineAttempt::Full(Some(pause))),
            Err(Unread::Line(problem)) => {
                let unasked = unasked_line(id, Value::Null, "unreadable", &problem);
                return Some(LineAttempt::Answered(unasked));
            }
        };
        let Some(routes) = self.routes_of(record) else {
            let problem = "The API key of the batch no longer exists.";
            let unasked = unasked_line(id, line.shown_id(), "invalid_api_key", problem);
            return Some(LineAttempt::Answered(unasked));
        };
        let model = model.unwrap_or_default();
        run.seen.look(&model);
        if self.models.get(&model).is_none() && self.models.is_coming(&model) {
            // Sent now, the line would hold up those of other models.
            return Some(LineAttempt::NoModel(model));
        }
        Some(match ask_once(&routes, id, &line).await {
            Attempt::NoModel(_) if run.awaits(&model) => LineAttempt::NoModel(model),
            Attempt::Full(_, retry_after) => LineAttempt::Full(retry_after),
            // A lost request is not sent again: attempts are not counted here, so one that crashes its workers would do so
            // forever.
            Attempt::Ended(line) | Attempt::NoModel(line) | Attempt::Lost(line) => {
                LineAttempt::Answered(line)
            }
        })
    }

    /// The routes with the batch owner's key; `None` if the owner no longer exists.
    fn routes_of(&self, record: &BatchRecord) -> Option<LocalFrontend> {
        let key = match (&self.keys, &record.owner) {
            (Some(keys), Some(owner)) => Some(keys.named(owner)?),
            (None, None) => None,
            (Some(_), None) | (None, Some(_)) => return None,
        };
        Some(self.routes.of(key))
    }

    /// Records the answer of a line. False if the server stops before.
    async fn note(&self, run: &BatchRun<'_>, index: usize, line: OutputLine) -> bool {
        let (store, id) = (self.store.clone(), run.record.id.clone());
        let noting = Arc::clone(run.batch);
        let note = move || {
            let mut batch = noting.lock();
            // This goes on when the batch is cancelled or expires, perhaps beside the writing of its files.
            if let Some(counts) = batch.note(index, &line)? {
                store.count(&id, counts);
            }
            Ok::<(), NotesError>(())
        };
        self.on_disk(&run.record.id, note).await.is_some()
    }

    /// Writes the files of answers and errors, and how the batch ended.
    async fn finish(&self, record: BatchRecord, batch: Arc<Mutex<OpenBatch>>, end: End) {
        let id = record.id.clone();
        if end != End::Cancelled {
            let finalizing = |record: &mut BatchRecord| {
                // A cancel at the last moment still counts.
                if record.status != BatchStatus::Cancelling {
                    record.enter(BatchStatus::Finalizing);
                }
            };
            if !self.changed(&id, finalizing).await {
                return;
            }
        }
        let store = self.store.clone();
        let is_expired = end == End::Expired;
        let write = move || batch.lock().write_files(&store, &record, is_expired);
        let Some((output, errors)) = self.on_disk(&id, write).await else {
            return;
        };
        let ended = self.changed(&id, move |record| {
            record.output_file_id.clone_from(&output);
            record.error_file_id.clone_from(&errors);
            record.enter(match (record.status, end) {
                (BatchStatus::Cancelling, _) | (_, End::Cancelled) => BatchStatus::Cancelled,
                (_, End::Expired) => BatchStatus::Expired,
                (_, End::Answered | End::Stopped) => BatchStatus::Completed,
            });
        });
        if ended.await {
            let notes = self.store.notes(&id);
            drop(tokio::task::spawn_blocking(move || std::fs::remove_file(notes)).await);
        }
    }

    /// Updates a batch's record. False if the server stops before.
    async fn changed(
        &self,
        id: &str,
        change: impl Fn(&mut BatchRecord) + Send + Sync + 'static,
    ) -> bool {
        let (store, of_id) = (self.store.clone(), id.to_owned());
        let update = move || store.update(&of_id, &change);
        self.on_disk(id, update).await.is_some()
    }

    /// Runs a batch's `work` on a thread that may block, and retries it as long as the disk fails. `None` if the server
    /// stops before.
    async fn on_disk<T: Send + 'static, E: Display + 'static>(
        &self,
        id: &str,
        work: impl Fn() -> Result<T, E> + Send + Sync + 'static,
    ) -> Option<T> {
        let work = Arc::new(work);
        loop {
            let work = Arc::clone(&work);
            let attempt = move || work().map_err(|error| error.to_string());
            match tokio::task::spawn_blocking(attempt).await {
                Ok(Ok(done)) => return Some(done),
                Ok(Err(problem)) if self.pause(id, &problem).await => {}
                Ok(Err(_)) | Err(_) => return None,
            }
        }
    }

    /// Waits before the disk is retried. False if the server stops.
    async fn pause(&self, batch: &str, problem: &str) -> bool {
        tracing::error!(batch, problem, "a batch waits for the disk");
        tokio::select! {
            biased;
            () = self.stops.draining.cancelled() => false,
            () = tokio::time::sleep(DISK_PAUSE) => true,
        }
    }
}

#[cfg(test)]
mod tests;
