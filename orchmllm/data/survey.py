"""Where the rows of a recipe's sources go, told from some of them before training (see
orchmllm.data.ledger), and whether so much is lost that it is refused to train."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np

from orchmllm.config.recipe import DataConfig
from orchmllm.data.formats.open import DataSource
from orchmllm.data.formats.rows import RowStore
from orchmllm.data.ledger import Ledger
from orchmllm.data.lengths import LengthReader
from orchmllm.data.media.medium import RowError
from orchmllm.data.storage.clients import StorageError

NUM_ROWS = 64  # of each source, before a run


def survey(sources: Sequence[DataSource], reader: LengthReader, data: DataConfig,
           log: Callable[[str], object], num_rows: int = NUM_ROWS, *, decode: bool = False
           ) -> list[Ledger]:
    """Tells `log` where num_rows rows of each source go, at equal distances, of a stream its first
    ones. decode: with their media. Raises ValueError where more than data.max_lost_percent of the
    rows cannot be used, or of what is to be learnt is left out or cut."""
    ledgers = []
    for source in sources:
        ledger, rows = Ledger(source.name), []
        for store, i in _places(source.store, num_rows, data.streaming):
            path, number = store.place(i)
            place = f"{path}, row {number}"
            try:
                rows.append((store.row(i), path))
                ledger.follow(source, reader, *rows[-1], place, decode=decode)
            except RowError as error:
                ledger.refuse(error, place)
            except OSError:  # told of when it is read to be trained on
                continue
            except StorageError as error:  # which is raised on all ranks then, if it still fails
                log(f"{source.name}: warning: no more rows are looked at: {place}: {error}")
                break
        log(str(ledger))
        for line in _remarks(ledger, reader):
            log(f"{source.name}: {line}")
        _check(ledger, reader, source, rows, data.max_lost_percent)
        ledgers.append(ledger)
    return ledgers


def _check(ledger: Ledger, reader: LengthReader, source: DataSource, rows: Sequence,
           most: float) -> None:
    """Raises ValueError where more than `most` percent is lost. rows: (row, its file)."""
    found = [*_lost(ledger, reader)]
    lost = [line for share, line in found if 100 * share > most]
    if ledger.rows and ledger.num_refused == ledger.rows:
        raise ValueError(f"{source.name}: {found[0][1]}{source.proposal(rows, known=True)}")
    unread = ledger.media["unread"] / max(1, ledger.media.total())
    if source.others and 100 * unread > most:  # formats were looked for
        lost.append(f"{unread:.0%} of the media are in keys that nothing reads")
    if lost:
        raise ValueError(f"{source.name}: {'; '.join(lost)}{source.proposal(rows, known=True)}; "
                         f"or set data.max_lost_percent, which is {most:g}, to train without it")


def _remarks(ledger: Ledger, reader: LengthReader) -> Iterator[str]:
    """What is told whether it is refused or not."""
    if ledger.unread:
        yield f"keys that nothing reads: {', '.join(sorted(ledger.unread)):.200}"
    if ledger.targets and not ledger.num_ends:
        yield ("warning: no special token is learnt, so the model does not learn to end its "
               "answers")
    for share, line in _lost(ledger, reader):
        if share:
            yield f"warning: {line}"


def _lost(ledger: Ledger, reader: LengthReader) -> Iterator[tuple[float, str]]:
    """(Share of the rows, or of what is to be learnt, that is lost; how)."""
    if ledger.refused:
        (reason, (place, _)), *others = ledger.refused.items()
        yield ledger.num_refused / ledger.rows, (
            f"{ledger.num_refused} of {ledger.rows} rows that were looked at cannot be used"
            f"{f', for {1 + len(others)} reasons' * bool(others)}; the first: {place}: {reason}")
    learnt, there = np.array(ledger.targets, int).reshape(-1, 2).T
    if num_cut := int((learnt < there).sum()):
        share = 1 - learnt.sum() / there.sum()
        yield share, (f"data.max_example_tokens={reader.max_example_tokens} cuts {num_cut} of "
                      f"{len(there)} rows that were looked at, and leaves out {share:.1%} of what "
                      "is learnt from all of them: raise it")
    if ledger.left_out:
        share = ledger.left_out / ledger.said
        yield share, (f"the chat template leaves out {share:.1%} of what the assistant says: take "
                      "one that keeps it")


def _places(store: RowStore, num_rows: int, streaming: bool) -> Iterator[tuple[RowStore, int]]:
    if streaming:
        return islice(((part, i) for part in store.parts() for i in range(len(part))), num_rows)
    return ((store, i) for i in np.unique(np.linspace(
        0, len(store) - 1, min(num_rows, len(store))).astype(int)).tolist())
