//! [`Adapters`]: the adapters that requests may name. They can be loaded and unloaded while the engine serves.
//!
//! A request holds its adapter until it ends. So it continues if the adapter is unloaded meanwhile, and the last such request
//! frees the adapter's memory.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use genset_backend_common::controls::Adapter;
use genset_backend_common::{EngineError, RequestField, error::At};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

use crate::load::{AdapterError, AdapterReader};
use crate::model::{AdapterWeights, gpu};

/// The limits of adapters.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AdapterLimits {
    /// At least 1.
    pub(crate) count: usize,
    /// Bytes of all adapters, including unloaded ones that are still in use.
    pub(crate) bytes: u64,
}

/// Reads an adapter's files.
pub(crate) trait ReadAdapter: Send + Sync {
    /// Reads the adapter in the folder `path`, of at most `left` bytes.
    ///
    /// # Errors
    /// The files are missing or invalid, or the adapter is larger than `left`.
    fn read(&self, path: &Path, left: u64) -> Result<AdapterWeights, AdapterError>;
}

impl ReadAdapter for AdapterReader {
    fn read(&self, path: &Path, left: u64) -> Result<AdapterWeights, AdapterError> {
        gpu::beside_recordings(|| Self::read(self, path, left))
    }
}

/// The loaded adapters.
pub(crate) struct Adapters {
    reader: Box<dyn ReadAdapter>,
    limits: AdapterLimits,
    /// Serializes reads, so that the memory left for an adapter is known.
    reading: Arc<Semaphore>,
    known: Mutex<Known>,
    used_bytes: Arc<AtomicU64>,
}

#[derive(Debug, Default)]
struct Known {
    loaded: BTreeMap<String, Arc<LoadedAdapter>>,
    /// Names that may have KV blocks in the prefix cache.
    used_names: BTreeSet<String>,
    /// Adapters that got another name there.
    renamed: u64,
}

/// The most names kept. Beyond that, each adapter gets a unique name in the prefix cache.
const MAX_USED_NAMES: usize = 1024;

/// An adapter. It lives as long as it is loaded or a request uses it.
#[derive(Debug)]
pub(crate) struct LoadedAdapter {
    adapter: Adapter,
    weights: Arc<AdapterWeights>,
    kv_name: String,
    used_bytes: Arc<AtomicU64>,
}

impl LoadedAdapter {
    pub(crate) fn weights(&self) -> &Arc<AdapterWeights> {
        &self.weights
    }

    /// Its name in the prefix cache.
    pub(crate) fn kv_name(&self) -> &str {
        &self.kv_name
    }
}

impl Drop for LoadedAdapter {
    fn drop(&mut self) {
        self.used_bytes
            .fetch_sub(self.weights.bytes(), Ordering::Relaxed);
        // The last owner may be on another thread than the engine's.
        let weights = std::mem::replace(&mut self.weights, Arc::new(AdapterWeights::new(0)));
        gpu::beside_recordings(|| drop(weights));
    }
}

impl Adapters {
    pub(crate) fn new(reader: Box<dyn ReadAdapter>, limits: AdapterLimits) -> Self {
        Self {
            reader,
            limits,
            reading: Arc::new(Semaphore::new(1)),
            known: Mutex::default(),
            used_bytes: Arc::default(),
        }
    }

    /// Reads an adapter and makes it available.
    ///
    /// # Errors
    /// `InvalidArgument` if the name is in use or a limit is exceeded, else an error of the files.
    ///
    /// # Cancel safety
    /// If the future is dropped, nothing is loaded.
    pub(crate) async fn load(self: &Arc<Self>, adapter: Adapter) -> Result<(), EngineError> {
        adapter.check()?;
        let permit = Arc::clone(&self.reading).acquire_owned();
        let permit = permit
            .await
            .map_err(|_| EngineError::engine_has_stopped())?;
        self.ensure_room(&adapter)?;
        let used = self.used_bytes.load(Ordering::Relaxed);
        let left = self.limits.bytes.saturating_sub(used);
        let (this, source) = (Arc::clone(self), adapter.source.clone());
        let reading = spawn_blocking(move || {
            let read = this.reader.read(Path::new(&source), left);
            (read, permit)
        });
        let panicked = |_| EngineError::internal("reading an adapter panicked; please report it");
        let (weights, _permit) = reading.await.map_err(panicked)?;
        self.insert(adapter, weights?);
        Ok(())
    }

