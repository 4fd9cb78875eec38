//! [`Report`]: what came out of a run.

use serde::{Deserialize, Serialize};

use crate::check::{Level, Profile, SkipReason};

/// How a check ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "verdict")]
pub enum Verdict {
    /// The engine keeps the promise.
    Pass,
    /// It does not.
    Fail {
        /// What was seen.
        reason: String,
    },
    /// The check does not apply.
    Skip {
        /// Why, for programs.
        code: SkipReason,
        /// Why, for people.
        reason: String,
    },
}

/// Where the evidence comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Evidence {
    /// The engine's own counters, or what a client sees.
    Direct,
    /// What a client sees, where the engine's own counters would say more.
    Indirect,
}

/// One check's result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CheckReport {
    /// The check.
    pub id: String,
    /// How much it counts.
    pub level: Level,
    /// What it applies to.
    pub profile: Profile,
    /// How it ended.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// Where the evidence comes from.
    pub evidence: Evidence,
    /// Wall time, in milliseconds.
    pub duration_ms: f64,
}

/// A whole run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The kit's version.
    pub kit_version: String,
    /// Every check of the catalogue, in its order.
    pub checks: Vec<CheckReport>,
}

impl Report {
    /// The failed checks.
    pub fn failures(&self) -> impl Iterator<Item = &CheckReport> {
        self.checks
            .iter()
            .filter(|check| matches!(check.verdict, Verdict::Fail { .. }))
    }

    /// Whether no core check failed.
    #[must_use]
    pub fn is_conformant(&self) -> bool {
        self.failures().all(|check| check.level != Level::Core)
    }

    /// For a test: panics with every failure, what it breaks and what was seen.
    ///
    /// # Panics
    /// When a check of any level that ran has failed.
    pub fn assert_conformant(&self) {
        let failures: Vec<String> = self.failures().map(describe).collect();
        assert!(
            failures.is_empty(),
            "the engine is not conformant:\n{}",
            failures.join("\n")
        );
    }
}

fn describe(check: &CheckReport) -> String {
    let reason = match &check.verdict {
        Verdict::Fail { reason } | Verdict::Skip { reason, .. } => reason.as_str(),
        Verdict::Pass => "passed",
    };
    match crate::find(&check.id) {
        Some(known) => format!(
            "  {} {}\n    seen:   {reason}\n    breaks: {}",
            known.id, known.title, known.breaks
        ),
        None => format!("  {} {reason}", check.id),
    }
}
