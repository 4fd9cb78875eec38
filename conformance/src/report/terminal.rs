//! The report for people: an overview of the groups, then each failure with what it breaks, what was seen and how to replay it.

use std::collections::BTreeMap;
use std::fmt::Write;

use genset_backend_common::terminal::escaped;

use super::{CheckReport, Evidence, Report, Verdict, listed};
use crate::check::{Level, SkipReason};

/// The groups of the catalogue, by the first two letters of their ids.
const GROUPS: &[(&str, &str)] = &[
    ("LC", "construct and start"),
    ("ST", "stream shape"),
    ("FN", "limits and finish reasons"),
    ("US", "usage"),
    ("CN", "cancellation"),
    ("CC", "concurrency and isolation"),
    ("DT", "sampling and determinism"),
    ("GD", "guided decoding"),
    ("ER", "errors"),
    ("SH", "drain and shutdown"),
    ("MT", "metrics and health"),
    ("KV", "KV events"),
    ("DG", "prefill and decode"),
    ("MG", "resume and migration"),
    ("EM", "embeddings"),
    ("SC", "scores"),
    ("CT", "controls"),
    ("LR", "adapters"),
    ("RK", "data-parallel ranks"),
    ("WB", "whole bodies"),
    ("SP", "engines in a process of their own"),
    ("RD", "rules of every stream"),
    ("SQ", "random sequences"),
    ("PF", "measurements"),
];

/// Escape codes, or nothing.
struct Paint {
    is_on: bool,
}

impl Paint {
    fn paint(&self, code: &str, text: &str) -> String {
        if self.is_on {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }

    fn good(&self, text: &str) -> String {
        self.paint("32", text)
    }

    fn bad(&self, text: &str) -> String {
        self.paint("1;31", text)
    }

    fn dim(&self, text: &str) -> String {
        self.paint("2", text)
    }
}

#[derive(Default)]
struct Tally {
    passed: usize,
    failed: usize,
    expected: usize,
    skipped: usize,
    measured: usize,
    indirect: usize,
}

impl Tally {
    fn of<'a>(checks: impl Iterator<Item = &'a CheckReport>) -> Self {
        let mut tally = Self::default();
        for check in checks {
            match check.verdict {
                Verdict::Pass => tally.passed += 1,
                Verdict::Fail { .. } | Verdict::UnexpectedPass { .. } => tally.failed += 1,
                Verdict::ExpectedFail { .. } => tally.expected += 1,
                Verdict::Skip { .. } => tally.skipped += 1,
                Verdict::Measured { .. } => tally.measured += 1,
            }
            let ran = !matches!(check.verdict, Verdict::Skip { .. });
            tally.indirect += usize::from(ran && check.evidence == Evidence::Indirect);
        }
        tally
    }
}

impl Report {
    /// The report for a terminal; `has_color` adds escape codes.
    #[must_use]
    pub fn to_terminal(&self, has_color: bool) -> String {
        let paint = Paint { is_on: has_color };
        let mut out = String::new();
        let name = match self.engine.name.is_empty() {
            true => "an engine that did not start".to_owned(),
            false => escaped(&self.engine.name),
        };
        line(
            &mut out,
            format_args!(
                "Genset conformance {} of {name}, level {}, seed {}\n",
                self.kit_version,
                self.level.number(),
                self.seed
            ),
        );
        self.write_about(&mut out);
        for (prefix, title) in GROUPS {
            self.write_group(prefix, title, &paint, &mut out);
        }
        self.write_measurements(&mut out);
        self.write_untried(&paint, &mut out);
        for check in self.failures().filter(|check| !check.is_precondition) {
            self.write_failure(check, &paint, &mut out);
        }
        for check in &self.checks {
            if let Verdict::ExpectedFail { waiver, .. } = &check.verdict {
                let waiver = escaped(waiver);
                line(
                    &mut out,
                    format_args!("\nexpected to fail: {} ({waiver})", check.id),
                );
            }
        }
        for problem in &self.waiver_problems {
            let problem = escaped(problem);
            line(
                &mut out,
                format_args!("\n{} {problem}", paint.bad("WAIVER")),
            );
        }
        self.write_summary(&paint, &mut out);
        out
    }

    fn write_about(&self, out: &mut String) {
        if self.about.is_empty() {
            return;
        }
        let facts = self.about.iter();
        let facts: Vec<String> = facts.map(|(name, fact)| format!("{name} {fact}")).collect();
        let facts = escaped(&facts.join(", "));
        line(out, format_args!("about     {facts}\n"));
    }

    fn write_group(&self, prefix: &str, title: &str, paint: &Paint, out: &mut String) {
        let tally = Tally::of(
            self.checks
                .iter()
                .filter(|check| check.id.starts_with(prefix)),
        );
        let ran = tally.passed + tally.failed + tally.expected + tally.measured;
        if ran + tally.skipped == 0 {
            return;
        }
        let mut parts = Vec::new();
        if tally.passed > 0 {
            parts.push(paint.good(&format!("{} passed", tally.passed)));
        }
        if tally.failed > 0 {
            parts.push(paint.bad(&format!("{} FAILED", tally.failed)));
        }
        if tally.expected > 0 {
            parts.push(format!("{} expected to fail", tally.expected));
        }
        if tally.measured > 0 {
            parts.push(format!("{} measured", tally.measured));
        }
        if tally.skipped > 0 {
            parts.push(paint.dim(&format!("{} skipped", tally.skipped)));
        }
        if tally.indirect > 0 {
            parts.push(paint.dim(&format!("{} on indirect evidence", tally.indirect)));
        }
        line(
            out,
            format_args!("  {prefix} {title:<28} {}", parts.join(", ")),
        );
    }

