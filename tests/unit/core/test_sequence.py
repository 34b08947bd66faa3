"""Request and Sequence: progress, what a choice shares with its request, and hashes of its blocks."""

from __future__ import annotations

import pytest

from specengine.core.block_pool import BlockPool
from specengine.core.block_table import BlockTable
from specengine.core.sequence import Request, Sequence, Status
from specengine.sampling_params import SamplingParams


def sequence_of(prompt: list[int], *, choice: int = 0, adapter: str | None = None, max_output: int = 5, **sampling: object) -> Sequence:
    request = Request("r", tuple(prompt), SamplingParams(**sampling), seed=1, max_output_tokens=max_output, adapter_id=adapter)  # type: ignore[arg-type]
    return Sequence(request, choice, (0, 1, choice), BlockTable(BlockPool(8, 2, enable_prefix_caching=True)))


def test_progress_counts_what_lacks_kv() -> None:
    sequence = sequence_of([1, 2, 3])
    assert (sequence.num_pending, sequence.is_at_tip, sequence.num_output_tokens, sequence.remaining_output_tokens) == (3, False, 0, 5)
    assert sequence.status is Status.WAITING and sequence.row == -1
    sequence.num_computed_tokens = 3
    sequence.append([7])
    assert (sequence.num_pending, sequence.is_at_tip, sequence.num_output_tokens, sequence.remaining_output_tokens) == (1, True, 1, 4)
    sequence.append([8, 9])
    assert sequence.tokens == [1, 2, 3, 7, 8, 9] and not sequence.is_at_tip


def test_ids_name_request_and_choice() -> None:
    assert sequence_of([1], choice=2).sequence_id == "r#2"


@pytest.mark.parametrize(("choice", "wanted", "reads"), [(0, 3, False), (1, None, True)])
def test_prompt_logprobs_are_the_first_choices_task(choice: int, wanted: int | None, reads: bool) -> None:
    sequence = sequence_of([1], choice=choice, n=2, prompt_logprobs=3)
    assert sequence.sampling.prompt_logprobs == wanted and sequence.reads_prefix_cache is reads
    assert sequence_of([1], choice=choice, n=2).reads_prefix_cache


def test_hashes_grow_with_the_sequence_and_depend_on_the_past_alone() -> None:
    sequence = sequence_of([1, 2, 3, 4])
    early = sequence.block_hashes(2)
    sequence.append([5, 6])
    assert sequence.block_hashes(3)[:2] == early and len(sequence.block_hashes(3)) == 3
    assert sequence.block_hashes(1) == early[:1]
    assert sequence_of([1, 2, 3, 4, 5, 6]).block_hashes(3) == sequence.block_hashes(3)
    assert sequence_of([9, 2, 3, 4, 5, 6]).block_hashes(3)[2] != sequence.block_hashes(3)[2]


def test_salt_and_adapter_keep_prefixes_apart() -> None:
    prompt = [1, 2]
    kinds = [
        sequence_of(prompt),
        sequence_of(prompt, cache_salt="a"),
        sequence_of(prompt, cache_salt="b"),
        sequence_of(prompt, adapter="a"),
    ]
    assert len({k.block_hashes(1)[0] for k in kinds}) == 4
