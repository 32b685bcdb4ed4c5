"""Rows in the layouts of public corpora, after their cards and readmes, and what they say: of each
corpus three rows, the question and the answer of the first, and its media."""

from __future__ import annotations

import base64
import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile
from PIL import Image

NUM_ROWS = 3


class Layout(NamedTuple):
    """row(k): the k-th row, or the cells of a line. said: (part of the question, the answer) of row
    0, None where the corpus is refused. media: of row 0. file: its name; head: whether a table has
    a line that names its columns; wrap: what a JSON file has around its rows."""

    row: Callable[[int], dict | list]
    said: tuple[str, str] | None
    media: int = 0
    file: str = "data.jsonl"
    head: bool = True
    wrap: Callable[[list], object] = list


def picture(k: int) -> str:
    return f"{k}.png"


def encoded(k: int) -> str:
    return base64.b64encode(Path(picture(k)).read_bytes()).decode()


def write(layout: Layout, folder: Path) -> Path:
    """The file of a corpus, with media beside it where it has some; the current folder is there."""
    for k in range(NUM_ROWS if layout.media else 0):
        pixels = np.random.default_rng(k).integers(0, 255, (28, 28, 3), np.uint8)
        for name in (picture(k), f"images/{k}.jpg", f"train2014/COCO_train2014_{100 + k:012}.jpg",
                     f"{1000 + k}.jpg"):
            (folder / name).parent.mkdir(exist_ok=True)
            Image.fromarray(pixels).save(folder / name)
        sound = np.random.default_rng(k).normal(0, 0.1, 8000)
        for name in (f"{k}.wav", f"wavs/LJ001-000{k}.wav", f"audio/train/{7000 + k}.wav",
                     f"clips/c{k}.wav", f"yt-{k}x.wav", f"flac/19/198/19-198-000{k}.flac"):
            (folder / name).parent.mkdir(exist_ok=True, parents=True)
            soundfile.write(folder / name, sound, 16000)
    rows = [layout.row(k) for k in range(NUM_ROWS)]
    path = folder / layout.file
    path.parent.mkdir(exist_ok=True, parents=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(layout.wrap(rows)))
    elif path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        lines = [list(rows[0])] * layout.head + [
            list(row.values()) if layout.head else row for row in rows]
        if path.name == "metadata.csv" and not layout.head:
            path.write_text("".join("|".join(line) + "\n" for line in lines))
        elif path.suffix == ".tsv":
            path.write_text("".join("\t".join(map(str, line)) + "\n" for line in lines))
        else:
            with path.open("w", newline="") as file:
                csv.writer(file).writerows(lines)
    return path


ASK, SAY = "What is it?", "A thing"
TURNS = [{"role": "user", "content": ASK}, {"role": "assistant", "content": SAY}]
SHARED = [{"from": "human", "value": ASK}, {"from": "gpt", "value": SAY}]
FOUR = ["red", "blue", "green", "white"]
CARD = "What is it?\nA. red\nB. blue\nC. green\nD. white"


def image(k: int) -> dict:
    return {"bytes": Path(picture(k)).read_bytes(), "path": picture(k)}


def audio(k: int) -> dict:
    return {"bytes": Path(f"{k}.wav").read_bytes(), "path": f"{k}.wav"}


