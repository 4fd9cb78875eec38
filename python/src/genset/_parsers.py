"""Names of parsers, as `genset run --tool-parser` and `--reasoning-parser` know them. Frontend tests compare them with its tables."""

from __future__ import annotations

TOOL_PARSERS = (
    "cohere", "deepseek_v3", "deepseek_v31", "deepseek_v32", "functiongemma", "gemma4", "glm45", "granite", "harmony", "hermes",
    "hunyuan_a13b", "internlm", "kimi_k2", "lfm2", "llama3_function", "llama3_json", "llama4_pythonic", "minimax_m2", "mistral",
    "olmo3", "phi4", "pythonic", "qwen3_coder", "seed_oss", "step3", "none",
)
TOOL_ALIASES = (
    "cohere_command3", "deepseek", "deepseek_v4", "glm", "glm47", "gpt_oss", "jamba", "kimi", "llama", "llama4_json", "minimax",
    "nemotron", "openai", "phi4_mini_json", "qwen", "qwen3_xml",
)
"""Aliases from other servers."""
REASONING_PARSERS = (
    "cohere", "deepseek_r1", "deepseek_v31", "ernie45", "gemma4", "glm45", "granite", "granite33", "harmony", "hunyuan_a13b",
    "kimi", "kimi_k2", "minimax_m2", "mistral", "nemotron", "olmo3", "phi4", "qwen3", "seed_oss", "step3", "none",
)
REASONING_ALIASES = (
    "cohere_command3", "deepseek", "deepseek_v3", "glm", "gpt_oss", "minimax", "openai_gptoss", "qwen3_thinking",
)
"""Aliases from other servers."""
