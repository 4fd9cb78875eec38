//! [`Report`]: the result of a run, for people on a terminal, and as JSON, JUnit and Markdown.

mod junit;
mod markdown;
mod read;
mod terminal;
mod waivers;

use std::collections::BTreeMap;

use genset_backend_common::Capabilities;
use serde::{Deserialize, Serialize};

pub use markdown::matrix;
pub use read::ReadReportError;
pub use waivers::Waivers;

use crate::check::{Level, Profile, SkipReason};
use crate::runner::{Options, SEQUENCES};
use crate::transcript::Transcript;

/// The version of the JSON form. A change that could break a reader increases it.
pub const SCHEMA: &str = "genset-conformance/4";

/// The JSON Schema of the JSON form.
pub const JSON_SCHEMA: &str = include_str!("../schema/report-4.json");

/// The result of a check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "verdict")]
pub enum Verdict {
    /// The engine kept the promise.
    Pass,
    /// The engine broke the promise.
    Fail {
        /// What was seen.
        reason: String,
    },
    /// The check does not apply.
    Skip {
        /// The reason, for programs.
        code: SkipReason,
        /// The reason, for people.
        reason: String,
    },
    /// It failed, as the engine's authors expected.
    ExpectedFail {
        /// What was seen.
        reason: String,
        /// Why it was expected, where it is tracked, and until when.
        waiver: String,
    },
    /// It passed although its authors expected a failure: remove the waiver.
    UnexpectedPass {
        /// The waiver.
        waiver: String,
    },
    /// It was measured, not judged.
    Measured {
        /// The values, by names that end with their units: `first_token_us`.
        measurements: BTreeMap<String, u64>,
    },
}

/// Where the evidence comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Evidence {
    /// From the engine's own counters, or from what a client sees.
    Direct,
    /// From what a client sees, although the engine's own counters would show more.
    Indirect,
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckReport {
    /// The check.
    pub id: String,
    /// Its importance.
    pub level: Level,
    /// The profile that it belongs to.
    pub profile: Profile,
    /// Its result.
    #[serde(flatten)]
    pub verdict: Verdict,
    /// Where the evidence comes from.
    pub evidence: Evidence,
    /// Wall time, in microseconds.
    pub duration_us: u64,
    /// Whether a precondition failed, a start or a plain request, before the promise was tested.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_precondition: bool,
    /// The other check that saw the failure, for a rule that holds in every check.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen_in: Option<String>,
    /// The requests and answers of the check, if it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transcript: Option<Transcript>,
}

impl CheckReport {
    /// Wall time, in seconds.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        std::time::Duration::from_micros(self.duration_us).as_secs_f64()
    }

    /// The check to run to reproduce the result: this one, or the one that saw the failure.
    #[must_use]
    pub fn tried(&self) -> &str {
        self.seen_in.as_deref().unwrap_or(&self.id)
    }

    /// Whether a waiver applies: the check failed as expected, or it was not judged.
    #[must_use]
    pub fn is_waived(&self) -> bool {
        let waived = SkipReason::Waived;
        match self.verdict {
            Verdict::ExpectedFail { .. } => true,
            Verdict::Skip { code, .. } => code == waived,
            Verdict::Pass
            | Verdict::Fail { .. }
            | Verdict::UnexpectedPass { .. }
            | Verdict::Measured { .. } => false,
        }
    }

    /// Whether this check makes the run bad.
    #[must_use]
    pub fn is_bad(&self) -> bool {
        match self.verdict {
            Verdict::Fail { .. } | Verdict::UnexpectedPass { .. } => true,
            Verdict::Pass
            | Verdict::Skip { .. }
            | Verdict::ExpectedFail { .. }
            | Verdict::Measured { .. } => false,
        }
    }
}

/// The engine under test.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct EngineReport {
    /// The model or engine name from its config; empty if it did not start.
    pub name: String,
    /// What it declares; `None` if it did not start.
    pub capabilities: Option<Capabilities>,
}

/// The machine of a run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostReport {
    /// The operating system.
    pub os: String,
    /// The processor's architecture.
    pub arch: String,
    /// The number of processors available to the run.
    pub processors: usize,
}

impl HostReport {
    fn here() -> Self {
        Self {
            os: std::env::consts::OS.into(),
            arch: std::env::consts::ARCH.into(),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }
}

/// A profile's result.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProfileReport {
    /// The profile.
    pub profile: Profile,
    /// `success` (all applicable checks ran, none failed), `partial` (some were skipped), `failure`, or `absent` (none applies:
    /// the profile is not declared). Checks above the run's level do not make it `partial`.
    pub result: String,
    /// Checks that passed.
    pub passed: usize,
    /// Checks that failed, or passed unexpectedly.
    pub failed: usize,
    /// Checks that were skipped.
    pub skipped: usize,
    /// Checks that failed as expected.
    pub expected_failures: usize,
}

