"""Which multimodal models of transformers are trained: what the proof says of a tiny model of each
type, and what a comparison says that shares no code with it.

    python scripts/check_models.py --write

Every entry of transformers' table of multimodal language models is built tiny, with examples of
text alone, of one medium, of several, and with media at the border of two examples. The proof
(orchmllm.proof) compares them in float64 throughout; the other comparison (tests/lib/whole_models)
leaves parts of the model in float32 where its code has them, so that its differences may be 1e-6.
--write puts the result into tests/golden/models.json and the table into docs/models.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from torch import nn  # noqa: E402

from orchmllm.batch import ProcessedExample  # noqa: E402
from orchmllm.encoders.planned import PlannedEncoders  # noqa: E402
from orchmllm.models.whole_model import WholeModel  # noqa: E402
from orchmllm.plan.layout import BatchLayout  # noqa: E402
from orchmllm.proof.compare import compare  # noqa: E402
from scripts.count_encoder_classes import put_table  # noqa: E402
from tests.lib import whole_models as apart  # noqa: E402
from tests.lib.any_models import examples_of  # noqa: E402
from tests.lib.tiny_models import build  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "tests/golden/models.json"
DOCS = ROOT / "docs/models.md"
HEAD = "| result | types | why | `model_type` |"
TRAINED, REFUSED, NOT_BUILT, WRONG = "trained", "refused", "not built", "wrong"
AGREES = 1e-6  # of the largest gradient ...
SHOWN = 1e-10  # ... and what of it the table shows
_REASONS = (  # said of many types -> in short
    (r"balance_encoders does not know",
     "no get_*_features method takes media that forward is given"),
    (r"needs (\w+), and what this says",
     r"its features need an argument of which no part is known to be of one medium: \1"),
    (r"itself applies (\w+)", "its forward itself applies a module to the features"),
    (r"is a (BatchNorm\w*)", r"\1 in its encoder, by which media change each other"),
    (r"(\d+) of (\d+) layers kept", "some layers mix positions otherwise than by an attention that "
     "can be told the examples"),
    (r"give `rows`", "how many rows of features a clip has is not known"),
    (r"has no output '(\w+)'", r"its features lack an output: \1"),
    (r"was given another mask", "it makes another mask than it is given"),
    (r"computes attention with ([\w, ]+), which", r"attention that packing does not know: \1"),
    (r"it sees what it should learn", "what it says of a token depends on later ones that are "
     "learnt"))


def types() -> dict[str, str]:
    """model type -> class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES)


def checked(model_type: str) -> dict[str, str]:
    """state: trained (both agree), refused, wrong (the proof passes, the other does not) or not
    built; why; chunks: no, if its loss cannot be made in chunks."""
    try:
        torch.manual_seed(0)
        model = build(model_type, types()[model_type])
        if type(model).forward is nn.Module.forward:
            model = model.thinker  # the whole has no forward
    except Exception as error:
        missing = "timm" if "timm" in str(error) else ""
        return {"state": NOT_BUILT, "why": f"needs {missing}, which is not installed" if missing
                else "the script's small sizes do not suit the configuration"}
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_attn_implementation", None) == "eager":
            config._attn_implementation = "sdpa"
    try:
        examples = examples_of(model)
        compare(model, examples)
    except Exception as error:
        return {"state": REFUSED, "why": short(error)}
    more = {}
    try:
        compare(model, examples, chunked=True)
    except ValueError:
        more = {"chunks": "no"}
    try:
        found = difference_apart(model, examples)
    except Exception as error:
        return {"state": WRONG, "why": short(error)}
    return {"state": TRAINED if found <= AGREES else WRONG, "why": f"{found:.0e}", **more}


def difference_apart(model: nn.Module, examples: Sequence[ProcessedExample]) -> float:
    """The largest of the gradients, over the largest gradient, by the tests' comparison."""
    _, wanted = apart.stock(model, [
        {"input_ids": e.input_ids[None], "labels": e.labels[None],
         "attention_mask": torch.ones_like(e.input_ids)[None], **e.media} for e in examples])
    whole = WholeModel(copy.deepcopy(model), torch.float64)
    whole.encoders = PlannedEncoders(whole.hf)
    layout = BatchLayout.concat([e.lengths for e in examples], [len(examples)])
    whole(apart.planned_row(whole, examples, layout)).backward()
    return apart.difference(apart.gradients(whole.hf), wanted)


def short(error: Exception) -> str:
    """In one line, the same for types that are refused for one reason."""
    text = re.sub(r"\s+", " ", str(error).replace("|", "/"))
    for pattern, said in _REASONS:
        if found := re.search(pattern, text):
            return found.expand(said)
    return f"{type(error).__name__}: {text}"[:160]


def table(results: dict[str, dict[str, str]]) -> list[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for name, seen in sorted(results.items()):
        why, _, detail = seen["why"].partition(": ")
        if seen["state"] == TRAINED:
            why = "gradients as by stock transformers" + (
                ", with `fsdp.loss_chunk_rows: 0`" if "chunks" in seen else "")
            detail = seen["why"] if float(seen["why"]) > SHOWN else ""
        elif why.endswith("Error"):
            why, detail = "another error", why
        groups.setdefault((seen["state"], why), []).append(name + f" ({detail})" * bool(detail))
    order = (TRAINED, WRONG, REFUSED, NOT_BUILT)
    rows = sorted(groups.items(), key=lambda item: (
        order.index(item[0][0]), -len(item[1]), item[0][1]))
    return [HEAD, "|---|---|---|---|", *(f"| {state} | {len(names)} | {why} | {', '.join(names)} |"
                                         for (state, why), names in rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="model types (default: all)")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if args.names and RESULTS.exists() else {}
    for name in args.names or types():
        results[name] = checked(name)
        print(name, results[name]["state"], results[name]["why"], flush=True)
        if args.write:
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            put_table(DOCS, table(results))
    print(dict(Counter(seen["state"] for seen in results.values())))


if __name__ == "__main__":
    main()
