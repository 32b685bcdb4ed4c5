"""A run as one HTML page without scripts, servers or other files: what
orchmllm.tools.report.log read, and nothing that it did not."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from html import escape

import numpy as np

from orchmllm.data.ledger import FATES, Ledger
from orchmllm.plan.assign import EVERY_PHASE
from orchmllm.plan.gain import Gain, spread
from orchmllm.plan.layout import GENERATOR
from orchmllm.runtime.log_schema import METRICS
from orchmllm.tools.report.answers import answers
from orchmllm.tools.report.log import RunLog
from orchmllm.tools.report.svg import Series, chart, figure, number
from orchmllm.tools.report.verdict import (
    PARTS,
    costs,
    figures,
    moved_bytes,
    step_parts,
    verdict,
)

SLOW_STEPS = 10  # rows of a table
CSS = """
:root{color-scheme:light dark;--bg:#fff;--ink:#1c1c1e;--muted:#6b6b70;--line:#dcdce0;--card:#f6f6f8;
--vision:#d1781a;--audio:#5f8f1e;--llm:#3b62b8;--generator:#00897b;--exchange:#a03b8f;--wait:#c0392b;--rest:#a0a0a8;
--update:#8a6d3b;--core:#c2a500;--ranks:#5b8f8f;--logging:#2b2b30;
--run:#2f6f8f;--sampled:#c8553d;--processed:#2f6f8f;--measured:#7a5cc0}
@media(prefers-color-scheme:dark){:root{--bg:#17171a;--ink:#ececf0;--muted:#a0a0a8;--line:#38383f;
--card:#212126;--vision:#f0a04b;--audio:#9ccc4f;--llm:#7f9ff0;--generator:#4db6ac;--exchange:#dd7fce;--wait:#ff7b6b;
--rest:#6f6f78;--update:#c9a66b;--core:#e6d04a;--ranks:#8fc7c7;--logging:#e8e8f0;--run:#6fb7d8;--sampled:#f08a72;--processed:#6fb7d8;--measured:#b39bf0}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1240px;padding:16px;background:var(--bg);
color:var(--ink);font:15px/1.45 system-ui,sans-serif}
h1{font-size:22px;margin:0;overflow-wrap:anywhere}
h2{font-size:17px;margin:28px 0 8px}h3{font-size:14px;margin:0}p{margin:4px 0}
.muted,.note,.none{color:var(--muted);font-size:13px}.tiles,.charts{display:grid;gap:12px}
.tiles{grid-template-columns:repeat(auto-fill,minmax(150px,1fr));margin-top:14px}
.tiles div,figure{background:var(--card);border-radius:8px;padding:10px 12px;margin:0}
.tiles b{display:block;font-size:19px}.tiles span{color:var(--muted);font-size:13px}
.charts{grid-template-columns:repeat(auto-fill,minmax(min(340px,100%),1fr))}
svg{display:block;width:100%;height:auto}svg text{fill:var(--muted);font-size:11px}
svg .grid{stroke:var(--line)}svg .mark{stroke:var(--wait);stroke-width:2;opacity:.6}
polyline{fill:none;stroke-width:1.6;stroke-linejoin:round}
.legend{font-size:12px;color:var(--muted);min-height:18px}.legend span{margin-right:10px;
white-space:nowrap}.legend b{color:var(--ink)}.legend i{display:inline-block;width:10px;height:10px;
border-radius:2px;margin-right:4px}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:13px}
td,th{padding:4px 12px 4px 0;text-align:left;border-bottom:1px solid var(--line);
vertical-align:top}
td img,td audio{display:block;max-width:240px;margin-bottom:4px}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
"""

# What each page begins with, by which an earlier one is known.
HEAD = "<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport "


def page(run: RunLog) -> str:
    """The whole HTML, which begins with HEAD."""
    body = [f"<h1>{escape(run.name)}</h1>", f"<p>{escape(verdict(run))}</p>",
            f"<p class=muted>{escape(_state(run))}</p>",
            _tiles(run), "<div class=charts style='margin-top:16px'>", *_charts(run), "</div>",
            "<h2>Gain of balancing</h2>", *_gain(run),
            "<h2>Answers to held-out examples</h2>", answers(run.folder, run.samples),
            "<h2>Slowest ranks, and what they had to do</h2>", *_slowest(run),
            "<h2>Where the rows of the data go</h2>", _ledgers(run),
            "<h2>Media that could not be used, by source</h2>", _quarantine(run),
            "<h2>Restarts</h2>",
            _table(("went on at step", "steps done again"), run.restarts, numbers=2),
            "<h2>Settings that changed on the way, marked on the loss</h2>",
            _table(("from step", "was -> is"), run.changes, numbers=0)]
    return (f'{HEAD}content="width=device-width,initial-scale=1"><title>{escape(run.name)}</title>'
            f"<style>{CSS}</style></head><body>" + "\n".join(body) + "</body></html>\n")


def _state(run: RunLog) -> str:
    ranks = f"{int(run['num_ranks'][-1])} ranks; " if run.num_steps else ""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.written_at))
    return (f"{ranks}last written {when}"
            + (" (its last line is still being written)" if run.cut else ""))


def _tiles(run: RunLog) -> str:
    return "<div class=tiles>" + "".join(
        f"<div><b>{number(value, unit)}</b><span>{escape(name)}</span></div>"
        for name, (value, unit) in figures(run).items()) + "</div>"


def _gain(run: RunLog) -> list[str]:
    """What was measured beside what was predicted of the same steps."""
    rows = []
    for name in Gain._fields:
        gains = run[f"measured.gain.{name}"]
        known = gains[np.isfinite(gains)]
        if len(known):
            rows.append((name, *(number(x, "%") for x in spread(known)), len(known)))
    if not rows:
        return ["<p class=none>Not measured: set balance.measure_every.</p>"]
    return [_table(("", "lower quartile", "median", "upper quartile", "comparisons"), rows,
                   numbers=4),
            "<p class=muted>Each comparison is of the balanced steps between two that ran as "
            "sampled: the share of time that balancing saved in them.</p>"]


def _charts(run: RunLog) -> list[str]:
    def line(name: str, colour: str, values: np.ndarray) -> Series:
        return Series(name, colour, run["step"], values)

    validation = [Series("validation", "sampled", *run.validations.T, dots=True)
                  ] * bool(len(run.validations))
    out = [
        chart("Loss", [line("training", "run", run["loss"]), *validation], least=None,
              note="" if validation else "Validation is not logged: set data.num_validation.",
              marks=run.changes),
        *(chart(metric.chart, [line(metric.unit, "run", run[name])])
          for name, metric in METRICS.items() if metric.chart),
        _step_time(run),
    ]
    for phase in EVERY_PHASE:
        if phase == GENERATOR and not np.isfinite(run[f"{phase}.mean_cost_kflop"]).any():
            continue  # this model has none
        columns = (("sampled", "imbalance_before"), ("processed", "imbalance_after"),
                   ("measured", "measured.imbalance"))
        out.append(chart(
            f"Imbalance, {phase}", [line(name, name, run[f"{phase}.{column}"])
                                    for name, column in columns], least=1.0,
            note="" if phase != "llm" else "Slowest rank / mean rank; 1: nobody waits. As sampled "
            "and as processed by the cost model, and as measured."))
    before, after = map(np.cumsum, costs(run))
    moved, between = moved_bytes(run)
    waiting = run["data_wait_s"] / np.maximum(run["step_s"], 1e-12)
    return [
        *out,
        chart("Saved by balancing so far", [
            line("predicted", "processed", 1 - after / np.where(before > 0, before, np.nan))],
            unit="%", note="Of what the phases would take as sampled, by the cost model."),
        chart("Bytes moved a step", [line("all", "run", moved),
                                     line("between nodes", "wait", between)], unit="B"),
        chart("Waiting for data", [line("share of the step", "wait", waiting)], unit="%"),
    ]


def _step_time(run: RunLog) -> str:
    steps, parts = step_parts(run)
    title = "Where a step's time goes"
    if not len(steps):
        return figure(title, "", '<p class="none">no step was measured yet</p>', "")
    return chart(title, [Series(name, colour, steps, parts[name])
                         for name, colour in PARTS.items()], unit="s", stacked=True,
                 note="Phases, exchange and update: the slowest rank's CPU time, on a GPU the "
                 "device's. Waiting for a core and for ranks: of rank 0, beyond the slowest rank's "
                 "work; on a GPU for the device as well. Logging comes on top of step_s.")


def _slowest(run: RunLog) -> list[str]:
    waits = {p: run[f"{p}.measured.slowest_s"] * (
        1 - 1 / np.maximum(run[f"{p}.measured.imbalance"], 1.0)) for p in EVERY_PHASE}
    ranks = {p: run[f"{p}.measured.rank"] for p in EVERY_PHASE}
    waits = {p: np.where(np.isfinite(ranks[p]), waits[p], 0.0) for p in EVERY_PHASE}
    if not any(np.isfinite(r).any() for r in ranks.values()):
        return ["<p class=none>No step was measured yet.</p>"]
    rows = []
    for p in EVERY_PHASE:
        known = waits[p] > 0
        total = waits[p][known].sum()
        by_rank = np.bincount(ranks[p][known].astype(int), waits[p][known])
        steps = np.bincount(ranks[p][known].astype(int))
        for r in np.argsort(-by_rank, kind="stable")[:3]:
            if by_rank[r]:
                rows.append((p, int(r), int(steps[r]), number(by_rank[r], "s"),
                             number(by_rank[r] / total, "%")))
    stacked = np.array([waits[p] for p in EVERY_PHASE])  # (phases, steps)
    worst = []
    for place in np.argsort(-stacked, axis=None, kind="stable")[:SLOW_STEPS]:
        phase, at = EVERY_PHASE[place // run.num_steps], place % run.num_steps
        if not stacked.flat[place]:
            break
        slow = run.row(int(run["measured.at"][at]))["measured"]["slowest"][phase]
        worst.append((
            int(run["step"][at]), phase, slow["rank"], number(stacked.flat[place], "s"),
            f"{run[f'{phase}.measured.imbalance'][at]:.2f}", slow["positions"],
            ", ".join(f"{e + 1} ({n})" for e, n in zip(slow["example_ids"], slow["lengths"],
                                                   strict=True))))
    return [
        "<p class=muted>How long the mean rank waited for the slowest one.</p>",
        _table(("phase", "rank", "steps as the slowest", "others waited", "of all such waiting"),
               rows, numbers=4),
        "<p class=muted style='margin-top:12px'>The steps with the longest waits. Examples are "
        "rows of all sources, counted from 1 as by <code>orchmllm data preview --row</code>, with "
        "the positions of their longest items.</p>",
        _table(("step", "phase", "rank", "others waited", "slowest / mean", "positions",
                "longest examples"), worst, numbers=0)]


def _ledgers(run: RunLog) -> str:
    """A row for each source, with the shares of its characters and media."""
    found = [Ledger(**one) for one in run.ledgers]
    return _table(("source", "rows looked at", "of", "number", *FATES.values()), [
        (one.name, one.rows, what, counts.total(),
         *(number(counts[fate] / max(1, counts.total()), "%") for fate in FATES))
        for one in found for what, counts in (("characters", Counter(one.chars)),
                                              ("media", Counter(one.media)))],
        numbers=1 + len(FATES))


def _quarantine(run: RunLog) -> str:
    if not run.quarantine:
        return "<p class=none>none</p>"
    rows = []
    for source, count in Counter(q["source"] for q in run.quarantine).most_common():
        reasons = Counter(q["reason"] for q in run.quarantine if q["source"] == source)
        first = next(q for q in run.quarantine if q["source"] == source)
        reason, times = reasons.most_common(1)[0]
        rows.append((source, count, f"{reason} ({times})",
                     f"{first['file']} (row {first['row']}, step {first['step']})"))
    return _table(("source", "media", "most common reason", "the first"), rows, numbers=0)


def _table(head: Sequence[str], rows: Sequence[Sequence], numbers: int) -> str:
    """numbers: how many of the last columns are right-aligned."""
    if not rows:
        return "<p class=none>none</p>"

    def line(cells: Sequence, tag: str) -> str:
        return "<tr>" + "".join(
            f"<{tag}{' class=n' * (i >= len(cells) - numbers)}>{escape(str(c))}</{tag}>"
            for i, c in enumerate(cells)) + "</tr>"

    return ("<div class=scroll><table>" + line(head, "th")
            + "".join(line(row, "td") for row in rows) + "</table></div>")
