"""Tuning the call that is being planned: what ``op.request_tune()`` and ``TILEOPS_TUNE=1`` ask for."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tileops.core.backend.gpu import Gpu
from tileops.core.check import Call
from tileops.core.errors import CaptureError, TileOpsError
from tileops.core.tune import results, search
from tileops.core.tune.task import tasks

logger = logging.getLogger("tileops.tune")


def tune_call(gpu: Gpu, call: Call, misaligned: Sequence[str], index: int, board: str) -> None:
    """Tune a call's bucket, if it has no choice in the result cache yet; blocks, and says so.

    What goes wrong is logged, and leaves the bucket its default. Raises CaptureError inside a graph capture.
    """
    results.forget()  # other processes may have tuned since
    for task in tasks(gpu, [call], gpu.device(index), board, misaligned=misaligned):
        if results.choice(task.bucket) is not None:
            continue
        if gpu.capturing():
            raise CaptureError(
                f"{call.entry.name}: this call is to be tuned, which a graph capture can't wait for; call it once, or "
                "op.warmup(...), before capturing"
            )
        logger.warning("tuning %s: %d candidates on %s", task.bucket, len(task.candidates), call.device)
        try:
            built = search.build([task], None, lambda progress: None)
            faults = search.run([task], [index], built.failures, lambda progress: logger.info(progress.last))
        except TileOpsError as e:
            faults = {task.bucket.key: str(e)}
        result = results.read(task.bucket)
        if result is None or result.chosen is None:
            logger.warning("not tuned: %s", faults.get(task.bucket.key, "its result could not be kept"))
        else:
            gain = result.gain(str(call))
            logger.warning("tuned: %s%s", result.chosen, f", x{gain:.3f} of the default" if gain else "")
