"""`LLM`: offline generation in this process, under vLLM's names.

Owns the loop from prompts to finished outputs, in the prompts' order. Knows nothing about HTTP.

    with LLM(target="smollm2-135m") as llm:
        print(llm.generate("Hello", SamplingParams(max_tokens=32))[0].outputs[0].text)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from tqdm import tqdm

from specengine.config import EngineOptions
from specengine.engine.engine import Engine
from specengine.engine.messages import AddRequest, OutputCollector, RequestDelta
from specengine.errors import EngineError, RequestError
from specengine.outputs import RequestOutput
from specengine.sampling_params import SamplingParams

Prompt = str | list[int]
Message = dict[str, Any]


class LLM:
    """Loads a target (and a draft) and generates. Takes every engine option by its name; see `EngineOptions`.

    Raises ConfigError for a wrong option and LoadError for a model that can't be read.
    """

    def __init__(self, target: str = "smollm2-135m", draft: str | None = None, **options: Any):
        if "model" in options:
            target = options.pop("model")
        self.engine = Engine(EngineOptions.create(target=target, draft=draft, **options))
        self._ids = itertools.count()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Frees the models and the KV cache; the object can't be used afterwards."""
        self.engine.close()

    def get_tokenizer(self) -> Any:
        return self.engine.tokenizer

    def default_sampling_params(self) -> SamplingParams:
        """The model's own defaults, from generation_config.json (unless `generation_config="none"`)."""
        return SamplingParams(**self.engine.generation_defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generates for one prompt or many (text or token ids) and returns their outputs in order.

        `sampling_params` is one for all, or one a prompt. Raises RequestError, naming the prompt's index, before
        anything runs.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        listed: list[Any] = [prompts] if single else list(prompts)
        if not listed:
            raise RequestError("no prompt is given; allowed is at least one", "prompts")
        params = self._params_of(sampling_params, len(listed))
        messages = [self._message(i, prompt, p) for i, (prompt, p) in enumerate(zip(listed, params, strict=True))]
        return self._run(messages, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """One conversation, or a list of them, through the model's chat template."""
        conversations: list[Any] = [messages] if not messages or isinstance(messages[0], dict) else list(messages)
        prompts: list[Prompt] = []
        for index, conversation in enumerate(conversations):
            try:
                if not conversation:
                    raise RequestError("messages is empty; allowed is at least one message", "messages")
                text = self.engine.tokenizer.apply_chat_template(
                    list(conversation), add_generation_prompt=add_generation_prompt, **(chat_template_kwargs or {})
                )
            except RequestError as error:
                raise RequestError(f"conversation {index}: {error}", error.param, error.code) from None
            prompts.append(self.engine.tokenizer.encode(text, add_special_tokens=False))
        if sampling_params is None:
            sampling_params = SamplingParams(**{**self.engine.generation_defaults, "max_tokens": None})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def _params_of(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None:
            return [self.default_sampling_params()] * count
        if isinstance(given, SamplingParams):
            return [given] * count
        if len(given) != count:
            raise RequestError(
                f"{len(given)} sampling_params are given for {count} prompts; allowed is one, or one a prompt", "sampling_params"
            )
        return list(given)

    def _message(self, index: int, prompt: Prompt, params: SamplingParams) -> AddRequest:
        text = prompt if isinstance(prompt, str) else None
        try:
            if params.max_tokens == 0:
                raise RequestError("max_tokens is 0; allowed is at least 1", "max_tokens")
            token_ids = self.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            message = AddRequest(f"llm-{next(self._ids)}", token_ids, params, text)
            self.engine.check(message)
        except RequestError as error:
            raise RequestError(f"prompt {index}: {error}", error.param, error.code) from None
        return message

    def _run(self, messages: list[AddRequest], *, use_tqdm: bool) -> list[RequestOutput]:
        collectors = {m.request_id: OutputCollector(m.request_id, m.prompt, m.prompt_token_ids, m.params) for m in messages}
        unfinished = set(collectors)
        progress = Progress(len(messages), shown=use_tqdm)
        try:
            for message in messages:
                self.engine.add(message)
            while unfinished:
                if not self.engine.has_work:
                    raise EngineError("the engine has no work left while requests are unfinished")
                for delta in self.engine.step():
                    collector = collectors.get(delta.request_id)
                    if collector is None:
                        continue
                    collector.add(delta)
                    progress.add(delta)
                    if delta.finished:
                        unfinished.discard(delta.request_id)
        finally:
            progress.close()
            if unfinished:  # an interruption: nothing of these requests may go on in a later call
                self.engine.abort(sorted(unfinished))
        return [collectors[m.request_id].output for m in messages]


class Progress:
    """The progress bar of `generate`: requests done, output tokens a second, mean accepted length."""

    def __init__(self, total: int, *, shown: bool):
        self.bar = tqdm(total=total, desc="generate", unit="request", disable=not shown, dynamic_ncols=True)
        self.tokens = 0
        self.passes = 0

    def add(self, delta: RequestDelta) -> None:
        self.tokens += len(delta.token_ids)
        self.passes += bool(delta.token_ids)
        if delta.finished:
            seconds = self.bar.format_dict["elapsed"] or 1e-9
            mean = self.tokens / self.passes if self.passes else 0.0
            self.bar.set_postfix_str(f"{self.tokens / seconds:.1f} tokens/s, accepted length {mean:.2f}", refresh=False)
            self.bar.update()

    def close(self) -> None:
        self.bar.close()
