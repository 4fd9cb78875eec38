//! The `/health` document of a process.

use std::fmt;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use genset_backend_common::worker::WorkerStatus;
use serde_json::{Value, json};
use tokio::sync::watch;

use super::Readiness;
use crate::names::{EndpointName, InstanceId};

/// A process's health at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Health {
    /// Whether the process should get requests.
    pub is_ready: bool,
    /// The worker in it, if there is one, and the name it serves under.
    pub worker: Option<(WorkerStatus, EndpointName)>,
}

impl Health {
    /// "ready" or "not ready".
    #[must_use]
    pub fn word(&self) -> &'static str {
        if self.is_ready { "ready" } else { "not ready" }
    }

    /// The document, as described in `docs/guide/operations.md`.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let Some((worker, endpoint)) = &self.worker else {
            return json!({"status": self.word()});
        };
        json!({
            "status": self.word(),
            "state": worker.state_name(),
            "since": rfc3339(worker.since),
            "instance_id": InstanceId(worker.worker_id).to_string(),
            "endpoint": endpoint.to_string(),
            "model": worker.model,
            "failed_canaries": worker.failed_canaries,
        })
    }
}

/// Returns the current health of a process on request.
#[derive(Clone)]
pub struct HealthSource(Arc<dyn Fn() -> Health + Send + Sync>);

impl HealthSource {
    /// The health that `now` returns. `now` is called on every request and must not wait.
    #[must_use]
    pub fn new(now: impl Fn() -> Health + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    /// The health of a worker that serves under `endpoint`.
    #[must_use]
    pub fn worker(status: watch::Receiver<WorkerStatus>, endpoint: EndpointName) -> Self {
        Self::new(move || {
            let status = status.borrow().clone();
            Health {
                is_ready: status.is_ready(),
                worker: Some((status, endpoint.clone())),
            }
        })
    }

    /// The current health.
    #[must_use]
    pub fn now(&self) -> Health {
        (self.0)()
    }
}

impl From<Readiness> for HealthSource {
    fn from(is_ready: Readiness) -> Self {
        Self::new(move || Health {
            is_ready: is_ready(),
            worker: None,
        })
    }
}

impl fmt::Debug for HealthSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HealthSource").field(&self.now()).finish()
    }
}

/// An instant as RFC 3339 in UTC, to the second: `2026-11-21T22:25:15Z`.
///
/// # Source
/// The calendar is Howard Hinnant's `civil_from_days`, <https://howardhinnant.github.io/date_algorithms.html>.
fn rfc3339(at: SystemTime) -> String {
    let seconds = at
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    let (days, second_of_day) = (seconds / 86_400, seconds % 86_400);
    // Days since 0000-03-01, in eras of 400 years; years begin in March, so that the leap day comes last.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 {
        march_month + 3
    } else {
        march_month - 9
    };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (
        second_of_day / 3600,
        second_of_day / 60 % 60,
        second_of_day % 60,
    );
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use genset_backend_common::worker::{Listing, State};

    use super::*;

    #[test]
    fn a_worker_whose_canary_failed_is_not_ready_and_says_so() {
        let (sender, status) = watch::channel(WorkerStatus {
            worker_id: 7,
            state: State::Serving(Listing::Listed),
            since: UNIX_EPOCH,
            model: Some("m".into()),
            failed_canaries: 0,
        });
        let source = HealthSource::worker(status, EndpointName::default());
        assert_eq!(source.now().word(), "ready");
        sender.send_modify(|status| status.failed_canaries = 1);
        let health = source.now();
        assert!(!health.is_ready);
        let expected = json!({
            "status": "not ready",
            "state": "serving",
            "since": "1970-01-01T00:00:00Z",
            "instance_id": "00000000000007",
            "endpoint": "genset.backend.generate",
            "model": "m",
            "failed_canaries": 1,
        });
        assert_eq!(health.to_json(), expected);
        let both = HealthSource::new(|| Health {
            is_ready: true,
            worker: None,
        });
        assert_eq!(both.now().to_json(), json!({"status": "ready"}));
        let lost = HealthSource::from(Arc::new(|| false) as Readiness).now();
        assert_eq!(lost.to_json(), json!({"status": "not ready"}));
    }

    #[test]
    fn instants_are_written_as_people_read_them() {
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_709_164_800, "2024-02-29T00:00:00Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            let at = UNIX_EPOCH + Duration::from_secs(seconds);
            assert_eq!(rfc3339(at), expected);
        }
    }
}
