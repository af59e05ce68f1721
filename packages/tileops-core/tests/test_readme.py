"""The README's Python works as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[3] / "README.md").read_text()


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_a_block_runs(block: str) -> None:
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_refusal_that_it_shows_is_ours() -> None:
    import torch

    from tileops.core.errors import CheckError
    from tileops.gemm import GEMMFwdOp

    with pytest.raises(CheckError) as caught:
        GEMMFwdOp()(torch.ones(1024, 512).half(), torch.ones(1024, 256).half())
    assert str(caught.value) in README
