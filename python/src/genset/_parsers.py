"""Names of parsers, as `genset run --tool-parser` and `--reasoning-parser` know them. Frontend tests compare them with its tables."""

from __future__ import annotations

TOOL_PARSERS = (
    "apertus", "cohere", "deepseek_v3", "deepseek_v31", "deepseek_v32", "dots", "functiongemma", "gemma3", "gemma4", "gigachat3",
    "gigachat35", "glm45", "granite", "granite-20b-fc", "harmony", "hermes", "hunyuan_a13b", "hy_v3", "hy_v4", "internlm", "k2_horizon",
    "kimi_k2", "kimi_k3", "lfm2", "llama3_function", "llama3_json", "llama4_pythonic", "longcat", "longcat_flash_lite", "minimax_m2",
    "minimax_m3", "mistral", "nemotron_json", "olmo3", "phi4", "pythonic", "qwen3_coder", "seed_oss", "solar_open2", "step3", "xlam",
    "none",
)
TOOL_ALIASES = (
    "apertus2509", "cohere_command3", "cohere_command4", "deepseek", "deepseek-v4", "deepseek_v3_1", "deepseek_v3_2", "deepseek_v4",
    "deepseekv3", "deepseekv31", "deepseekv32", "deepseekv4", "ernie45", "gemma-4", "glm", "glm47", "gpt-oss", "gpt_oss", "granite4",
    "hunyuan", "interns1", "jamba", "kimi", "ling3", "llama", "llama3", "llama4_json", "mimo", "minimax", "minimax-m2", "minimax-m3",
    "minimax-m3-nom", "minimax_m3_nom", "nemotron", "nemotron_deci", "nemotron_nano", "openai", "phi4_mini_json", "poolside_v1", "qwen",
    "qwen25", "qwen3_xml", "spark25", "step3p5", "trinity",
)
"""Aliases from other servers."""
REASONING_PARSERS = (
    "apertus", "cohere", "deepseek_r1", "deepseek_v31", "ernie45", "gemma4", "glm45", "granite", "granite33", "harmony", "hunyuan",
    "hunyuan_a13b", "hy_v3", "hy_v4", "kimi", "kimi_k2", "kimi_k3", "minimax_m2", "minimax_m2_append_think", "minimax_m3", "mistral",
    "nemotron", "olmo3", "phi4", "qwen3", "qwen3_thinking", "seed_oss", "solar_open2", "step3", "none",
)
REASONING_ALIASES = (
    "apertus2509", "basic", "cohere_command3", "cohere_command4", "deepseek", "deepseek-r1", "deepseek-v3", "deepseek-v4", "deepseek_v3",
    "deepseek_v3_1", "deepseek_v3_2", "deepseek_v4", "deepseekv4", "gemma-4", "glm", "glm47", "gpt-oss", "gpt_oss", "holo2",
    "interns1", "kimi_k25", "mimo", "minimax", "minimax-append-think", "minimax-m3", "minimax_append_think", "nano_v3", "nemotron3",
    "nemotron_3", "nemotron_deci", "nemotron_nano", "nemotron_v3", "openai_gptoss", "poolside_v1", "qwen3-thinking", "step3p5",
)
"""Aliases from other servers."""