/// A whole run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: String,
    /// The version of the kit and of the contract: they are released together.
    pub kit_version: String,
    /// The engine.
    pub engine: EngineReport,
    /// The machine.
    pub host: HostReport,
    /// Information from the caller about both: [`Options::about`].
    pub about: BTreeMap<String, String>,
    /// The highest level of the run.
    pub level: Level,
    /// The beginning of a replay line: a command that takes `--only ID`, `--level LEVEL` and `--seed N`; empty for a call in
    /// Rust.
    pub replay: String,
    /// The seed of the prompts.
    pub seed: u64,
    /// The number of random sequences for SQ01.
    pub sequences: u32,
    /// The profiles.
    pub profiles: Vec<ProfileReport>,
    /// The problems of the waivers. Any problem makes the run bad.
    #[serde(default)]
    pub waiver_problems: Vec<String>,
    /// Every check of the catalogue, in its order.
    pub checks: Vec<CheckReport>,
}

impl Report {
    pub(crate) fn new(engine: EngineReport, options: &Options, checks: Vec<CheckReport>) -> Self {
        let mut report = Self {
            schema: SCHEMA.to_owned(),
            kit_version: env!("CARGO_PKG_VERSION").to_owned(),
            engine,
            host: HostReport::here(),
            about: options.about.clone(),
            level: options.level,
            replay: options.replay.clone(),
            seed: options.seed,
            sequences: options.sequences,
            profiles: Vec::new(),
            waiver_problems: Vec::new(),
            checks,
        };
        report.count_profiles();
        report
    }

    /// Applies waivers: waived failures become expected, waived checks that pass become unexpected passes.
    pub fn apply(&mut self, waivers: &Waivers) {
        self.waiver_problems = waivers.problems();
        for check in &mut self.checks {
            waivers.apply_to(check);
        }
        self.count_profiles();
    }

    fn count_profiles(&mut self) {
        self.profiles = Profile::ALL
            .into_iter()
            .map(|profile| count(profile, &self.checks, self.level))
            .collect();
    }

    /// Reproduces a check as it was run: a command, or a call in Rust.
    #[must_use]
    pub fn replay_of(&self, check: &CheckReport) -> String {
        let (tried, seed) = (check.tried(), self.seed);
        let sequences = Some(self.sequences).filter(|_| tried == SEQUENCES);
        if self.replay.is_empty() {
            let level = self.level;
            let sequences = sequences.map(|count| format!("sequences: {count}, "));
            return format!(
                "run_conformance_with(factory, &Options {{ only: vec![\"{tried}\".into()], level: Level::{level:?}, seed: \
                 {seed}, {}..Options::default() }})",
                sequences.unwrap_or_default()
            );
        }
        let level = self.level.name();
        let sequences = sequences.map(|count| format!(" --sequences {count}"));
        format!(
            "{} --only {tried} --level {level} --seed {seed}{}",
            self.replay,
            sequences.unwrap_or_default()
        )
    }

    fn seconds(&self) -> f64 {
        self.checks.iter().map(CheckReport::seconds).sum()
    }

    /// The checks that make the run bad.
    pub fn failures(&self) -> impl Iterator<Item = &CheckReport> {
        self.checks.iter().filter(|check| check.is_bad())
    }

    /// Why the run ended before all of its checks ran, if it did.
    #[must_use]
    pub fn end(&self) -> Option<&str> {
        self.checks.iter().find_map(|check| match &check.verdict {
            Verdict::Skip {
                code: SkipReason::Gone,
                reason,
            } => Some(reason.as_str()),
            Verdict::Pass
            | Verdict::Fail { .. }
            | Verdict::Skip { .. }
            | Verdict::UnexpectedPass { .. }
            | Verdict::ExpectedFail { .. }
            | Verdict::Measured { .. } => None,
        })
    }

    /// Whether the engine may be called conformant: no core check was excluded by name, failed or was waived, and the waivers
    /// are valid.
    #[must_use]
    pub fn is_conformant(&self) -> bool {
        self.left_out() == 0 && self.is_conformant_so_far()
    }

    /// The number of core checks that were excluded by name.
    fn left_out(&self) -> usize {
        let is_left_out = |check: &&CheckReport| {
            let filtered = SkipReason::Filtered;
            let is_skipped =
                matches!(check.verdict, Verdict::Skip { code, .. } if code == filtered);
            check.level == Level::Core && is_skipped
        };
        self.checks.iter().filter(is_left_out).count()
    }

