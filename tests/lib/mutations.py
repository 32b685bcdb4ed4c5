"""Dangerous changes of the package, each of which some fast test has to notice.

    python -m tests.lib.mutations [NAME...]   applies them one at a time in a copy of the tree

A row: name, file, text that stands there once, text instead, tests that are run, what it would do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.lib.commands import ROOT

RUN_S = 1800.0  # after which tests are taken to hang
AS_LONG = 4  # times as long as without the mutation, and a minute: a row's tests hang, so noticed
COMM, RUNTIME, DATA = "orchmllm/comm/", "orchmllm/runtime/", "orchmllm/data/"
ABSENCE = "tests/runtime/test_absence.py"


class Mutation(NamedTuple):
    """tests: arguments of pytest, separated by spaces."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    harm: str


MUTATIONS = [Mutation(*row) for row in (
    ("gradients by the forward permutation", COMM + "exchange.py",
     "returned = all_to_all(_placed(grad, recv_index), ",
     "returned = all_to_all(grad.index_select(0, recv_index), ", "tests/comm/test_rearrange.py",
     "Gradients return to other rows than those that they are of."),
    ("of rows that went to several ranks one gradient stays", COMM + "exchange.py",
     "out.index_add_(0, at, some.to(out.dtype))", "out.index_copy_(0, at, some.to(out.dtype))",
     "tests/sharding/test_shared_examples.py",
     "Keys and values of shared examples get the gradient of one rank alone."),
    ("a rank without pieces leaves the exchange of gradients", "orchmllm/models/packing.py",
     "return found if keys.shape[2] else found + (keys.sum() + values.sum())", "return found",
     "tests/sharding/test_shared_examples.py", "The ranks that share an example wait forever."),
    ("a piece attends as if it began its example", "orchmllm/models/attention.py",
     "tril(whole - n)", "tril()", "tests/sharding/test_shared_examples.py",
     "A piece sees the beginning of its example alone."),
    ("the second piece costs like a whole example", "orchmllm/plan/shares.py",
     "np.where(self.start > 0, model(self.start), 0)", "0", "tests/plan/test_shares.py",
     "Ranks with the later pieces are taken to be slower than they are."),
    ("the first rank's row decides the capacity", COMM + "exchange.py",
     "longest = int(rows[:, 0].max())\n            if", "longest = int(rows[0, 0])\n            if",
     "tests/comm/test_agreement.py", "Longer rows of other ranks are cut."),
    ("lengths cut to the capacity", COMM + "exchange.py", "sent[0] = len(row)",
     "sent[0] = min(len(row), self._capacity)", "tests/comm/test_agreement.py",
     "Lengths beyond the first capacity are lost."),
    ("a sender without bytes sends none", COMM + "exchange_bytes.py",
     "-1 if b is None else len(b)", "0 if b is None else len(b)",
     "tests/loader/test_bytes_errors.py", "What a rank could not read passes for an empty item."),
    ("bytes one place too early", COMM + "exchange_bytes.py", "incoming.numpy().clip(min=0)",
     "incoming.numpy()", "tests/comm/test_rearrange.py",
     "Behind an item that could not be read every item is shifted by a byte."),
    ("a digest without order", "orchmllm/plan/assign.py",
     "np.dot(block, _FACTORS[:len(block)])", "block.sum()", "tests/plan/test_plan_schemes.py",
     "Ranks that have the microbatches in another order pass for agreed."),
    ("a part of a file begins where the rank's does", RUNTIME + "shards.py",
     "part.narrow(dim, first - here,", "part.narrow(dim, 0,", "tests/runtime/test_shards.py",
     "On another number of ranks a run goes on with other weights."),
    ("the first of two files is the whole part", RUNTIME + "shards.py",
     "if found.get(name) != part.numel()", "if name not in found", "tests/runtime/test_shards.py",
     "A tensor of another size is taken for that of the model."),
    ("only the first block is hashed", RUNTIME + "files.py", "while block := f.read(1 << 20):",
     "if block := f.read(1 << 20):", "tests/runtime/test_resume.py",
     "Damage beyond the first MiB of a file is not found."),
    ("manifests are not synced", RUNTIME + "files.py", "        os.fsync(f.fileno())\n", "",
     "tests/runtime/test_crash_points.py",
     "After a loss of power a checkpoint that was renamed may have half a manifest."),
    ("saves overlap", RUNTIME + "checkpoint.py",
     "before = self.settle()\n        optional", "before = ''\n        optional",
     "tests/runtime/test_host_copies.py",
     "A save begins while the one before is written, and the error of that one is lost."),
    ("a save on the first GPU", RUNTIME + "checkpoint.py", "on_this_device(self._run)", "self._run",
     "tests/e2e/test_devices.py::test_threads_use_the_gpu_of_their_rank",
     "The thread that saves makes a context on the GPU of rank 0."),
    ("the event of another GPU", RUNTIME + "host_copies.py",
     "copied.record(torch.cuda.current_stream(gpu))", "copied.record()",
     "tests/runtime/test_host_copies.py",
     "A save begins to write before its copies are complete."),
    ("pinned memory given back early", RUNTIME + "checkpoint.py", "self._copies.make(",
     "HostCopies().make(", "tests/runtime/test_host_copies.py",
     "Copies go to memory that may be another's by then."),
    ("damaged checkpoints count as kept", RUNTIME + "lineage.py", "kept += is_sound(path)",
     "kept += 1", "tests/runtime/test_lineage.py",
     "The last sound checkpoint is deleted in favour of damaged ones."),
    ("numbers of saves repeat", RUNTIME + "lineage.py",
     "1 + max((s.sequence for s in saved), default=0)", "1 + len(saved)",
     "tests/runtime/test_lineage.py",
     "After the first deletion a new save counts as older than those that are there."),
    ("the branch point is not of the line", RUNTIME + "lineage.py", "saved.sequence <= last",
     "saved.sequence < last", "tests/runtime/test_lineage.py",
     "A branch gives up the checkpoint that it began from."),
    ("a whole last line is torn", RUNTIME + "metrics.py", 'tail.rfind(b"\\n") - 1',
     'tail.rfind(b"\\n")', "tests/runtime/test_progress.py",
     "A resumed run eats the end of the last row of its log."),
    ("failures in a row are never reset", RUNTIME + "run_state.py",
     "self.in_a_row + 1 if failure else 0", "self.in_a_row + bool(failure)",
     "tests/runtime/test_failed_limits.py", "Twenty bad rows or media of a whole run end it."),
    ("times of this step for the last one", RUNTIME + "measured.py",
     "timed, self._before = self._before, timed", "before, self._before = self._before, timed",
     "tests/runtime/test_measured.py",
     "On a GPU the times of one step are told of the next."),
    ("a microbatch as sampled is one of the balanced step", "orchmllm/plan/step.py",
     "layout.in_order(num_microbatches)", "np.arange(layout.num_examples) % num_microbatches",
     "tests/plan/test_microbatches.py",
     "With several microbatches balancing is said to gain more than it can."),
    ("a step as sampled breaks the cap", "orchmllm/orchestrator.py",
     "if not plan.is_within_caps:", "if False:", "tests/runtime/test_measured_gain.py",
     "A step that measures the gain runs out of memory."),
    ("room for one checkpoint too few", RUNTIME + "preflight.py", "keep.keep_last + 1",
     "keep.keep_last", "tests/runtime/test_preflight.py",
     "A disk passes that is full when the second save is written."),
    ("a repeated signal kills", RUNTIME + "stop.py",
     " and time.monotonic() - self._at > SAME_REQUEST_S", "", "tests/runtime/test_resume.py",
     "Ctrl-C reaches a rank twice and ends it without a checkpoint."),
    ("blocks of a mixture repeat", DATA + "sampler.py", " + block * self.counts[source[here]]", "",
     "tests/data/test_mixing.py", "Every 1,000 draws begin with the same rows again."),
    ("the thread runs one step ahead", DATA + "loading/pipeline.py",
     "in range(ahead)", "in range(ahead + 1)", "tests/data/test_sampler_loader.py",
     "A rank makes one agreement more than the others when all stop."),
    ("a stop between agreements", DATA + "loading/pipeline.py",
     "    wanted.put(False)\n", "    while not wanted.empty():\n        wanted.get()\n"
     "    wanted.put(False)\n",
     "tests/data/test_sampler_loader.py",
     "Ranks that stop together have made unequally many agreements."),
    ("failures by place in the microbatch", DATA + "loading/whole_examples.py",
     "            position = int(self.micro.positions[example])\n",
     "            position = example\n", ABSENCE,
     "With microbatches another example than the broken one is left out."),
    ("no zeros after a clip", "orchmllm/composition/processing.py", "(0, extractor.n_fft)",
     "(0, 0)", "tests/data/test_decode.py", "The last frames of a clip depend on its reflection."),
    ("a window is read on from its end", DATA + "stream.py", "(k, block + 1), rest",
     "(k, block), rest", "tests/data/test_stream.py",
     "The second window of a shard of a stream holds rows of the third."),
    ("a fetched file is not counted", DATA + "storage/cache.py",
     "            self._make_room(part.stat().st_size)\n", "", "tests/data/test_storage_cache.py",
     "The cache of remote files grows without a limit."),
    ("all traffic is between nodes", "orchmllm/plan/step.py",
     "volume[source // node != target // node]", "volume[source != target]",
     "tests/plan/test_plan_schemes.py",
     "Bytes inside a node are reported as bytes between nodes."),
    ("filling empties another rank", "orchmllm/plan/assign.py", "counts[out[item]] > least",
     "counts[out[item]] >= least", "tests/loader/test_fill.py",
     "A rank is filled with the only example of another."),
    ("the next clip is heard", "orchmllm/composition/clips.py", "(frame < length)",
     "(frame < len(x))", "tests/models/test_whisper.py",
     "The convolutions read one frame beyond the end of a clip."),
    ("every logit is learnt", "orchmllm/models/loss.py",
     "hidden[part].masked_fill(ignored[part], 0.0)", "hidden[part]",
     "tests/models/test_chunked_loss.py",
     "With fsdp.loss_chunk_rows ignored positions have gradients."),
    ("the norm of a part of the shards", "orchmllm/sharding/optimizer.py",
     "    if isinstance(first, DTensor):\n", "    if False:\n", "tests/sharding/test_optimizer.py",
     "Every rank clips by the norm of its own shards."),
    ("no final save", "orchmllm/trainer/__init__.py",
     "_train_steps()\n                self.checkpointer.save_run(self.progress)\n",
     "_train_steps()\n",
     "tests/e2e/test_any_recipe.py",
     "A run that is finished leaves no checkpoint."),
    ("sources change places", DATA + "index.py", "joined.taken(np.argsort(order), ",
     "joined.taken(order, ", "tests/data/test_sources.py tests/data/test_mixing.py",
     "With several sources examples get the lengths of others."),
    ("norms decay", "orchmllm/sharding/optimizer.py", "((decayed, decay), (rest, 0.0))",
     "((decayed, decay), (rest, decay))", ABSENCE, "Norms, biases and the embedding shrink."),
    ("a sampler resumes in microbatches", "orchmllm/loader/indices.py",
     "islice(batch_sampler, first_step * accumulation_steps, None)",
     "islice(batch_sampler, first_step, None)", "tests/loader/test_state.py",
     "A resumed loop repeats half of what it has learnt."),
    ("a loss that the caller divides again", "orchmllm/loader/loss.py",
     "    factor *= _divisor(info) if divided_by is None else divided_by\n", "",
     "tests/loader/test_loss.py",
     "Under gradient accumulation gradients are too small by its steps."),
    ("ranks of a replica are not known", "orchmllm/loader/groups.py",
     "slice(None) if name in _DATA else k", "slice(None)", "tests/loader/test_groups.py",
     "Under tensor parallelism the ranks of one replica get different examples."),
    ("causal attention counts twice", "orchmllm/loader/costs.py",
     "2 if seen.causal else 1", "1", "tests/loader/test_costs.py",
     "Long examples are taken to cost more than they do."),
    ("images are not as displayed", "orchmllm/loader/lengths.py",
     "return height, width\n", "return width, height\n", "tests/loader/test_lengths_of.py",
     "The length of a row is that of its images turned by 90 degrees."),
    ("the last target of a row is not counted", "orchmllm/loader/collator.py",
     "counted[..., 1:].sum()", "counted[..., :-1].sum()",
     "tests/loader/test_loader_facts.py",
     "The denominator of a model that shifts labels is wrong."),
    ("all ranks draw the first rows", "orchmllm/sharding/initial_values.py", "first + at + k",
     "at + k",
     "tests/sharding/test_whole_models.py::"
     "test_every_rank_draws_its_rows_as_the_class_of_the_model_would",
     "A model that starts from nothing is made of copies of its first rows."),
    ("a validation loss of all ranks", "orchmllm/trainer/__init__.py",
     "device=self.device) / self.world.world_size", "device=self.device)",
     "tests/runtime/test_progress.py",
     "The validation loss falls with the number of ranks."),
    ("texts have the length of the longest", COMM + "exchange.py",
     "rows[r, : num_bytes[r]].tobytes()", "rows[r, : longest].tobytes()",
     "tests/comm/test_agreement.py", "Errors and names of other ranks end in zero bytes."),
    ("the rank that is furthest is late", RUNTIME + "stall_report.py",
     "least = min(r.progress", "least = max(r.progress", "tests/runtime/test_stall_report.py",
     "A report of a hang names a rank that waits."),
    ("a gain that is too small breaks the cap", "orchmllm/plan/step.py",
     "if sampled.is_within_caps:", "if True:", "tests/plan/test_plan_schemes.py",
     "With min_gain a step as sampled runs out of memory."),
    ("an export writes infinities", "orchmllm/hf/tensors.py",
     "if out.isinf().any() and not values.isinf().any():", "if False:",
     "tests/tools/export/test_export.py::test_values_that_a_dtype_does_not_have_are_refused",
     "Weights beyond float16 become infinite in an export."),
    ("a rule evaluated at the first example's positions", "orchmllm/models/packing.py",
     "example, start, whole = first, 0, n", "example, start, whole = 0, 0, n",
     "tests/models/test_packed_models.py",
     "Images of a later example are masked like the text of the first one."),
    ("a forward without our masks passes", "orchmllm/models/packing.py",
     "if num_calls != num_layers:", "if False:", "tests/models/test_packed_models.py",
     "Another attention is chosen, and examples of a row see each other."),
    ("positions go on across examples", "orchmllm/models/whole_model.py",
     "torch.cat([positions[k][..., run] for k, run in row], -1)", "torch.arange(len(ids))[None]",
     "tests/models/test_packed_models.py",
     "Every example but the first has other rotary positions than alone."),
    ("images padded at their beginning", "orchmllm/batch.py", "for n in (0, m)",
     "for n in (m, 0)", "tests/models/test_packed_models.py",
     "Images of several sizes on a rank are cut at the wrong side."),
    ("features in the order of arrival", "orchmllm/encoders/planned.py",
     "order=None if stays else torch.from_numpy(_rows_of(by_call, exchange.lengths)))",
     "order=None)",
     "tests/encoders/test_planned.py", "Images get the features of a video before them."),
    ("features of another plan pass", "orchmllm/encoders/planned.py",
     "if not np.array_equal(found, items.num_tokens):", "if False:",
     "tests/encoders/test_planned.py", "A medium's features are those of the one beside it."),
    ("linear attention goes on across examples", "orchmllm/models/packing.py",
     "hidden_states.split(seqlens.lengths, 1)", "[hidden_states]",
     "tests/models/test_packed_models.py",
     "The state of an example is where the next one of a rank begins."),
    ("windows see everything", "orchmllm/counts/counted.py",
     "Seen(length, True, self.reach)", "Seen(length, True)", "tests/models/test_whole_flops.py",
     "Long examples are taken to cost more than they do."),
    ("frames at the numbers of the file", "orchmllm/data/media/video_processor.py",
     '"frames_indices": seconds})', '"frames_indices": [*range(len(seconds))]})',
     "tests/data/test_processed_videos.py", "Times in the text are not those of the frames."),
    ("a slice of the frames of another", "orchmllm/data/media/video_processor.py",
     "elif number:", "elif number and not out[-1].insert(0, [medium]):",
     "tests/data/test_processed_videos.py", "Features of a video are in another order."),
    ("parts of a medium that is cut overlap", "orchmllm/plan/shares.py",
     "        ends[np.flatnonzero(later) - 1] = inside\n", "", "tests/plan/test_shares.py",
     "Ranks that share an example have some of its rows twice."),
    ("media of the first part of a call", DATA + "loading/long_calls.py",
     "for value, *_ in parts for segment", "for value, *_ in parts[:1] for segment",
     "tests/data/test_long_calls.py", "An example that workers read in parts loses media."),
    ("the rest of a line is a row", DATA + "formats/compressed.py", "begins = not is_cut",
     "begins = True", "tests/data/test_compressed.py",
     "Of a compressed file all rows behind one that is too long have other numbers."),
    ("slots of examples by their place", "orchmllm/plan/batches.py",
     "slot[at[plan.llm.order]] =", "slot[at] =", "tests/plan/test_batches.py",
     "A rank of another project's trainer gets more than max_tokens."),
    ("only the loss has to be finite", RUNTIME + "measured.py",
     " & of_ranks.norms[0, 0].isfinite()\n", "\n",
     "tests/runtime/test_read_late.py::test_an_update_that_is_not_finite_is_not_made",
     "On a GPU a gradient that is not finite makes all weights nan."),
    ("calls in the order of their time", DATA + "loading/long_calls.py",
     "self._request([self._call(k) for k in rest])",
     "self._request([self._call(k) for k in asked[-len(rest):]])",
     "tests/data/test_long_calls.py::test_no_call_is_asked_for_twice",
     "An example gets the text and media of another one."),
    ("sizes of mended rows alone", "orchmllm/tools/data/build_index.py",
     "if row in planned else old.sizes(row) for", "if row in planned else () for",
     "tests/data/test_processed.py::test_an_index_after_a_row_was_mended_is_a_new_one",
     "After an index was brought up to date rows have the sizes of others' media."),
    ("keys without gradients leave the exchange", "orchmllm/models/shared.py",
     "if torch.is_grad_enabled() and not row.requires_grad:", "if False:",
     "tests/sharding/test_shared_examples.py::test_gradients_come_to_keys_that_need_none",
     "With a frozen LLM ranks that share an example wait forever."),
    ("a rank without images leaves the exchange of gradients", "orchmllm/models/made.py",
     "states.new_zeros(1, states.shape[1]) + states.sum()", "states.new_zeros(1, states.shape[1])",
     "tests/sharding/test_generator.py", "The ranks that make images wait forever."),
    ("a save that fails passes", RUNTIME + "checkpoint.py", "            if not optional:\n"
     "                raise CheckpointError(f\"{e}{before}\") from e\n", "",
     "tests/runtime/test_ends.py::"
     "test_a_save_that_the_recipe_asks_for_ends_the_run_where_it_fails",
     "A run without a checkpoint ends as if it had one."),
)]


