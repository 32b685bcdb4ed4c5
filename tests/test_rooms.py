"""The sizes of the three rooms of docs/design.md: what trains, the tools, other papers' schemes."""

from __future__ import annotations

import pytest

from scripts.count_code import count_parts, count_rooms, read_all

# Lines of code. What grows a room says here by how much, and why in its commit.
# The base grew from 14,800 with what is measured and not believed: what a loss is, costs
# and lengths of models, meshes and clients of the loader (+500), the proof of encoders (+260), the
# record of a run, the measured gain, trackers and clocks of a step (+360), the command line (+50);
# with whole models of transformers, their rows and their packing (+1,100), columns, splits, parts
# and documents (+680), answers while training (+150), the host's memory of a save (+100).
# Whole models grew by phases that are planned (+210), clips of sound (+230) and videos (+230),
# experts, linear attention and six more families (+100) and adapters (+180); the vision tower of
# another model went (-120). Recomputation by layer (+250, and +110 that came from the tools),
# frozen connectors and stages (+120), and what is told of long examples (+225).
# It grew again when whole models got what only this project's own parts had (inputs that move as
# tensors and as bytes, images as bytes, streams, capped batches, shards, answers, compiled
# blocks, a chunked loss, drawn weights: +1,100, of which a part goes with the twins of the own
# parts), when a row came to be read once and proven (+200), its media by parts of a processor
# (+150), when a step of several microbatches came to be planned as one, below caps, for loaders
# and other trainers, too (+420), and with saves of runs that end by themselves and what else was
# mended (+150), and a loss that copies no gradient (+30). A limit of memory in bytes of all phases
# together took +150. Counting any model by running it, and keeping what was counted, took +405
# beside what it replaced of whole models and the loader, and models that are composed of towers and
# an LLM of transformers +370.
# The drop-in grew by what it had to be told: lengths by a Trainer's own collator and its encoders
# (+100), wrappers of a loader (+25), positions that are fitted to what was seen, of the place where
# a loop stands (+100), and the causes that check_equivalence names, for Trainers, too (+130).
# A forecast of time that counts the bytes of kernels that are no products, of own parts, whole
# models and the loss, took +155, and FSDP2's copies +35 in the tools.
# Towers that attend once a block, and integers of which the host knows what a model makes of
# them, took +210.
# The data grew by the ledger and the rows that go the whole way before ranks start (+330), by the
# lines that refusals propose, tried on the rows (+200), by choices, tables without names, rows of
# several layouts and base64 (+60), and by pyarrow in place of `datasets`, without a copy (+35).
# Composed models grew by pickle and by the size of image that a tower gets (+20).
# The core grew by the plan that starts from greedy's (+42), by microbatches that wait together and
# slots below caps (+330), and by the tables of what examples cost (+80). The tools grew with init,
# whose maker of the demo's corpus came from scripts, generate and answers in the report (+760),
# with slow networks and host memory in the doctor (+75), the dry run of whole models (+210),
# whole models in init and caps in what is predicted and searched (+90), their profile (+130), and
# compose (+260).
# Compressed files that are read as streams took +105, lengths of images without their patches +20;
# the journal of an index that goes on, and a pool of Ray's actors, less than the servers that they
# replace. Norms and rotations of whole models took +110; the proof of a model before its run, which
# has to shrink any configuration, make examples by its processor and compare, +450, with the lists
# of families and text models gone (-60). Packed clips of compositions took +75. The tools grew with
# answers of a run of a whole model (+45). Pages of chat templates that keep runs took +29, bytes
# that are counted of one pass alone +6.
# Then the models, names, weights, formulas and answers of this project's own parts went: base
# -1,820, tools -230. The papers have formulas of models that they tell by their shapes: +45.
# Predicted memory got the moment when the head's gradients are added up (+12).
# Examples that ranks of a node share took +530 of the base (pieces and their ranks 190, the plan of
# a step 70, keys and values 65, rows, masks and attention 65, memory, time and what is told of long
# examples 50, keys and refusals 80), +100 of the core and +11 of the tools.
# Counts that do not depend on addresses that are used again took +10 of the base, and steps that
# are read while a GPU computes the next one +115 (1.06 times the tokens per second on an H200).
# Choices that a column picks, and no line for what it could not read, took +13 of the data.
# What is used up before blocks go backward took +10 (longest items that fit: 29.76 of 30 GB, not
# 28.2).
# Lengths of images that are made, drawn and from files, took +30 of the tools, and the row of a
# model with a generator +14 of the papers.
# The table of tokens that templates may write for media went, as a model's processor names them:
# base -73. The doctor's own images and frames, which were a geometry of the base, are the tools'.
# What nobody used went: tools -315 (profiles of phases, pages of two runs, a picture of lengths),
# papers -165 (plans of units, splits and recomputation that no run here can follow), core -215 (the
# simulator of pipelines, which is Python now).
# States and manifests that lack what every one has are refused with their cure: +14 of the base.
# Long calls that are made early count what it takes to find their frames, and end with what is
# kept: +8.
# Lines of a log within 100 columns, and a memory that is that of the machine, took +3 of each.
# The end of a rank before its interpreter is taken apart took +13 of the base.
# Media of rows that are held for steps ahead are bounded in bytes, shards with batches that differ
# are refused, and readers of Ray that cannot be made end the run: +19 of the base.
# What a walk in a fresh clone stumbled over, and counting a JPEG's scans by their headers, took +4
# of the base and +6 of the tools.
# Fabric's and Ray's wrappers are looked for where they iterate alone, and JSON that is nested too
# deeply is refused by every Python: +24 of the base. A sum in one pass: +1 of the tools.
# Ranks compare the arguments of a loader before they make groups, an encoder is told of its items
# as its caller says it, rows of CSV are those of Python's reader, rows and media that cannot be
# used have limits of their own, and the end of an MP4 with uneven frames is read: +133 of the base.
# What clients met took +311 of the base and +46 of the tools: encoders whose gradients are reduced
# over other ranks, that look at other items, keep values or stop gradients (+190), streams, fillers
# and passes that failed (+45), means over padding (+30), validations that a stop cut off (+40).
# Trackers that no run waits for (+50), ends that a watchdog records and that reports tell (+25), an
# index that is renewed beside its readers (+20), rows that no prediction is made of and what is
# refused before a start (+40), and what trainers tell the loader of epochs and steps (+90).
# Outputs that would replace other files, and arguments that are refused before the first step:
# +13 of the base and +6 of the tools; what no one called went (-24 of the base).
# Clients and faults of another round took +185 of the base (what check_equivalence compares of all
# ranks, values that towers keep, what may join embeddings, losses in chunks that are proven,
# signals, terminals, clocks, and checkpoints that users copy and move), and one codec in place of
# two -46. A question that is no text, and losses that one of two runs lacks, took +3 of the tools.
# What grew with the ranks and is no longer done by each took +30 of the base, a warning where the
# ranks of a machine are apart +15, and the check that a save has all parts, which torch made, +10.
# A bound on the parquet files that a thread reads at once, lengths that are looked up as an array,
# errors of a shard that reach the others, and the ranks of a node by srun: +45. Adapters beside
# connectors that are drawn, or of another scale, are refused: +18. Exports that end answers
# as they were trained, and that AutoPeftModel reads, took +19 of the tools.
# An order of rows that each rank holds in 4 bytes a row, not in 16, took +10 of the base, and
# a resume that opens the files of a rank's own parts alone +14. Rows that were read as something
# else took +60: members of tars where a row names them, lines that are not proposed, marks and
# tables of other programs. Saves after one that failed, stops in a validation and branches of runs
# that are gone took +38, shards that fail or have nothing, shared towers and epochs behind a
# state of a stream +28.
# The integer program for nodes, which the search beats, left the base: -180. Resumes that open the
# files of a rank's parts on any number of ranks, starts that wait for a dead host, answers that a
# stop cuts off, streams of which a rank reads few shards, and media that generate repeats: +60.
MOST = {"base": 25_390, "tools": 5_225, "papers": 1_598, "cpp": 2_100}


@pytest.fixture(scope="module")
def rooms() -> dict[str, int]:
    return count_rooms(count_parts(read_all("")))


@pytest.mark.parametrize("room", list(MOST))
def test_a_room_stays_below_its_size(room, rooms):
    assert rooms.keys() == MOST.keys()
    assert rooms[room] <= MOST[room]
