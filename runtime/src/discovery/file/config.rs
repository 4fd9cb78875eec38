//! Settings of discovery in a directory.

use std::time::Duration;

use genset_backend_common::EngineError;

/// Times and limits of a [`FileDiscovery`](super::FileDiscovery). Processes that share a directory should agree on them.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use genset_runtime::discovery::FileDiscoveryConfig;
///
/// let config = FileDiscoveryConfig {
///     time_to_live: Duration::from_secs(10),
///     ..FileDiscoveryConfig::default()
/// };
/// assert!(config.validate().is_ok());
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileDiscoveryConfig {
    /// Time between two beats of a lease. At least 10 ms; default 500 ms.
    pub heartbeat_interval: Duration,
    /// How long a lease without a beat is considered alive. At least twice the heartbeat interval; default 2 s.
    pub time_to_live: Duration,
    /// Time between two scans of the directory, while there are watchers. At least 10 ms, and at most a quarter of the
    /// time to live; default 200 ms.
    pub scan_interval: Duration,
    /// The maximum size of one lease's entries, keys and values together, in bytes. A larger file of another process
    /// is not read. At least 1; default 64 MiB.
    pub max_lease_bytes: u64,
    /// Who may own the directory; private by default.
    pub access: DirectoryAccess,
}

/// Who may own the directory of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DirectoryAccess {
    /// Only this user. A directory that another user owns or can write to is refused, since that user could name any address.
    #[default]
    Private,
    /// This user or root, and others may write to it: every writer is trusted to name addresses. The directory must then be
    /// sticky, so that each user's entries stay that user's.
    Shared,
}

/// With shorter intervals, processes would do little else than scan and beat.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(10);

impl Default for FileDiscoveryConfig {
    fn default() -> Self {
        Self {
            heartbeat_interval: Duration::from_millis(500),
            time_to_live: Duration::from_secs(2),
            scan_interval: Duration::from_millis(200),
            max_lease_bytes: 64 << 20,
            access: DirectoryAccess::default(),
        }
    }
}

impl FileDiscoveryConfig {
    /// Checks every value and their relations.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the first field that is out of range.
    pub fn validate(&self) -> Result<(), EngineError> {
        let beat = self.heartbeat_interval;
        let scan = self.scan_interval;
        let live = self.time_to_live;
        let problem = if beat < SHORTEST_INTERVAL {
            (
                "heartbeat_interval",
                format!("must be at least {SHORTEST_INTERVAL:?}, got {beat:?}"),
            )
        } else if scan < SHORTEST_INTERVAL {
            (
                "scan_interval",
                format!("must be at least {SHORTEST_INTERVAL:?}, got {scan:?}"),
            )
        } else if live / 2 < beat {
            (
                "time_to_live",
                format!("must be at least twice the heartbeat interval of {beat:?}, got {live:?}"),
            )
        } else if live / 4 < scan {
            (
                "scan_interval",
                format!("must be at most a quarter of the time to live of {live:?}, got {scan:?}"),
            )
        } else if self.max_lease_bytes == 0 {
            ("max_lease_bytes", "must be at least 1, got 0".to_owned())
        } else {
            return Ok(());
        };
        Err(EngineError::invalid_argument(problem.0, problem.1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_valid_and_each_bad_value_is_named() {
        type Change = fn(&mut FileDiscoveryConfig);
        FileDiscoveryConfig::default().validate().unwrap();
        let bad: [(&str, Change); 5] = [
            ("heartbeat_interval", |it| {
                it.heartbeat_interval = Duration::from_millis(0)
            }),
            ("scan_interval", |it| {
                it.scan_interval = Duration::from_millis(9)
            }),
            ("time_to_live", |it| {
                it.time_to_live = Duration::from_millis(999)
            }),
            ("scan_interval", |it| {
                it.scan_interval = Duration::from_millis(501)
            }),
            ("max_lease_bytes", |it| it.max_lease_bytes = 0),
        ];
        for (field, change) in bad {
            let mut config = FileDiscoveryConfig::default();
            change(&mut config);
            let error = config.validate().unwrap_err();
            assert_eq!(error.at().map(|at| at.name()), Some(field), "{error}");
        }
    }
}
