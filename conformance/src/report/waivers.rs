//! [`Waivers`]: `conformance.toml` in an engine's repository, in which its authors list known failures.
//!
//! ```toml
//! [[check]]
//! id = "CN04"
//! expect = "fail"            # or "skip"
//! reason = "prefill runs in one step of the vendor's library"
//! issue = "https://example.org/issues/12"
//! until = "2027-06-30"
//! ```

use std::time::{SystemTime, UNIX_EPOCH};

use serde::Deserialize;

use super::{CheckReport, Verdict};
use crate::check::{Check, Level, SkipReason};
use crate::checks::{catalogue, find};

/// The maximum share of core checks that may be waived, in percent.
const MAX_CORE_PERCENT: usize = 10;

/// The result that a waiver expects of its check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Expect {
    Fail,
    Skip,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Waiver {
    id: String,
    expect: Expect,
    #[serde(default)]
    reason: String,
    #[serde(default)]
    issue: String,
    #[serde(default)]
    until: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    check: Vec<Waiver>,
}

/// The waivers of an engine's repository.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Waivers {
    waivers: Vec<Waiver>,
    today: i64,
}

impl Waivers {
    /// Parses a `conformance.toml`. [`Waivers::problems`] reports problems of single waivers.
    ///
    /// # Errors
    /// Fails if the text is not such a file.
    ///
    /// # Examples
    /// ```
    /// use genset_conformance::Waivers;
    ///
    /// let waivers = Waivers::parse("[[check]]\nid = \"XX99\"\nexpect = \"fail\"").unwrap();
    /// assert_eq!(waivers.problems()[0], "XX99: no check has this id");
    /// ```
    pub fn parse(text: &str) -> Result<Self, toml::de::Error> {
        let file: File = toml::from_str(text)?;
        let today = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs() / 86_400);
        Ok(Self {
            waivers: file.check,
            today: i64::try_from(today).unwrap_or(i64::MAX),
        })
    }

    /// All problems of the waivers. Any problem makes a run bad: a neglected waiver hides other failures.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        for (index, waiver) in self.waivers.iter().enumerate() {
            let mut earlier = self.waivers.iter().take(index);
            let is_twice = earlier.any(|earlier| earlier.id.eq_ignore_ascii_case(&waiver.id));
            let found = self.problems_of(waiver).into_iter();
            let found = found.chain(is_twice.then(|| "waived twice".into()));
            problems.extend(found.map(|problem| format!("{}: {problem}", waiver.id)));
        }
        let is_core = |check: &&Check| check.level == Level::Core;
        let waived = self.waivers.iter().filter_map(|waiver| find(&waiver.id));
        let waived = waived.filter(is_core).count();
        let total = catalogue().filter(is_core).count();
        if waived * 100 > total * MAX_CORE_PERCENT {
            problems.push(format!(
                "{waived} of {total} core checks are waived; at most {MAX_CORE_PERCENT} % may be"
            ));
        }
        problems
    }

    fn problems_of(&self, waiver: &Waiver) -> Vec<String> {
        let mut problems = Vec::new();
        match find(&waiver.id) {
            None => problems.push("no check has this id".into()),
            Some(check) if check.level == Level::Info => {
                problems.push("a measurement is never judged, so there is nothing to waive".into());
            }
            Some(_) => {}
        }
        let until = &waiver.until;
        let fields = [
            ("reason", &waiver.reason),
            ("issue", &waiver.issue),
            ("until", until),
        ];
        for (field, _) in fields.iter().filter(|(_, text)| text.trim().is_empty()) {
            problems.push(format!("the waiver gives no {field}"));
        }
        match days_since_1970(until) {
            None if until.trim().is_empty() => {}
            None => problems.push(format!("until = {until:?} is not a date like 2027-06-30")),
            Some(day) if day < self.today => {
                problems.push(format!("the waiver ended on {until}"));
            }
            Some(_) => {}
        }
        problems
    }

    pub(super) fn apply_to(&self, check: &mut CheckReport) {
        let Some(waiver) = self
            .waivers
            .iter()
            .find(|waiver| waiver.id.eq_ignore_ascii_case(&check.id))
        else {
            return;
        };
        let text = format!(
            "{}, {}, until {}",
            waiver.reason, waiver.issue, waiver.until
        );
        check.verdict = match (waiver.expect, &check.verdict) {
            (Expect::Fail, Verdict::Fail { reason }) => Verdict::ExpectedFail {
                reason: reason.clone(),
                waiver: text,
            },
            (Expect::Fail, Verdict::Pass) => Verdict::UnexpectedPass { waiver: text },
            (Expect::Skip, Verdict::Pass | Verdict::Fail { .. }) => Verdict::Skip {
                code: SkipReason::Waived,
                reason: text,
            },
            (_, verdict) => verdict.clone(),
        };
    }
}

