//! [`Figures`]: the load that a server reports. Pure; nothing that a server sends is trusted.
//!
//! # Source
//! vLLM 0.32.0, "Production Metrics" (`kv_cache_usage_perc` was `gpu_cache_usage_perc` before), with a series per rank.
//! llama.cpp, `tools/server/README.md` (`/metrics`). SGLang 0.5.23, `entrypoints/v1_loads.py` and `managers/io_struct.py`
//! (`GetLoadsReqOutput`): the ranks' current answers, while its metrics are from the last logged step. `realtime_tokens_total`
//! counts parts of a prompt, vLLM's counters only whole prompts; llama.cpp counts calls of `llama_decode`.

use serde::Deserialize;

use crate::exposition::{count, samples};

/// The share of KV blocks in use, under the names that vLLM has given it.
const VLLM_USAGE: [&str; 2] = ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"];

/// Counters that increase only when a server has computed a step.
const COMPUTED: [&str; 4] = [
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "sglang:realtime_tokens_total",
    "llamacpp:n_decode_total",
];

/// A server's reported load, summed over all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Figures {
    /// The number of requests that wait inside the server.
    pub(crate) waiting: u32,
    /// `None` if the server does not report it.
    pub(crate) blocks: Option<KvBlocks>,
}

/// The KV blocks of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KvBlocks {
    pub(crate) used: u64,
    pub(crate) total: u64,
}

impl KvBlocks {
    /// All blocks in use.
    pub(crate) fn full(total: u64) -> Self {
        Self { used: total, total }
    }

    /// From a share of all blocks; a share above 0 is at least one block.
    fn of_share(share: f64, total: u64) -> Self {
        let all = u32::try_from(total).map_or(f64::from(u32::MAX), f64::from);
        let used = count(share.clamp(0.0, 1.0) * all).unwrap_or(0);
        let least = u64::from(share > 0.0);
        Self {
            used: used.max(least).min(total),
            total,
        }
    }

    /// The number of blocks for `used` of `max` tokens.
    fn of_tokens(used: u64, max: u64, total: u64) -> Option<Self> {
        let tokens = u128::from(used.min(max)) * u128::from(total);
        let blocks = (max > 0).then(|| tokens.div_ceil(u128::from(max)))?;
        Some(Self {
            used: u64::try_from(blocks).unwrap_or(total),
            total,
        })
    }
}

impl Figures {
    /// From vLLM's metrics; `None` if they are missing, as with `--disable-log-stats`.
    pub(crate) fn of_vllm(metrics: &str) -> Option<Self> {
        let usage = VLLM_USAGE.iter().find_map(|name| mean(metrics, name));
        let mut told = samples(metrics, "vllm:cache_config_info");
        let total: Option<u64> = told.find_map(|rank| rank.label("num_gpu_blocks")?.parse().ok());
        Some(Self {
            waiting: sum(metrics, "vllm:num_requests_waiting")?,
            blocks: usage
                .zip(total)
                .map(|(share, total)| KvBlocks::of_share(share, total)),
        })
    }

    /// From llama-server's metrics. It has no KV blocks.
    pub(crate) fn of_llama(metrics: &str) -> Option<Self> {
        Some(Self {
            waiting: sum(metrics, "llamacpp:requests_deferred")?,
            blocks: None,
        })
    }
}

/// How much a server has computed, in its own unit: an increase means a step. `None` if the server does not report it.
pub(crate) fn computed(metrics: &str) -> Option<f64> {
    let counts = COMPUTED.iter().flat_map(|name| values(metrics, name));
    counts.reduce(|sum, count| sum + count)
}

/// The finite values with one name.
fn values<'a>(metrics: &'a str, name: &'a str) -> impl Iterator<Item = f64> {
    let values = samples(metrics, name).map(|sample| sample.value);
    values.filter(|value| value.is_finite())
}

/// The sum over all ranks; `None` if no rank reports it.
fn sum(metrics: &str, name: &str) -> Option<u32> {
    let sum = values(metrics, name).reduce(|sum, value| sum + value)?;
    Some(u32::try_from(count(sum)?).unwrap_or(u32::MAX))
}

/// The mean over all ranks; `None` if no rank reports it.
fn mean(metrics: &str, name: &str) -> Option<f64> {
    let both = values(metrics, name).map(|value| (value, 1.0));
    let (sum, ranks) = both.reduce(|(sum, ranks), (value, one)| (sum + value, ranks + one))?;
    Some(sum / ranks)
}

/// The fields of SGLang's `/v1/loads` that we use.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct RankLoads {
    loads: Vec<RankLoad>,
}

/// Of one data-parallel rank.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RankLoad {
    num_waiting_reqs: Option<u64>,
    num_used_tokens: Option<u64>,
    max_total_num_tokens: Option<u64>,
}

impl RankLoads {
    /// `None` if there is no rank, or one does not report its waiting requests. The blocks are scaled to the server's total
    /// number, if known.
    pub(crate) fn figures(&self, total_blocks: Option<u64>) -> Option<Figures> {
        let waiting = self.sum(|rank| rank.num_waiting_reqs)?;
        let used = self.sum(|rank| rank.num_used_tokens);
        let tokens = used.zip(self.sum(|rank| rank.max_total_num_tokens));
        let blocks = tokens.zip(total_blocks);
        Some(Figures {
            waiting: u32::try_from(waiting).unwrap_or(u32::MAX),
            blocks: blocks.and_then(|((used, max), total)| KvBlocks::of_tokens(used, max, total)),
        })
    }

