//! [`FileRecord`] and [`BatchRecord`] describe a file and a batch. The API shows them and the folder keeps them in the same form.
//!
//! # Source
//! [OpenAI's API](https://platform.openai.com/docs/api-reference/batch): the objects `file` and `batch`.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::clock::{now, since_1970};

/// An id that nobody can guess, in the order of time.
pub(crate) fn new_id(prefix: &str) -> String {
    let micros = since_1970().as_micros() & ((1 << 56) - 1);
    let random = rand::random::<u128>() >> 56;
    format!("{prefix}{micros:014x}{random:018x}")
}

/// What a file is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Purpose {
    /// The requests of a batch.
    Batch,
    /// The answers of one.
    BatchOutput,
}

impl Purpose {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Batch => "batch",
            Self::BatchOutput => "batch_output",
        }
    }
}

/// A file that is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileRecord {
    pub(crate) id: String,
    /// The name of the API key that it belongs to; `None` on a server without keys.
    pub(crate) owner: Option<String>,
    pub(crate) bytes: u64,
    pub(crate) created_at: u64,
    pub(crate) expires_at: u64,
    pub(crate) filename: String,
    pub(crate) purpose: Purpose,
}

impl FileRecord {
    /// As its owner sees it.
    pub(crate) fn to_json(&self) -> Value {
        json!({
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose.name(),
            "status": "processed",
            "status_details": null,
        })
    }
}

/// How far a batch is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum BatchStatus {
    /// Its input is looked at.
    Validating,
    /// Its input is none.
    Failed,
    /// Its requests are answered.
    InProgress,
    /// Its answers are written.
    Finalizing,
    /// Every request was answered.
    Completed,
    /// Its time was over before.
    Expired,
    /// It ends, for its owner wants no more of it.
    Cancelling,
    /// It was ended so.
    Cancelled,
}

impl BatchStatus {
    /// The word on the wire.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Validating => "validating",
            Self::Failed => "failed",
            Self::InProgress => "in_progress",
            Self::Finalizing => "finalizing",
            Self::Completed => "completed",
            Self::Expired => "expired",
            Self::Cancelling => "cancelling",
            Self::Cancelled => "cancelled",
        }
    }

    /// Whether nothing more will happen.
    pub(crate) fn is_end(self) -> bool {
        match self {
            Self::Failed | Self::Completed | Self::Expired | Self::Cancelled => true,
            Self::Validating | Self::InProgress | Self::Finalizing | Self::Cancelling => false,
        }
    }
}

/// What is wrong with an input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LineError {
    pub(crate) code: String,
    pub(crate) message: String,
    pub(crate) param: Option<String>,
    pub(crate) line: Option<usize>,
}

/// How many requests a batch has, and what became of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Counts {
    pub(crate) total: usize,
    pub(crate) completed: usize,
    pub(crate) failed: usize,
}

/// When a batch was made, when it ends at the latest, and when it entered each state: seconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct BatchTimes {
    pub(crate) created_at: u64,
    pub(crate) expires_at: u64,
    in_progress_at: Option<u64>,
    finalizing_at: Option<u64>,
    completed_at: Option<u64>,
    failed_at: Option<u64>,
    expired_at: Option<u64>,
    cancelling_at: Option<u64>,
    cancelled_at: Option<u64>,
}

impl BatchTimes {
    /// Of a batch that is made now and may take `seconds`.
    pub(crate) fn begin(seconds: u64) -> Self {
        let created_at = now();
        Self {
            created_at,
            expires_at: created_at.saturating_add(seconds),
            ..Self::default()
        }
    }
}

/// A batch that is kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BatchRecord {
    pub(crate) id: String,
    /// The name of the API key that it belongs to; `None` on a server without keys.
    pub(crate) owner: Option<String>,
    pub(crate) endpoint: String,
    pub(crate) input_file_id: String,
    pub(crate) completion_window: String,
    pub(crate) status: BatchStatus,
    pub(crate) errors: Vec<LineError>,
    pub(crate) output_file_id: Option<String>,
    pub(crate) error_file_id: Option<String>,
    #[serde(flatten)]
    pub(crate) times: BatchTimes,
    pub(crate) request_counts: Counts,
    pub(crate) metadata: Option<Map<String, Value>>,
    /// How long its output files are kept, in seconds, if its owner said so.
    pub(crate) output_seconds: Option<u64>,
}

impl BatchRecord {
    /// As its owner sees it.
    pub(crate) fn to_json(&self) -> Value {
        let errors = match self.errors.is_empty() {
            true => Value::Null,
            false => json!({"object": "list", "data": self.errors}),
        };
        json!({
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status.name(),
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.times.created_at,
            "in_progress_at": self.times.in_progress_at,
            "expires_at": self.times.expires_at,
            "finalizing_at": self.times.finalizing_at,
            "completed_at": self.times.completed_at,
            "failed_at": self.times.failed_at,
            "expired_at": self.times.expired_at,
            "cancelling_at": self.times.cancelling_at,
            "cancelled_at": self.times.cancelled_at,
            "request_counts": self.request_counts,
            "metadata": self.metadata,
        })
    }

    /// Goes on to `status`, now.
    pub(crate) fn enter(&mut self, status: BatchStatus) {
        self.status = status;
        let at = match status {
            BatchStatus::Validating => return,
            BatchStatus::Failed => &mut self.times.failed_at,
            BatchStatus::InProgress => &mut self.times.in_progress_at,
            BatchStatus::Finalizing => &mut self.times.finalizing_at,
            BatchStatus::Completed => &mut self.times.completed_at,
            BatchStatus::Expired => &mut self.times.expired_at,
            BatchStatus::Cancelling => &mut self.times.cancelling_at,
            BatchStatus::Cancelled => &mut self.times.cancelled_at,
        };
        at.get_or_insert_with(now);
    }

    /// When it ended.
    pub(crate) fn ended_at(&self) -> Option<u64> {
        let ends = [
            self.times.completed_at,
            self.times.failed_at,
            self.times.expired_at,
            self.times.cancelled_at,
        ];
        ends.into_iter().flatten().next()
    }

    /// What its own files are called after.
    pub(crate) fn stem(&self) -> &str {
        self.id.strip_prefix("batch_").unwrap_or(&self.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_differ_and_have_one_length() {
        let ids: std::collections::HashSet<String> = (0..1000).map(|_| new_id("file-")).collect();
        assert_eq!(ids.len(), 1000);
        assert!(ids.iter().all(|id| id.len() == "file-".len() + 32));
    }
}
