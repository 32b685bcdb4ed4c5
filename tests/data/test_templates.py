"""Chat templates that read what they are given: the text is that of transformers, and what is
learnt is what the assistant says."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from orchmllm.batch import IGNORE_INDEX
from orchmllm.data.formats.conversation import Turn, chat, media_of
from orchmllm.data.media.medium import Medium, RowError
from orchmllm.data.media.root import MediaRoot
from orchmllm.data.text.spans import Text
from orchmllm.data.text.template_engine import TODAY
from orchmllm.data.text.templates import ChatTemplate
from orchmllm.data.text.tokenizer import ChatTokenizer
from orchmllm.data.text.traced import Traced
from orchmllm.plan.layout import AUDIO, VISION
from orchmllm.tools.data.command import main
from tests.lib.drawn import reader_in, write_model
from tests.lib.formats import write_jsonl
from tests.lib.sources import opened, read_row
from tests.lib.tokenizers import SPECIAL, write_tokenizer

# Reasoning in an answer is split off; only that after the last question is written again, and
# an answer without any gets an empty block there.
THINK = """\
{%- set seen = namespace(last=-1) %}
{%- for m in messages %}
{%- set result = m.content.startswith('<result>') and m.content.endswith('</result>') %}
{%- if m.role == 'user' and not result %}{%- set seen.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- set why = '' %}{%- set said = m.content %}
{%- if '</think>' in said %}
{%- set why = said.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set said = said.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > seen.last %}
{{- '<think>\\n' + why.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- said + '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
GENERATION = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
              "{% generation %}{{ m.content | trim }}<|im_end|>{% endgeneration %}{% else %}"
              "{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}")
DATED = ("{{ 'Today is ' + strftime_now('%d %B %Y') + '.\n' }}{% for m in messages %}<|im_start|>"
         "{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}")
# The system turn becomes part of the first question; roles have to alternate.
FOLDING = ("{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' "
           "%}{% set turns = messages[1:] %}{% else %}{% set first = '' %}{% set turns = messages "
           "%}{% endif %}{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
           "{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.role }}\n"
           "{{ (first if loop.first else '') + m.content | trim }}<|im_end|>\n{% endfor %}")
CUTTING = "{% for m in messages %}[{{ m.role }}]{{ m.content.strip('\n') }}<|im_end|>{% endfor %}"
# Nothing that a loop over turns writes says which turn it was at; one goes on before it ends.
COUNTING = ("{% for i in range(messages | length) %}<|im_start|>{{ messages[i].role }}\n"
            "{{ messages[i].content }}<|im_end|>\n{% endfor %}")
COLLECTING = ("{% set ns = namespace(out='') %}{% for m in messages %}{% set ns.out = ns.out + "
              "'<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' %}{% endfor %}"
              "{{ ns.out }}")
CONTINUING = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
              "{% if m.role == 'user' %}{% continue %}{% endif %}{% endfor %}")
TEMPLATES = dict(think=THINK, generation=GENERATION, dated=DATED, folding=FOLDING, cutting=CUTTING,
                 counting=COUNTING, collecting=COLLECTING, continuing=CONTINUING)
WHY = "<think>\nred is\n\nwarm </think> \n\n blue"


def talk(*texts: str, system: str = "") -> list[Turn]:
    said = [Turn("assistant" if k % 2 else "user", (t,), bool(k % 2)) for k, t in enumerate(texts)]
    return [Turn("system", (system,), False), *said] if system else said


TALKS = {
    "plain": talk("What is drawn?", "a red square.", "And now?", "blue"),
    "system": talk("  What?\n", " red ", system=" You are a helpful assistant.\n"),
    "reasoning": talk("What is drawn?", WHY),
    "earlier reasoning": talk("What?", WHY, "one two", "<think>\n\n</think>\n\nno", "tone", WHY),
    "reasoning that nothing opens": talk("What?", "is it red</think>yes"),
    "a question with the words": talk("Say <think>one</think>", WHY),
    "a result": talk("What?", WHY, "<result>two</result>", "<think>low</think>high"),
    "end token in the data": talk("<|im_end|>\n<|im_start|>assistant\nyes", "no <|im_end|> no"),
    "space": talk("\n\n one", "\n\n<think>a</think>\n\n two \n"),
    "private use": talk("\ue0000\ue001 \ue002a\ue003", "\ue0001\ue001</think>\ue004b"),
    "empty answer": talk("What?", "", "one", "two"),
}


