"""specengine: an inference engine for language models that is built around speculative decoding.

Owns the list of public names. They are loaded when they are first used, so that `import specengine` costs nothing.

    from specengine import LLM, SamplingParams
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specengine.config import SpeculativeConfig
    from specengine.engine.llm import LLM
    from specengine.outputs import RequestOutput
    from specengine.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "SpeculativeConfig"]


def __getattr__(name: str) -> Any:
    match name:
        case "LLM":
            module = "specengine.engine.llm"
        case "RequestOutput":
            module = "specengine.outputs"
        case "SamplingParams":
            module = "specengine.sampling_params"
        case "SpeculativeConfig":
            module = "specengine.config"
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
