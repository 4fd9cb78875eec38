//! Scans the directory, judges its leases, and maintains the view that watchers follow.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio::time::Instant;

use super::CONFIRM_INTERVAL;
use super::config::FileDiscoveryConfig;
use super::format::{self, Entries};
use super::liveness::{Liveness, Verdict};
use super::store::{LeaseId, Listing, Store, StoreError, StoreId};
use super::view::View;
use crate::discovery::Outage;

/// Files of dead processes are removed after this many times to live. A process that only slept that long then finds its
/// file missing and its lease lost.
const TIMES_TO_LIVE_UNTIL_REMOVED: u32 = 10;

/// At most this many scan intervals between two scans count as watched: for the rest, this process slept.
const INTERVALS_COUNTED: u32 = 2;

/// The result of a scan.
#[derive(Debug)]
pub(super) struct Scanned {
    pub(super) view: Arc<View>,
    /// When to scan again to be sure; `None` if there is no doubt.
    pub(super) look_again_in: Option<Duration>,
}

/// A lease as this reader knows it.
#[derive(Debug, Default)]
struct Known {
    /// `None` until the first scan, and again after a time without scans.
    liveness: Option<Liveness>,
    version: Option<u64>,
    entries: Entries,
    missing_since: Option<Instant>,
    is_complained_about: bool,
}

impl Known {
    fn is_alive(&self) -> bool {
        self.is(Verdict::Alive)
    }

    fn is(&self, verdict: Verdict) -> bool {
        let liveness = self.liveness.as_ref();
        liveness.is_some_and(|liveness| liveness.verdict() == verdict)
    }
}

/// The reader of one process; all its watchers share it.
#[derive(Debug)]
pub(super) struct Scanner {
    store: Arc<Store>,
    config: FileDiscoveryConfig,
    known: BTreeMap<LeaseId, Known>,
    temporaries: BTreeMap<PathBuf, Liveness>,
    /// The store of the last scan.
    store_id: Option<StoreId>,
    last_look: Option<Instant>,
    /// While the directory cannot be read.
    outage: Option<Outage>,
    /// Watched time since the last outage. Until it reaches a time to live, leases may still be reappearing.
    settled_for: Duration,
    /// Whether there are watchers, so that scans are continuous.
    is_followed: bool,
    epoch: u64,
    has_news: bool,
    views: watch::Sender<Arc<View>>,
}

impl Scanner {
    pub(super) fn new(store: Arc<Store>, config: FileDiscoveryConfig) -> Self {
        Self {
            store,
            settled_for: config.time_to_live,
            config,
            known: BTreeMap::new(),
            temporaries: BTreeMap::new(),
            store_id: None,
            last_look: None,
            outage: None,
            is_followed: false,
            epoch: 0,
            has_news: false,
            views: watch::Sender::default(),
        }
    }

    /// Scans once, for a caller that does not watch.
    pub(super) fn scan(&mut self) -> Result<Scanned, StoreError> {
        let now = Instant::now();
        let is_stale = |look: Instant| now - look > self.config.scan_interval * INTERVALS_COUNTED;
        if !self.is_followed && self.last_look.is_none_or(is_stale) {
            self.forget_liveness();
        }
        self.look()
    }

    /// Scans once, and subscribes to the results of later scans.
    pub(super) fn follow(&mut self) -> Result<watch::Receiver<Arc<View>>, StoreError> {
        self.scan()?;
        self.is_followed = true;
        Ok(self.views.subscribe())
    }

    /// Scans for the watchers, if there are any, and returns the time until the next scan.
    pub(super) fn keep_following(&mut self) -> Option<Duration> {
        self.is_followed = self.views.receiver_count() > 0;
        if !self.is_followed {
            // Nobody waits for its end.
            self.outage = None;
            return None;
        }
        let doubt = self.look().ok().and_then(|scanned| scanned.look_again_in);
        let interval = self.config.scan_interval;
        Some(doubt.map_or(interval, |doubt| doubt.min(interval)))
    }

    /// The stamp for a put of `key` that orders it after all existing ones.
    pub(super) fn stamp_after(&self, key: &str) -> u64 {
        let stamps = self
            .known
            .values()
            .filter_map(|known| known.entries.get(key));
        stamps
            .map(|held| held.stamp)
            .max()
            .map_or(1, |last| last.saturating_add(1))
    }

    /// There was no scan for a while, so the known liveness is stale. Keeps the entries.
    fn forget_liveness(&mut self) {
        self.known
            .values_mut()
            .for_each(|known| known.liveness = None);
        self.temporaries.clear();
        self.store_id = None;
        self.last_look = None;
        self.outage = None;
        self.settled_for = self.config.time_to_live;
        self.has_news = true;
    }

    fn look(&mut self) -> Result<Scanned, StoreError> {
        let listing = self
            .store
            .list()
            .inspect_err(|error| self.begin_outage(error))?;
        let now = Instant::now();
        let watched = self.watched_until(now);
        if self.outage.is_some() || self.store_id.as_ref().is_some_and(|id| *id != listing.id) {
            self.end_outage();
        }
        self.settled_for = self.settled_for.saturating_add(watched);
        self.store_id = Some(listing.id.clone());
        self.take_in_leases(&listing, watched);
        self.take_in_missing(&listing, now);
        self.remove_remains(&listing, watched);
        self.publish();
        Ok(Scanned {
            view: Arc::clone(&self.views.borrow()),
            look_again_in: self.doubt(),
        })
    }

