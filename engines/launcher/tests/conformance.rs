//! Engines on stand-in servers keep the contract: all of the conformance kit, one test a check.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    unreachable_pub,
    dead_code,
    reason = "a test fails by panicking, and no test file needs all of the support"
)]

mod support;

mod vllm {
    use genset_conformance::{Scenario, suite};
    use genset_engine_launcher::LauncherEngine;

    suite!(|_: &Scenario| LauncherEngine::new(crate::support::operated(
        "vllm",
        &["--block-size=32"]
    )));
}

mod vllm_of_two_ranks {
    use genset_conformance::{Scenario, suite};
    use genset_engine_launcher::LauncherEngine;

    const FLAGS: [&str; 3] = ["-dp", "2", "--block-size=32"];

    suite!(|_: &Scenario| LauncherEngine::new(crate::support::config("vllm", &FLAGS)));
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
