"""The servers: how each is started behind Genset, how it is called directly, and what it cannot do."""

import os

from genset import ask

# Questions that do not apply to a server with text input.
OF_TOKENS = (
    "the server's own answers",
    "completions by token ids, two in one",
    "stop_token_ids",
    "log probabilities equal the server's",
    "guided_regex",
    "a tool that must be called",
    "a prompt of the whole context",
)


class Kind:
    """The properties that all servers have."""

    # The time limit of its start, in seconds.
    start = 900
    # The time limit for noticing its death, or that of its part, in seconds.
    death = 60
    # The names of the questions that it refuses.
    refused = ()
    # The path of the model file within the model's folder.
    file = ""
    # The name of an inner process whose death the server survives for a while.
    part = None
    # Its extra arguments.
    extra = None
    # Its other command-line arguments.
    words = ()
    # Whether its token ids are known.
    has_tokens = True
    # Whether it serves LoRA adapters.
    has_adapters = False
    # Whether it takes chats with images, and returns log probabilities for them.
    has_images = False
    rates_chats = False
    # Whether it supports operations.
    is_operated = False
    # Whether its prefix cache can be cleared during an answer.
    clears_beside = False
    # Whether an answer with a JSON schema ends: some servers allow endless white space.
    ends_json = True

    def __init__(self, args):
        self.args = args

    @property
    def env(self):
        return {"HF_HUB_OFFLINE": "1", "PATH": f"{self.args.bin}:{os.environ['PATH']}"}

    def operated(self, _profiles):
        """Additional arguments and environment for operations."""
        return {}, {}

    @property
    def model(self):
        return os.path.join(self.args.model, self.file) if self.file else self.args.model

    def running(self, port, key):
        """The number of requests that run in the server."""
        text = ask(port, "/metrics", key=key)
        values = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(self.gauge)]
        assert values, f"the server's metrics have no {self.gauge}"
        return sum(map(float, values))


class Vllm(Kind):
    out = "vllm"
    part = "VLLM::EngineCore"
    extra = {"enforce_eager": True, "dtype": "float32", "max_model_len": 512}
    words = ("--kv-cache-block-size", "32")
    gauge = "vllm:num_requests_running"
    has_adapters = True
    has_images = True
    rates_chats = True
    ends_json = False
    is_operated = True
    clears_beside = True
    sleep_setting = "enable-sleep-mode"

    def operated(self, profiles):
        profiler = {"profiler": "torch", "torch_profiler_dir": profiles}
        env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
        return {"profiler-config": profiler, "enable-lora": True}, env

    @property
    def env(self):
        return {**super().env, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}

    def text(self, port, key, ids, max_tokens, model=None):
        name = model or ask(port, "/v1/models", key=key)["data"][0]["id"]
        body = {"model": name, "prompt": ids, "max_tokens": max_tokens, "temperature": 0}
        return ask(port, "/v1/completions", body, key)["choices"][0]["text"]

    def logprob(self, port, key, ids):
        name = ask(port, "/v1/models", key=key)["data"][0]["id"]
        body = {"model": name, "prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 1}
        return ask(port, "/v1/completions", body, key)["choices"][0]["logprobs"]["token_logprobs"][0]


class Llama(Kind):
    """llama-server with token ids."""

    out = "llamacpp"
    file = "tiny-chat-q8_0.gguf"
    start = 120
    refused = ("guided_regex",)

    @property
    def words(self):
        return ("--model-config", self.args.model, "--server-cmd", os.path.join(self.args.bin, "llama-server"))

    def text(self, port, key, ids, max_tokens):
        body = {"prompt": ids, "n_predict": max_tokens, "temperature": 0}
        return ask(port, "/completion", body, key)["content"]

    def logprob(self, port, key, ids):
        body = {"prompt": ids, "n_predict": 1, "temperature": 0, "n_probs": 1}
        return ask(port, "/completion", body, key)["completion_probabilities"][0]["logprob"]

    def running(self, port, key):
        return sum(slot["is_processing"] for slot in ask(port, "/slots", key=key))


class LlamaText(Llama):
    """llama-server with text."""

    has_tokens = False
    refused = (*OF_TOKENS, "min_tokens")

    @property
    def words(self):
        return super().words[2:]


class Sglang(Kind):
    out = "sglang"
    part = "sglang::scheduler"
    # Its default blocks of one token are not published.
    words = ("--kv-cache-block-size", "16")
    gauge = "sglang:num_running_reqs"
    refused = ("seed",)
    has_images = True
    ends_json = False
    is_operated = True
    sleep_setting = "enable-memory-saver"
    extra = {
        "device": "cpu",
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "disable-overlap-schedule": True,
        "mem-fraction-static": 0.1,
        "max-total-tokens": 8192,
        "disable-cuda-graph": True,
        "enable-metrics": True,
    }

    def operated(self, profiles):
        return {}, {"SGLANG_TORCH_PROFILER_DIR": profiles}

    @property
    def env(self):
        return {**super().env, "SGLANG_USE_CPU_ENGINE": "1"}

    def text(self, port, key, ids, max_tokens):
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": max_tokens, "temperature": 0}}
        return ask(port, "/generate", body, key)["text"]

    def logprob(self, port, key, ids):
        params = {"max_new_tokens": 1, "temperature": 0}
        body = {"input_ids": ids, "sampling_params": params, "return_logprob": True}
        return ask(port, "/generate", body, key)["meta_info"]["output_token_logprobs"][0][0]


KINDS = {"vllm": Vllm, "llamacpp": Llama, "llamacpp-text": LlamaText, "sglang": Sglang}