    /// As [`Self::is_conformant`], for the checks that ran.
    fn is_conformant_so_far(&self) -> bool {
        let is_broken = |check: &CheckReport| check.is_bad() || check.is_waived();
        self.end().is_none()
            && self.waiver_problems.is_empty()
            && !self
                .checks
                .iter()
                .any(|check| check.level == Level::Core && is_broken(check))
    }

    /// Whether all checks ran and none failed unexpectedly, at any level of the run.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.end().is_none() && self.waiver_problems.is_empty() && self.failures().next().is_none()
    }

    /// The canonical form, described by [`JSON_SCHEMA`].
    ///
    /// # Errors
    /// Never, for a report made by this kit.
    pub fn to_json(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string_pretty(self)
    }

    /// For tests: panics with every failure, what it breaks and what was seen.
    ///
    /// # Panics
    /// Panics if a check of any level failed, or a waiver is invalid.
    pub fn assert_conformant(&self) {
        assert!(
            self.is_good(),
            "the engine is not conformant:\n\n{}",
            self.to_terminal(false)
        );
    }
}

fn count(profile: Profile, checks: &[CheckReport], level: Level) -> ProfileReport {
    let (mut passed, mut failed, mut skipped, mut expected_failures) = (0, 0, 0, 0);
    let (mut inapplicable, mut missed) = (0, 0);
    let is_judged = |check: &&CheckReport| check.profile == profile && check.level != Level::Info;
    for check in checks.iter().filter(is_judged) {
        match check.verdict {
            Verdict::Measured { .. } => {}
            Verdict::Pass => passed += 1,
            Verdict::Fail { .. } | Verdict::UnexpectedPass { .. } => failed += 1,
            Verdict::ExpectedFail { .. } => expected_failures += 1,
            Verdict::Skip { code, .. } => {
                skipped += 1;
                if matches!(code, SkipReason::NotDeclared | SkipReason::NeedsTokens) {
                    inapplicable += 1;
                } else if check.level <= level {
                    missed += 1;
                }
            }
        }
    }
    let result = if failed > 0 || expected_failures > 0 {
        "failure"
    } else if passed > 0 && missed == 0 {
        "success"
    } else if passed == 0 && missed == 0 && inapplicable > 0 {
        "absent"
    } else {
        "partial"
    };
    ProfileReport {
        profile,
        result: result.into(),
        passed,
        failed,
        skipped,
        expected_failures,
    }
}

/// Measurements on one line.
fn listed(measurements: &BTreeMap<String, u64>) -> String {
    let parts: Vec<String> = measurements
        .iter()
        .map(|(name, value)| format!("{name} {value}"))
        .collect();
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn skip(code: SkipReason) -> Verdict {
        let reason = "not tried".into();
        Verdict::Skip { code, reason }
    }

    /// A check of the profile `tokens` that ended so.
    pub(super) fn check(level: Level, verdict: Verdict) -> CheckReport {
        CheckReport {
            id: "ST01".into(),
            level,
            profile: Profile::Tokens,
            verdict,
            evidence: Evidence::Direct,
            duration_us: 0,
            is_precondition: false,
            seen_in: None,
            transcript: None,
        }
    }

    /// The result of a profile with these checks, in a run of level 2.
    fn result_of(checks: Vec<(Level, Verdict)>) -> String {
        let checks: Vec<CheckReport> = checks
            .into_iter()
            .map(|(level, verdict)| check(level, verdict))
            .collect();
        count(Profile::Tokens, &checks, Level::Strict).result
    }

    #[test]
    fn what_does_not_apply_or_is_above_the_level_makes_no_profile_partial() {
        let passed = || (Level::Core, Verdict::Pass);
        let above = || (Level::Soak, skip(SkipReason::Level));
        for code in [SkipReason::NotDeclared, SkipReason::NeedsTokens] {
            let inapplicable = || (Level::Core, skip(code));
            let all = vec![passed(), inapplicable(), above()];
            assert_eq!(result_of(all), "success");
            assert_eq!(result_of(vec![inapplicable(), above()]), "absent");
        }
    }

    #[test]
    fn what_applies_and_was_skipped_makes_a_profile_partial() {
        for code in [SkipReason::Filtered, SkipReason::NoProbe, SkipReason::Level] {
            let missed = || (Level::Core, skip(code));
            let passed = (Level::Core, Verdict::Pass);
            assert_eq!(result_of(vec![passed, missed()]), "partial");
            assert_eq!(result_of(vec![missed()]), "partial");
        }
        let above = (Level::Soak, skip(SkipReason::Level));
        assert_eq!(result_of(vec![above]), "partial");
    }
}
