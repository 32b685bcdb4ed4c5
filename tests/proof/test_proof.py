"""The proof of a model: what passes, and models that are changed in one place, each of which it has
to refuse by what differs."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from orchmllm.config.fsdp import FsdpConfig
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import Recipe
from orchmllm.counts import kept
from orchmllm.data.text.processor import Processor
from orchmllm.models import loss
from orchmllm.models.whole_model import meta_model
from orchmllm.proof.compare import EXACT, compare
from orchmllm.proof.examples import made_by
from orchmllm.proof.prove import prove, prove_on_first_rank
from tests.lib import tiny_models
from tests.lib.any_models import examples_of
from tests.lib.processors import FAMILIES
from tests.lib.whole_folders import write_model
from tests.lib.whole_models import ADMITTED

pytestmark = pytest.mark.whole


def changed(module: nn.Module, forward: Callable) -> None:
    """Gives a module a forward of its own, which copies of it have, too. forward: (module, stock
    forward, *arguments)."""
    family = type(module)

    @functools.wraps(family.forward)
    def run(self, *args, **kwargs):
        return forward(self, functools.partial(family.forward, self), *args, **kwargs)

    module.__class__ = type(family.__name__, (family,), {"forward": run})


def of_mlp(more: Callable) -> Callable:
    """Adds to what the LLM's first block makes of x (1, n, D)."""
    return lambda model: changed(model.model.language_model.layers[0].mlp,
                                 lambda self, stock, x: stock(x) + more(x))


def of_images(result: Callable) -> Callable:
    """Of features (images, rows, D)."""
    return lambda model: changed(model.model.multi_modal_projector,
                                 lambda self, stock, x: result(stock(x)))


def of_loss(more: Callable) -> Callable:
    def change(model: nn.Module) -> None:
        def forward(self, stock, *args, **kwargs):
            out = stock(*args, **kwargs)
            if out.loss is not None:
                out.loss = out.loss + more(out.logits)
            return out
        changed(model, forward)
    return change


def without_mask(model: nn.Module) -> None:
    """An attention of its own, which is causal."""
    def forward(self, stock, hidden_states, **_):
        def heads(x):
            return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads(self.q_proj(hidden_states)), *(
            heads(layer(hidden_states)).repeat_interleave(self.num_key_value_groups, 1)
            for layer in (self.k_proj, self.v_proj))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None
    changed(model.model.language_model.layers[1].self_attn, forward)


def other_mask(model: nn.Module) -> None:
    def forward(self, stock, hidden_states, **given):
        n = hidden_states.shape[1]
        mask = hidden_states.new_full((n, n), -torch.inf).triu(1)[None, None]
        return stock(hidden_states, **given | {"attention_mask": mask})
    changed(model.model.language_model.layers[1].self_attn, forward)


def dropout_of_attention(model: nn.Module) -> None:
    for layer in model.model.language_model.layers:
        layer.self_attn.attention_dropout = 0.1


def batch_norm(model: nn.Module) -> None:
    projector = model.model.multi_modal_projector
    projector.norm = nn.BatchNorm1d(32).double()
    changed(projector, lambda self, stock, x: self.norm(stock(x).flatten(0, 1)).view(
        *x.shape[:-1], 32))


def dropout_of_images(model: nn.Module) -> None:
    projector = model.model.multi_modal_projector
    projector.drop = nn.Dropout(0.1)
    changed(projector, lambda self, stock, x: self.drop(stock(x)))


def remembers(model: nn.Module) -> None:
    model.model.multi_modal_projector.register_buffer("seen", torch.ones((), dtype=torch.float64))

    def forward(self, stock, x):
        self.seen = self.seen + len(x)
        return stock(x) * self.seen
    changed(model.model.multi_modal_projector, forward)


def head_by_row(model: nn.Module) -> None:
    changed(model.lm_head, lambda self, stock, x: stock(x) / x.norm(dim=(0, 1)).mean())


def steps(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[1], dtype=x.dtype)[None, :, None]


