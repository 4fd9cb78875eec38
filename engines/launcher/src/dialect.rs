//! [`Dialect`]: a program that can be started, and the table of its flags. llama.cpp has two programs; the others have one
//! each.
//!
//! # Source
//! The servers' documentation: vLLM 0.18 (`vllm serve --help`), SGLang 0.5.9 (Server Arguments), TensorRT-LLM 1.1
//! (`trtllm-serve`), llama.cpp's `tools/server/README.md` of spring 2026, llama-cpp-python 0.3.16 (`llama_cpp.server`).

use crate::kind::ServerKind;

/// The server program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    Vllm,
    Sglang,
    Trtllm,
    LlamaServer,
    LlamaCppPython,
}

/// How a setting of ours is passed to a program.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Flag {
    /// By the first of these flags; the others are synonyms.
    Named(&'static [&'static str]),
    /// By the variable `CUDA_VISIBLE_DEVICES`: the program uses all GPUs that it sees.
    VisibleDevices,
    /// Not supported; this is the alternative.
    Refused(&'static str),
}

/// How a program receives the key that requests must carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyPlace {
    /// In this environment variable.
    Variable(&'static str),
    /// In a config file, named by this flag.
    File(&'static str),
    /// Not at all: it supports no key.
    Nowhere,
}

/// How a program receives the entries of a file of extra arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExtraStyle {
    /// As `--some-name value`; true becomes `--some-name`, false becomes `--no-some-name`.
    Dashes,
    /// As `--some-name value`; true becomes `--some-name`, false is omitted.
    DashesNoFalse,
    /// As `--some_name value`, including true and false.
    Underscores,
    /// As the whole file, with this flag.
    File(&'static str),
}

/// The flags of a program.
#[derive(Debug)]
pub(crate) struct Flags {
    /// The first arguments.
    pub(crate) words: &'static [&'static str],
    /// The flag for the model; `None` if it is a positional argument.
    pub(crate) model: Option<&'static str>,
    pub(crate) context: &'static [&'static str],
    pub(crate) tensor_parallel: Flag,
    pub(crate) base_gpu: Flag,
    pub(crate) num_nodes: Flag,
    pub(crate) node_rank: Flag,
    /// The leader's address: `HOST:PORT`, or the host alone if there is a flag for the port.
    pub(crate) leader: Flag,
    pub(crate) leader_port: Option<&'static [&'static str]>,
    pub(crate) kv_block_size: Flag,
    pub(crate) key: KeyPlace,
    /// The program's names of settings that we set ourselves, besides host, port and model.
    pub(crate) reserved: &'static [&'static str],
    /// The program's names of settings that would break our parsing or have no effect, each with the alternative.
    pub(crate) refused: &'static [(&'static str, &'static str)],
    /// Defaults, unless the extra arguments override them.
    pub(crate) defaults: &'static [(&'static str, Option<&'static str>)],
    pub(crate) extra: ExtraStyle,
}

const LLAMA_SPLITS: &str = "llama.cpp splits a model over the GPUs that it sees; set CUDA_VISIBLE_DEVICES, or tensor-split in \
                            --extra-engine-args";
const MPI_NODES: &str = "start genset under mpirun or trtllm-llmapi-launch, which know the nodes";
const ONE_NODE: &str = "it runs on one node";
const CALLS_STAY: &str = "SGLang would take calls of tools out of the text, where genset looks for them; leave it out, and name the \
                          parser with --tool-parser";
const REASONING_STAYS: &str = "llama-server would take the reasoning out of the text, and genset, which looks for it there, would lose it; \
                               leave it out, and name the parser with --reasoning-parser";
const NEVER_IDLE: &str = "llama-server would never sleep, for it is asked for its metrics each second and now and then for an \
                          answer; leave it out";

const UNREACHABLE: &str = "genset asks the server by plain HTTP, at a port of the loopback interface, and would wait for it in vain; leave \
                           it out (clients get TLS from genset, with --http-tls-cert)";

const NAMED_BY_US: &str = "clients ask genset for the model, and genset asks the server for its path; leave it out, and name the model with \
                           --model-name";

const VLLM: Flags = Flags {
    words: &["serve"],
    model: None,
    context: &["max-model-len"],
    tensor_parallel: Flag::Named(&["tensor-parallel-size", "tp"]),
    base_gpu: Flag::VisibleDevices,
    num_nodes: Flag::Named(&["nnodes"]),
    node_rank: Flag::Named(&["node-rank"]),
    leader: Flag::Named(&["master-addr"]),
    leader_port: Some(&["master-port"]),
    kv_block_size: Flag::Named(&["block-size"]),
    key: KeyPlace::Variable("VLLM_API_KEY"),
    reserved: &["api-key"],
    refused: &[
        ("served-model-name", NAMED_BY_US),
        ("ssl-certfile", UNREACHABLE),
        ("ssl-keyfile", UNREACHABLE),
        ("uds", UNREACHABLE),
        ("headless", UNREACHABLE),
    ],
    defaults: &[
        ("enable-prompt-tokens-details", None),
        ("uvicorn-log-level", Some("warning")),
    ],
    extra: ExtraStyle::Dashes,
};

