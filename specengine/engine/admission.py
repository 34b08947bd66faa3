"""`Admission`: turns a client's request into the scheduler's `Request`, or refuses it in one sentence.

Owns every check that needs the model: vocabulary, context length, stop ids, bad words, and the request's seed. The
scheduler checks capacity. Nothing that passes here can end the engine.

    request = admission.request(AddRequest("r1", [1, 2, 3], SamplingParams()))
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any

from specengine.config import EngineOptions, SpeculativeConfig, speculation_keys
from specengine.core.sequence import Request
from specengine.engine.messages import AddRequest
from specengine.errors import ConfigError, RequestError
from specengine.sampling_params import SamplingParams
from specengine.tokenizer import Tokenizer

PER_REQUEST_KEYS = {"method", "num_speculative_tokens", "tree_width", "tree_depth"}


class Admission:
    """`num_token_ids` counts the tokenizer's ids: padding ids of the model beyond it can't be asked for."""

    def __init__(self, tokenizer: Tokenizer, options: EngineOptions):
        self.tokenizer = tokenizer
        self.num_token_ids = tokenizer.num_token_ids
        self.seed = options.seed
        self.method = options.speculative.resolved_method()
        speculative = options.speculative
        self.most = {"num_speculative_tokens": speculative.num_speculative_tokens, "tree_width": speculative.tree_width}
        self._arrivals = 0

    def request(self, message: AddRequest) -> Request:
        """The checked request. Raises RequestError naming the field at fault."""
        params = message.params
        self._check_prompt(message.prompt_token_ids)
        self._check_ids(params)
        for name in ("structured_outputs", "prediction"):
            if getattr(params, name) is not None:
                raise RequestError(f"{name} is not supported by this version; leave it out", name)
        params = self._with_bad_words(params)
        speculation = self._speculation(params.speculation)
        return Request(
            request_id=message.request_id,
            prompt_token_ids=tuple(message.prompt_token_ids),
            sampling=params.replace(speculation=speculation),
            seed=self._seed(params.seed),
            arrival_time=message.arrival_time,
            stop_token_ids=self._stop_ids(params),
        )

    def arrived(self) -> None:
        """Counts a request that was taken: with `--seed`, the next one gets another seed."""
        self._arrivals += 1

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise RequestError("the prompt is empty; allowed is at least one token", "prompt")
        for place, token in enumerate(token_ids):
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.num_token_ids:
                raise RequestError(
                    f"the prompt's token {place} is {token!r}; allowed are token ids from 0 to {self.num_token_ids - 1}", "prompt"
                )

    def _check_ids(self, params: SamplingParams) -> None:
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            for token in getattr(params, name) or ():
                if not 0 <= token < self.num_token_ids:
                    raise RequestError(f"{name} names token {token}; allowed are token ids from 0 to {self.num_token_ids - 1}", name)
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > self.num_token_ids:
                raise RequestError(f"{name} is {count}; allowed is at most the vocabulary, {self.num_token_ids}", name)

    def _with_bad_words(self, params: SamplingParams) -> SamplingParams:
        """Each bad word as token ids, with and without a leading space, as it may begin a text or follow a word."""
        if not params.bad_words:
            return params
        found: list[list[int]] = []
        for word in params.bad_words:
            for text in dict.fromkeys((word.lstrip(), " " + word.lstrip())):
                token_ids = self.tokenizer.encode(text, add_special_tokens=False)
                if token_ids and token_ids not in found:
                    found.append(token_ids)
        return params.replace(bad_words_token_ids=found)

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        stops = list(params.stop_token_ids or ())
        if not params.ignore_eos:
            stops += self.tokenizer.eos_token_ids
        return tuple(dict.fromkeys(stops))

    def _seed(self, named: int | None) -> int:
        """64 bits: the named seed, or one from the server's seed and the arrival's number, or a drawn one."""
        if named is not None:
            return named & 0xFFFF_FFFF_FFFF_FFFF
        if self.seed is None:
            return secrets.randbits(64)
        digest = hashlib.sha256(f"{self.seed}:{self._arrivals}".encode()).digest()
        return int.from_bytes(digest[:8], "little")

    def _speculation(self, given: bool | dict[str, Any] | None) -> dict[str, Any] | None:
        """The request's own limits: None is the engine's, {"method": "off"} is none."""
        if given is None or given is True:
            return None
        if given is False:
            return {"method": "off"}
        try:
            keys = speculation_keys(given)
            SpeculativeConfig(**{k: v for k, v in keys.items() if k != "method"})
        except ConfigError as error:
            raise RequestError(str(error), "speculation") from None
        for key in keys:
            if key not in PER_REQUEST_KEYS:
                raise RequestError(
                    f"speculation key {key!r} is the engine's; a request may set {', '.join(sorted(PER_REQUEST_KEYS))}", "speculation"
                )
        for key, most in self.most.items():
            if keys.get(key, 0) > most:
                raise RequestError(f"speculation key {key!r} is {keys[key]}; allowed is at most the engine's {most}", "speculation")
        method = keys.get("method", "auto")
        if method not in ("auto", "off", self.method):
            raise RequestError(f"speculation method is {method!r}; this engine has {self.method} and off", "speculation")
        if method == "auto":
            keys.pop("method", None)
        return keys