    fn sum(&self, of: impl Fn(&RankLoad) -> Option<u64>) -> Option<u64> {
        let mut told = self.loads.iter().map(of);
        let first = told.next()??;
        told.try_fold(first, |sum, value| Some(sum.saturating_add(value?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VLLM: &str = "\
        # TYPE vllm:num_requests_waiting gauge\n\
        vllm:num_requests_waiting{engine=\"0\",model_name=\"m\"} 3.0\n\
        vllm:num_requests_waiting{engine=\"1\",model_name=\"m\"} 1.0\n\
        vllm:num_requests_waiting_by_reason{engine=\"0\",reason=\"capacity\"} 9.0\n\
        vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"m\"} 0.5\n\
        vllm:kv_cache_usage_perc{engine=\"1\",model_name=\"m\"} 0.25\n\
        vllm:cache_config_info{engine=\"0\",num_gpu_blocks=\"4096\"} 1.0\n\
        vllm:cache_config_info{engine=\"1\",num_gpu_blocks=\"4096\"} 1.0\n";

    fn blocks(used: u64, total: u64) -> Option<KvBlocks> {
        Some(KvBlocks { used, total })
    }

    #[test]
    fn the_ranks_of_vllm_count_together() {
        let read = Figures::of_vllm(VLLM).unwrap();
        assert_eq!((read.waiting, read.blocks), (4, blocks(1536, 4096)));
        let older = VLLM.replace("kv_cache_usage", "gpu_cache_usage");
        assert_eq!(Figures::of_vllm(&older), Some(read));
        let untold = Figures::of_vllm("vllm:num_requests_waiting 2.0\n");
        assert_eq!(
            untold.map(|read| (read.waiting, read.blocks)),
            Some((2, None))
        );
        // A server without statistics still reports the size of its cache.
        assert_eq!(
            Figures::of_vllm("vllm:cache_config_info{num_gpu_blocks=\"4\"} 1.0\n"),
            None
        );
    }

    #[test]
    fn what_was_computed_is_counted_of_all_ranks() {
        let vllm = "vllm:prompt_tokens_total{engine=\"0\"} 40.0\n\
            vllm:prompt_tokens_created{engine=\"0\"} 1.7e+09\n\
            vllm:generation_tokens_total{engine=\"0\"} 2.0\n\
            vllm:generation_tokens_total{engine=\"1\"} 3.0\n";
        assert_eq!(computed(vllm), Some(45.0));
        let sglang = "sglang:realtime_tokens_total{mode=\"prefill_compute\"} 8192.0\n\
            sglang:realtime_tokens_total{mode=\"decode\"} 40.0\n";
        assert_eq!(computed(sglang), Some(8232.0));
        assert_eq!(computed("llamacpp:n_decode_total 7\n"), Some(7.0));
        assert_eq!(computed(VLLM), None);
    }

    #[test]
    fn what_is_no_count_is_no_load() {
        for value in ["NaN", "-1", "+Inf", "1e300", "many"] {
            let metrics =
                format!("vllm:num_requests_waiting {value}\nllamacpp:requests_deferred {value}\n");
            assert_eq!(Figures::of_vllm(&metrics), None, "{value}");
            assert_eq!(Figures::of_llama(&metrics), None, "{value}");
        }
        let llama = Figures::of_llama("llamacpp:requests_deferred 5\n").unwrap();
        assert_eq!((llama.waiting, llama.blocks), (5, None));
    }

    #[test]
    fn a_share_is_of_whole_blocks_and_never_more_than_there_are() {
        for (share, used) in [
            (0.0, 0),
            (0.000_001, 1),
            (0.5, 50),
            (1.0, 100),
            (7.0, 100),
            (-1.0, 0),
        ] {
            assert_eq!(
                Some(KvBlocks::of_share(share, 100)),
                blocks(used, 100),
                "{share}"
            );
        }
        assert_eq!(Some(KvBlocks::of_share(0.5, 0)), blocks(0, 0));
        assert_eq!(Some(KvBlocks::of_share(f64::NAN, 100)), blocks(0, 100));
    }

    #[test]
    fn the_ranks_of_sglang_count_together() {
        let figures = |text: &str, total| {
            serde_json::from_str::<RankLoads>(text)
                .unwrap()
                .figures(total)
        };
        let two = r#"{"version": "0.5.23", "loads": [
            {"dp_rank": 0, "num_running_reqs": 2, "num_waiting_reqs": 1, "num_used_tokens": 33, "max_total_num_tokens": 1600, "token_usage": 0.02},
            {"dp_rank": 1, "num_running_reqs": 0, "num_waiting_reqs": 2, "num_used_tokens": 0, "max_total_num_tokens": 1600}]}"#;
        let read = figures(two, Some(200)).unwrap();
        assert_eq!((read.waiting, read.blocks), (3, blocks(3, 200)));
        assert_eq!(figures(two, None).map(|read| read.blocks), Some(None));
        for none in [
            "{}",
            r#"{"loads": []}"#,
            r#"{"loads": [{"num_waiting_reqs": null}]}"#,
        ] {
            assert_eq!(figures(none, Some(200)), None, "{none}");
        }
        let odd = r#"{"loads": [{"num_waiting_reqs": 18446744073709551615, "num_used_tokens": 5, "max_total_num_tokens": 0},
            {"num_waiting_reqs": 1, "num_used_tokens": 18446744073709551615, "max_total_num_tokens": 0}]}"#;
        let read = figures(odd, Some(200)).unwrap();
        assert_eq!((read.waiting, read.blocks), (u32::MAX, None));
    }
}
