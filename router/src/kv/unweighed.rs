//! [`Unweighed`]: this router's requests whose prompts are not token ids here, such as chats with images. How many KV blocks they
//! take is unknown, so they count at their instances as other routers' requests do.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::StreamExt;
use genset_backend_common::OutputStream;
use genset_runtime::InstanceId;
use parking_lot::{Mutex, MutexGuard};

type Counts = BTreeMap<InstanceId, usize>;

/// The number of these requests at each instance that has any. Clones share the numbers.
#[derive(Debug, Clone, Default)]
pub(super) struct Unweighed(Arc<Mutex<Counts>>);

impl Unweighed {
    /// Counts a request at an instance until the returned value is dropped.
    pub(super) fn enter(&self, instance: InstanceId) -> UnweighedRequest {
        *self.0.lock().entry(instance).or_default() += 1;
        UnweighedRequest {
            all: self.clone(),
            instance,
        }
    }

    /// Returns the numbers, locked.
    pub(super) fn counts(&self) -> MutexGuard<'_, Counts> {
        self.0.lock()
    }
}

/// A request that counts until this is dropped.
#[derive(Debug)]
pub(super) struct UnweighedRequest {
    all: Unweighed,
    instance: InstanceId,
}

impl UnweighedRequest {
    /// Counts the request as long as its answer lasts.
    pub(super) fn until_end_of(self, outputs: OutputStream) -> OutputStream {
        let counted = outputs.inspect(move |_| {
            let _counted = &self;
        });
        OutputStream::from_raw(Box::pin(counted))
    }
}

impl Drop for UnweighedRequest {
    fn drop(&mut self) {
        let mut counts = self.all.0.lock();
        if let Some(count) = counts.get_mut(&self.instance) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.instance);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_instance_is_known_as_long_as_it_has_such_a_request() {
        let unweighed = Unweighed::default();
        let [first, second] = [1, 1].map(|id| unweighed.enter(InstanceId(id)));
        assert_eq!(unweighed.counts().get(&InstanceId(1)), Some(&2));
        drop(first);
        assert_eq!(unweighed.counts().get(&InstanceId(1)), Some(&1));
        drop(second);
        assert!(unweighed.counts().is_empty());
    }
}
