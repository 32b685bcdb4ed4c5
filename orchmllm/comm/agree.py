"""What all ranks conclude from what they gathered: the same error everywhere, or none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from orchmllm.comm.errors import AgreedError

MOST_CHARS = 4000  # of an error's text


class RemoteError(AgreedError):
    """An exception on at least one rank, raised with the same text on all of them."""


class PlanMismatchError(AgreedError):
    """Ranks disagree on lengths, plan or configuration; raised on all of them."""


def raise_first(step: int, errors: Sequence[str | None], own: Exception | None = None,
                first: int = 0) -> None:
    """Raises RemoteError for the first rank with an error. own: this rank's exception, its cause,
    so that its traceback is shown. first: rank that errors[0] belongs to."""
    failing = [r for r, e in enumerate(errors, first) if e]
    if failing:
        others = f" (also ranks {failing[1:]})" if len(failing) > 1 else ""
        if len(failing) > 9:
            others = f" (also {len(failing) - 1} other ranks)"
        raise RemoteError(
            f"step {step}: rank {failing[0]}{others} failed: {errors[failing[0] - first]}") from own


def describe(error: BaseException | None) -> str:
    """The text under which an exception is raised on all ranks; empty for None. It can always be
    encoded: the other ranks wait for it. Of a long one its two ends: each rank holds the texts of
    all in as many bytes as the longest has."""
    if error is None:
        return ""
    try:
        text = str(error)
    except Exception:
        text = "(its text raises an exception)"
    if len(text) > MOST_CHARS:
        text = f"{text[:MOST_CHARS // 2]} [...] {text[-MOST_CHARS // 2:]}"
    return f"{type(error).__name__}: {text}".encode(errors="backslashreplace").decode()


def require_agreement(step: int, what: str, values: np.ndarray, first: int = 0) -> None:
    """Raises PlanMismatchError naming the minority, or both values of two ranks. first: rank that
    values[0] belongs to. values: (d,), one of each rank."""
    counts = Counter(values.tolist())
    if len(counts) == 1:
        return
    shown = {r: (hex(v & (2**64 - 1)) if "digest" in what or what == "plan" else v)
             for r, v in enumerate(values.tolist())}
    most = counts.most_common(1)[0]
    if most[1] > len(values) / 2:
        odd = [r for r, v in enumerate(values.tolist()) if v != most[0]]
        who = f"rank {odd[0]} differs" if len(odd) == 1 else f"ranks {odd} differ"
        shown = {r: shown[r] for r in [*odd[:8], values.tolist().index(most[0])]}
        who = who if not first else f"ranks counted from {first}: {who}"
    else:
        who = "no majority"
    raise PlanMismatchError(
        f"step {step}: ranks disagree on {what}: {who}: "
        + ", ".join(f"rank {r} has {v}" for r, v in shown.items())
        + "; check that all ranks run the same code, recipe and data"
    )
