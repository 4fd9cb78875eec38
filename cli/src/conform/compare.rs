//! The difference between two reports.

use std::fmt::Write;

use genset_conformance::{CheckReport, Report, SkipReason, Verdict};

/// Lists every check whose verdict changed, with the reason of a skip; also returns whether any got worse.
pub(super) fn diff(old: &Report, new: &Report) -> (String, bool) {
    let (mut text, mut is_worse) = (String::new(), false);
    for check in &new.checks {
        let before = old.checks.iter().find(|earlier| earlier.id == check.id);
        let (was, is) = (before.map_or("absent", word), word(check));
        if was != is {
            let skip = skip(check);
            let why = skip.map_or_else(String::new, |(_, reason)| format!(" ({reason})"));
            let _ = writeln!(text, "{}  {was} -> {is}{why}", check.id);
            let has_passed = before.is_some_and(|before| before.verdict == Verdict::Pass);
            is_worse |= check.is_bad() || (has_passed && skip.is_some_and(is_lost));
        } else if let Some(before) = before {
            write_measurements(before, check, &mut text);
        }
    }
    for gone in old
        .checks
        .iter()
        .filter(|check| new.checks.iter().all(|later| later.id != check.id))
    {
        let _ = writeln!(text, "{}  {} -> absent", gone.id, word(gone));
    }
    if text.is_empty() {
        text.push_str("No verdict changed.\n");
    }
    (text, is_worse)
}

/// Smaller changes of a measurement are noise, in per cent.
const NOISE_PERCENT: u64 = 20;

/// Reports a changed measurement. It is not a regression: people decide what is slow.
fn write_measurements(old: &CheckReport, new: &CheckReport, text: &mut String) {
    let (Verdict::Measured { measurements: old }, Verdict::Measured { measurements }) =
        (&old.verdict, &new.verdict)
    else {
        return;
    };
    for (name, is) in measurements {
        let Some(was) = old.get(name) else { continue };
        let change = was.abs_diff(*is).saturating_mul(100);
        if change > was.saturating_mul(NOISE_PERCENT) {
            let _ = writeln!(text, "{}  {name} {was} -> {is}", new.id);
        }
    }
}

/// Why a check was skipped.
fn skip(check: &CheckReport) -> Option<(SkipReason, &str)> {
    match &check.verdict {
        Verdict::Skip { code, reason } => Some((*code, reason.as_str())),
        Verdict::Pass
        | Verdict::Fail { .. }
        | Verdict::ExpectedFail { .. }
        | Verdict::UnexpectedPass { .. }
        | Verdict::Measured { .. } => None,
    }
}

/// Whether the engine is why a check was skipped, and not what was asked for: it is gone, or does not declare the ability.
fn is_lost((code, _): (SkipReason, &str)) -> bool {
    matches!(code, SkipReason::Gone | SkipReason::NotDeclared)
}

fn word(check: &CheckReport) -> &'static str {
    match check.verdict {
        Verdict::Pass => "pass",
        Verdict::Fail { .. } => "FAIL",
        Verdict::Skip { .. } => "skip",
        Verdict::ExpectedFail { .. } => "expected fail",
        Verdict::UnexpectedPass { .. } => "UNEXPECTED PASS",
        Verdict::Measured { .. } => "measured",
    }
}
