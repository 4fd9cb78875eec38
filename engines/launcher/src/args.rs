//! The launchers' command-line flags.

use std::num::NonZeroU32;
use std::path::PathBuf;

/// What is said about a server on the command line.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct LauncherArgs {
    /// GPUs that share each layer of the model, in all [out=vllm, sglang, trtllm]
    #[arg(long, value_name = "GPUS")]
    pub tensor_parallel_size: Option<u32>,
    /// First GPU to use [out=sglang]
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
    /// JSON or YAML file with settings of the server's own, passed through unchanged [out=vllm, sglang, trtllm, llamacpp]
    #[arg(long, value_name = "FILE")]
    pub extra_engine_args: Option<PathBuf>,
    /// Command that starts the server, in place of the usual one [out=vllm, sglang, trtllm, llamacpp]
    #[arg(long, env = "GENSET_SERVER_CMD", value_name = "COMMAND")]
    pub server_cmd: Option<String>,
    /// How long the server may take until it is healthy, in seconds [default: 1800]
    #[arg(long, value_name = "SECONDS")]
    pub engine_start_timeout: Option<u32>,
}

impl LauncherArgs {
    /// The first flag that was given, for engines that are no servers.
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
            (self.extra_engine_args.is_some(), "--extra-engine-args"),
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
