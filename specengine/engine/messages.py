"""What crosses between a client (server, `AsyncLLM`) and the engine's process: msgspec structs, msgpack-encoded.

Owns the message types and their codecs. Knows nothing about sockets, HTTP or tensors.

    frame = encode(AddRequest("r1", [1, 2, 3], params))
    message = decode_for_engine(frame)
"""

from __future__ import annotations

import time
from typing import Literal

import msgspec

from specengine.outputs import CompletionOutput, Logprob, Provenance, RequestMetrics, RequestOutput
from specengine.sampling_params import SamplingParams


class AddRequest(msgspec.Struct, tag="add"):
    """`arrival_time` is in seconds of the client's `time.monotonic`, which processes of one machine share."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    arrival_time: float = msgspec.field(default_factory=time.monotonic)


class AbortRequests(msgspec.Struct, tag="abort"):
    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache"):
    pass


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Finish within `grace_seconds`, abort what is left, and exit."""

    grace_seconds: float


class EngineInfo(msgspec.Struct, tag="ready"):
    """Sent once, when the engine can serve."""

    target: str
    draft: str | None
    max_model_len: int
    capacity_tokens: int  # tokens that one request may occupy: the KV pool or max_model_len, whichever is smaller
    vocab_size: int
    dtype: str
    device: str
    speculation: str  # the method in use
    num_kv_blocks: int
    block_size: int
    load_seconds: float


class EngineStats(msgspec.Struct):
    """Gauges of now, and counters since the start."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0  # share of blocks in use, 0 to 1
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0  # tokens
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    rolled_back_blocks: int = 0
    steps: int = 0
    drafts_by_source: dict[str, int] = {}  # trees (of at least one node)
    drafted_by_source: dict[str, int] = {}  # nodes
    accepted_by_source: dict[str, int] = {}
    accepted_by_position: list[int] = []  # index 0 is depth 1
    phase_seconds: dict[str, float] = {}  # schedule, draft, verify, process


class RequestDelta(msgspec.Struct):
    """What one step added to one choice of a request."""

    request_id: str
    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[dict[int, Logprob]] | None = None
    provenance: list[Provenance] | None = None
    finish_reason: str | None = None  # set on the last delta of this choice
    stop_reason: int | str | None = None
    finished: bool = False  # the whole request, all choices
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # on the first delta of choice 0
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None  # on the delta with `finished`
    error: str | None = None  # with finish_reason "error"
    error_code: str | None = None


class StepOutputs(msgspec.Struct, tag="outputs"):
    deltas: list[RequestDelta]
    stats: EngineStats


class RequestRefused(msgspec.Struct, tag="refused"):
    """The engine refused a request as it arrived; nothing of it runs."""

    request_id: str
    message: str
    param: str | None = None
    code: str | None = None


class PrefixCacheReset(msgspec.Struct, tag="prefix_cache_reset"):
    done: bool


class EngineFailed(msgspec.Struct, tag="failed"):
    """The engine can't start or died. `kind` names the error: "config" and "load" are for the user to mend."""

    message: str
    kind: Literal["config", "load", "engine"] = "engine"


ToEngine = AddRequest | AbortRequests | ResetPrefixCache | Shutdown
ToClient = EngineInfo | StepOutputs | RequestRefused | PrefixCacheReset | EngineFailed

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_to_client = msgspec.msgpack.Decoder(ToClient)


def encode(message: ToEngine | ToClient) -> bytes:
    return _encoder.encode(message)


def decode_for_engine(frame: bytes) -> ToEngine:
    return _to_engine.decode(frame)


def decode_for_client(frame: bytes) -> ToClient:
    return _to_client.decode(frame)


class OutputCollector:
    """Builds a `RequestOutput` out of its deltas, in any order over choices."""

    def __init__(self, request_id: str, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams):
        outputs = [CompletionOutput(index=i) for i in range(params.n)]
        if params.logprobs is not None:
            for output in outputs:
                output.logprobs = []
                output.cumulative_logprob = 0.0
        if params.return_provenance:
            for output in outputs:
                output.provenance = []
        self.output = RequestOutput(request_id, prompt, prompt_token_ids, outputs)

    def add(self, delta: RequestDelta) -> RequestOutput:
        """Applies one delta and returns the request's output so far (the same object every time)."""
        output, choice = self.output, self.output.outputs[delta.index]
        choice.text += delta.text
        choice.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None and choice.logprobs is not None:
            choice.logprobs.extend(delta.logprobs)
            chosen = (d[t].logprob for d, t in zip(delta.logprobs, delta.token_ids, strict=True))
            choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + sum(chosen)
        if delta.provenance is not None and choice.provenance is not None:
            choice.provenance.extend(delta.provenance)
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason
            choice.stop_reason = delta.stop_reason
        if delta.prompt_logprobs is not None:
            output.prompt_logprobs = delta.prompt_logprobs
        output.num_cached_tokens = max(output.num_cached_tokens, delta.num_cached_tokens)
        if delta.error is not None:
            output.error = delta.error
        if delta.finished:
            output.finished = True
            output.metrics = delta.metrics or output.metrics
        return output
