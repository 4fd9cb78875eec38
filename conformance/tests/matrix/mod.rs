//! `each_group!`: one test per group of mutants, so that each can be run alone.

/// Each test in `$module` calls `$judge` with the name of its group.
macro_rules! each_group {
    ($module:ident, $judge:ident) => {
        each_group! { $module, $judge,
            lifecycle stream finish usage lengths cancellation concurrency
            sampling deviations memory guided errors shutdown metrics kv_events
            disaggregated transfer resume seam rules embeddings scores controls ranks bodies text
        }
    };
    ($module:ident, $judge:ident, $($group:ident)*) => {
        mod $module {
            $(
                #[test]
                fn $group() {
                    super::$judge(stringify!($group));
                }
            )*
        }

        #[test]
        fn every_group_of_mutants_has_its_test() {
            let groups = genset_conformance::mutants::groups();
            let groups: Vec<&str> = groups.map(|(name, _)| name).collect();
            assert_eq!(groups, [$(stringify!($group)),*]);
        }
    };
}
