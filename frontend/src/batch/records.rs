//! [`FileRecord`] and [`BatchRecord`] describe a file and a batch. The API and the folder use the same form.
//!
//! # Source
//! [OpenAI's API](https://platform.openai.com/docs/api-reference/batch): the objects `file` and `batch`.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::clock::{now, since_1970};

/// An unguessable id; ids sort by time.
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
    /// The answers of a batch.
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

/// A stored file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileRecord {
    pub(crate) id: String,
    /// The name of the API key that owns it; `None` on a server without keys.
    pub(crate) owner: Option<String>,
    pub(crate) bytes: u64,
    pub(crate) created_at: u64,
    pub(crate) expires_at: u64,
    pub(crate) filename: String,
    pub(crate) purpose: Purpose,
}

impl FileRecord {
    /// The record as its owner sees it.
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

/// The state of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum BatchStatus {
    /// Its input is being validated.
    Validating,
    /// Its input is invalid.
    Failed,
    /// Its requests are being answered.
    InProgress,
    /// Its output files are being written.
    Finalizing,
    /// Every request was answered.
    Completed,
    /// Its time ran out before that.
    Expired,
    /// Its owner cancelled it, and it is ending.
    Cancelling,
    /// It ended because its owner cancelled it.
    Cancelled,
}

impl BatchStatus {
    /// The name on the wire.
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

    /// Whether the state is final.
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

/// The number of a batch's requests by outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Counts {
    pub(crate) total: usize,
    pub(crate) completed: usize,
    pub(crate) failed: usize,
}

/// When a batch was created, when it expires, and when it entered each state, in seconds since 1970.
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
    /// A batch created now that may take `seconds`.
    pub(crate) fn begin(seconds: u64) -> Self {
        let created_at = now();
        Self {
            created_at,
            expires_at: created_at.saturating_add(seconds),
            ..Self::default()
        }
    }
}

/// A stored batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BatchRecord {
    pub(crate) id: String,
    /// The name of the API key that owns it; `None` on a server without keys.
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
    /// How long its output files are kept, in seconds, if its owner set it.
    pub(crate) output_seconds: Option<u64>,
}

impl BatchRecord {
    /// The record as its owner sees it.
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

    /// Moves to `status`, now.
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

    /// The prefix of its own files' names.
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
