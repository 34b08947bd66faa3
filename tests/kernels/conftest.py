"""Fixtures of the kernel tests: every implementation of the operations, and the threads they run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from specengine import ops
from specengine.errors import ConfigError

IMPLEMENTATIONS = ("reference", "portable", "avx2")


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once with each implementation that this build and this machine have."""
    name: str = request.param
    try:
        if name == "reference":
            ops.use("reference")
        else:
            ops.use("cpu")
            ops.use_isa(name)
    except ConfigError as error:
        pytest.skip(str(error))
    yield name
    if name != "reference":
        ops.use_isa("auto")
    ops.use("auto")


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def generator(request: pytest.FixtureRequest) -> torch.Generator:
    """Random numbers that depend on the test's name alone."""
    return torch.Generator().manual_seed(sum(request.node.nodeid.encode()))
