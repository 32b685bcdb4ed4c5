"""What the model answered to held-out examples while it trained, beside their media, which are read
from the data of the run."""

from __future__ import annotations

import mimetypes
from base64 import b64encode
from collections.abc import Sequence
from html import escape
from io import BytesIO
from pathlib import Path

from orchmllm.config.recipe import load_recipe
from orchmllm.data.formats.conversation import Conversation
from orchmllm.data.formats.open import DataSource, index_path, open_source, sources_of
from orchmllm.data.media.medium import MediaError, Medium, reading
from orchmllm.data.storage.clients import StorageError
from orchmllm.data.storage.remote import Storage
from orchmllm.plan.layout import AUDIO

LAST_STEPS = 3  # of which answers are shown
SIDE = 240  # pixels of an image
MOST_BYTES = 1 << 20  # of a clip on the page


def answers(folder: Path, samples: Sequence[dict]) -> str:
    """A table as HTML. folder: of the run; samples: lines of its samples.jsonl."""
    if not samples:
        return "<p class=none>Not asked for: set train.sample_every and data.num_validation.</p>"
    found: dict[int, dict[int, dict]] = {}
    for line in samples:
        found.setdefault(line["example"], {})[line["step"]] = line  # a later line counts
    try:
        recipe = load_recipe(folder / "recipe.yaml")
        data, storage = recipe.data, Storage(recipe.data.remote)
        sources = [open_source(config, index_path(data.index_dir), storage)
                   for config in sources_of(data)]
        asked = {example: _asked(_conversation(sources, example)) for example in found}
    except (ValueError, OSError, StorageError) as error:
        asked = dict.fromkeys(found, f"the data cannot be read: {escape(str(error))}")
    body = "".join(
        f"<tr><td>{example}</td><td>{asked[example]}</td><td>"
        f"{escape(next((s['expected'] for s in steps.values() if 'expected' in s), ''))}</td><td>"
        + "<br />".join(f"step {k}: {_told(steps[k])}" for k in sorted(steps)[-LAST_STEPS:])
        + "</td></tr>" for example, steps in sorted(found.items()))
    return ("<div class=scroll><table><tr><th>example</th><th>question</th><th>the data say</th>"
            f"<th>the model says</th></tr>{body}</table></div>")


def _conversation(sources: Sequence[DataSource], example: int) -> Conversation:
    """Raises ValueError if there are fewer examples by now, or its row cannot be read."""
    for source in sources:
        if example < len(source):
            return source.conversation(example)
        example -= len(source)
    raise ValueError("there are fewer rows than when the run was started")


def _told(line: dict) -> str:
    if "error" in line:
        return escape(f"cannot be asked about: {line['error']}")
    return escape(line["answer"] + ("" if line["ended"] else " ... (cut off)"))


def _asked(turns: Conversation) -> str:
    """What comes before the first answer, as HTML."""
    first = next((k for k, turn in enumerate(turns) if turn.supervised), len(turns))
    parts = [part for turn in turns[:first] for part in turn.parts]
    return "".join(_shown(p) if isinstance(p, Medium) else escape(p) for p in parts)


def _shown(medium: Medium) -> str:
    """A medium on the page, or its name where it is too large, a frame, or cannot be read."""
    from PIL import Image, ImageOps

    name, source = escape(medium.name, quote=True), ""
    try:
        with reading(medium) as file:
            if medium.modality != AUDIO and medium.frame is None:
                image, out = ImageOps.exif_transpose(Image.open(file)).convert("RGB"), BytesIO()
                image.thumbnail((SIDE, SIDE))
                image.save(out, "JPEG")
                source = f"data:image/jpeg;base64,{b64encode(out.getvalue()).decode()}"
            elif medium.modality == AUDIO and len(data := file.read(MOST_BYTES + 1)) <= MOST_BYTES:
                kind = mimetypes.guess_type(medium.name)[0] or "audio/wav"
                source = f"data:{kind};base64,{b64encode(data).decode()}"
    except MediaError as error:
        return f"[{escape(str(error))}]"
    if not source:
        return f"[{name}]"
    return (f'<img alt="{name}" src="{source}" />' if medium.modality != AUDIO
            else f'<audio controls src="{source}"></audio>')
