//! [`ServerKind`]: the servers that can be launched.

use std::fmt;

/// A server of another project.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ServerKind {
    /// vLLM, started by `vllm serve`.
    Vllm,
    /// SGLang, started by `python3 -m sglang.launch_server`.
    Sglang,
    /// TensorRT-LLM, started by `trtllm-serve`.
    Trtllm,
    /// llama.cpp, started by `llama-server`, or else by `python3 -m llama_cpp.server`.
    LlamaCpp,
}

impl ServerKind {
    /// Every kind.
    pub const ALL: [Self; 4] = [Self::Vllm, Self::Sglang, Self::Trtllm, Self::LlamaCpp];

    /// The name on a command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::Trtllm => "trtllm",
            Self::LlamaCpp => "llamacpp",
        }
    }

    /// The project's name for itself.
    #[must_use]
    pub const fn title(self) -> &'static str {
        match self {
            Self::Vllm => "vLLM",
            Self::Sglang => "SGLang",
            Self::Trtllm => "TensorRT-LLM",
            Self::LlamaCpp => "llama.cpp",
        }
    }

    /// The command that installs the server.
    #[must_use]
    pub const fn install_line(self) -> &'static str {
        match self {
            Self::Vllm => "pip install vllm",
            Self::Sglang => "pip install 'sglang[all]'",
            Self::Trtllm => "pip install tensorrt_llm --extra-index-url https://pypi.nvidia.com",
            Self::LlamaCpp => "pip install 'llama-cpp-python[server]'",
        }
    }
}

impl fmt::Display for ServerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