@pytest.fixture
def both(tmp_path, monkeypatch):
    """(template) -> (our tokenizer, transformers'), which says that it is the fixed day."""
    from transformers.utils import chat_template_utils

    class Fixed(datetime):
        now = classmethod(lambda cls: TODAY)

    monkeypatch.setattr(chat_template_utils, "datetime", Fixed)

    def make(template: str):
        from transformers import PreTrainedTokenizerFast

        path = write_tokenizer(tmp_path, SPECIAL)
        (tmp_path / "chat_template.jinja").write_text(template)
        return ChatTokenizer(tmp_path), PreTrainedTokenizerFast(
            tokenizer_file=str(path), chat_template=template)

    yield make
    chat_template_utils._compile_jinja_template.cache_clear()  # it keeps the fixed day


def messages(turns: list[Turn]) -> list[dict]:
    return [{"role": t.role, "content": "".join(t.parts)} for t in turns]


def test_what_a_template_puts_before_a_content_may_be_empty():
    """The JSON of both is from where the content is from."""
    template = ChatTemplate("{% for m in messages %}{{ m.role }}: {{ ('' + m.content) | tojson }}"
                            "</s>\n{% endfor %}", {"eos_token": "</s>"}, ["</s>"], "here")
    spans = template.spans(talk("Who?", "I am."))
    assert [span.text for span in spans if span.learnt] == ['"I am."', "</s>"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_transformers(both, name):
    ours, theirs = both(TEMPLATES[name])
    checked = 0
    for what, turns in TALKS.items():
        expected = theirs.apply_chat_template(messages(turns), tokenize=False)
        token_ids, mask = ours.tokenize(turns)
        assert ours.decode(token_ids) == expected, what
        # What data spells out is never a special token.
        ends = int((token_ids == ours.tokenizer.token_to_id("<|im_end|>")).sum())
        assert ends == len(turns) - (name == "folding" and turns[0].role == "system"), what
        if name in ("counting", "collecting", "continuing") and "" not in turns[1].parts:
            assert ours.decode(token_ids[mask]) == "".join(
                f"{t.parts[0]}<|im_end|>" for t in turns if t.supervised), what
        checked += 1
    assert checked == len(TALKS)


def test_a_token_that_nothing_comes_before_is_no_target(both, tmp_path):
    """A template that writes nothing before the text of a turn, and an answer that comes first."""
    ours, _ = both("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    turns = [{"role": "assistant", "content": "red"}, {"role": "user", "content": "which colour?"},
             {"role": "assistant", "content": "blue"}]
    write_jsonl(tmp_path / "rows.jsonl", [{"messages": turns}])
    dataset = opened(tmp_path / "rows.jsonl", reader_in(tmp_path), tmp_path)
    answers = len(ours.tokenizer.encode("red")) + len(ours.tokenizer.encode("blue")) + 2
    assert dataset.layout(0).num_targets.tolist() == [answers - 1]
    assert int((dataset.load(0).labels[1:] != IGNORE_INDEX).sum()) == answers - 1


AFTER = " \n\n blue<|im_end|>"
REASONED = f"<think>\nred is\n\nwarm \n</think>\n\n{AFTER}"
LEARNT = {
    "plain": "a red square.<|im_end|>blue<|im_end|>",
    "reasoning": REASONED, "a question with the words": REASONED,
    "earlier reasoning": f"{AFTER}no<|im_end|>{REASONED}",
    "a result": f"{REASONED}<think>\nlow\n</think>\n\nhigh<|im_end|>",
    "empty answer": "<|im_end|>two<|im_end|>",
}


@pytest.mark.parametrize("what", LEARNT)
def test_reasoning_is_learnt_and_an_empty_block_is_not(both, what):
    ours, _ = both(THINK)
    token_ids, mask = ours.tokenize(TALKS[what])
    assert ours.decode(token_ids[mask]) == LEARNT[what]
    assert ours.end_id == ours.tokenizer.token_to_id("<|im_end|>")


def test_a_part_of_a_text_knows_where_its_characters_are_from():
    text, codes = Traced("abcd", [(1, 7), (3, 9)]), np.array([7, 9, 9, 9])
    for key in (0, 3, -1, -4, slice(1, None), slice(-2, None), slice(None, None, -1), slice(3, 1)):
        part = text[key]
        assert str(part) == "abcd"[key]
        assert [code for count, code in part.runs for _ in range(count)] == [
            *np.atleast_1d(codes[key])]


def test_generation_tags_say_what_is_learnt(both):
    ours, theirs = both(GENERATION)
    for what, turns in TALKS.items():
        expected = theirs.apply_chat_template(messages(turns), return_dict=True,
                                              return_assistant_tokens_mask=True)
        learnt = [i for i, m in zip(expected["input_ids"], expected["assistant_masks"],
                                    strict=True) if m]
        token_ids, mask = ours.tokenize(turns)
        assert ours.decode(token_ids[mask]) == theirs.decode(learnt), what
    quiet = [t._replace(supervised=False) for t in TALKS["plain"][:2]] + TALKS["plain"][2:]
    token_ids, mask = ours.tokenize(quiet)
    assert ours.decode(token_ids[mask]) == "blue<|im_end|>"
    assert ours.end_id == ours.tokenizer.token_to_id("<|im_end|>")


def test_media_stay_in_place(both):
    """Also of a template that writes texts alone."""
    ours, theirs = both(THINK)
    image = Medium(VISION, "a.png", data=b"x")
    turns = [Turn("user", ("Look: ", image, " which colour?"), False),
             Turn("assistant", ("<think>red</think>", image, " blue"), True)]
    written = [span if isinstance(span, Text) else Text("HERE", False)
               for span in ours.spans(turns)]
    assert "".join(span.text for span in written) == theirs.apply_chat_template(
        [{"role": "user", "content": "Look: HERE which colour?"},
         {"role": "assistant", "content": "<think>red</think>HERE blue"}], tokenize=False)
    lost = [Turn("user", ("What?",), False), Turn("assistant", (image, "</think>one"), True),
            *talk("two", "low")]
    with pytest.raises(RowError, match="leaves out an image or a clip"):
        ours.spans(lost)


@pytest.mark.parametrize("template, text", [
    ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "changes the texts of turns"),
    ("{% for m in messages %}{{ m.content[:5] }}{% endfor %}", "changes the texts of turns|leaves"),
    ("{{ messages[0].content }}", "leaves out turns"),
    ("{% for m in messages %}{{ m.content }}{% endfor %}{{ messages[0].content }}", "repeats"),
    ("{% for m in messages %}{{ m.content }}", "cannot be read: Unexpected end of template"),
    ("{{ today() }}", "'today' is undefined"),
    ("{{ raise_exception('a tool is needed') }}", "a tool is needed"),
])
def test_what_cannot_be_followed_is_refused_before_training(tmp_path, capsys, template, text):
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match=text) as error:
        ChatTokenizer(tmp_path)
    assert "tokenizer.json: " in str(error.value) and "chat template" in str(error.value)
    rows = [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]
    write_jsonl(tmp_path / "data.jsonl", rows)
    (tmp_path / "chat_template.jinja").unlink()
    model = write_model(tmp_path / "model", tmp_path / "tokenizer.json")
    (model / "chat_template.jinja").write_text(template)
    (tmp_path / "r.yaml").write_text(f"data: {{path: {tmp_path}/data.jsonl, index_dir: ix}}\n"
                                     f"model: {{config: {model}}}\n")
    assert main(["lint", str(tmp_path / "r.yaml"), "--workers", "1"]) == 2
    assert f"error: {tmp_path}" in capsys.readouterr().err