P = "data.parquet"
SPEECH = ("Transcribe the speech.", SAY)
LAYOUTS: dict[str, Layout] = {
    "GSM8K": Layout(lambda k: {"question": ASK, "answer": SAY}, (ASK, SAY)),
    "SQuAD": Layout(lambda k: {"id": f"5{k}", "title": "T", "context": f"Long text {k}. " * 9,
                               "question": ASK,
                               "answers": {"text": [SAY], "answer_start": [515]}}, (ASK, SAY)),
    "Dolly": Layout(lambda k: {"instruction": ASK, "context": "", "response": SAY,
                               "category": "open_qa"}, (ASK, SAY)),
    "MMLU": Layout(lambda k: {"question": ASK, "subject": "physics", "choices": FOUR,
                              "answer": 1}, (CARD, "B. blue")),
    "ARC": Layout(lambda k: {"id": f"M{k}", "question": ASK, "choices": {
        "text": FOUR, "label": ["A", "B", "C", "D"]}, "answerKey": "C"}, (CARD, "C. green")),
    "CommonsenseQA": Layout(lambda k: {"id": f"e8{k}", "question": ASK, "question_concept": "thing",
                                       "choices": {"label": ["A", "B", "C", "D"], "text": FOUR},
                                       "answerKey": "A"}, (CARD, "A. red")),
    "OpenBookQA": Layout(lambda k: {"id": f"7-{k}", "question_stem": ASK, "choices": {
        "text": FOUR, "label": ["A", "B", "C", "D"]}, "answerKey": "D"}, (CARD, "D. white")),
    "RACE": Layout(lambda k: {"example_id": f"high{k}.txt", "article": f"Article {k}. " * 9,
                              "answer": "C", "question": ASK, "options": FOUR},
                   (CARD, "C. green")),
    "SciQ": Layout(lambda k: {"question": ASK, "distractor3": "x", "distractor1": "y",
                              "distractor2": "z", "correct_answer": SAY,
                              "support": "Because of it."}, (ASK, SAY)),
    "XSum": Layout(lambda k: {"document": f"Long text {k}. " * 9, "summary": SAY, "id": f"{k}1"},
                   ("Long text 0", SAY)),
    "CNN/DailyMail": Layout(lambda k: {"article": f"Long text {k}. " * 9, "highlights": SAY,
                                       "id": "a9"}, ("Long text 0", SAY)),
    "SAMSum": Layout(lambda k: {"id": f"13{k}", "dialogue": "A: hi\r\nB: ho", "summary": SAY},
                     ("A: hi", SAY)),
    "WMT": Layout(lambda k: {"translation": {"de": "Ein Ding", "en": SAY}}, ("Ein Ding", SAY),
                  file=P),
    "MetaMathQA": Layout(lambda k: {"type": "MATH_AnsAug", "query": ASK,
                                    "original_question": "Else?", "response": SAY}, (ASK, SAY)),
    "UltraChat": Layout(lambda k: {"prompt": ASK, "prompt_id": f"f{k}", "messages": TURNS},
                        (ASK, SAY)),
    "OpenHermes": Layout(lambda k: {"custom_instruction": None, "topic": None, "idx": k,
                                    "conversations": SHARED, "source": "airoboros",
                                    "category": "orca"}, (ASK, SAY)),
    "WildChat": Layout(lambda k: {"conversation_hash": f"h{k}", "model": "m", "turn": 1,
                                  "conversation": [{**t, "language": "English", "toxic": False}
                                                   for t in TURNS]}, (ASK, SAY)),
    "OpenOrca": Layout(lambda k: {"id": f"flan.{k}", "system_prompt": "", "question": ASK,
                                  "response": SAY}, (ASK, SAY)),
    "NuminaMath": Layout(lambda k: {"source": "aops", "problem": ASK, "solution": SAY,
                                    "messages": TURNS}, (ASK, SAY)),
    "OpenR1-Math": Layout(lambda k: {"problem": ASK, "solution": SAY, "source": "aops"},
                          (ASK, SAY)),
    "Tulu 3": Layout(lambda k: {"id": f"p{k}", "messages": TURNS, "source": "ai2"}, (ASK, SAY)),
    "TriviaQA": Layout(lambda k: {"question": ASK, "question_id": f"tc_{k}", "answer": {
        "value": SAY, "aliases": [SAY, "It"], "type": "WikipediaEntity"}}, (ASK, SAY)),
    "PubMedQA": Layout(lambda k: {"pubid": 21 + k, "question": ASK, "context": {
        "contexts": ["One.", "Two."], "labels": ["A", "B"]}, "long_answer": SAY,
        "final_decision": "yes"}, (ASK, SAY)),
    "FineWeb": Layout(lambda k: {"text": f"Text {k}", "id": f"<urn:{k}>", "dump": "CC",
                                 "url": "https://a.org", "language": "en"}, ("", "Text 0")),
    "Wikipedia": Layout(lambda k: {"id": f"{k}2", "url": "https://a.org", "title": "T",
                                   "text": f"Text {k}"}, ("", "Text 0")),
    "The Stack": Layout(lambda k: {"content": f"print({k})", "size": 8, "lang": "Python"},
                        ("", "print(0)")),
    "COCO (Karpathy)": Layout(lambda k: {
        "filepath": "train2014", "sentids": [1], "filename": f"COCO_train2014_{100 + k:012}.jpg",
        "imgid": k, "split": "train", "sentences": [SAY, "Or this"]},
        ("Describe the image.", SAY), 1),
    "COCO captions": Layout(lambda k: {"image_id": 100 + k, "id": 48 + k, "caption": SAY},
                            ("Describe the image.", SAY), 1, "data.json",
                            wrap=lambda rows: {"info": {}, "annotations": rows}),
    "Flickr30k": Layout(lambda k: {"image_name": f"{1000 + k}.jpg", "comment_number": 0,
                                   "comment": SAY}, ("Describe the image.", SAY), 1, "results.csv"),
    "VQAv2": Layout(lambda k: {"question_type": "what", "multiple_choice_answer": SAY, "answers": [
        {"answer": "x", "answer_confidence": "yes", "answer_id": 1}], "image_id": 10 + k,
        "answer_type": "other", "question_id": k, "question": ASK, "image": image(k)},
        (ASK, SAY), 1, P),
    "TextVQA": Layout(lambda k: {"image_id": f"a{k}", "question_id": k, "question": ASK,
                                 "question_tokens": ["what"], "image": image(k), "answers": [
                                     SAY, "x"], "image_width": 28}, (ASK, SAY), 1, P),
    "ScienceQA": Layout(lambda k: {"image": image(k), "question": ASK, "choices": FOUR, "answer": 3,
                                   "hint": "", "task": "closed choice", "grade": "grade2",
                                   "subject": "science", "lecture": "", "solution": ""},
                        (CARD, "D. white"), 1, P),
    "AI2D": Layout(lambda k: {"question": ASK, "options": FOUR, "answer": "2", "image": image(k)},
                   (CARD, "C. green"), 1, P),
    "A-OKVQA": Layout(lambda k: {"image": image(k), "question_id": f"q{k}", "question": ASK,
                                 "choices": FOUR, "correct_choice_idx": 1,
                                 "direct_answers": "['red']", "rationales": ["It is so."]},
                      (CARD, "B. blue"), 1, P),
    "MMBench": Layout(lambda k: {"index": k, "question": ASK, "hint": "", "A": "red", "B": "blue",
                                 "C": "green", "D": "white", "answer": "A", "category": "c",
                                 "image": encoded(k), "source": "s"}, (CARD, "A"), 1, "dev.tsv"),
    "ChartQA": Layout(lambda k: {"image": image(k), "query": ASK, "label": [SAY],
                                 "human_or_machine": 0}, (ASK, SAY), 1, P),
    "DocVQA": Layout(lambda k: {"questionId": f"{k}", "question": ASK, "question_types": ["x"],
                                "image": image(k), "docId": 5, "answers": [SAY]}, (ASK, SAY), 1, P),
    "MathVista": Layout(lambda k: {"pid": f"{k}", "question": ASK, "image": f"images/{k}.jpg",
                                   "choices": FOUR, "answer": "blue", "question_type":
                                   "multi_choice"}, (CARD, "B. blue"), 1),
    "VizWiz": Layout(lambda k: {"image": f"{1000 + k}.jpg", "question": ASK, "answers": [
        {"answer_confidence": "yes", "answer": SAY}], "answerable": 1}, (ASK, SAY), 1, "a.json"),
    "SEED-Bench": Layout(lambda k: {"answer": "A", "choice_a": "red", "choice_b": "blue",
                                    "choice_c": "green", "choice_d": "white", "data_id": f"d{k}",
                                    "question": ASK, "question_id": f"{k}", "image": picture(k)},
                         (CARD, "A"), 1),
    "TRL vision": Layout(lambda k: {"messages": TURNS, "images": [image(k)]}, (ASK, SAY), 1, P),
    "ALLaVA": Layout(lambda k: {"id": f"a{k}", "image": picture(k), "conversations": [
        {"from": "human", "value": f"<image>\n{ASK}"}, SHARED[1]], "url": "https://a.org/b"},
        (ASK, SAY), 1, "a.json"),
    "M3IT": Layout(lambda k: {"instruction": ASK, "inputs": "", "image_base64_str": [encoded(k)],
                              "outputs": SAY}, (ASK, SAY), 1),
    "Qwen-VL": Layout(lambda k: {"id": f"identity_{k}", "conversations": [
        {"from": "user", "value": f"Picture 1: <img>{picture(k)}</img>\n{ASK}"},
        {"from": "assistant", "value": SAY}]}, (ASK, SAY), 1, "a.json"),
    "LAION (embedded)": Layout(lambda k: {"jpg": image(k), "caption": SAY, "url": "https://a.org",
                                          "similarity": 0.3}, ("Describe the image.", SAY), 1, P),
    "Recap-DataComp": Layout(lambda k: {"image": image(k), "org_caption": "x", "re_caption": SAY},
                             ("Describe the image.", SAY), 1, P),
    "CC3M": Layout(lambda k: [SAY, f"https://a.org/{k}.jpg"], None, 1, "train.tsv", head=False),
    "LJSpeech": Layout(lambda k: [f"LJ001-000{k}", "Printing, in the only sense with which we are "
                                  "at present concerned, differs", SAY],
                       ("Transcribe", "Printing, in the only sense with which we are at present "
                        "concerned, differs"), 1, "metadata.csv", head=False),
    "FLEURS": Layout(lambda k: [str(1900 + k), f"{7000 + k}.wav", SAY, SAY.lower(), "a | t", "8000",
                                "MALE"], SPEECH, 1, "train.tsv", head=False),
    "VCTK": Layout(lambda k: {"speaker_id": "p225", "audio": audio(k), "file": f"/r/{k}.wav",
                              "text": SAY, "text_id": "001", "age": "23"}, SPEECH, 1, P),
    "VoxPopuli": Layout(lambda k: {"audio_id": f"2013{k}", "language": 0, "audio": audio(k),
                                   "raw_text": SAY, "normalized_text": SAY.lower()},
                        SPEECH, 1, P),
    "People's Speech": Layout(lambda k: {"id": f"{k}.flac", "audio": audio(k), "duration_ms": 500,
                                         "text": SAY}, SPEECH, 1, P),
    "TED-LIUM": Layout(lambda k: {"audio": audio(k), "text": SAY, "speaker_id": "A", "gender": 1,
                                  "file": "x.sph", "id": f"A-{k}"}, SPEECH, 1, P),
    "MLS": Layout(lambda k: {"audio": audio(k), "original_path": "https://a.org/x.mp3",
                             "begin_time": 10.5, "end_time": 11.0, "transcript": SAY,
                             "audio_duration": 0.5, "speaker_id": "9", "id": f"9_{k}"},
                  SPEECH, 1, P),
    "LibriLight": Layout(lambda k: {"speaker": "19", "book": "198", "id": f"19-198-000{k}",
                                    "transcription": SAY}, SPEECH, 1),
    "WavCaps": Layout(lambda k: {"id": f"yt-{k}x", "caption": SAY, "duration": 0.5},
                      ("Describe the sound.", SAY), 1, "sb.json",
                      wrap=lambda rows: {"num_captions_per_audio": 1, "data": rows}),
    "MusicCaps": Layout(lambda k: {"ytid": f"yt-{k}x", "start_s": 30, "end_s": 30.5,
                                   "aspect_list": "['a']", "caption": SAY, "author_id": 4},
                        ("Describe the sound.", SAY), 1, "musiccaps.csv"),
    "MINDS-14": Layout(lambda k: {"path": f"{k}.wav", "audio": audio(k), "transcription": SAY,
                                  "english_transcription": SAY, "intent_class": 11}, SPEECH, 1, P),
    "ClothoAQA": Layout(lambda k: {"file_name": f"{k}.wav", "QuestionText": ASK, "answer": SAY,
                                   "confidence": "yes"}, (ASK, SAY), 1, "clotho_aqa_train.csv"),
    "ESC-50": Layout(lambda k: {"filename": f"{k}.wav", "fold": 1, "target": 0, "category": "dog",
                                "esc10": "True"}, ("the sound", "dog"), 1, "esc50.csv"),
    "Emilia": Layout(lambda k: {"id": f"EN_{k}", "wav": f"{k}.wav", "text": SAY, "duration": 0.5,
                                "speaker": "S", "language": "en", "dnsmos": 3.3}, SPEECH, 1),
    "CoVoST 2": Layout(lambda k: {"path": f"c{k}.wav", "translation": SAY, "split": "train",
                                  "client_id": "x"}, ("", SAY), 1, "covost_v2.de_en.tsv"),
    "HellaSwag": Layout(lambda k: {"ind": k, "activity_label": "Run", "ctx": ASK, "endings": FOUR,
                                   "label": "3"}, (CARD, "D. white")),
    "OASST": Layout(lambda k: {"message_id": f"m{k}", "parent_id": "p", "text": SAY,
                               "role": "prompter", "lang": "en"}, None),
    "GQA": Layout(lambda k: {"question": ASK, "imageId": f"{1000 + k}", "answer": SAY,
                             "fullAnswer": f"It is {SAY}."}, (ASK, SAY), 1),
}