    fn ensure_room(&self, adapter: &Adapter) -> Result<(), EngineError> {
        let known = self.known.lock();
        if known.loaded.contains_key(&adapter.name) {
            let problem = format!("{:?} is loaded already; unload it first", adapter.name);
            return Err(EngineError::invalid_argument(
                At::other("adapter.name"),
                problem,
            ));
        }
        if known.loaded.len() >= self.limits.count {
            let problem = format!(
                "is {}, and as many adapters are loaded; raise it, or unload one",
                self.limits.count
            );
            return Err(EngineError::invalid_argument("--max-adapters", problem));
        }
        Ok(())
    }

    fn insert(&self, adapter: Adapter, weights: AdapterWeights) {
        self.used_bytes
            .fetch_add(weights.bytes(), Ordering::Relaxed);
        let bytes = weights.bytes();
        let mut known = self.known.lock();
        let kv_name = known.kv_name(&adapter.name);
        let name = adapter.name.clone();
        let loaded = LoadedAdapter {
            adapter,
            weights: Arc::new(weights),
            kv_name,
            used_bytes: Arc::clone(&self.used_bytes),
        };
        known.loaded.insert(name.clone(), Arc::new(loaded));
        drop(known);
        tracing::info!(adapter = name, bytes, "an adapter is loaded");
    }

    /// Makes an adapter unavailable. Requests that use it continue.
    ///
    /// # Errors
    /// `NotFound`: no such adapter is loaded.
    pub(crate) fn unload(&self, name: &str) -> Result<(), EngineError> {
        let unloaded = self.known.lock().loaded.remove(name);
        // Dropped outside the lock: freeing its memory must not block others.
        match unloaded {
            Some(unloaded) => {
                let users = Arc::strong_count(&unloaded) - 1;
                tracing::info!(adapter = name, users, "an adapter is unloaded");
                Ok(())
            }
            None => Err(unknown(name).with_at(At::other("name"))),
        }
    }

    /// The loaded adapters, by name.
    pub(crate) fn list(&self) -> Vec<Adapter> {
        let known = self.known.lock();
        let loaded = known.loaded.values();
        loaded.map(|loaded| loaded.adapter.clone()).collect()
    }

    /// The adapter of this name.
    ///
    /// # Errors
    /// `NotFound`: no such adapter is loaded.
    pub(crate) fn get(&self, name: &str) -> Result<Arc<LoadedAdapter>, EngineError> {
        let known = self.known.lock();
        let found = known.loaded.get(name).cloned();
        found.ok_or_else(|| unknown(name).with_at(RequestField::Adapter))
    }
}

impl Known {
    /// An adapter's name in the prefix cache: its own, which routers hash too. If another adapter had this name before, it gets
    /// a new one, because the other's blocks may still be cached, and its requests may still add to them.
    fn kv_name(&mut self, name: &str) -> String {
        let is_new = !self.used_names.contains(name) && self.used_names.len() < MAX_USED_NAMES;
        if is_new {
            self.used_names.insert(name.to_owned());
            return name.to_owned();
        }
        self.renamed += 1;
        // No adapter's own name contains a control character.
        format!("{name}\0{}", self.renamed)
    }
}

fn unknown(name: &str) -> EngineError {
    EngineError::not_found(format!("no adapter {name:?} is loaded"))
}

genset_backend_common::debug_as!(|it| Adapters {
    limits: it.limits,
    known: it.known,
    ..
});