def test_a_row_that_the_template_would_change_is_named(tmp_path, capsys):
    write_tokenizer(tmp_path)
    Path(tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content | upper if 'cat' in m.content else m.content }}"
        "<|im_end|>{% endfor %}")
    rows = [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": v}]}
            for v in ("a bird", "a cat")]
    write_jsonl(tmp_path / "data.jsonl", rows)
    reader_in(tmp_path)
    (tmp_path / "r.yaml").write_text(json.dumps({
        "data": {"path": f"{tmp_path}/data.jsonl", "index_dir": str(tmp_path / "index")},
        "model": {"config": str(tmp_path / "model")}}))
    assert main(["lint", str(tmp_path / "r.yaml"), "--workers", "1"]) == 1
    said = capsys.readouterr().out
    assert "row 2: the chat template changes the texts of turns" in said and "1 problem(s)" in said


# As Qwen2.5 writes tools, their calls and what they answered.
TOOLS = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- elif m.tool_calls %}
{{- '<|im_start|>assistant' }}
{%- if m.content %}{{- '\\n' + m.content }}{%- endif %}
{%- for call in m.tool_calls %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}"""
OTHER_TOOLS = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls "
               "%}[CALL]{{ m.tool_calls[0].function.name }}{% endif %}<|im_end|>{% endfor %}")
DEFINED = [{"type": "function", "function": {"name": "look", "parameters": {"at": "string"}}}]
CALL = {"name": "look", "arguments": {"at": "the \u00e9 \"red\" one"}}
CALLED = ('<tool_call>\n{"name": "look", "arguments": {"at": "the \u00e9 \\"red\\" one"}}\n'
          '</tool_call>')
OPENAI = {"tools": DEFINED, "messages": [
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function",
         "function": {"name": "look", "arguments": json.dumps(CALL["arguments"])}},
        {"id": "2", "type": "function", "function": CALL}]},
    {"role": "tool", "content": "red", "tool_call_id": "1"}, {"role": "tool", "content": "one"},
    {"role": "assistant", "content": "red one"}, {"role": "user", "content": "Again."},
    {"role": "assistant", "content": "I look.", "tool_calls": [{"function": CALL}]},
    {"role": "tool", "content": "blue"}, {"role": "assistant", "content": "no"}]}
SHAREGPT = {"tools": json.dumps(DEFINED), "conversations": [
    {"from": "human", "value": "What is it?"},
    {"from": "function_call", "value": json.dumps([CALL, CALL])},
    {"from": "observation", "value": "red"}, {"from": "observation", "value": "one"},
    {"from": "gpt", "value": "red one"}]}


def test_tools_their_calls_and_answers_are_those_of_transformers(both):
    ours, theirs = both(TOOLS)
    token_ids, mask = ours.tokenize(chat(OPENAI, MediaRoot("")))
    messages = json.loads(json.dumps(OPENAI["messages"]))
    messages[1]["tool_calls"][0]["function"] = CALL
    messages[1]["content"] = ""
    expected = theirs.apply_chat_template(messages, tools=DEFINED, tokenize=False)
    assert ours.decode(token_ids) == expected and expected.count(CALLED) == 3
    assert ours.decode(token_ids[mask]).split("<|im_end|>") == [
        f"{CALLED}\n{CALLED}", "red one", f"I look.\n{CALLED}", "no", ""]
    token_ids, mask = ours.tokenize(read_row(SHAREGPT))
    text = ours.decode(token_ids)
    assert expected.startswith(text) and text.endswith("red one<|im_end|>\n")


# As Command-R7B writes what tools answered: in another loop over the calls.
NUMBERED = """\
{%- for m in messages %}{% set turn = loop.index0 %}
{%- if m.tool_calls %}{{- '<|im_start|>assistant\n' }}
{%- for call in m.tool_calls %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n<|im_start|>system' }}
{%- for call in m.tool_calls %}
{{- '\n' ~ loop.index0 ~ ': ' + messages[turn + loop.index].content }}
{%- endfor %}{{- '<|im_end|>\n' }}
{%- elif m.role != 'tool' %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- endif %}{%- endfor %}"""


@pytest.mark.parametrize("num_calls", [1, 2])
def test_what_tools_answered_is_not_learnt(both, tmp_path, num_calls):
    """Nor what opens the next turn, where it comes after the token that ends an answer."""
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    ours, _ = both(NUMBERED)
    messages = json.loads(json.dumps(OPENAI["messages"][:5]))
    del messages[1]["tool_calls"][num_calls:], messages[2 + num_calls:4]
    token_ids, mask = ours.tokenize(chat({"messages": messages}, MediaRoot("")))
    assert "0: red" in ours.decode(token_ids)
    assert ours.decode(token_ids[mask]).split("<|im_end|>") == [CALLED * num_calls, "red one", ""]


@pytest.mark.parametrize("change, reason", [
    (lambda row: row["messages"][1].pop("tool_calls"), "needs a string or a list"),
    (lambda row: row["messages"][1]["tool_calls"].append({"function": {}}), 'needs a "name"'),
    (lambda row: row["messages"][1]["tool_calls"][0].update(function="look"), 'needs a "name"'),
    (lambda row: row.update(tools="{look"), "not JSON"),
    (lambda row: row.update(tools={"a": 1}), '"tools" must be a list'),
    (lambda row: row.update(tools=[{"name": "<|im_end|>"}]), "contain the special token"),
])
def test_tools_that_cannot_be_used_are_refused_by_name(both, change, reason):
    ours, _ = both(TOOLS)
    row = json.loads(json.dumps(OPENAI))
    change(row)
    with pytest.raises(RowError, match=reason):
        ours.tokenize(chat(row, MediaRoot("")))


@pytest.mark.parametrize("keys", [("messages", "role", "content"),
                                  ("conversations", "from", "value")])
def test_media_without_placeholders_stand_before_the_first_question(keys):
    """As TRL and ms-swift write them: plain strings, and the images beside."""
    turns, role, content = keys
    row = {turns: [{role: "system", content: "Look."}, {role: "user", content: "What?"},
                   {role: "assistant", content: "red"}, {role: "user", content: "Sure?"},
                   {role: "assistant", content: "yes"}],
           "images": ["a.png", "b.png"], "audios": ["c.wav"]}
    first = read_row(row)[1]
    assert [m if isinstance(m, str) else (m.modality, m.path.rpartition("/")[2])
            for m in first.parts] == [
        (VISION, "a.png"), (VISION, "b.png"), (AUDIO, "c.wav"), "\nWhat?"]
    assert [len(turn.parts) for turn in read_row(row)] == [1, 4, 1, 1, 1]
    with pytest.raises(RowError, match="1 <image> placeholders but 2 paths"):
        row[turns][3][content] = "<image> Sure?"
        read_row(row)


def test_paths_in_a_question_are_images():
    """As Qwen-VL writes them; boxes and what an answer says stay texts."""
    question, answer = read_row({"conversations": [
        {"from": "user", "value": "Picture 1: <img>x/a b.png</img>\nPicture 2: <img>c.jpg</img>\n"
                                  "What is <ref>it</ref><box>(1,2),(3,4)</box>?"},
        {"from": "assistant", "value": "<img>no.png</img>"}]})
    assert [m if isinstance(m, str) else (m.modality, m.path) for m in question.parts] == [
        "Picture 1: ", (VISION, "x/a b.png"), "\nPicture 2: ", (VISION, "c.jpg"),
        "\nWhat is <ref>it</ref><box>(1,2),(3,4)</box>?"]
    assert answer.parts == ("<img>no.png</img>",)


@pytest.mark.parametrize("row, names", [
    ({"images": ["a.png"], "image": "b.png"}, "'images' and 'image'"),
    ({"audio": "a.wav", "sound": ["a.wav", "b.wav"]}, "'audio' and 'sound'"),
    ({"images": ["a.png"], "image": "a.png"}, ""), ({"images": [], "image": "a.png"}, ""),
])
def test_media_of_two_columns_are_one_list_or_refused(row, names):
    turns = [{"role": "user", "content": "<image>" if "image" in row else "<audio>"},
             {"role": "assistant", "content": "b"}]
    if names:
        with pytest.raises(RowError, match=f"{names} have other values: keep one"):
            read_row({**row, "messages": turns})
    else:
        (medium,) = media_of(read_row({**row, "messages": turns}))
        assert medium.name == "a.png"


@pytest.mark.parametrize("template, reason", [
    (OTHER_TOOLS, "does not write calls of tools"), (None, "need the chat template")])
def test_calls_that_a_template_leaves_out_are_refused(both, tmp_path, template, reason):
    ours, _ = both(template or TOOLS)
    rows = [{"messages": OPENAI["messages"]}]
    if template is None:
        (tmp_path / "chat_template.jinja").unlink()
        ours = ChatTokenizer(tmp_path)
        rows.append({"messages": [{"role": "user", "content": "What?"}, {
            "role": "assistant", "content": "red", "reasoning_content": "It is warm."}]})
    for row in rows:
        with pytest.raises(RowError, match=reason):
            ours.tokenize(chat(row, MediaRoot("")))
