"""What the oldest torch that pyproject.toml admits cannot do."""

from __future__ import annotations

import pytest
import torch
from packaging.version import Version

_OLD = Version(torch.__version__) < Version("2.9")

#: Transforms of torch.func inside a compiled function.
COMPILES_TRANSFORMS = pytest.mark.skipif(_OLD, reason="torch 2.8's compiler cannot trace jvp")
#: A rank that waits for one that never comes is told so after the timeout of the process group.
GROUPS_HAVE_ITS_TIMEOUT = pytest.mark.skipif(
    _OLD, reason="with torch 2.8 the groups of a mesh wait for their default timeout"
)
