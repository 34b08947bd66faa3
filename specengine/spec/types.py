"""Array types of the speculation code."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[Any]  # int32, int64 or uint64: token ids, positions, random bits
