//! The report as JUnit XML, for CI servers. The message of a skip is its reason; the replay line is in the case's `system-out`.
//!
//! # Source
//! <https://github.com/testmoapp/junitxml>

use std::fmt::Write;

use super::{CheckReport, Report, Verdict, listed};

impl Report {
    /// The report as JUnit XML.
    #[must_use]
    pub fn to_junit(&self) -> String {
        let failures = self.failures().count();
        let skipped = self
            .checks
            .iter()
            .filter(|check| matches!(check.verdict, Verdict::Skip { .. }))
            .count();
        let seconds = self.seconds();
        let mut out = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n");
        let _ = writeln!(
            out,
            "<testsuite name=\"genset-conformance: {}\" tests=\"{}\" failures=\"{failures}\" skipped=\"{skipped}\" time=\"{seconds:.3}\">",
            escape(&self.engine.name),
            self.checks.len(),
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
                    let untried = match check.is_precondition {
                        true => "could not be tried: ",
                        false => "",
                    };
                    writeln!(
                        out,
                        "    <failure message=\"{untried}{}\"/>",
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
