"""`AsyncLLM`: generation for asyncio, with the engine in a process of its own; imports no torch.

Owns the tokenizer, the way from a prompt to a request, and the life of the engine's process. Knows nothing about HTTP.

    async with AsyncLLM(target="smollm2-135m") as llm:
        async for output in llm.generate("Hello", SamplingParams(max_tokens=32)):
            print(output.outputs[0].text)
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

from specengine import hub
from specengine.config import EngineOptions
from specengine.engine.client import EngineClient, EngineProcess, EngineRunner, RequestStream
from specengine.engine.messages import AddRequest, EngineInfo, EngineStats, OutputCollector
from specengine.errors import EngineError, LoadError, RequestError
from specengine.outputs import RequestOutput
from specengine.sampling_params import SamplingParams
from specengine.tokenizer import Tokenizer

SHUTDOWN_SECONDS = 10.0
INLINE_CHARACTERS = 4096  # longer prompts are tokenized in a thread, so that others' streams don't wait


class AsyncLLM:
    """Takes every engine option by its name; see `EngineOptions`. `start` loads the models.

    Raises ConfigError for a wrong option. For one event loop; use it as a context manager, or call `shutdown`.
    """

    def __init__(self, target: str = "smollm2-135m", draft: str | None = None, **options: Any):
        if "model" in options:
            target = options.pop("model")
        self._set_up(EngineOptions.create(target=target, draft=draft, **options), None)

    @classmethod
    def from_options(cls, options: EngineOptions, runner: EngineRunner | None = None) -> AsyncLLM:
        """From checked options; `runner` runs the engine elsewhere than in a process of its own."""
        llm = cls.__new__(cls)
        llm._set_up(options, runner)
        return llm

    def _set_up(self, options: EngineOptions, runner: EngineRunner | None) -> None:
        self.options = options
        self._client = EngineClient(EngineProcess(options) if runner is None else runner)
        self._tokenizer: Tokenizer | None = None
        self._info: EngineInfo | None = None

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        await self.shutdown()

    async def start(self) -> EngineInfo:
        """Starts the engine's process and waits until it serves.

        Raises ConfigError or LoadError for what the user got wrong, EngineError where the engine can't start otherwise;
        then nothing is left running.
        """
        if self._info is not None:
            return self._info
        try:
            self._client.launch()
            # The engine's process fetches what isn't on this machine; both would do it twice.
            self._tokenizer = await asyncio.to_thread(self._load_tokenizer, fetch=False)
            self._info = await self._client.ready()
            if self._tokenizer is None:
                self._tokenizer = await asyncio.to_thread(self._load_tokenizer, fetch=True)
        except BaseException:
            self._client.kill()
            raise
        return self._info

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise EngineError("the engine was not started; call start() first")
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise EngineError("the engine was not started; call start() first")
        return self._tokenizer

    @property
    def stats(self) -> EngineStats:
        """As of the engine's last step."""
        return self._client.stats

    @property
    def error(self) -> EngineError | None:
        """Why the engine is dead, or None."""
        return self._client.error

    @property
    def generation_defaults(self) -> dict[str, Any]:
        """The model's own sampling values, from generation_config.json (unless `generation_config="none"`)."""
        return {} if self.options.generation_config == "none" else self.tokenizer.generation_defaults

    def default_sampling_params(self) -> SamplingParams:
        return SamplingParams(**self.generation_defaults)

    @property
    def num_queued(self) -> int:
        """Choices that wait for a place in the engine: as it said last, and those sent since that find no free place."""
        stats = self.stats
        since = max(0, self._client.num_choices - stats.num_running - stats.num_waiting)
        if stats.num_waiting:
            return stats.num_waiting + since
        return max(0, since + stats.num_running - self.options.max_num_seqs)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt."""
        if len(text) <= INLINE_CHARACTERS:
            return self.tokenizer.encode(text, add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens)

    async def generate(
        self, prompt: str | list[int], sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """The output so far, after every step that added to it; the last one has `finished`.

        The same object is given each time, with the whole text. Leaving the loop, or cancelling the task, aborts the
        request. Raises RequestError for what the request got wrong, EngineError where the engine failed.
        """
        params = self.default_sampling_params() if sampling_params is None else sampling_params
        if params.max_tokens == 0:
            raise RequestError("max_tokens is 0; allowed is at least 1", "max_tokens")
        text = prompt if isinstance(prompt, str) else None
        token_ids = await self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        with self.stream(token_ids, params, request_id) as stream:
            collector = OutputCollector(stream.request_id, text, token_ids, params)
            async for delta in stream:
                yield collector.add(delta)

    def stream(self, prompt_token_ids: list[int], params: SamplingParams, request_id: str | None = None) -> RequestStream:
        """Sends a request; its deltas come one by one. Close the stream (or leave it as a context) to abort the request.

        Equal ids are no fault: each request is told apart inside. Raises EngineError if the engine is gone.
        """
        return self._client.submit(AddRequest(request_id or uuid.uuid4().hex, prompt_token_ids, params, None, time.monotonic()))

    async def abort(self, request_id: str) -> None:
        """Ends every request of that id; its consumer gets what there is, with finish_reason "abort"."""
        self._client.abort(request_id)

    async def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache; False while blocks of it are in use."""
        return await self._client.reset_prefix_cache()

    def check(self) -> None:
        """Raises EngineError if a request would not be served."""
        self._client.check()

    def begin_shutdown(self, grace: float) -> None:
        """Takes no more requests; those in flight may go on for `grace` seconds, and end with "abort" then."""
        self._client.begin_shutdown(grace)

    async def shutdown(self, grace: float = SHUTDOWN_SECONDS) -> None:
        """Lets requests go on for `grace` seconds at most, then ends the engine's process. Safe to call twice."""
        await self._client.shutdown(grace)

    def _load_tokenizer(self, *, fetch: bool) -> Tokenizer | None:
        if not fetch:
            try:
                hub.path(self.options.target)
            except LoadError:
                return None  # the engine's process fetches it, or says why it can't
        return Tokenizer.load(hub.resolve(self.options.target), chat_template=self.options.chat_template)
