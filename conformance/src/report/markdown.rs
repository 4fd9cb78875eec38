//! Reports of several engines as one Markdown table: the matrix.

use std::fmt::Write;

use super::{Report, Verdict, listed};
use crate::checks::catalogue;

/// A table with a row per check and a column per report.
#[must_use]
pub fn matrix(reports: &[Report]) -> String {
    let mut out = String::from("| check | level | promise |");
    for report in reports {
        let _ = write!(out, " {} |", cell(&report.engine.name));
    }
    out.push_str("\n|---|---|---|");
    out.push_str(&"---|".repeat(reports.len()));
    out.push('\n');
    for check in catalogue() {
        let _ = write!(
            out,
            "| {} | {} | {} |",
            check.id,
            check.level.number(),
            cell(check.title)
        );
        for report in reports {
            let found = report.checks.iter().find(|result| result.id == check.id);
            let _ = write!(
                out,
                " {} |",
                found.map_or(String::new(), |result| word(&result.verdict))
            );
        }
        out.push('\n');
    }
    out
}

/// Escapes a name for a table cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ")
}

fn word(verdict: &Verdict) -> String {
    let word = match verdict {
        Verdict::Pass => "pass",
        Verdict::Fail { .. } => "**FAIL**",
        Verdict::Skip { .. } => "skip",
        Verdict::ExpectedFail { .. } => "expected fail",
        Verdict::UnexpectedPass { .. } => "**unexpected pass**",
        Verdict::Measured { measurements } => return listed(measurements),
    };
    word.to_owned()
}
