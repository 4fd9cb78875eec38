//! [`Finding`]: what was checked and the result, for people and for programs.

use std::fmt::Write as _;

use genset_runtime::shows_colours;
use serde_json::{Value, json};

use crate::input::escaped;

pub(crate) const HELP: &str = "\
Each line is ok, a warning or a problem. Below a warning or a problem stands how to fix it. Flags, the environment and
the file of --config choose what is checked, as for `genset run`: with ETCD_ENDPOINTS it is etcd, with NATS_SERVER the
NATS server.

Exit codes: 0 no problem, 1 a problem, 2 usage.";

/// The result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {
    Ok,
    /// It works, but could work better or will soon fail.
    Warning,
    /// It does not work.
    Problem,
}

impl Level {
    fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Problem => "problem",
        }
    }

    /// The terminal's colour code.
    fn colour(self) -> &'static str {
        match self {
            Self::Ok => "\x1b[32m",
            Self::Warning => "\x1b[33m",
            Self::Problem => "\x1b[31m",
        }
    }
}

/// One checked item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Finding {
    pub(super) level: Level,
    pub(super) what: String,
    /// The command that fixes it, or what to do.
    pub(super) mend: Option<String>,
}

/// The findings about one area, under its heading.
pub(super) type Area = (&'static str, Vec<Finding>);

impl Finding {
    pub(super) fn ok(what: impl Into<String>) -> Self {
        Self {
            level: Level::Ok,
            what: what.into(),
            mend: None,
        }
    }

    pub(super) fn warning(what: impl Into<String>, mend: impl Into<String>) -> Self {
        Self {
            level: Level::Warning,
            mend: Some(mend.into()),
            ..Self::ok(what)
        }
    }

    pub(super) fn problem(what: impl Into<String>, mend: impl Into<String>) -> Self {
        Self {
            level: Level::Problem,
            mend: Some(mend.into()),
            ..Self::ok(what)
        }
    }
}

pub(super) fn in_json(areas: &[Area]) -> String {
    let mut lines: Vec<Value> = Vec::new();
    for (area, findings) in areas {
        lines.extend(findings.iter().map(|finding| {
            json!({
                "area": area,
                "level": finding.level.word(),
                "what": finding.what,
                "mend": finding.mend,
            })
        }));
    }
    format!(
        "{:#}\n",
        json!({"findings": lines, "warnings": count(areas, Level::Warning), "problems": count(areas, Level::Problem)})
    )
}

pub(super) fn in_words(areas: &[Area]) -> String {
    text(areas, shows_colours(&std::io::stdout()))
}

fn text(areas: &[Area], has_colours: bool) -> String {
    let mut text = String::new();
    for (area, findings) in areas.iter().filter(|(_, findings)| !findings.is_empty()) {
        push(&mut text, format_args!("{area}\n"));
        for finding in findings {
            let word = format!("{:8}", finding.level.word());
            let word = match has_colours {
                true => format!("{}{word}\x1b[0m", finding.level.colour()),
                false => word,
            };
            push(
                &mut text,
                format_args!("  {word} {}\n", escaped(&finding.what)),
            );
            if let Some(mend) = &finding.mend {
                push(&mut text, format_args!("           -> {}\n", escaped(mend)));
            }
        }
        text.push('\n');
    }
    let counted = |level, one: &str| match count(areas, level) {
        1 => format!("1 {one}"),
        count => format!("{count} {one}s"),
    };
    push(
        &mut text,
        format_args!(
            "{}, {}\n",
            counted(Level::Problem, "problem"),
            counted(Level::Warning, "warning")
        ),
    );
    text
}

/// The number of findings of this level.
pub(super) fn count(areas: &[Area], level: Level) -> usize {
    let findings = areas.iter().flat_map(|(_, findings)| findings);
    findings.filter(|finding| finding.level == level).count()
}

fn push(text: &mut String, more: std::fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _infallible = text.write_fmt(more);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_says_how_it_is_and_what_mends_it() {
        let machine = [
            Finding::ok("2 cores"),
            Finding::warning("little memory", "close something"),
        ];
        let port = Finding::problem("8080 is taken", "--http-port 9000");
        let findings = [("Machine", machine.into()), ("Ports", vec![port])];
        let expected = "\
Machine
  ok       2 cores
  warning  little memory
           -> close something

Ports
  problem  8080 is taken
           -> --http-port 9000

1 problem, 1 warning
";
        assert_eq!(text(&findings, false), expected);
        assert!(text(&findings, true).contains("\x1b[31mproblem \x1b[0m 8080"));
        let json: Value = serde_json::from_str(&in_json(&findings)).unwrap();
        assert_eq!(
            (
                json["problems"].as_u64(),
                json["findings"][2]["mend"].as_str()
            ),
            (Some(1), Some("--http-port 9000"))
        );
    }
}