DIFFERS = "differs by"
ITSELF = "when it is asked again"
SEES = "it sees what it should learn"
LOSS = "its own loss is"
MUTATIONS = {
    "a bias that looks at the neighbour": (of_mlp(lambda x: 0.1 * x.roll(1, 1)),
                                           f"{DIFFERS}|{SEES}"),
    "a convolution over positions": (of_mlp(lambda x: F.pad(x, (0, 0, 2, 0))[:, :-2]), DIFFERS),
    "a mean of all before": (of_mlp(lambda x: x.cumsum(1) / (1 + steps(x))), DIFFERS),
    "a state that runs on": (of_mlp(lambda x: (x * 0.9 ** -steps(x)).cumsum(1) * 0.9 ** steps(x)),
                             DIFFERS),
    "a norm over the row": (of_mlp(lambda x: x / x.std((0, 1))), f"{DIFFERS}|{SEES}"),
    "a mean of the row": (of_mlp(lambda x: x - x.mean((0, 1))), f"{DIFFERS}|{SEES}"),
    "the last token": (of_mlp(lambda x: x[:, -1:]), SEES),
    "positions that run on": (of_mlp(lambda x: torch.sin(steps(x)).expand_as(x)), DIFFERS),
    "a scale by the length": (of_mlp(lambda x: x * len(x[0]) / 50), DIFFERS),
    "dropout": (of_mlp(lambda x: F.dropout(x, 0.1)), ITSELF),
    "dropout of attention": (dropout_of_attention, ITSELF),
    "noise": (of_mlp(lambda x: 0.01 * torch.randn_like(x)), ITSELF),
    "a loss of routers": (of_loss(lambda logits: 0.01 * logits.logsumexp(-1).pow(2).mean()), LOSS),
    "a loss of norms": (of_loss(lambda logits: 1e-4 * logits.abs().max()), LOSS),
    "an attention of its own": (without_mask, "1 of 2 layers kept the examples of the row apart"),
    "a mask of its own": (other_mask, "was given another mask"),
    "a head that looks at the row": (head_by_row, f"{DIFFERS}|{SEES}"),
    "a tower that mixes images": (of_images(lambda x: x + x.mean(0, keepdim=True)), DIFFERS),
    "a tower that numbers images": (of_images(lambda x: x + torch.arange(len(x))[:, None, None]),
                                    DIFFERS),
    "a tower that scales by their number": (of_images(lambda x: x * len(x)), DIFFERS),
    "batch normalisation of images": (batch_norm, "is a BatchNorm1d"),
    "dropout of images": (dropout_of_images, f"has dropout 0.1|{ITSELF}"),
    "a tower that remembers": (remembers, f"{DIFFERS}|{ITSELF}"),
}
FAST = ("a bias that looks at the neighbour", "a mask of its own", "a tower that mixes images",
        "a loss of routers")


@pytest.fixture(scope="module")
def made():
    def build() -> nn.Module:
        torch.manual_seed(0)
        return tiny_models.build("llava", "LlavaForConditionalGeneration")
    return build, examples_of(build())


def test_a_model_of_transformers_passes(made):
    build, examples = made
    assert len(examples) == 5
    assert compare(build(), examples) <= EXACT


ODD = ("qwen2_5_omni", "audioflamingo3")


@pytest.mark.parametrize("name", [
    name if name in ODD else pytest.param(name, marks=pytest.mark.slow) for name in ADMITTED])
def test_examples_are_those_that_transformers_runs(name, tmp_path, monkeypatch):
    """The rule of positions of Qwen2.5-Omni needs what its template writes after a medium; the
    processor of Audio Flamingo 3 takes one clip. What this machine lacked once is not kept. Of the
    other families blocks are compiled, too."""
    if name in FAMILIES:
        FAMILIES[name](transformers)  # imports a processor that would need torchvision
    write_model(name, tmp_path)
    monkeypatch.setattr(kept, "FOLDER", str(tmp_path / "counts"))
    processor, said = Processor(tmp_path), []
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="FileNotFoundError: .*"):
        patch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
        prove(tmp_path, processor, said.append)
    prove(tmp_path, processor, said.append, compiled=name not in ODD, chunked=True)
    assert len(said) == 1 and "is trained as transformers trains examples\n" in said[0]


