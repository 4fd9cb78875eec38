//! [`Fault`]: an event during a run that affects a worker or a frontend.

use std::fmt;
use std::time::Duration;

use genset_backend_common::EngineError;
use serde::{Deserialize, Serialize};

/// A fault.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub struct Fault {
    /// When it happens, from the beginning of the run.
    pub at: Duration,
    /// What happens.
    pub what: What,
}

/// What happens, and to which worker or frontend (numbered from 0).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// An action on a worker.
    Worker(usize, Action),
    /// A frontend ends, and a new one without any state replaces it.
    FrontendRestart(usize),
}

/// A fault in a script's format.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    at_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    worker: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    frontend: Option<usize>,
    #[serde(rename = "do")]
    action: WrittenAction,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum WrittenAction {
    Crash,
    Stop,
    Start,
    Restart,
}

impl TryFrom<Written> for Fault {
    type Error = &'static str;

    fn try_from(written: Written) -> Result<Self, Self::Error> {
        let action = match written.action {
            WrittenAction::Crash => Some(Action::Crash),
            WrittenAction::Stop => Some(Action::Stop),
            WrittenAction::Start => Some(Action::Start),
            WrittenAction::Restart => None,
        };
        let what = match (written.worker, written.frontend, action) {
            (Some(worker), None, Some(action)) => What::Worker(worker, action),
            (None, Some(frontend), None) => What::FrontendRestart(frontend),
            _ => {
                return Err(
                    "a fault is of a worker (crash, stop, start) or of a frontend (restart)",
                );
            }
        };
        if !(0.0..=1e9).contains(&written.at_s) {
            return Err("at_s must be between 0 and 10^9");
        }
        Ok(Self {
            at: Duration::from_secs_f64(written.at_s),
            what,
        })
    }
}

impl From<Fault> for Written {
    fn from(fault: Fault) -> Self {
        let (worker, frontend, action) = match fault.what {
            What::Worker(worker, action) => {
                let action = match action {
                    Action::Crash => WrittenAction::Crash,
                    Action::Stop => WrittenAction::Stop,
                    Action::Start => WrittenAction::Start,
                };
                (Some(worker), None, action)
            }
            What::FrontendRestart(frontend) => (None, Some(frontend), WrittenAction::Restart),
        };
        Self {
            at_s: fault.at.as_secs_f64(),
            worker,
            frontend,
            action,
        }
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Worker(worker, action) => write!(f, "worker {worker}: {action}"),
            Self::FrontendRestart(frontend) => write!(f, "frontend {frontend}: restart"),
        }
    }
}

/// An action on a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Its engine fails at once and permanently, and the worker ends.
    Crash,
    /// It is asked to stop: it takes no new requests, and ends when its requests have ended.
    Stop,
    /// Starts it again after it ended, with an empty cache.
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
    /// Parses a script: a JSON array of faults such as `{"at_s": 10, "worker": 0, "do": "crash"}` and `{"at_s": 20,
    /// "frontend": 0, "do": "restart"}`, in any order.
    ///
    /// # Errors
    /// `InvalidArgument`, naming the fault or its position in the text.
    pub fn read_script(
        text: &str,
        workers: usize,
        frontends: usize,
    ) -> Result<Vec<Self>, EngineError> {
        let bad = |problem: String| EngineError::invalid_argument("--faults", problem);
        let mut faults: Vec<Self> =
            serde_json::from_str(text).map_err(|error| bad(error.to_string()))?;
        for (number, fault) in faults.iter().enumerate() {
            let (name, whose, count) = match fault.what {
                What::Worker(worker, _) => ("worker", worker, workers),
                What::FrontendRestart(frontend) => ("frontend", frontend, frontends),
            };
            if whose >= count {
                let problem =
                    format!("fault {number} is of {name} {whose}, but there are {count}, from 0");
                return Err(bad(problem));
            }
        }
        faults.sort_by_key(|fault| fault.at);
        Ok(faults)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_is_sorted_and_checked() {
        let read = |text| Fault::read_script(text, 2, 1);
        let script = read(
            r#"[{"at_s": 9, "worker": 1, "do": "start"}, {"at_s": 1.5, "worker": 1, "do": "crash"}]"#,
        )
        .unwrap();
        assert_eq!(script[0].what, What::Worker(1, Action::Crash));
        let text = r#"[{"at_s":3.0,"frontend":0,"do":"restart"}]"#;
        let script = read(text).unwrap();
        assert_eq!(script[0].what, What::FrontendRestart(0));
        assert_eq!(serde_json::to_string(&script).unwrap(), text);
        for (text, expected) in [
            (r#"[{"at_s": 1, "worker": 2, "do": "stop"}]"#, "worker 2"),
            (
                r#"[{"at_s": 1, "frontend": 1, "do": "restart"}]"#,
                "frontend 1",
            ),
            (
                r#"[{"at_s": 1, "frontend": 0, "do": "crash"}]"#,
                "of a frontend",
            ),
            (
                r#"[{"at_s": 1, "worker": 0, "do": "restart"}]"#,
                "of a worker",
            ),
            (r#"[{"at_s": -1, "worker": 0, "do": "stop"}]"#, "at_s"),
            (r#"[{"at_s": 1, "worker": 0, "do": "melt"}]"#, "melt"),
            (r#"[{"at_s": 1, "worker": 0, "do": "stop", "x": 1}]"#, "x"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.message().contains(expected), "{error}");
        }
    }
}