    fn write_measurements(&self, out: &mut String) {
        let mut is_first = true;
        for check in &self.checks {
            if let Verdict::Measured { measurements } = &check.verdict {
                let break_before = if std::mem::take(&mut is_first) {
                    "\n"
                } else {
                    ""
                };
                let measured = listed(measurements);
                line(
                    out,
                    format_args!("{break_before}measured  {} {measured}", check.id),
                );
            }
        }
    }

    /// Writes the checks whose promises were not tested, by the failed precondition.
    fn write_untried(&self, paint: &Paint, out: &mut String) {
        let mut untried: BTreeMap<&str, Vec<&CheckReport>> = BTreeMap::new();
        for check in self.failures().filter(|check| check.is_precondition) {
            if let Verdict::Fail { reason } = &check.verdict {
                untried.entry(reason).or_default().push(check);
            }
        }
        for (seen, checks) in untried {
            let ids: Vec<&str> = checks.iter().map(|check| check.id.as_str()).collect();
            let failed = paint.bad("FAILED");
            line(
                out,
                format_args!("\n{failed} before it could be tried: {}", ids.join(", ")),
            );
            line(out, format_args!("  seen    {}", escaped(seen)));
            line(
                out,
                format_args!("  breaks  nothing is known of what these checks are about"),
            );
            line(out, format_args!("  replay  {}", self.replay_of(checks[0])));
        }
    }

    fn write_failure(&self, check: &CheckReport, paint: &Paint, out: &mut String) {
        let seen = match &check.verdict {
            Verdict::Fail { reason } => reason.clone(),
            Verdict::UnexpectedPass { waiver } => {
                format!("it passes; remove the waiver ({waiver})")
            }
            Verdict::Pass
            | Verdict::Skip { .. }
            | Verdict::ExpectedFail { .. }
            | Verdict::Measured { .. } => return,
        };
        let known = crate::find(&check.id);
        let title = known.map_or("", |known| known.title);
        let failed = paint.bad("FAILED");
        line(out, format_args!("\n{failed} {} {title}", check.id));
        line(out, format_args!("  seen    {}", escaped(&seen)));
        if let Some(known) = known {
            line(out, format_args!("  breaks  {}", known.breaks));
            line(out, format_args!("  clause  {}", known.located_clause()));
        }
        line(out, format_args!("  replay  {}", self.replay_of(check)));
    }

    fn write_summary(&self, paint: &Paint, out: &mut String) {
        let tally = Tally::of(self.checks.iter());
        let mut reasons: BTreeMap<&str, Vec<&CheckReport>> = BTreeMap::new();
        for check in &self.checks {
            if let Verdict::Skip { code, .. } = check.verdict {
                reasons.entry(skip_words(code)).or_default().push(check);
            }
        }
        let reasons: Vec<String> = reasons
            .iter()
            .map(|(reason, checks)| format!("{} {reason}", checks.len()))
            .collect();
        let seconds = self.seconds();
        let skipped = match reasons.is_empty() {
            true => String::new(),
            false => format!(", {} skipped ({})", tally.skipped, reasons.join(", ")),
        };
        line(
            out,
            format_args!(
                "\n{} passed, {} failed{skipped} in {seconds:.1} s",
                tally.passed, tally.failed
            ),
        );
        if let Some(reason) = self.end() {
            let reason = escaped(reason);
            line(out, format_args!("{}: {reason}", paint.bad("ENDED EARLY")));
        }
        let core = { self.checks.iter() }.filter(|check| check.level == Level::Core);
        let part = match (self.left_out(), core.count()) {
            (0, _) => None,
            (left, core) => Some(format!(
                "{left} of {core} checks of level 1 left out by name"
            )),
        };
        let verdict = match (self.is_conformant_so_far(), self.is_good(), part) {
            (true, true, None) => paint.good("CONFORMANT"),
            (true, true, Some(part)) => paint.good(&format!("PASSED, with {part}")),
            (true, false, None) => paint.bad("CONFORMANT at level 1, with failures above it"),
            (true, false, Some(part)) => paint.bad(&format!("FAILED above level 1, with {part}")),
            (false, _, _) => paint.bad("NOT CONFORMANT"),
        };
        line(out, format_args!("{verdict}"));
    }
}

fn skip_words(code: SkipReason) -> &'static str {
    match code {
        SkipReason::NotDeclared => "not declared",
        SkipReason::NoProbe => "without a probe",
        SkipReason::Level => "above the level",
        SkipReason::Filtered => "left out by name",
        SkipReason::NotMeasured => "not measured",
        SkipReason::NeedsTokens => "about tokens or prompts",
        SkipReason::Waived => "waived",
        SkipReason::Gone => "not run",
    }
}

fn line(out: &mut String, text: std::fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _ = writeln!(out, "{text}");
}
