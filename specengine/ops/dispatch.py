"""Which implementation serves each operation: the compiled one on the CPU if it was built, the reference otherwise.

Owns the process's choice, made at the first call or by `use`. Knows nothing about arithmetic.

    use("reference")  # tests compare implementations
    describe()  # {"linear": "cpu (avx2)", ...}
"""

from __future__ import annotations

from dataclasses import fields
from typing import Literal

from specengine.errors import ConfigError
from specengine.log import get_logger, warn_once
from specengine.ops import cpu, reference
from specengine.ops.types import Operations

logger = get_logger(__name__)

Implementation = Literal["auto", "reference", "cpu"]

REFERENCE = Operations(
    name="reference",
    linear=reference.linear,
    linear_add=reference.linear_add,
    rms_norm=reference.rms_norm,
    silu_mul=reference.silu_mul,
    rope_write_kv=reference.rope_write_kv,
    tree_attention=reference.tree_attention,
    move_kv=reference.move_kv,
    copy_blocks=reference.copy_blocks,
)


class Active:
    """The operations in use: `host` for tensors on the CPU, `device` for all others. Resolved when first read."""

    host: Operations
    device: Operations

    def __getattr__(self, name: str) -> Operations:
        # Python calls this only while the attribute is missing, so a resolved table costs one plain attribute read.
        if name not in ("host", "device"):
            raise AttributeError(name)
        use("auto")
        table: Operations = self.__dict__[name]
        return table


ACTIVE = Active()


def use(implementation: Implementation) -> None:
    """Chooses the implementation for the whole process.

    `auto` takes the compiled operations if the extension loads and warns once if it doesn't; `cpu` insists on them and
    raises ConfigError; `reference` takes plain torch.
    """
    ACTIVE.device = REFERENCE
    if implementation == "reference":
        ACTIVE.host = REFERENCE
        return
    if implementation not in ("auto", "cpu"):
        raise ConfigError(f"unknown implementation {implementation!r}; known are auto, cpu, reference")
    try:
        ACTIVE.host = cpu.load()
    except cpu.ExtensionUnavailable as error:
        if implementation == "cpu":
            raise ConfigError(f"the compiled operations can't be used: {error}") from error
        warn_once(logger, f"the compiled operations can't be used ({error}); the slower reference operations serve")
        ACTIVE.host = REFERENCE


def use_isa(name: str) -> str:
    """Forces an instruction set of the compiled operations, for tests and comparisons; returns the one now in use.

    Args:
        name: "avx2", "portable", "auto" (the best this machine has), or "" to ask only.

    Raises:
        ConfigError: the extension isn't there, the name is unknown, or the machine lacks the instruction set.
    """
    try:
        chosen = cpu.use_isa(name)
    except (cpu.ExtensionUnavailable, ValueError) as error:
        raise ConfigError(f"instruction set {name!r} can't be used: {error}") from error
    if ACTIVE.host is not REFERENCE:
        ACTIVE.host = cpu.load()
    return chosen


def describe() -> dict[str, str]:
    """Operation -> implementation that serves it for tensors on the CPU."""
    return {field.name: ACTIVE.host.name for field in fields(Operations) if field.name != "name"}
