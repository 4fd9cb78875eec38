//! The report as JUnit XML, for CI servers. The text of a failure is what it breaks and the clause of the contract; the message of
//! a skip is its reason; the replay line is in the case's `system-out`. Each problem of the waivers is a failed case, since any
//! makes the run bad, and so is the end of a run before all of its checks ran.
//!
//! # Source
//! <https://github.com/testmoapp/junitxml>

use std::fmt::Write;

use super::{CheckReport, Report, Verdict, listed};

impl Report {
    /// The report as JUnit XML.
    #[must_use]
    pub fn to_junit(&self) -> String {
        let waivers = self.waiver_problems.iter();
        let mut problems: Vec<(&str, String)> = waivers
            .map(|problem| ("waivers", escape(problem)))
            .collect();
        let end = self.end().map(escape);
        problems.extend(end.map(|reason| ("run", format!("ended early: {reason}"))));
        let failures = self.failures().count() + problems.len();
        let skipped = self.checks.iter().filter(|check| is_skipped(check)).count();
        let seconds = self.seconds();
        let mut out = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
        let _ = writeln!(
            out,
            "<testsuite name=\"genset-conformance: {}\" tests=\"{}\" failures=\"{failures}\" skipped=\"{skipped}\" time=\"{seconds:.3}\">",
            escape(&self.engine.name),
            self.checks.len() + problems.len(),
        );
        for check in &self.checks {
            let title = crate::find(&check.id).map_or("", |known| known.title);
            let _ = writeln!(
                out,
                "  <testcase classname=\"{}\" name=\"{} {}\" time=\"{:.3}\">",
                check.profile.name(),
                check.id,
                escape(title),
                check.seconds(),
            );
            let _ = match &check.verdict {
                Verdict::Pass | Verdict::Measured { .. } => Ok(()),
                Verdict::Fail { reason } => {
                    let (untried, promise) = match check.is_precondition {
                        true => ("could not be tried: ", String::new()),
                        false => ("", promise_of(check)),
                    };
                    writeln!(
                        out,
                        "    <failure message=\"{untried}{}\">{promise}</failure>",
                        escape(reason)
                    )
                }
                Verdict::UnexpectedPass { waiver } => {
                    writeln!(
                        out,
                        "    <failure message=\"passes although waived: {}\"/>",
                        escape(waiver)
                    )
                }
                Verdict::Skip { reason, .. } => {
                    writeln!(out, "    <skipped message=\"{}\"/>", escape(reason))
                }
                Verdict::ExpectedFail { reason, waiver } => {
                    writeln!(
                        out,
                        "    <skipped message=\"expected to fail: {}: {}\"/>",
                        escape(waiver),
                        escape(reason)
                    )
                }
            };
            let _ = writeln!(
                out,
                "    <system-out>{}</system-out>",
                escape(&self.output_of(check))
            );
            out.push_str("  </testcase>\n");
        }
        for (class, problem) in problems {
            let _ = writeln!(
                out,
                "  <testcase classname=\"{class}\" name=\"{problem}\" time=\"0.000\">\n    <failure message=\"{problem}\"/>\n  </testcase>"
            );
        }
        out.push_str("</testsuite>\n");
        out
    }

    /// The measurements and the replay line.
    fn output_of(&self, check: &CheckReport) -> String {
        let replay = self.replay_of(check);
        if let Verdict::Measured { measurements } = &check.verdict {
            return format!("{}; {replay}", listed(measurements));
        }
        replay
    }
}

/// What breaks for an engine that fails a check, and the clause that it breaks.
fn promise_of(check: &CheckReport) -> String {
    let Some(known) = crate::find(&check.id) else {
        return String::new();
    };
    let (breaks, clause) = (escape(known.breaks), escape(&known.located_clause()));
    format!("breaks: {breaks}\nclause: {clause}")
}

/// Whether a check's case is a skipped one: it did not apply, or failed as expected.
fn is_skipped(check: &CheckReport) -> bool {
    match check.verdict {
        Verdict::Skip { .. } | Verdict::ExpectedFail { .. } => true,
        Verdict::Pass
        | Verdict::Fail { .. }
        | Verdict::UnexpectedPass { .. }
        | Verdict::Measured { .. } => false,
    }
}

/// Escapes a text for an attribute or an element. Characters that XML cannot represent become spaces.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::tests::check;
    use super::super::{EngineReport, Options, Waivers};
    use super::*;
    use crate::check::Level;

    #[test]
    fn a_waived_failure_is_skipped_and_a_bad_waiver_a_failure() {
        let reason = "x".into();
        let failed = check(Level::Core, Verdict::Fail { reason });
        let options = Options::default();
        let mut report = Report::new(EngineReport::default(), &options, vec![failed]);
        let waiver = |until: &str| {
            let waiver = format!(
                "[[check]]\nid = \"ST01\"\nexpect = \"fail\"\nreason = \"r\"\nissue = \"i\"\nuntil = \"{until}\""
            );
            Waivers::parse(&waiver).unwrap()
        };
        report.apply(&waiver("2999-12-31"));
        let xml = report.to_junit();
        let counts = " tests=\"1\" failures=\"0\" skipped=\"1\" ";
        assert!(xml.contains(counts), "{xml}");

        report.apply(&waiver("2001-12-31"));
        let xml = report.to_junit();
        for part in [
            " tests=\"2\" failures=\"1\" skipped=\"1\" ",
            "<testcase classname=\"waivers\" name=\"ST01: the waiver ended on 2001-12-31\" ",
            "<failure message=\"ST01: the waiver ended on 2001-12-31\"/>",
        ] {
            assert!(xml.contains(part), "{part:?} is not in:\n{xml}");
        }
    }
}
