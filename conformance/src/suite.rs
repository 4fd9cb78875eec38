//! [`suite!`](crate::suite): one test per check.

use std::sync::{Arc, OnceLock};

use crate::check::Level;
use crate::checks::find;
use crate::report::Verdict;
use crate::runner::{Acquaintance, acquaint, run_known};
use crate::subject::Factory;

/// What the tests of one [`suite!`](crate::suite) know of their engine; they share the first look at it.
#[doc(hidden)]
#[derive(Debug, Default)]
pub struct Acquainted(OnceLock<Acquaintance>);

impl Acquainted {
    /// Creates an empty value: the first test looks at the engine.
    #[must_use]
    pub const fn new() -> Self {
        Self(OnceLock::new())
    }

    /// Returns the result of the first look. Tests that start at the same time may each look. If an engine did not start, the
    /// next test looks again: otherwise one failed start would fail the checks of all that the engine may declare.
    fn with(&self, factory: &Arc<dyn Factory>) -> Acquaintance {
        if let Some(known) = self.0.get() {
            return known.clone();
        }
        let known = acquaint(factory);
        if known.has_started() {
            self.0.get_or_init(|| known).clone()
        } else {
            known
        }
    }
}

/// Runs the check `id` and panics if it fails: the body of each test from [`suite!`](crate::suite). `skips` lists the ids, or
/// prefixes of ids, of the checks that may be skipped; `None` for all.
///
/// # Panics
/// Panics if the check fails, with what it breaks and what was seen; if it is skipped and must not be; if no check has the id.
#[expect(
    clippy::print_stdout,
    reason = "`cargo test -- --show-output` shows it beside the test's name"
)]
pub fn assert_check(
    id: &str,
    acquainted: &Acquainted,
    skips: Option<&[&str]>,
    factory: impl Factory,
) {
    let check = find(id);
    assert!(
        check.is_some(),
        "the suite names {id:?}, which is no check of this kit"
    );
    let Some(check) = check else { return };
    let factory: Arc<dyn Factory> = Arc::new(factory);
    let report = run_known(check, &factory, &acquainted.with(&factory));
    if let Verdict::Fail { reason } = &report.verdict {
        let (title, breaks, clause) = (check.title, check.breaks, check.clause);
        let fails = if report.is_precondition {
            format!("{id} could not be tried\n  seen    {reason}\n  it asks whether {title}")
        } else {
            format!("{id} {title}\n  seen    {reason}\n  breaks  {breaks}\n  clause  {clause}")
        };
        assert!(report.verdict == Verdict::Pass, "{fails}");
    }
    if let Verdict::Skip { reason, .. } = &report.verdict {
        let is_named = |skips: &[&str]| skips.iter().any(|skip| id.starts_with(skip));
        // A measurement is never judged, even if it could not be taken.
        let may_be_skipped = check.level == Level::Info || skips.is_none_or(is_named);
        assert!(
            may_be_skipped,
            "{id} is skipped, and is not among the suite's `skips`\n  reason  {reason}\n  it asks whether {}",
            check.title
        );
        println!("skipped: {reason}");
    }
}

/// Generates one test per check, named by its id, for the engines of a factory.
///
/// A check that does not apply passes, since a running test can only pass or fail. Its output says why:
/// `cargo test -- --show-output`. `suite!(factory, skips: ["GD", "KV11"])` lists the checks that may be skipped, by id or
/// prefix. Any other skipped check fails, except a measurement, so that a lost declaration does not go unnoticed.
///
/// ```
/// # use genset_engine_sample::{SampleArgs, SampleEngine};
/// mod each_check {
///     # use super::*;
///     genset_conformance::suite!(|_: &genset_conformance::Scenario| SampleEngine::from_args(&SampleArgs {
///         vocab_size: 1000,
///         token_delay_ms: 1,
///     }));
/// }
/// ```
#[macro_export]
macro_rules! suite {
    ($factory:expr) => {
        $crate::__suite_checks! { $factory, None }
    };
    ($factory:expr, skips: $skips:expr) => {
        $crate::__suite_checks! { $factory, Some(&$skips) }
    };
}

