//! Engines on stand-in servers meet the contract: the whole conformance kit, one test per check. For a server with two ranks,
//! only the checks that ranks affect.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    unreachable_pub,
    dead_code,
    reason = "a test fails by panicking, and no test file needs all of the support"
)]

mod support;

mod vllm {
    use std::sync::LazyLock;

    use genset_backend_common::controls::Adapter;
    use genset_conformance::{Scenario, Subject, suite};
    use genset_engine_launcher::LauncherEngine;
    use tempfile::TempDir;

    use crate::support::{adapter_folder, operated};

    static ADAPTER: LazyLock<TempDir> = LazyLock::new(|| adapter_folder(4));

    fn subject() -> Subject {
        let engine = LauncherEngine::new(operated("vllm", &["--block-size=32"]));
        Subject::new(engine).with_adapter(Adapter {
            name: "poems".into(),
            source: ADAPTER.path().display().to_string(),
        })
    }

    suite!(|_: &Scenario| subject());
}

/// Requests and answers are translated by the same code as for one rank.
mod vllm_of_two_ranks {
    use genset_conformance::{Level, Options, Scenario, run_conformance_with};
    use genset_engine_launcher::LauncherEngine;

    const FLAGS: [&str; 3] = ["-dp", "2", "--block-size=32"];

    fn keep(groups: &[&str]) {
        let options = Options {
            only: groups.iter().map(ToString::to_string).collect(),
            level: Level::Soak,
            is_measuring: false,
            ..Options::default()
        };
        let engine = |_: &Scenario| LauncherEngine::new(crate::support::config("vllm", &FLAGS));
        run_conformance_with(engine, &options).assert_conformant();
    }

    #[test]
    fn start_and_end() {
        keep(&["LC", "SH"]);
    }

    #[test]
    fn requests_beside_each_other() {
        keep(&["CC", "CN", "SQ"]);
    }

    #[test]
    fn load_caches_and_ranks() {
        keep(&["MT", "KV", "DG", "RK"]);
    }
}

mod sglang {
    use std::num::NonZeroU32;

    use genset_conformance::{Scenario, suite};
    use genset_engine_launcher::LauncherEngine;

    suite!(|_: &Scenario| {
        let mut config = crate::support::operated("sglang", &[]);
        config.kv_block_size = NonZeroU32::new(16);
        LauncherEngine::new(config)
    });
}

mod trtllm {
    use genset_conformance::{Scenario, suite};
    use genset_engine_launcher::LauncherEngine;

    suite!(|_: &Scenario| LauncherEngine::new(crate::support::config("trtllm", &[])));
}
