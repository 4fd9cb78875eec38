//! The launchers' command-line flags.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::str::FromStr;

use genset_backend_common::request::MediaKind;
use genset_backend_common::spelling::none_of;
use serde_json::Value;

/// What a model takes in chats besides text, in the form of `--media`: `image,audio`, or `none`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MediaKinds(pub BTreeSet<MediaKind>);

impl FromStr for MediaKinds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self::default());
        }
        let kinds = text.split(',').map(|name| {
            let kind = MediaKind::from_name(name.trim());
            kind.ok_or_else(|| none_of(name, MediaKind::ALL.map(MediaKind::name)))
        });
        kinds.collect::<Result<_, _>>().map(Self)
    }
}

impl MediaKinds {
    /// Reads the `config.json` of a checkout: a model that sees has a `vision_config`, one that hears an `audio_config`. A
    /// model that also speaks has them in its `thinker_config`.
    #[must_use]
    pub fn of_config(config_json: &[u8]) -> Self {
        let config: Value = serde_json::from_slice(config_json).unwrap_or_default();
        let has = |name: &str| {
            let mut places = [&config, &config["thinker_config"]].into_iter();
            places.any(|place| place[name].is_object())
        };
        let named = [
            (MediaKind::Image, "vision_config"),
            (MediaKind::Audio, "audio_config"),
        ];
        let named = named.into_iter().filter(|(_, name)| has(name));
        Self(named.map(|(kind, _)| kind).collect())
    }
}

/// What is said about a server on the command line.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct LauncherArgs {
    /// GPUs that share each layer of the model, in all [out=vllm, sglang, trtllm]
    #[arg(long, value_name = "GPUS")]
    pub tensor_parallel_size: Option<u32>,
    /// First GPU to use; where the server has no such setting, CUDA_VISIBLE_DEVICES says it [out=vllm, sglang, trtllm, llamacpp]
    #[arg(long, value_name = "GPU")]
    pub base_gpu_id: Option<u32>,
    /// Nodes that run the model together; this one is the leader [out=vllm, sglang]
    #[arg(long, value_name = "NODES")]
    pub num_nodes: Option<u32>,
    /// Rank of this node, which is 0 [out=vllm, sglang]
    #[arg(long, value_name = "RANK")]
    pub node_rank: Option<u32>,
    /// The leader's address as the other nodes reach it [out=vllm, sglang]
    #[arg(long, value_name = "HOST:PORT")]
    pub leader_addr: Option<String>,
    /// Tokens per KV block [out=vllm, sglang]
    #[arg(long, value_name = "TOKENS")]
    pub kv_cache_block_size: Option<NonZeroU32>,
    /// Address of this machine at which the servers of other workers reach this one's KV blocks, for --role prefill and decode
    /// [default: the one that other processes are told] [out=vllm]
    #[arg(long, value_name = "ADDRESS")]
    pub kv_transfer_host: Option<IpAddr>,
    /// JSON or YAML file with settings of the server's own, passed through unchanged, or of the engine's own [out=vllm, sglang,
    /// trtllm, llamacpp, mistralrs, libllama, mocker]
    #[arg(long, value_name = "FILE")]
    pub extra_engine_args: Option<PathBuf>,
    /// Kinds of input in chats beside text: image, audio, both separated by a comma, or none [default: what its config.json
    /// names] [out=vllm, sglang]
    #[arg(long, value_name = "KINDS")]
    pub media: Option<MediaKinds>,
    /// Command that starts the server, in place of the usual one [out=vllm, sglang, trtllm, llamacpp]
    #[arg(long, env = "GENSET_SERVER_CMD", value_name = "COMMAND")]
    pub server_cmd: Option<String>,
    /// How long the server may take until it is healthy, in seconds [default: 1800]
    #[arg(long, value_name = "SECONDS")]
    pub engine_start_timeout: Option<u32>,
}

/// The leader's address in the usage line of the command that ours replaces.
const USUAL_LEADER: &str = "127.0.0.1:9876";

impl LauncherArgs {
    /// Discards values that select nothing: one GPU, the first GPU, one node and its leader. Scripts often pass them
    /// explicitly, even for engines that have no GPUs or nodes.
    pub fn forget_defaults(&mut self) {
        let is_one_node = self.num_nodes.is_none_or(|nodes| nodes == 1);
        self.tensor_parallel_size.take_if(|gpus| *gpus == 1);
        self.base_gpu_id.take_if(|gpu| *gpu == 0);
        self.num_nodes.take_if(|nodes| *nodes == 1);
        self.node_rank.take_if(|rank| *rank == 0);
        self.leader_addr
            .take_if(|address| is_one_node && *address == USUAL_LEADER);
    }

    /// The first flag that was given, for engines that are not servers.
    #[must_use]
    pub fn first_given(&self) -> Option<&'static str> {
        let given = [
            (
                self.tensor_parallel_size.is_some(),
                "--tensor-parallel-size",
            ),
            (self.base_gpu_id.is_some(), "--base-gpu-id"),
            (self.num_nodes.is_some(), "--num-nodes"),
            (self.node_rank.is_some(), "--node-rank"),
            (self.leader_addr.is_some(), "--leader-addr"),
            (self.kv_cache_block_size.is_some(), "--kv-cache-block-size"),
            (self.kv_transfer_host.is_some(), "--kv-transfer-host"),
            (self.extra_engine_args.is_some(), "--extra-engine-args"),
            (self.media.is_some(), "--media"),
            (self.server_cmd.is_some(), "--server-cmd"),
            (
                self.engine_start_timeout.is_some(),
                "--engine-start-timeout",
            ),
        ];
        given
            .into_iter()
            .find_map(|(is_given, flag)| is_given.then_some(flag))
    }
}
