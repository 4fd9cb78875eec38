//! Everything that an engine may declare, and the checks for it. A new declaration does not compile here until the check that
//! tests it is listed.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use genset_backend_common::{
    Capabilities, EngineConfig, Role,
    config::{Deviation, GuidedKind, InputKind, SamplingOption},
};
use genset_conformance::find;

/// A declaration's name and its checks.
type Row = (&'static str, &'static [&'static str]);

/// The fields of a struct with their checks; does not compile if one is missing.
macro_rules! fields {
    ($name:ident { $($field:ident: $checks:expr),* $(,)? }) => {{
        fn _all(declared: $name) {
            let $name { $($field: _),* } = declared;
        }
        let rows: Vec<Row> = vec![$((stringify!($field), $checks)),*];
        rows
    }};
}

/// As `fields`, for the variants of an enum.
macro_rules! variants {
    ($name:ident { $($variant:ident: $checks:expr),* $(,)? }) => {{
        fn _all(declared: $name) {
            match declared {
                $($name::$variant => (),)*
            }
        }
        let rows: Vec<Row> = vec![$((stringify!($variant), $checks)),*];
        rows
    }};
}

fn config() -> Vec<Row> {
    fields!(EngineConfig {
        model: &["LC01", "LC04"],
        context_length_tokens: &["FN04", "FN05", "FN15"],
        vocab_size: &["ER02", "RD01"],
        kv_block_size: &["KV07", "CC17", "MT09"],
        kv_total_blocks: &["KV09", "CC17"],
        max_num_seqs: &["CC13", "MT08"],
        // Only that it is not 0: no answer shows how many tokens a step has, as the guide says.
        max_num_batched_tokens: &["LC01"],
        data_parallel_size: &["MT04", "RK01"],
        capabilities: &["DT09"],
        canary: &["LC01", "MT06"],
    })
}

fn capabilities() -> Vec<Row> {
    fields!(Capabilities {
        inputs: &["US02", "ER08"],
        media: &["ER08"],
        sampling: &["DT09"],
        max_logprobs: &["DT07", "DT13", "DT17", "DT20"],
        // No engine can declare it: a config with it is invalid.
        prompt_logprobs: &["LC01", "DT09"],
        guided: &["GD01", "DT09"],
        whole_bodies: &["WB01"],
        priority: &["CC12"],
        adapters: &["LR01", "ER06"],
        kv_events: &["KV01", "RD05"],
        kv_ranks: &["RK02"],
        resume: &["MG01"],
        resume_as_prompt: &["MG01", "MG02", "DT09"],
        virtual_time: &["LC09"],
        roles: &["DG03", "LC07"],
        deviations: &["DT09", "DT18"],
    })
}

fn values() -> Vec<Row> {
    let sampling = variants!(SamplingOption {
        Temperature: &["DT04", "DT12", "DT20"],
        TopP: &["DT11", "DT19"],
        TopK: &["DT05", "DT19"],
        MinP: &["DT11", "DT19"],
        PresencePenalty: &["DT08", "DT14"],
        FrequencyPenalty: &["DT08", "DT14", "DT18"],
        RepetitionPenalty: &["DT08"],
        LogitBias: &["DT06"],
        Seed: &["DT02", "DT03", "DT15"],
    });
    let guided = variants!(GuidedKind {
        JsonObject: &["GD01", "DT09"],
        JsonSchema: &["GD01"],
        Regex: &["GD02"],
        Choice: &["GD02"],
        Grammar: &["GD09"],
    });
    let inputs = variants!(InputKind {
        Tokens: &["US02"],
        Text: &["US02"],
        Chat: &["US02"],
        Embed: &["EM01", "EM02", "EM03"],
        Score: &["SC01", "SC02"],
    });
    let roles = variants!(Role {
        Aggregated: &["DG03"],
        Prefill: &["DG01"],
        Decode: &["DG02"],
    });
    let deviations = variants!(Deviation {
        BatchVariant: &["CC04", "CC16", "DT10", "DT15", "DT16", "MG01"],
        NoMinTokens: &["DT09"],
        PenaltiesCountPrompt: &["DT18"],
        LogprobsAfterBias: &["DT17"],
    });
    [sampling, guided, inputs, roles, deviations].concat()
}

#[test]
fn every_declaration_has_its_checks() {
    for (name, checks) in [config(), capabilities(), values()].concat() {
        assert!(!checks.is_empty(), "no check is about {name}");
        for id in checks {
            assert!(find(id).is_some(), "{name}: there is no check {id}");
        }
    }
}
