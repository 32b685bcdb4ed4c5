"""Which classes of transformers balance_encoders balances exactly, and which it refuses.

    python scripts/count_encoder_classes.py --write

Every entry of transformers' table of multimodal language models is built tiny in float64. Two gloo
ranks run it with balanced encoders under FSDP2 and under DDP: two steps of two batches each. In one
batch a rank holds three items of each medium, and the other one text only, where the class takes
text without media; in the other batch both hold some, one and two. The gradients of each step are
compared with those of a plain copy of the model that runs the batches of both ranks. --write puts
the result into tests/golden/encoder_classes.json and the table into docs/encoders.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils._pytree import tree_map  # noqa: E402

from orchmllm import balance_encoders  # noqa: E402
from orchmllm.encoders.infer import infer_encoders  # noqa: E402
from orchmllm.encoders.spec import check_encoder  # noqa: E402
from tests.lib.encoder_runs import gradients, mean_gradients, worst, wrapped  # noqa: E402
from tests.lib.ranks import run_ranks  # noqa: E402
from tests.lib.tiny_inputs import batch, media_of  # noqa: E402
from tests.lib.tiny_models import build  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests/golden/encoder_classes.json"
TRAINER_RESULTS = ROOT / "tests/golden/models.json"  # of scripts/check_models.py
DOCS = ROOT / "docs/encoders.md"
EXACT, REFUSED = "exact", "refused"
# Of a gradient's largest difference.
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-6}
ROUNDING = 1e-12  # differences that the table does not name
HEAD = "| result | classes | what moved, or why | model types |"
_ORDER = (EXACT, REFUSED, "not tried", "not built", "wrong", "no effect", "fails")
AT_ONCE = 4  # classes in one world of ranks


def classes() -> dict[str, str]:
    """model type -> class, of all multimodal language models of transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)


def prepared(model_type: str) -> tuple[nn.Module, list[list[dict[str, Any]]], str]:
    """The model, two batches with the arguments of each of two ranks, and what is in the first. In
    float64, or in float32 where the class itself casts a part to float32 and cannot run in
    float64."""
    try:
        return _prepared(model_type, torch.float64)
    except NotImplementedError as error:
        if "float != double" not in str(error):
            raise
        model, batches, scenario = _prepared(model_type, torch.float32)
        return model, batches, f"{scenario}, in float32"


def _prepared(model_type: str, dtype: torch.dtype
              ) -> tuple[nn.Module, list[list[dict[str, Any]]], str]:
    torch.manual_seed(0)
    model = build(model_type, classes()[model_type])
    if type(model).forward is nn.Module.forward:
        model = model.thinker  # the whole has no forward
    model.to(dtype)
    owner, encoders = infer_encoders(model)
    media, few, some = (media_of(owner, encoders, seed, sizes) for seed, sizes in (
        (1, [1, 2, 3]), (4, [2]), (5, [3, 1])))
    problem = ""
    for kinds in (list(media), list(media)[:1]):
        full = batch(model, {k: media[k] for k in kinds}, 2)
        both = [batch(model, {k: of[k] for k in kinds}, seed) for of, seed in ((few, 5), (some, 6))]
        for other, name in ((batch(model, {}, 3), "a rank with text only"),
                            (batch(model, {kinds[0]: few[kinds[0]]}, 3), "media on both ranks")):
            batches = tree_map(partial(_in, dtype), [[full, other], both])
            try:
                for inputs in (*batches[0], *batches[1]):
                    model(**inputs, use_cache=False).loss.backward()
                model.zero_grad()
                return model, batches, f"{', '.join(kinds)}; {name}"
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
    raise NotImplementedError(problem)


def _in(dtype: torch.dtype, value: Any) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def cells(world, names: list[str]) -> list[dict[str, Any]]:
    """Two steps of each class under FSDP2, and under DDP."""
    return [cell(world, name, wrap) for name in names for wrap in ("fsdp2", "ddp")]


def cell(world, model_type: str, wrap: str) -> dict[str, Any]:
    try:
        model, batches, scenario = prepared(model_type)
    except Exception as error:  # alike on all ranks: the class is not tried
        return {"not tried": f"{type(error).__name__}: {error}"}
    steps = [[of_ranks[rank] for of_ranks in batches] for rank in (world.rank, 1 - world.rank)]

    def losses(model: nn.Module, batches: list[dict[str, Any]]) -> list[Tensor]:
        return [model(**inputs, use_cache=False).loss for inputs in batches]

    want = [mean_gradients(model, partial(losses, batches=step)) for step in steps]
    model = wrapped(model, wrap, "none")
    out, differences, moved = {"scenario": scenario}, [], 0
    try:
        handle = balance_encoders(model)
        for step, gradient in zip(steps, want, strict=True):
            model.zero_grad()
            for inputs in step:
                losses(model, [inputs])[0].backward()
                moved += sum(step.moved for step in handle.last.values())
            differences.append(worst(gradients(model), gradient))
    except (RuntimeError, ValueError) as error:
        return out | {"error": f"{type(error).__name__}: {error}"}
    return out | {"bound": BOUNDS[next(model.parameters()).dtype], "difference": max(differences),
                  "size": min(max(float(g.abs().max()) for g in w.values()) for w in want),
                  "moved": moved}


