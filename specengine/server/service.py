"""`Service`: what every route shares: the engine, the options, the model's name, the metrics.

Owns which model answers, when a request is turned away, and the prompts' log. Knows nothing about bodies or answers.

    service = Service(llm, options)
    service.check_model("smollm2-135m")
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

from specengine import __version__
from specengine.config import ServerOptions
from specengine.engine.async_llm import AsyncLLM
from specengine.log import get_logger
from specengine.server.errors import ApiError, overloaded
from specengine.server.metrics import Metrics
from specengine.server.prompts import Prompt

logger = get_logger(__name__)


class Service:
    """One for each app."""

    def __init__(self, llm: AsyncLLM, options: ServerOptions):
        self.llm = llm
        self.options = options
        self.metrics = Metrics(lambda: llm.stats)
        self.model = options.served_model_name or llm.options.target
        self.created = int(time.time())

    @property
    def system_fingerprint(self) -> str:
        """Changes when the same request with the same seed may be answered otherwise."""
        info = self.llm.info
        named = f"{__version__} {info.target} {info.dtype} {info.device} {self.llm.options.kv_cache_dtype}"
        return "fp_" + hashlib.sha256(named.encode()).hexdigest()[:10]

    def check_model(self, name: str | None) -> None:
        """No name is the model that is served. Raises ApiError 404 for another one."""
        if name is not None and name not in (self.model, self.llm.options.target):
            raise ApiError(404, f"the model {name!r} does not exist; this server has {self.model!r}", param="model", code="model_not_found")

    def check_load(self) -> None:
        """Raises ApiError 503 where too many requests wait already, EngineError where the engine is gone."""
        self.llm.check()
        limit = self.options.max_queued_requests
        if limit is not None and self.llm.num_queued >= limit:
            raise overloaded(f"{self.llm.num_queued} requests are waiting; this server lets {limit} wait")

    def log_request(self, request_id: str, prompts: list[Prompt], params: Any) -> None:
        """Prompts are private: without --log-requests, only their number is logged."""
        if self.options.log_requests:
            shown = [prompt.token_ids if prompt.text is None else prompt.text for prompt in prompts]
            logger.info("request %s: %r, %s", request_id, shown, params)
        else:
            logger.debug("request %s: %d prompts, %d tokens", request_id, len(prompts), sum(len(p.token_ids) for p in prompts))