/// The number of days from 1970 to a date like `2027-06-30`.
///
/// # Source
/// Howard Hinnant, "chrono-compatible low-level date algorithms", `days_from_civil`.
fn days_since_1970(date: &str) -> Option<i64> {
    let mut parts = date.trim().split('-');
    let mut part = |digits: usize| {
        parts
            .next()
            .filter(|text| text.len() == digits && text.bytes().all(|byte| byte.is_ascii_digit()))?
            .parse::<i64>()
            .ok()
    };
    let (year, month, day) = (part(4)?, part(2)?, part(2)?);
    let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let days = match month {
        2 => 28 + i64::from(is_leap),
        4 | 6 | 9 | 11 => 30,
        _ => 31,
    };
    if parts.next().is_some() || !(1..=12).contains(&month) || !(1..=days).contains(&day) {
        return None;
    }
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    Some(era * 146_097 + day_of_era - 719_468)
}

#[cfg(test)]
mod tests {
    use super::super::tests::check;
    use super::*;

    const GOOD: &str = r#"
        [[check]]
        id = "ST01"
        expect = "fail"
        reason = "known"
        issue = "https://example.org/1"
        until = "2999-12-31"
    "#;

    fn result(verdict: Verdict) -> CheckReport {
        check(Level::Core, verdict)
    }

    #[test]
    fn a_failure_that_is_waived_is_expected_and_a_pass_is_not() {
        let waivers = Waivers::parse(GOOD).unwrap();
        let mut failed = result(Verdict::Fail { reason: "x".into() });
        waivers.apply_to(&mut failed);
        assert!(matches!(failed.verdict, Verdict::ExpectedFail { .. }) && !failed.is_bad());
        let mut passed = result(Verdict::Pass);
        waivers.apply_to(&mut passed);
        assert!(matches!(passed.verdict, Verdict::UnexpectedPass { .. }) && passed.is_bad());
    }

    #[test]
    fn every_problem_is_named() {
        let text = |id: &str, until: &str| {
            format!("[[check]]\nid = \"{id}\"\nexpect = \"skip\"\nuntil = \"{until}\"\n")
        };
        let problems = |text: &str| Waivers::parse(text).unwrap().problems();
        assert_eq!(
            problems(&text("ST01", "2020-01-31")),
            [
                "ST01: the waiver gives no reason",
                "ST01: the waiver gives no issue",
                "ST01: the waiver ended on 2020-01-31",
            ]
        );
        let odd = problems(&text("ZZ99", "tomorrow"));
        assert_eq!(odd[0], "ZZ99: no check has this id");
        assert_eq!(
            odd.last().map(String::as_str),
            Some("ZZ99: until = \"tomorrow\" is not a date like 2027-06-30")
        );
        let measurement = problems(&text("PF01", "2999-12-31"));
        assert_eq!(
            measurement[0],
            "PF01: a measurement is never judged, so there is nothing to waive"
        );
    }

    #[test]
    fn a_check_is_waived_once_in_any_case_of_its_id() {
        for second in ["ST01", "st01"] {
            let both = GOOD.to_owned() + &GOOD.replace("ST01", second);
            let problems = Waivers::parse(&both).unwrap().problems();
            assert_eq!(problems, [format!("{second}: waived twice")]);
        }
    }

    #[test]
    fn a_tenth_of_the_core_checks_may_be_waived() {
        let core = || catalogue().filter(|check| check.level == Level::Core);
        let problems = |count: usize| {
            let waivers = core().map(|check| GOOD.replace("ST01", check.id));
            let waivers: String = waivers.take(count).collect();
            Waivers::parse(&waivers).unwrap().problems()
        };
        let total = core().count();
        let most = total / 10;
        assert!(problems(most).is_empty());
        let more = most + 1;
        let refusal = format!("{more} of {total} core checks are waived; at most 10 % may be");
        assert_eq!(problems(more), [refusal]);
    }

    #[test]
    fn a_text_that_is_no_list_of_waivers_is_refused() {
        for text in [
            "[[check]]\nid = 3".to_owned(),
            GOOD.replace("[[check]]", "[[checks]]"),
            GOOD.replace("id =", "name ="),
            GOOD.replace("expect =", "expects ="),
            GOOD.replace("\"fail\"", "\"pass\""),
            GOOD.to_owned() + "since = \"2026-01-01\"",
        ] {
            assert!(Waivers::parse(&text).is_err(), "{text}");
        }
    }

    #[test]
    fn days_are_counted_right() {
        assert_eq!(days_since_1970("1970-01-01"), Some(0));
        assert_eq!(days_since_1970("2000-03-01"), Some(11_017));
        assert_eq!(days_since_1970("2024-02-29"), Some(19_782));
        assert_eq!(days_since_1970("2026-11-21"), Some(20_778));
        for bad in [
            "",
            "2026",
            "2026-13-01",
            "2026-02-29",
            "2100-02-29",
            "2027-04-31",
            "2026-1-1",
            "2026-+1-01",
            "2026-01-01-01",
        ] {
            assert_eq!(days_since_1970(bad), None, "{bad}");
        }
    }
}
