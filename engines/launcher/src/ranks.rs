//! [`Ranks`]: the data-parallel ranks of a server, and whether a request may select one.
//!
//! If a server reports its ranks, that counts. Otherwise its start options give the number of ranks, or it is unknown. If it is
//! unknown, a request that selects a rank is refused, even rank 0, since it is unknown which rank would serve it.
//!
//! # Source
//! vLLM 0.32.0: `vllm/engine/arg_utils.py` (the flags), `v1/metrics/loggers.py` (a label for each rank),
//! `entrypoints/generate/base/serving.py` (`X-data-parallel-rank`). SGLang 0.5.23: `runtime_context.py` (`num_dp_ranks_of`),
//! `managers/io_struct.py` (`routed_dp_rank`). TensorRT-LLM has ranks with attention data parallelism, but its API cannot
//! select one.

use genset_backend_common::{EngineError, RequestField};
use serde_json::Value;

use crate::command::word;
use crate::config::LauncherConfig;
use crate::dialect::Dialect;
use crate::extra::{ExtraArgs, spelled};

/// vLLM's flags for the number of ranks.
const VLLM_SIZE: [&str; 2] = ["--data-parallel-size", "-dp"];

/// vLLM's flags with which the server's ranks are not numbered from 0, so that requests cannot select them.
const VLLM_PARTS: [&str; 10] = [
    "--data-parallel-rank",
    "-dpn",
    "--data-parallel-start-rank",
    "-dpr",
    "--data-parallel-hybrid-lb",
    "-dph",
    "--data-parallel-external-lb",
    "-dpe",
    "--data-parallel-multi-port-external-lb",
    "-dpm",
];

/// SGLang's flags for ranks.
const SGLANG_SIZE: [&str; 4] = [
    "--dp-size",
    "--data-parallel-size",
    "--dp",
    "--attn-dp-size",
];

/// TensorRT-LLM's setting for ranks, and the config file flags that may contain it.
const TRTLLM_SIZE: [&str; 3] = [
    "--enable-attention-dp",
    "--extra-llm-api-options",
    "--config",
];

/// The ranks of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ranks {
    /// This number of ranks, from 0; a request may select one.
    Known(u32),
    /// A request may not select one, for this reason.
    Unknown(String),
}

impl Ranks {
    /// The ranks of a server with this config that reports `told`.
    pub(crate) fn of(config: &LauncherConfig, dialect: Dialect, told: Option<u32>) -> Self {
        let unknown = |name: &str, why: &str| Self::Unknown(format!("{why} ({name})"));
        let unless = |flags: &[&str], why: &str| match said(config, flags) {
            Some((name, _)) => unknown(&name, why),
            None => Self::Known(1),
        };
        match dialect {
            Dialect::Vllm => match (said(config, &VLLM_PARTS), told.or(vllm_size(config))) {
                (Some((name, _)), _) => unknown(&name, "the server has only some of the ranks"),
                (None, Some(ranks)) => Self::Known(ranks),
                (None, None) => unless(
                    &["--config"],
                    "the server reports no number of ranks, and a file may set one",
                ),
            },
            Dialect::Sglang => match told {
                Some(ranks) => Self::Known(ranks),
                None => unless(
                    &SGLANG_SIZE,
                    "the server does not report how many ranks it has",
                ),
            },
            Dialect::Trtllm => unless(
                &TRTLLM_SIZE,
                "TensorRT-LLM chooses among its ranks by itself: its API takes none",
            ),
            Dialect::LlamaServer | Dialect::LlamaCppPython => Self::Known(1),
        }
    }

    /// The number of ranks that a request may select from.
    pub(crate) fn count(&self) -> u32 {
        match self {
            Self::Known(ranks) => *ranks,
            Self::Unknown(_) => 1,
        }
    }

    /// # Errors
    /// `Unsupported` or `InvalidArgument` for a rank that a request cannot select.
    pub(crate) fn check(&self, rank: Option<u32>) -> Result<(), EngineError> {
        let Some(rank) = rank else { return Ok(()) };
        let field = RequestField::DataParallelRank;
        match self {
            Self::Known(ranks) if rank < *ranks => Ok(()),
            Self::Known(ranks) => Err(EngineError::invalid_argument(
                field,
                format!("must be below {ranks}, the number of ranks that can be named, got {rank}"),
            )),
            Self::Unknown(why) => Err(EngineError::unsupported(
                field,
                format!("no rank can be named: {why}; leave it out"),
            )),
        }
    }
}

/// The number in vLLM's arguments, if given.
pub(crate) fn vllm_size(config: &LauncherConfig) -> Option<u32> {
    said(config, &VLLM_SIZE)?.1.parse().ok()
}