def copied(folder: Path) -> Path:
    """A copy of what the tests need of this tree."""
    shutil.copytree(ROOT, folder, symlinks=True, ignore=shutil.ignore_patterns(
        ".*", "build", "runs", "demo_data", "*.egg-info"))
    return folder


def outcome(tests: str, tree: Path, limit_s: float = RUN_S) -> tuple[str, str]:
    """(`passed`, `failed`, `hung` or what pytest ended with, its last lines) of tests in a tree."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
               "--timeout", str(limit_s), *tests.split()]
    env = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True,
                              timeout=limit_s + 30)
    except subprocess.TimeoutExpired:
        return "hung", ""
    how = {0: "passed", 1: "failed"}.get(done.returncode, f"exit code {done.returncode}")
    return how, "\n".join(done.stdout.splitlines()[-15:]) + done.stderr[-2000:]


def noticed(mutation: Mutation, tree: Path, limit_s: float) -> bool:
    """Whether the row's tests fail in `tree`, a copy, which is as before afterwards, or take longer
    than limit_s. Raises RuntimeError where they cannot be run."""
    original, path = ROOT / mutation.file, tree / mutation.file
    text = original.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation.name}: its text stands {text.count(mutation.old)} times in "
                         f"{mutation.file}: change the row as the file was changed")
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        how, said = outcome(mutation.tests, tree, limit_s)
    finally:
        shutil.copy2(original, path)  # with its time, for which there is compiled code
    if how.startswith("exit code"):
        raise RuntimeError(f"{mutation.name}: {how} of {mutation.tests}\n{said}")
    return how != "passed"


def run(names: list[str]) -> Iterator[tuple[Mutation, bool]]:
    """The rows of these names (all: none given), and whether each was noticed. A line on each is
    printed. Raises RuntimeError where tests fail without any change."""
    rows = [m for m in MUTATIONS if not names or m.name in names]
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder) / "tree")
        limit_s = {}
        for tests in dict.fromkeys(m.tests for m in rows):
            started = time.monotonic()
            how, said = outcome(tests, tree)
            limit_s[tests] = 60 + AS_LONG * (time.monotonic() - started)
            if how != "passed":
                raise RuntimeError(f"{tests}: {how} without a mutation\n{said}")
        for mutation in rows:
            started = time.monotonic()
            found = noticed(mutation, tree, limit_s[mutation.tests])
            print(f"{'noticed' if found else 'NOT NOTICED':12}{mutation.name} "
                  f"({time.monotonic() - started:.0f} s)", flush=True)
            yield mutation, found


if __name__ == "__main__":
    unknown = {*sys.argv[1:]} - {m.name for m in MUTATIONS}
    if unknown:
        sys.exit(f"no such mutation: {', '.join(sorted(unknown))}")
    sys.exit(0 if all([found for _, found in run(sys.argv[1:])]) else 1)
