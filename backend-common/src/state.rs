//! [`EngineState`]: holds what `start` builds, so that `cleanup` is idempotent and safe before, during and after a failed
//! `start`.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::error::EngineError;

/// Everything that an engine builds at start, in one value that exists only while it is usable.
///
/// # Examples
/// ```
/// use genset_backend_common::EngineState;
///
/// # futures_util::future::FutureExt::now_or_never(async {
/// let state = EngineState::new();
/// assert!(state.get().is_err(), "not started");
/// let config = state.start(async { Ok(("model", "config")) }).await?;
/// assert_eq!(config, "config");
/// assert_eq!(*state.get()?, "model");
/// assert!(state.take().is_some());
/// assert!(state.take().is_none(), "the second cleanup finds nothing");
/// # Ok::<(), genset_backend_common::EngineError>(())
/// # }).unwrap().unwrap();
/// ```
pub struct EngineState<T> {
    slot: Mutex<Slot<T>>,
}

enum Slot<T> {
    Created,
    Starting,
    Running(Arc<T>),
    Stopped,
}

impl<T> EngineState<T> {
    /// Creates an unstarted state.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            slot: Mutex::new(Slot::Created),
        }
    }

    /// Runs `init`, stores the first value it returns, and returns the second: what the engine declares, or `()`. Only one start
    /// is possible.
    ///
    /// # Errors
    /// The error of `init`; `Internal` for a second start; `EngineShutdown` if [`take`](Self::take) was called meanwhile: then
    /// the value of `init` is dropped.
    ///
    /// # Cancel safety
    /// Dropping the future drops `init`; the state is then stopped.
    pub async fn start<R>(
        &self,
        init: impl Future<Output = Result<(T, R), EngineError>>,
    ) -> Result<R, EngineError> {
        {
            let mut slot = self.slot.lock();
            match *slot {
                Slot::Created => *slot = Slot::Starting,
                Slot::Starting | Slot::Running(_) => {
                    return Err(EngineError::internal(
                        "the engine was started before; build a new one",
                    ));
                }
                Slot::Stopped => {
                    return Err(EngineError::engine_shutdown(
                        "the engine was stopped; build a new one",
                    ));
                }
            }
        }
        let unfinished = StopOnDrop(self);
        let (built, declared) = init.await?;
        std::mem::forget(unfinished);
        let mut slot = self.slot.lock();
        match *slot {
            Slot::Starting => {
                *slot = Slot::Running(Arc::new(built));
                Ok(declared)
            }
            Slot::Created | Slot::Running(_) | Slot::Stopped => Err(EngineError::engine_shutdown(
                "the engine was stopped while it started",
            )),
        }
    }

    /// Returns what `start` built.
    ///
    /// # Errors
    /// `EngineShutdown` before a successful start and after [`take`](Self::take).
    pub fn get(&self) -> Result<Arc<T>, EngineError> {
        match &*self.slot.lock() {
            Slot::Running(built) => Ok(Arc::clone(built)),
            Slot::Created | Slot::Starting => Err(EngineError::engine_shutdown(
                "the engine is not started yet",
            )),
            Slot::Stopped => Err(EngineError::engine_shutdown("the engine has stopped")),
        }
    }

    /// Takes what `start` built, for `cleanup`; `None` if there is nothing.
    pub fn take(&self) -> Option<Arc<T>> {
        match std::mem::replace(&mut *self.slot.lock(), Slot::Stopped) {
            Slot::Running(built) => Some(built),
            Slot::Created | Slot::Starting | Slot::Stopped => None,
        }
    }
}

/// Marks the state as stopped if a start failed or was dropped.
struct StopOnDrop<'a, T>(&'a EngineState<T>);

impl<T> Drop for StopOnDrop<'_, T> {
    fn drop(&mut self) {
        *self.0.slot.lock() = Slot::Stopped;
    }
}

impl<T> Default for EngineState<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> fmt::Debug for EngineState<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &*self.slot.lock() {
            Slot::Created => "EngineState::Created",
            Slot::Starting => "EngineState::Starting",
            Slot::Running(_) => "EngineState::Running",
            Slot::Stopped => "EngineState::Stopped",
        })
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;
    use crate::error::ErrorKind;

    #[tokio::test]
    async fn a_second_start_is_refused_and_the_first_stays() {
        let state = EngineState::new();
        state.start(async { Ok((1, ())) }).await.unwrap();
        assert!(state.start(async { Ok((2, ())) }).await.is_err());
        assert_eq!(*state.get().unwrap(), 1);
    }

    #[tokio::test]
    async fn a_failed_or_dropped_start_leaves_nothing() {
        let failed = EngineState::<i32>::new();
        failed
            .start(async { Err::<(i32, ()), _>(EngineError::internal("no device")) })
            .await
            .unwrap_err();
        assert_eq!(failed.get().unwrap_err().kind(), ErrorKind::EngineShutdown);

        let dropped = EngineState::<i32>::new();
        assert!(
            dropped
                .start::<()>(std::future::pending())
                .now_or_never()
                .is_none()
        );
        assert!(dropped.take().is_none());
    }

    #[tokio::test]
    async fn cleanup_during_start_wins() {
        let state = EngineState::new();
        let built = state.start(async {
            assert!(state.take().is_none());
            Ok((1, ()))
        });
        assert_eq!(built.await.unwrap_err().kind(), ErrorKind::EngineShutdown);
        assert!(state.take().is_none());
    }
}