def test_a_proof_where_no_clip_could_be_read_has_none(tmp_path, monkeypatch):
    write_model("qwen3_vl", tmp_path)
    processor = Processor(tmp_path)

    def clips() -> list[bool]:
        return ["pixel_values_videos" in example.media for example in next(made_by(processor))]

    assert clips() == [False, False, True, True, False, False]
    monkeypatch.setattr("orchmllm.proof.examples.has_pyav", lambda: False)
    assert clips() == [False] * 5


def test_a_proof_is_kept_for_what_was_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "FOLDER", str(tmp_path / "kept"))
    proven: list[dict] = []
    monkeypatch.setattr("orchmllm.proof.prove._difference", lambda config, processor, generator,
                        asked: proven.append(asked) or 0.0)
    write_model("qwen3_vl", tmp_path)
    both = [{"compiled": compiled, "chunked": chunked}
            for compiled in (False, True) for chunked in (False, True)]
    for asked in both * 2:
        prove(tmp_path, Processor(tmp_path), lambda text: None, **asked)
    assert proven == both


def test_what_a_recipe_does_is_proven(tmp_path, monkeypatch):
    write_model("qwen3_vl", tmp_path)
    asked: list[dict] = []
    dataset = SimpleNamespace(reader=SimpleNamespace(processor=Processor(tmp_path)))
    monkeypatch.setattr("orchmllm.proof.prove.prove", lambda *args, **how: asked.append(how))
    monkeypatch.setattr("orchmllm.proof.prove.agreed", lambda gather, error: None)
    for options in ({}, {"loss_chunk_rows": 0, "compile": True}):
        recipe = Recipe(model=ModelConfig(config=str(tmp_path)), fsdp=FsdpConfig(**options))
        prove_on_first_rank(recipe, dataset, SimpleNamespace(rank=0), print)
    assert asked == [{"compiled": False, "chunked": True}, {"compiled": True, "chunked": False}]


def test_a_loss_in_chunks_is_compared(made, monkeypatch):
    build, examples = made
    assert compare(build(), examples, chunked=True) <= EXACT
    model = build()

    def copied(self, stock, *args, **kwargs):
        out = stock(*args, **kwargs)
        out.logits = out.logits.clone()
        return out

    changed(model, copied)
    assert compare(model, examples) <= EXACT
    with pytest.raises(ValueError, match=r"changes what .* \(fsdp.loss_chunk_rows=0 makes"):
        compare(model, examples, chunked=True)
    monkeypatch.setattr(loss, "_add_product", lambda total, grad, h: None)
    with pytest.raises(ValueError, match="in chunks, the gradient of lm_head.weight differs"):
        compare(build(), examples, chunked=True)


def test_an_example_without_positions_is_named(tmp_path):
    FAMILIES["qwen2_5_omni"](transformers)
    write_model("qwen2_5_omni", tmp_path)
    ends_with_its_medium = next(made_by(Processor(tmp_path)))[-2]
    whole = meta_model.__wrapped__(str(tmp_path))
    with pytest.raises(ValueError, match="example 4 has no positions .* data.max_example_tokens"):
        whole.join([ends_with_its_medium])


def lost_by_compiling(x: torch.Tensor) -> torch.Tensor:
    """As torch 2.11 lost the gradient of a function of autograd that returned what it was given."""
    return 0.1 * (x.detach() if torch.compiler.is_compiling() else x)


@pytest.mark.slow
def test_blocks_that_are_compiled_are_compared_with_those_that_are_not(made):
    build, examples = made
    model = build()
    of_mlp(lost_by_compiling)(model)
    assert compare(model, examples) <= EXACT
    with pytest.raises(ValueError, match="gradient of .*layers.0.* compiles the blocks .fsdp"):
        compare(model, examples, compiled=True)


@pytest.mark.parametrize("name", [
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MUTATIONS])
def test_a_changed_model_is_refused_by_what_differs(name, made):
    build, examples = made
    model, (change, told) = build(), MUTATIONS[name]
    change(model)
    with pytest.raises((ValueError, RuntimeError), match=told):
        compare(model, examples)