    fn begin_outage(&mut self, error: &StoreError) {
        // Without watchers the caller has the error. One that cannot begin a watch counts that itself.
        if self.is_followed && self.outage.is_none() {
            tracing::warn!(%error, "discovery cannot be read; known instances stay in use");
            self.outage = Some(Outage::of(self.store.outages()));
        }
        self.last_look = None;
    }

    /// The store may now be older or newer. Each known lease has a time to live to reappear in it.
    fn end_outage(&mut self) {
        tracing::info!(path = %self.store.path().display(), "discovery can be read again");
        self.outage = None;
        self.settled_for = Duration::ZERO;
        self.epoch += 1;
        self.has_news = true;
        for known in self
            .known
            .values_mut()
            .filter_map(|known| known.liveness.as_mut())
        {
            known.pardon();
        }
    }

    /// The time since the last scan in which this process was awake.
    fn watched_until(&mut self, now: Instant) -> Duration {
        let most = self.config.scan_interval * INTERVALS_COUNTED;
        let last = self.last_look.replace(now);
        last.map_or(Duration::ZERO, |last| (now - last).min(most))
    }

    fn take_in_leases(&mut self, listing: &Listing, watched: Duration) {
        let clock = SystemTime::now();
        let time_to_live = self.config.time_to_live;
        for &(id, mark) in &listing.leases {
            let known = self.known.entry(id).or_default();
            let was_alive = known.is_alive();
            known.missing_since = None;
            let is_changed = match &mut known.liveness {
                Some(liveness) => liveness.observe(mark, watched, time_to_live),
                None => {
                    known.liveness = Some(Liveness::first_seen(mark, clock, time_to_live));
                    true
                }
            };
            let is_read_anew = is_changed && read_anew(&self.store, id, known);
            self.has_news |= is_read_anew || known.is_alive() != was_alive;
        }
    }

    /// Removes a lease whose file is not listed, once a second scan has shown that the store is otherwise intact.
    fn take_in_missing(&mut self, listing: &Listing, now: Instant) {
        let is_settled = self.settled_for >= self.config.time_to_live;
        let listed: BTreeSet<_> = listing.leases.iter().map(|(id, _)| *id).collect();
        let store = &self.store;
        let before = self.known.len();
        self.known.retain(|id, known| {
            if listed.contains(id) {
                return true;
            }
            // A listing may leave out a file that is being replaced.
            if known.liveness.is_some() && !matches!(store.look_at(*id), Ok(None)) {
                return true;
            }
            let since = *known.missing_since.get_or_insert(now);
            let is_confirmed = is_settled && now - since >= CONFIRM_INTERVAL;
            known.liveness.is_some() && !is_confirmed
        });
        self.has_news |= self.known.len() != before;
    }

    /// Removes the files of dead processes. An owner that only slept then finds its lease lost.
    fn remove_remains(&mut self, listing: &Listing, watched: Duration) {
        let time_to_live = self.config.time_to_live;
        let longest = time_to_live * TIMES_TO_LIVE_UNTIL_REMOVED;
        for (id, mark) in &listing.leases {
            let known = self.known.get(id).and_then(|known| known.liveness.as_ref());
            let is_old = known.is_some_and(|liveness| liveness.silent() >= longest);
            if is_old && matches!(self.store.look_at(*id), Ok(Some(now)) if now == *mark) {
                tracing::info!(lease = %id, "a dead process's lease is removed from discovery");
                self.store.remove(&self.store.lease_path(*id));
            }
        }
        let mut temporaries = BTreeMap::new();
        for (path, mark) in &listing.temporaries {
            let liveness = self.temporaries.remove(path);
            let mut liveness = liveness.unwrap_or_else(|| Liveness::unjudged(*mark));
            liveness.observe(*mark, watched, time_to_live);
            if liveness.silent() >= longest {
                self.store.remove(path);
            } else {
                temporaries.insert(path.clone(), liveness);
            }
        }
        self.temporaries = temporaries;
    }

    fn publish(&mut self) {
        if std::mem::take(&mut self.has_news) {
            let alive = self.known.iter().filter(|(_, known)| known.is_alive());
            let view = View::of(self.epoch, alive.map(|(id, known)| (*id, &known.entries)));
            self.views.send_replace(Arc::new(view));
        }
    }

    fn doubt(&self) -> Option<Duration> {
        let is_settled = self.settled_for >= self.config.time_to_live;
        let mut known = self.known.values();
        if is_settled && known.any(|known| known.missing_since.is_some()) {
            return Some(CONFIRM_INTERVAL);
        }
        let mut known = self.known.values();
        known
            .any(|known| known.is(Verdict::Undecided))
            .then_some(self.config.scan_interval)
    }
}

/// Reads a lease whose file has changed. Returns whether its entries have. If the read fails, the old entries stay.
fn read_anew(store: &Store, id: LeaseId, known: &mut Known) -> bool {
    let decoded = store.read(id, known.version).and_then(|file| {
        let decoded = file.map(|file| format::decode(&file)).transpose();
        decoded.map_err(|source| StoreError::Format {
            path: store.lease_path(id),
            source,
        })
    });
    match decoded {
        // A remounted directory may show older contents; the holder is about to write it again.
        Ok(Some((version, _))) if known.version.is_some_and(|known| version < known) => false,
        Ok(Some((version, entries))) => {
            known.is_complained_about = false;
            known.version = Some(version);
            known.entries = entries;
            true
        }
        Ok(None) => false,
        // Removed since the listing: the next scan shows it as missing.
        Err(error) if error.is_missing() => false,
        Err(error) => {
            if !std::mem::replace(&mut known.is_complained_about, true) {
                tracing::warn!(%error, "a lease in discovery cannot be read; its known entries stay in use");
            }
            false
        }
    }
}
