//! [`Fault`]: what happens to workers meanwhile.

use std::fmt;

use genset_backend_common::EngineError;
use serde::{Deserialize, Serialize};

/// Something that happens to a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// When, in seconds from the beginning. Finite, at least 0.
    pub at_s: f64,
    /// Whose, from 0.
    pub worker: usize,
    /// What.
    #[serde(rename = "do")]
    pub action: Action,
}

/// What happens to a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// Its engine fails at once and for good, and the worker ends.
    Crash,
    /// It is told to stop: it takes no more, and ends when its requests did.
    Stop,
    /// One that ended starts again, with an empty cache.
    Start,
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Crash => "crash",
            Self::Stop => "stop",
            Self::Start => "start",
        })
    }
}

impl Fault {
    /// Reads a script: a JSON array of faults such as `{"at_s": 10, "worker": 0, "do": "crash"}`, in any order.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the fault.
    pub fn read_script(text: &str, workers: usize) -> Result<Vec<Self>, EngineError> {
        let bad = |problem: String| EngineError::invalid_argument("--faults", problem);
        let mut faults: Vec<Self> =
            serde_json::from_str(text).map_err(|error| bad(error.to_string()))?;
        for (number, fault) in faults.iter().enumerate() {
            if fault.worker >= workers {
                let problem = format!(
                    "fault {number} is of worker {}, but there are {workers}, from 0",
                    fault.worker
                );
                return Err(bad(problem));
            }
            if !(0.0..=1e9).contains(&fault.at_s) {
                let problem = format!("fault {number}: at_s must be between 0 and 10^9");
                return Err(bad(problem));
            }
        }
        faults.sort_by(|first, second| first.at_s.total_cmp(&second.at_s));
        Ok(faults)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_is_sorted_and_checked() {
        let read = |text| Fault::read_script(text, 2);
        let script = read(
            r#"[{"at_s": 9, "worker": 1, "do": "start"}, {"at_s": 1.5, "worker": 1, "do": "crash"}]"#,
        )
        .unwrap();
        assert_eq!(script[0].action, Action::Crash);
        for (text, expected) in [
            (r#"[{"at_s": 1, "worker": 2, "do": "stop"}]"#, "worker 2"),
            (r#"[{"at_s": -1, "worker": 0, "do": "stop"}]"#, "at_s"),
            (r#"[{"at_s": 1, "worker": 0, "do": "melt"}]"#, "melt"),
            (r#"[{"at_s": 1, "worker": 0, "do": "stop", "x": 1}]"#, "x"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.message().contains(expected), "{error}");
        }
    }
}