/// The checks of [`suite!`](crate::suite).
#[doc(hidden)]
#[macro_export]
macro_rules! __suite_checks {
    ($factory:expr, $skips:expr) => {
        $crate::__suite_test! { $factory, $skips,
            LC01 LC02 LC03 LC04 LC05 LC06 LC07 LC08 LC09 LC10
            ST01 ST02 ST03 ST04 ST05 ST06 ST07 ST08 ST09 ST10 ST11 ST12
            FN01 FN02 FN03 FN04 FN05 FN06 FN07 FN08 FN09 FN10 FN11 FN12 FN13 FN14 FN15 FN16
            US01 US02 US03 US04 US05 US06 US07 US08 US09
            CN01 CN02 CN03 CN04 CN05 CN06 CN07 CN08 CN09 CN10 CN11 CN12 CN13 CN14 CN15 CN16
            CC01 CC02 CC03 CC04 CC05 CC06 CC07 CC08 CC09 CC10 CC11 CC12 CC13 CC14 CC15 CC16 CC17
            DT01 DT02 DT03 DT04 DT05 DT06 DT07 DT08 DT09 DT10 DT11 DT12 DT13 DT14 DT15 DT16 DT17 DT18 DT19 DT20
            GD01 GD02 GD03 GD04 GD05 GD06 GD07 GD08 GD09
            ER01 ER02 ER03 ER04 ER05 ER06 ER07 ER08 ER09
            SH01 SH02 SH03 SH04 SH05 SH06 SH07 SH08 SH09 SH10 SH11 SH12 SH13 SH14 SH15 SH16
            MT01 MT02 MT03 MT04 MT05 MT06 MT07 MT08 MT09
            KV01 KV02 KV03 KV04 KV05 KV06 KV07 KV08 KV09 KV10 KV11 KV12 KV13
            DG01 DG02 DG03 DG04 DG05 DG06 DG07
            DG08 DG09 DG10 DG11 DG12 DG13 DG14 DG15 DG16
            MG01 MG02 MG03 MG04 MG05 MG06 MG07 MG08 MG09 MG10 MG11 MG12
            EM01 EM02 EM03
            SC01 SC02
            CT01 CT02 CT03 LR01 LR02 LR03 LR04 LR05 LR06 RK01 RK02 WB01
            SP01 SP02 SP03 SP04 SP05 SP06 SP07 SP08 SP09 SP10 SP11 SP12 SP13 SP14
            RD01 RD02 RD03 RD04 RD05 RD06
            SQ01
            PF01 PF02 PF03
        }
    };
}

/// A test of [`suite!`](crate::suite).
#[doc(hidden)]
#[macro_export]
macro_rules! __suite_test {
    ($factory:expr, $skips:expr, $($id:ident)*) => {
        #[cfg(test)]
        static ACQUAINTED: $crate::Acquainted = $crate::Acquainted::new();

        $(
            #[test]
            #[allow(non_snake_case, reason = "tests are named by the checks' ids")]
            fn $id() {
                $crate::assert_check(stringify!($id), &ACQUAINTED, $skips, $factory);
            }
        )*
    };
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use genset_engine_sample::{SampleArgs, SampleEngine};

    use super::{Acquainted, assert_check};
    use crate::mutants::corpus;
    use crate::subject::{Factory, Scenario};

    fn sample(vocab_size: u32) -> impl Factory {
        move |_: &Scenario| {
            SampleEngine::from_args(&SampleArgs {
                vocab_size,
                token_delay_ms: 1,
            })
        }
    }

    fn judge(id: &str, skips: Option<&[&str]>) {
        assert_check(id, &Acquainted::new(), skips, sample(1000));
    }

    #[test]
    fn a_skip_passes_where_all_may_be_or_the_suite_names_it() {
        judge("KV01", None);
        judge("KV01", Some(&["DG01", "KV"]));
        judge("LC01", Some(&[]));
        // A measurement, which this engine does not declare.
        judge("GD07", Some(&[]));
    }

    #[test]
    #[should_panic(expected = "KV01 is skipped, and is not among the suite's `skips`")]
    fn a_skip_that_the_suite_does_not_name_fails() {
        judge("KV01", Some(&["DG", "KV02"]));
    }

    #[test]
    #[should_panic(expected = "the suite names \"XX99\", which is no check of this kit")]
    fn a_check_that_is_not_there_fails() {
        judge("XX99", None);
    }

    #[test]
    #[should_panic(
        expected = "ST01 every accepted request gets an item that is not an error\n  seen    "
    )]
    fn a_failure_says_what_was_seen() {
        let name = "silent-on-a-whole-chunk";
        let broken = corpus().find(|mutant| mutant.name == name).unwrap();
        let broken = broken.factory(Arc::new(sample(1000)));
        assert_check("ST01", &Acquainted::new(), None, broken);
    }

    #[test]
    #[should_panic(expected = "ST01 could not be tried\n  seen    start failed: vocab_size: ")]
    fn a_check_that_could_not_be_tried_fails_and_says_so() {
        assert_check("ST01", &Acquainted::new(), None, sample(0));
    }

    /// The macro cannot see the catalogue, so a test compares them.
    #[test]
    fn the_suite_is_the_catalogue() {
        let written = include_str!("suite.rs");
        let list = written
            .split("__suite_test! { $factory, $skips,")
            .nth(1)
            .and_then(|rest| rest.split('}').next());
        let listed: BTreeSet<&str> = list.unwrap_or_default().split_whitespace().collect();
        let known: BTreeSet<&str> = crate::catalogue().map(|check| check.id).collect();
        assert_eq!(listed, known);
    }
}
