"""Speculation changes nothing: the same tokens as plain decoding, whatever drafts, trees, pools and chunks are used.

Equality, not similarity: the reference operations are row-invariant, so no near tie excuses a difference.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from specengine import LLM, SamplingParams
from tests import fixtures

ROOMY: dict[str, Any] = {"num_kv_blocks": 400, "max_num_batched_tokens": 64}
SITUATIONS: dict[str, dict[str, Any]] = {
    "roomy": ROOMY,
    "preempted": {"num_kv_blocks": 34, "max_num_batched_tokens": 32},
    "no prefix cache, small chunks": {"num_kv_blocks": 400, "max_num_batched_tokens": 16, "enable_prefix_caching": False},
    "two at a time": {**ROOMY, "max_num_seqs": 2},
}
DRAFTS = {"same": fixtures.same, "noisy": fixtures.noisy, "foreign": fixtures.foreign}


def requests(temperature: float) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 49 tokens, some with a common start and some that repeat themselves, and filters and penalties in turn."""
    rng = np.random.default_rng(5)
    common = rng.integers(0, 256, 30).tolist()
    prompts, params = [], []
    for i in range(8):
        length = int(rng.integers(1, 50))
        prompts.append((common[: length // 2] + rng.integers(0, 4 if i % 2 else 256, length).tolist())[:length])
        params.append(
            SamplingParams(
                temperature=temperature,
                seed=1000 + i,
                max_tokens=20,
                n=2 if i == 3 else 1,
                top_k=20 if i % 3 == 1 else 0,
                top_p=0.9 if i % 3 == 2 else 1.0,
                frequency_penalty=0.5 if i % 4 == 1 else 0.0,
                repetition_penalty=1.2 if i % 4 == 2 else 1.0,
            )
        )
    return prompts, params


def generate(temperature: float, **options: Any) -> tuple[list[list[list[int]]], LLM]:
    """Token ids by request and choice, and the closed engine with its counts."""
    options = {"max_num_seqs": 8, "block_size": 4, "max_model_len": 128, **options}
    with LLM(target=str(fixtures.rand()), **options) as llm:
        outputs = llm.generate(*requests(temperature), use_tqdm=False)
    return [[choice.token_ids for choice in output.outputs] for output in outputs], llm


@lru_cache
def plain(temperature: float) -> list[list[list[int]]]:
    return generate(temperature, speculation="off", **ROOMY)[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_plain_decoding_depends_on_nothing_else(situation: str, temperature: float):
    tokens, llm = generate(temperature, speculation="off", **SITUATIONS[situation])
    assert tokens == plain(temperature)
    assert (llm.engine.stats().preemptions > 0) == (situation == "preempted")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("situation", ["roomy", "preempted"])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("draft", DRAFTS)
def test_draft_model(draft: str, nodes: int, width: int, situation: str, temperature: float):
    speculation = {"method": "draft", "num_speculative_tokens": nodes, "tree_width": width}
    tokens, llm = generate(temperature, draft=str(DRAFTS[draft]()), speculation=speculation, **SITUATIONS[situation])
    assert tokens == plain(temperature)
    stats = llm.engine.stats()
    drafted, accepted = stats.drafted_by_source["draft"], stats.accepted_by_source["draft"]
    assert 0 <= accepted <= drafted
    if draft == "same" and (width == 1 or nodes == 1):
        assert accepted > 0.9 * drafted  # what is drafted past an end of text is not accepted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("nodes", [1, 8])
def test_ngram(nodes: int, situation: str, temperature: float):
    speculation = {"method": "ngram", "num_speculative_tokens": nodes, "prompt_lookup_min": 1}
    tokens, llm = generate(temperature, speculation=speculation, **SITUATIONS[situation])
    assert tokens == plain(temperature)
    assert llm.engine.stats().drafted_by_source["ngram"] > 0


@pytest.mark.parametrize("nodes", [1, 8])
@pytest.mark.parametrize(("stop", "text"), [(["de"], "bc"), (["e"], "bcd"), (["zz", "de"], "bc")])
def test_stop_string_early_in_an_accepted_block(stop: list[str], text: str, nodes: int):
    alphabet = str(fixtures.alphabet())
    speculation = {"method": "draft", "num_speculative_tokens": nodes, "tree_width": 1}
    with LLM(target=alphabet, draft=alphabet, speculation=speculation, num_kv_blocks=64, max_model_len=256) as llm:
        (output,) = llm.generate("a", SamplingParams(temperature=0, max_tokens=200, stop=stop), use_tqdm=False)
    choice = output.outputs[0]
    assert (choice.text, choice.finish_reason, len(choice.token_ids)) == (text, "stop", 4)
