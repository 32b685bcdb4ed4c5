"""The token ids of ChatML are pinned: a corpus that was indexed or trained on keeps its ids."""

from __future__ import annotations

import hashlib
import random
from itertools import groupby

from orchmllm.data.formats.row_formats import FORMATS
from orchmllm.data.media.medium import Medium
from orchmllm.data.media.root import MediaRoot
from orchmllm.data.text.tokenizer import ChatTokenizer
from orchmllm.plan.layout import TEXT
from tests.lib.tokenizers import SPECIAL, write_merged_tokenizer

WORDS = ("What is drawn here ? a red square . caf\u00e9 na\u00efve \u4e2d\u6587 \U0001f600 "
         "\U0001f469\u200d\U0001f4bb 12345 don't  two\n\nlines \ttab <|im_end|> <|im_start|>user "
         "</s> <think> {\"a\": 1} `code` \u0645\u0631\u062d\u0628\u0627 e\u0301 ...").split(" ")
DIGEST = "ca16d9c79053904ae890b6a81ad42556b31df4c6266513bbf26d0d913759d7dd"


def rows(count: int):
    """Conversations as the public corpora write them: with and without a system turn, of one and
    more rounds, with media as placeholders and as content parts, and rows of instructions."""
    draw = random.Random(0)

    def text() -> str:
        words = draw.choices(WORDS, k=draw.randint(1, 30))
        said = " ".join(words).strip() or "?"
        return draw.choice(["", "  "]) + said + draw.choice(["", " ", "\n"])

    for k in range(count):
        turns = [{"from": who, "value": text()} for _ in range(draw.randint(1, 4))
                 for who in ("human", "gpt")]
        if k % 4 == 0:
            yield "sharegpt", {"conversations": turns}
        elif k % 4 == 1:
            turns[0]["value"] = "<image>\n" + turns[0]["value"] + "<audio>"
            turns[-1]["value"] += "<image>"
            yield "llava", {"conversations": turns, "images": ["a.png", "b.png"], "audios": "a.wav"}
        elif k % 4 == 2:
            parts = [{"type": "text", "text": text()}, {"type": "image", "image": "a.png"},
                     {"type": "text", "text": text()}]
            yield "openai", {"messages": [
                {"role": "system", "content": text()}, {"role": "user", "content": parts},
                {"role": "assistant", "content": text(), "weight": k % 3 // 2},
                {"role": "user", "content": text()},
                {"role": "assistant", "content": "", "weight": 0}]}
        else:
            yield "llama_factory (alpaca)", {
                "instruction": text(), "input": draw.choice(["", text()]), "output": text(),
                "system": draw.choice(["", text()])}


def test_the_ids_of_chatml_corpora_are_those_of_all_versions(tmp_path):
    write_merged_tokenizer(tmp_path, SPECIAL)
    tokenizer = ChatTokenizer(tmp_path)
    conversations = [FORMATS[name].reader.read(FORMATS[name].columns.pick(row), MediaRoot(""), "")
                     for name, row in rows(400)]
    found = hashlib.sha256()
    for turns in conversations:
        ids, learnt, segments = [], [], []
        for is_medium, part in groupby(tokenizer.spans(turns), lambda s: isinstance(s, Medium)):
            if is_medium:
                segments += [(medium.modality, 0) for medium in part]
                continue
            some, are_learnt = tokenizer.encode_spans([*part])
            segments += [(TEXT, len(some))] * (len(some) > 0)
            ids += some.tolist()
            learnt += are_learnt.tolist()
        found.update(repr((ids, learnt, segments)).encode())
    assert found.hexdigest() == DIGEST