/// The first of these flags that the server receives, and its value. Extra arguments follow the command, so they win.
pub(crate) fn said(config: &LauncherConfig, flags: &[&str]) -> Option<(String, String)> {
    let extra = config.extra.iter().flat_map(ExtraArgs::entries);
    let extra = extra
        .filter(|(_, value)| !value.is_null() && **value != Value::Bool(false))
        .map(|(key, value)| (spelled(key), word(value)));
    let words = config.command.as_deref().unwrap_or_default();
    let command = words
        .iter()
        .enumerate()
        .map(|(at, word)| match word.split_once('=') {
            Some((name, value)) => (name, value.to_owned()),
            None => (
                word.as_str(),
                words.get(at + 1).cloned().unwrap_or_default(),
            ),
        });
    let command = command
        .filter(|(name, _)| name.starts_with('-'))
        .map(|(name, value)| (spelled(name), value));
    extra
        .chain(command)
        .find(|(name, _)| flags.contains(&name.as_str()))
}

#[cfg(test)]
mod tests {
    use genset_backend_common::ErrorKind;

    use super::*;
    use crate::config::ServerInput;

    fn ranks(dialect: Dialect, command: &str, extra: &str, told: Option<u32>) -> Ranks {
        let input = ServerInput::Tokens { vocab_size: None };
        let mut config = LauncherConfig::new(dialect.kind(), "/m", input);
        config.command = Some(command.split(' ').map(str::to_owned).collect());
        config.extra = Some(ExtraArgs::in_test(extra));
        Ranks::of(&config, dialect, told)
    }

    #[test]
    fn every_spelling_of_vllm_is_read() {
        for command in [
            "vllm serve --data-parallel-size 4",
            "vllm serve --data-parallel-size=4",
            "vllm serve --data_parallel_size=4 --seed 1",
            "vllm serve -dp 4",
            "vllm serve -dp=4",
        ] {
            let found = ranks(Dialect::Vllm, command, "{}", None);
            assert_eq!(found, Ranks::Known(4), "{command}");
        }
        for extra in [
            "{\"data_parallel_size\": 4}",
            "{\"--data-parallel-size\": \"4\"}",
            "{\"-dp\": 4}",
        ] {
            let found = ranks(Dialect::Vllm, "vllm serve -dp 2", extra, None);
            assert_eq!(found, Ranks::Known(4), "{extra}");
        }
        // vLLM expands `--dp` to another setting.
        for (command, extra) in [("vllm serve", "{\"dp\": 4}"), ("vllm serve --dp 4", "{}")] {
            assert_eq!(ranks(Dialect::Vllm, command, extra, None), Ranks::Known(1));
        }
    }

    #[test]
    fn a_server_that_tells_is_believed() {
        let vllm = |command, told| ranks(Dialect::Vllm, command, "{}", Some(told));
        assert_eq!(vllm("vllm serve --config a.yaml", 8), Ranks::Known(8));
        assert_eq!(vllm("vllm serve -dp 2", 1), Ranks::Known(1));
        let sglang = ranks(Dialect::Sglang, "sglang", "{\"dp-size\": 4}", Some(2));
        assert_eq!(sglang, Ranks::Known(2));
    }

    #[test]
    fn ranks_that_cannot_be_known_are_refused_and_named() {
        for (dialect, command, extra, told, name) in [
            (
                Dialect::Vllm,
                "vllm serve --config a.yaml",
                "{}",
                None,
                "(--config)",
            ),
            (
                Dialect::Vllm,
                "vllm serve -dp 4 -dpn 1",
                "{}",
                Some(4),
                "(-dpn)",
            ),
            (
                Dialect::Vllm,
                "vllm serve",
                "{\"data-parallel-hybrid-lb\": true}",
                Some(2),
                "(--data-parallel-hybrid-lb)",
            ),
            (
                Dialect::Sglang,
                "sglang --dp-size 2",
                "{}",
                None,
                "(--dp-size)",
            ),
            (
                Dialect::Trtllm,
                "trtllm-serve",
                "{\"enable_attention_dp\": true}",
                None,
                "(--enable-attention-dp)",
            ),
        ] {
            let ranks = ranks(dialect, command, extra, told);
            assert_eq!(ranks.count(), 1);
            let error = ranks.check(Some(0)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert_eq!(error.at().map(|at| at.name()), Some("data_parallel_rank"));
            assert!(error.message().contains(name), "{error}");
            ranks.check(None).unwrap();
        }
    }

    #[test]
    fn servers_without_ranks_have_one() {
        for (dialect, extra) in [
            (Dialect::Trtllm, "{\"enable_attention_dp\": false}"),
            (Dialect::Sglang, "{}"),
            (Dialect::LlamaServer, "{}"),
        ] {
            let one = ranks(dialect, "server", extra, None);
            assert_eq!(one, Ranks::Known(1));
            one.check(Some(0)).unwrap();
            let error = one.check(Some(1)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        }
    }
}
