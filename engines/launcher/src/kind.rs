//! [`ServerKind`]: the servers that can be launched.

genset_backend_common::named! {
    /// A server of another project. Its name is the word for it on a command line.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum ServerKind {
        /// vLLM, started by `vllm serve`.
        Vllm = "vllm",
        /// SGLang, started by `python3 -m sglang.launch_server`.
        Sglang = "sglang",
        /// TensorRT-LLM, started by `trtllm-serve`.
        Trtllm = "trtllm",
        /// llama.cpp, started by `llama-server`, or else by `python3 -m llama_cpp.server`.
        LlamaCpp = "llamacpp",
    }
}

impl ServerKind {
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