def at_call(model_type: str) -> dict[str, str] | None:
    """The result of a class that never runs."""
    try:
        model = build(model_type, classes()[model_type])
    except Exception as error:
        return {"state": "not built", "why": short(f"{type(error).__name__}: {error}")}
    try:
        owner, encoders = infer_encoders(model)
        for encoder in encoders:
            check_encoder(owner, encoder)
    except ValueError as error:
        return {"state": REFUSED, "why": f"at the call: {short(str(error))}"}
    return None


def verdicts(names: list[str]) -> dict[str, dict[str, str]]:
    """By class. A world that breaks is tried again with each class alone."""
    try:
        ranks = run_ranks(cells, 2, names, timeout_s=60 + 60 * len(names))
    except AssertionError as error:
        if len(names) > 1:
            return {k: v for name in names for k, v in verdicts([name]).items()}
        return {names[0]: {"state": "fails", "why": short(str(error).strip()[-150:])}}
    return {name: verdict([rank[2 * i + k] for rank in ranks for k in (0, 1)])
            for i, name in enumerate(names)}


def verdict(seen: list[dict[str, Any]]) -> dict[str, str]:
    """state: exact, refused, wrong, no effect, fails, or not tried; why."""
    if any("not tried" in s for s in seen):
        return {"state": "not tried", "why": short(next(
            s["not tried"] for s in seen if "not tried" in s))}
    if errors := sorted({s["error"] for s in seen if "error" in s}):
        alike = all("error" in s for s in seen) and all(" failed: " in e for e in errors)
        return {"state": REFUSED if alike else "fails",
                "why": f"in the first forward: {short(' / '.join(errors))}"}
    difference = max(s["difference"] for s in seen)
    right = difference <= seen[0]["bound"] and seen[0]["size"] > 1e-3
    state = EXACT if right and seen[0]["moved"] else "wrong" if not right else "no effect"
    return {"state": state, "why": f"{difference:.0e}; {seen[0]['scenario']}"}


def short(text: str) -> str:
    text = re.sub(r"\s+", " ", text.replace("|", "/"))
    return text if len(text) <= 200 else text[:197] + "..."


def table(results: dict[str, dict[str, str]]) -> list[str]:
    """A row for each result and reason, with the model types of transformers' table. Those with the
    same result in the trainer, which no exact one has, stand in docs/models.md alone."""
    trainer = json.loads(TRAINER_RESULTS.read_text(encoding="utf-8"))
    groups: dict[tuple[str, str], list[str]] = {}
    for name, seen in sorted(results.items()):
        why = seen["why"]
        if name in trainer and seen["state"] == trainer[name]["state"]:
            continue
        if seen["state"] == EXACT:
            difference, why = why.split("; ", 1)
            if float(difference) > ROUNDING:
                name = f"{name} {difference}"
        groups.setdefault((seen["state"], why), []).append(name)
    rows = sorted(groups.items(), key=lambda item: (_ORDER.index(item[0][0]), item[0][1]))
    return [HEAD, "|---|---|---|---|", *(
        f"| {state} | {len(names)} | {why} | {', '.join(names)} |"
        for (state, why), names in rows)]


def put_table(page: Path, rows: list[str]) -> None:
    """Writes a table in place of the one on a page that has the same head."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start = lines.index(rows[0])
    end = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
    lines[start:end] = rows
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="model types (default: all)")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    names = args.names or list(classes())
    early = {name: at_call(name) for name in names}
    runs = [name for name in names if early[name] is None]
    parts = [{n: e for n, e in early.items() if e}]
    for some in [[], *(runs[i: i + AT_ONCE] for i in range(0, len(runs), AT_ONCE))]:
        for name, seen in (verdicts(some) if some else parts[0]).items():
            results[name] = seen
            print(name, seen["state"], seen["why"], flush=True)
        if args.write:
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            put_table(DOCS, table(results))
    print(dict(Counter(seen["state"] for seen in results.values())))


if __name__ == "__main__":
    main()
