"""An engine's requests and answers, as dictionaries."""

from __future__ import annotations

from typing import Any, TypedDict


class StopConditions(TypedDict, total=False):
    """When to stop. An absent key imposes no condition."""

    max_tokens: int | None
    min_tokens: int
    stop_token_ids: list[int]
    """Tokens that end the answer without being part of it."""
    eos_token_ids: list[int]
    """The same, unless `ignore_eos`."""
    ignore_eos: bool


class SamplingOptions(TypedDict, total=False):
    """How to choose tokens. None leaves the engine's default."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    """At least 1; 4294967295 is no limit."""
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: dict[int, float]
    seed: int | None


class OutputOptions(TypedDict, total=False):
    """What to return beside the tokens: the number of most probable tokens at each position."""

    logprobs: int | None
    prompt_logprobs: int | None


class TransferParams(TypedDict):
    """Where a decode engine finds the KV blocks of a prefill engine."""

    source_worker_id: int
    data: Any


class ScorePair(TypedDict):
    """Two texts as one token sequence, joined as the model's tokenizer does it."""

    token_ids: list[int]
    first_tokens: int
    """The number of leading tokens that are of the first kind (BERT's token type 0); the rest are of the second."""


class GenerateRequest(TypedDict, total=False):
    """One sequence to generate, or one batch of inputs to embed or of pairs to score.

    Exactly one of `token_ids`, `text`, `messages`, `embed` and `score` is present: a kind of input that the engine's config declares.
    """

    model: str
    token_ids: list[int]
    text: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    embed: list[list[int]]
    score: list[ScorePair]
    stop_conditions: StopConditions
    sampling_options: SamplingOptions
    output_options: OutputOptions
    guided_decoding: dict[str, Any] | None
    """One of `json_object` (True), `json_schema`, `regex`, `choice`, `grammar`."""
    priority: int
    cache_salt: str | None
    """The prefix cache it may share: that of requests with the same salt, or of requests without one."""
    adapter: str | None
    transfer: TransferParams | None
    resumed_tokens: int
    data_parallel_rank: int | None
    """The rank that must serve the request, below the config's `data_parallel_size`; None leaves it to the engine."""
    annotations: dict[str, Any]


class TopLogprob(TypedDict):
    """A candidate and the natural logarithm of its probability."""

    token_id: int
    logprob: float


class TokenLogprob(TypedDict, total=False):
    """The log probabilities of one position; `top` best first."""

    logprob: float
    top: list[TopLogprob]


class PredictionTokens(TypedDict):
    """Draft tokens of speculation. Rejected ones are no part of the answer or of its `completion_tokens`."""

    accepted: int
    rejected: int


class PromptTokensDetails(TypedDict, total=False):
    """The details of OpenAI's usage."""

    cached_tokens: int


class CompletionUsage(TypedDict, total=False):
    """Tokens counted for billing. The total is computed from the others."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int | None
    prompt_tokens_details: PromptTokensDetails | None
    """The other place of `cached_tokens`, as in OpenAI's API."""
    predictions: PredictionTokens | None
    """From engines that speculate."""


class GenerateChunk(TypedDict, total=False):
    """A piece of an answer. The last one has `finish_reason`; the generator is closed at its `yield`."""

    token_ids: list[int]
    index: int
    """The choice; always 0, since a request is one sequence."""
    logprobs: list[TokenLogprob]
    """One entry per token, if the request asked for them."""
    text: str
    """From engines that detokenize, together with `token_count`. Beside `token_ids` it is the same tokens: the answer to a request with
    `token_ids` has those, any other has the text."""
    token_count: int
    embeddings: list[list[float]]
    scores: list[float]
    """One per pair of `score`, in order; a larger score means that the texts are more related."""
    finish_reason: str | None
    """`stop`, `length`, `cancelled` or `content_filter`. `eos` and `abort` are accepted too."""
    completion_usage: CompletionUsage
    """Counted from the chunks if absent."""
    stop_token: int
    """The token that ended the answer without being part of it."""
    transfer: TransferParams


class Load(TypedDict, total=False):
    """How busy the engine is. Absent fields are 0, except `kv_total_blocks`, which is then the declared value."""

    running_requests: int
    waiting_requests: int
    kv_used_blocks: int
    kv_total_blocks: int


class Metric(TypedDict, total=False):
    """The current value of one series. `kind` is `gauge`, `counter` or `histogram`; `genset.metrics` makes them."""

    name: str
    help: str
    kind: str
    labels: dict[str, str]
    value: float
    buckets: list[tuple[float, int]]
    """For a histogram: each upper bound with the number of observations above the previous bound. The last bound is `math.inf`."""
    sum: float
    """For a histogram: the sum of all observations."""