const SGLANG: Flags = Flags {
    words: &["-m", "sglang.launch_server"],
    model: Some("model-path"),
    context: &["context-length"],
    tensor_parallel: Flag::Named(&["tp-size", "tensor-parallel-size", "tp"]),
    base_gpu: Flag::Named(&["base-gpu-id"]),
    num_nodes: Flag::Named(&["nnodes"]),
    node_rank: Flag::Named(&["node-rank"]),
    leader: Flag::Named(&["dist-init-addr"]),
    leader_port: None,
    kv_block_size: Flag::Named(&["page-size"]),
    // No variable sets its key.
    key: KeyPlace::File("config"),
    reserved: &["api-key", "config"],
    refused: &[
        ("tool-call-parser", CALLS_STAY),
        ("served-model-name", NAMED_BY_US),
        ("ssl-certfile", UNREACHABLE),
        ("ssl-keyfile", UNREACHABLE),
    ],
    defaults: &[
        ("log-level-http", Some("warning")),
        ("enable-metrics", None),
    ],
    extra: ExtraStyle::DashesNoFalse,
};

const TRTLLM: Flags = Flags {
    words: &[],
    model: None,
    context: &["max_seq_len"],
    tensor_parallel: Flag::Named(&["tp_size", "tensor_parallel_size"]),
    base_gpu: Flag::VisibleDevices,
    num_nodes: Flag::Refused(MPI_NODES),
    node_rank: Flag::Refused(MPI_NODES),
    leader: Flag::Refused(MPI_NODES),
    leader_port: None,
    kv_block_size: Flag::Refused(
        "set kv_cache_config: {tokens_per_block: N} in --extra-engine-args",
    ),
    key: KeyPlace::Nowhere,
    reserved: &[],
    refused: &[],
    defaults: &[],
    extra: ExtraStyle::File("extra_llm_api_options"),
};

const LLAMA_SERVER: Flags = Flags {
    words: &[],
    model: Some("model"),
    context: &["ctx-size"],
    tensor_parallel: Flag::Refused(LLAMA_SPLITS),
    base_gpu: Flag::VisibleDevices,
    num_nodes: Flag::Refused(ONE_NODE),
    node_rank: Flag::Refused(ONE_NODE),
    leader: Flag::Refused(ONE_NODE),
    leader_port: None,
    kv_block_size: Flag::Refused("llama.cpp has no KV blocks"),
    key: KeyPlace::Variable("LLAMA_API_KEY"),
    reserved: &["api-key", "api-key-file"],
    refused: &[
        ("sleep-idle-seconds", NEVER_IDLE),
        ("reasoning-format", REASONING_STAYS),
        ("ssl-cert-file", UNREACHABLE),
        ("ssl-key-file", UNREACHABLE),
        ("api-prefix", UNREACHABLE),
    ],
    // Keeps reasoning in the text, where our own parsers look for it.
    defaults: &[("reasoning-format", Some("none")), ("metrics", None)],
    extra: ExtraStyle::Dashes,
};

const LLAMA_CPP_PYTHON: Flags = Flags {
    words: &["-m", "llama_cpp.server"],
    context: &["n_ctx"],
    // Otherwise a second request cuts the first one short.
    defaults: &[("interrupt_requests", Some("false"))],
    // Its settings are fields of pydantic's `BaseSettings`, which reads fields without an argument from the environment.
    key: KeyPlace::Variable("API_KEY"),
    refused: &[("ssl-certfile", UNREACHABLE), ("ssl-keyfile", UNREACHABLE)],
    extra: ExtraStyle::Underscores,
    ..LLAMA_SERVER
};

impl Dialect {
    /// The program of `kind` to look for first.
    pub(crate) fn first_of(kind: ServerKind) -> Self {
        match kind {
            ServerKind::Vllm => Self::Vllm,
            ServerKind::Sglang => Self::Sglang,
            ServerKind::Trtllm => Self::Trtllm,
            ServerKind::LlamaCpp => Self::LlamaServer,
        }
    }

    pub(crate) fn kind(self) -> ServerKind {
        match self {
            Self::Vllm => ServerKind::Vllm,
            Self::Sglang => ServerKind::Sglang,
            Self::Trtllm => ServerKind::Trtllm,
            Self::LlamaServer | Self::LlamaCppPython => ServerKind::LlamaCpp,
        }
    }

    pub(crate) fn flags(self) -> &'static Flags {
        match self {
            Self::Vllm => &VLLM,
            Self::Sglang => &SGLANG,
            Self::Trtllm => &TRTLLM,
            Self::LlamaServer => &LLAMA_SERVER,
            Self::LlamaCppPython => &LLAMA_CPP_PYTHON,
        }
    }

    /// The program's name; `None` for a module that Python runs.
    pub(crate) fn program(self) -> Option<&'static str> {
        match self {
            Self::Vllm => Some("vllm"),
            Self::Trtllm => Some("trtllm-serve"),
            Self::LlamaServer => Some("llama-server"),
            Self::Sglang | Self::LlamaCppPython => None,
        }
    }

    /// A path that returns 200 once the model is loaded. `llama_cpp.server` has no health path, and its other paths wait while
    /// the model is busy.
    pub(crate) fn health_path(self) -> &'static str {
        match self {
            Self::Vllm | Self::Sglang | Self::Trtllm | Self::LlamaServer => "/health",
            Self::LlamaCppPython => "/openapi.json",
        }
    }

    /// A path that returns 200 if the server is alive, without generating anything: SGLang's own health check generates a
    /// token. For SGLang, the scheduler answers this path; it does not answer while it moves weights.
    pub(crate) fn resting_health_path(self) -> &'static str {
        match self {
            Self::Sglang => "/server_info",
            Self::Vllm | Self::Trtllm | Self::LlamaServer | Self::LlamaCppPython => {
                self.health_path()
            }
        }
    }
}
