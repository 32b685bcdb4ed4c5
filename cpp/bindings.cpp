// Python bindings of the planning core. They check shapes, dtypes and ranges (arrays.hpp) and
// release the GIL, so that a plan made in the prefetch thread does not hold up the training thread.
#include <pybind11/pybind11.h>

#include "arrays.hpp"
#include "conv_transformer.hpp"
#include "greedy.hpp"
#include "least_move.hpp"
#include "lengths.hpp"
#include "maps.hpp"
#include "microbatches.hpp"
#include "step_shortening.hpp"
#include "nodewise.hpp"
#include "padded.hpp"
#include "shares.hpp"
#include "slots.hpp"
#include "tables.hpp"

namespace orchmllm::python {

// Checks what all policies share, runs `fill(weight, home, rank_of)` without the GIL.
template <class Fill>
Array assign(const Array& weight, const Array& home, i64 num_ranks, const Fill& fill) {
  Array rank_of(weight.size());
  i64* out = rank_of.mutable_data();
  py::gil_scoped_release release;
  check_count("num_ranks", num_ranks);
  const View<i64> w = weights(weight, "weight");
  fill(w, homes(home, w.size, num_ranks), out);
  return rank_of;
}

void greedy(View<i64> weight, View<i64> home, i64 num_ranks, i64* rank_of) {
  orchmllm::greedy(weight, home, num_ranks, rank_of, {});
}

using Policy = void (*)(View<i64>, View<i64>, i64, i64*);
template <Policy policy>
Array by(const Array& weight, const Array& home, i64 num_ranks) {
  return assign(weight, home, num_ranks,
                [&](View<i64> w, View<i64> h, i64* out) { policy(w, h, num_ranks, out); });
}

Array conv_transformer(const Array& weight, const Array& pad, const Array& home, i64 num_ranks) {
  const View<i64> p = weights(pad, "pad");
  check_size("pad", p.size, static_cast<std::size_t>(weight.size()));
  return assign(weight, home, num_ranks, [&](View<i64> w, View<i64> h, i64* out) {
    orchmllm::Conv(w, p, num_ranks).run(h, out);
  });
}

// (rank_of (n,), the operations that it took).
py::tuple least_move_counted(const Array& weight, const Array& home, const Array& move_cost,
                             i64 num_ranks, i64 ranks_per_node, i64 cap, const Array& held) {
  check_count("ranks_per_node", ranks_per_node);
  if (cap < 0) throw std::invalid_argument("cap must be >= 0");
  orchmllm::LocalProblem problem;
  if (move_cost.size() != 0) {
    problem.move_cost = weights(move_cost, "move_cost");
    check_size("move_cost", problem.move_cost.size, static_cast<std::size_t>(weight.size()));
  }
  problem.num_ranks = num_ranks;
  problem.ranks_per_node = std::min(ranks_per_node, num_ranks);
  problem.cap = cap;
  i64 operations = 0;
  Array rank_of = assign(weight, home, num_ranks, [&](View<i64> w, View<i64> h, i64* out) {
    problem.weight = w;
    problem.home = h;
    problem.held = held_loads(held, w, num_ranks);
    operations = orchmllm::LocalSearch(problem, out).run();
  });
  return py::make_tuple(rank_of, operations);
}

Array least_move(const Array& weight, const Array& home, const Array& move_cost, i64 num_ranks,
                 i64 ranks_per_node, i64 cap, const Array& held) {
  return least_move_counted(weight, home, move_cost, num_ranks, ranks_per_node, cap, held)[0]
      .cast<Array>();
}

// (sum of count,) the ranks of each shared example, see shares.hpp.
Array place_shares(const Array& share, const Array& count, const Array& home, i64 num_ranks,
                   i64 ranks_per_node, i64 room) {
  check_count("num_ranks", num_ranks);
  check_count("ranks_per_node", ranks_per_node);
  if (room < 0) throw std::invalid_argument("room must be >= 0");
  const i64 width = std::min(ranks_per_node, num_ranks);
  const View<i64> s = weights(share, "share"), c = weights(count, "count");
  check_size("count", c.size, s.size);
  const View<i64> h = homes(home, s.size, num_ranks);
  for (std::size_t i = 0; i < c.size; ++i) {
    if (c[i] < 2) bad_entry("count", i, c[i], " must be >= 2");
    if (c[i] > width) bad_entry("count", i, c[i], ": no node has so many ranks");
  }
  Array ranks(total(c));
  i64* out = ranks.mutable_data();
  py::gil_scoped_release release;
  orchmllm::place_shares(s, c, h, num_ranks, width, room, out);
  return ranks;
}

Array assign_microbatches(const Array& share, i64 num_microbatches) {
  if (share.ndim() != 2 || !share.shape(1)) throw std::invalid_argument("share has no phases");
  check_count("num_microbatches", num_microbatches);
  const auto phases = static_cast<std::size_t>(share.shape(1));
  const View<i64> s{share.data(), static_cast<std::size_t>(share.size())};
  Array step_of(share.shape(0));
  i64* out = step_of.mutable_data();
  py::gil_scoped_release release;
  orchmllm::assign_microbatches(s, phases, static_cast<std::size_t>(num_microbatches), out);
  return step_of;
}

// (micro_of (n,) with the moves that shorten the step, what it takes at least); the tables are
// (n, phases) and (n, sizes), room is (sizes,).
py::tuple shorten_step(const Array& cost, const Array& longest, const Array& size,
                       const Array& room, const Array& micro_of, i64 num_ranks,
                       i64 num_microbatches, i64 least, bool cut) {
  check_count("num_ranks", num_ranks);
  check_count("num_microbatches", num_microbatches);
  const auto n = static_cast<std::size_t>(micro_of.size());
  const View<i64> c = weights(cost, "cost"), l = weights(longest, "longest");
  const View<i64> s = weights(size, "size"), r = weights(room, "room");
  check_size("longest", l.size, c.size);
  check_size("cost", c.size, n == 0 ? 0 : c.size / n * n);
  check_size("size", s.size, n * r.size);
  homes(micro_of, n, num_microbatches);
  Array out(micro_of.size(), micro_of.data());  // a copy
  double time = 0;
  {
    i64* moved = out.mutable_data();
    py::gil_scoped_release release;
    orchmllm::StepShortening step(n, c, l, s, r, num_ranks,
                                  static_cast<std::size_t>(num_microbatches), least, moved);
    if (cut) step.cut_in_order();
    time = step.run();
  }
  return py::make_tuple(out, time);
}

// (n,) slot of each example, or nothing where some example finds none; size is (n, sizes).
py::object fill_slots(const Array& cost, const Array& size, const Array& cap, i64 num_slots) {
  check_count("num_slots", num_slots);
  const View<i64> c = weights(cost, "cost"), s = weights(size, "size"), most = view(cap, "cap");
  check_size("size", s.size, c.size * most.size);
  Array slot_of(cost.size());
  i64* out = slot_of.mutable_data();
  bool found = false;
  {
    py::gil_scoped_release release;
    found = orchmllm::fill_slots(c, s, most, num_slots, out);
  }
  return found ? py::object(slot_of) : py::none();
}

// (order (n,), sizes (num_ranks,)): items grouped by rank, in ascending order inside each.
py::tuple group_by_rank(const Array& rank_of, i64 num_ranks) {
  check_count("num_ranks", num_ranks);
  Array order(rank_of.size()), sizes(num_ranks);
  i64 *order_out = order.mutable_data(), *sizes_out = sizes.mutable_data();
  {
    py::gil_scoped_release release;
    const View<i64> ranks = homes(rank_of, static_cast<std::size_t>(rank_of.size()), num_ranks);
    orchmllm::group_by_rank(ranks, num_ranks, order_out, sizes_out);
  }
  return py::make_tuple(order, sizes);
}

Array expand_order(const Array& order, const Array& counts) {
  const View<i64> c = weights(counts, "counts");
  const View<i64> o = homes(order, c.size, static_cast<i64>(c.size));
  orchmllm::i128 size = 0;
  for (const i64 item : o) size += c[static_cast<std::size_t>(item)];
  if (size != total(c)) throw std::invalid_argument("order must have every item once");
  Array result(total(c));
  i64* out = result.mutable_data();
  py::gil_scoped_release release;
  orchmllm::expand_order(o, c, out);
  return result;
}

Array heaviest_holder(const Array& example, const Array& rank, const Array& bytes,
                      const Array& home, i64 num_ranks) {
  Array result(home.size(), home.data());  // a copy
  i64* out = result.mutable_data();
  py::gil_scoped_release release;
  const View<i64> held = weights(bytes, "bytes"), own = view(home, "home");
  const View<i64> e = homes(example, held.size, static_cast<i64>(own.size));
  const View<i64> r = homes(rank, held.size, num_ranks);
  if (!std::is_sorted(e.begin(), e.end())) throw std::invalid_argument("example must ascend");
  orchmllm::heaviest_holder(e, r, held, num_ranks, own.size, out);
  return result;
}

Array sums_of(const Array& values, const Array& sizes) {
  Array result(sizes.size());
  i64* out = result.mutable_data();
  py::gil_scoped_release release;
  const View<i64> v = view(values, "values"), s = weights(sizes, "sizes");
  check_size("values", v.size, static_cast<std::size_t>(total(s)));
  orchmllm::sums_of(v, s, out);
  return result;
}

// An array that is not initialised. For one of 4 MiB or more numpy asks for huge pages, which a
// virtual machine may take long to give: 18 ms for the 13 MB of 2,560 ranks.
Array small_pages(i64 rows, i64 columns) {
  i64* data = new i64[static_cast<std::size_t>(rows * columns)];
  const py::capsule owner(data, [](void* p) { delete[] static_cast<i64*>(p); });
  return Array({rows, columns}, data, owner);
}

// What d ranks sent, see BatchLayout.to_payload: payloads (d, words) -> example_id (n,), num_targets
// (n,), segments_per_example (n,), columns (4, s), grid (s, 3).
py::tuple read_payloads(const py::array_t<i64, 0>& payloads, const Array& num_words,
                        const Array& num_examples, const Array& num_segments) {
  if (payloads.ndim() != 2 || payloads.strides(1) != sizeof(i64)) {
    throw std::invalid_argument("payloads must be 2-D with contiguous rows");
  }
  const View<i64> words = weights(num_words, "num_words");
  const View<i64> n = weights(num_examples, "num_examples");
  const View<i64> s = weights(num_segments, "num_segments");
  for (const View<i64>& counts : {words, n, s}) {
    check_size("payloads", static_cast<std::size_t>(payloads.shape(0)), counts.size);
  }
  Array ids(total(n)), targets(total(n)), per_example(total(n));
  Array columns = small_pages(4, total(s)), grid = small_pages(total(s), 3);
  orchmllm::Lengths out{ids.mutable_data(), targets.mutable_data(), per_example.mutable_data(),
                        columns.mutable_data(), grid.mutable_data(),
                        static_cast<std::size_t>(total(s))};
  const i64* row = payloads.data();
  const i64 stride = payloads.strides(0) / static_cast<i64>(sizeof(i64));
  {
    py::gil_scoped_release release;
    for (std::size_t r = 0; r < words.size; ++r, row += stride) {
      if (words[r] > payloads.shape(1)) bad_entry("num_words", r, words[r], " is more than a row");
      out.append(row, words[r], n[r], s[r]);
    }
  }
  return py::make_tuple(ids, targets, per_example, columns, grid);
}

// (cost, longest, positions) of each example in each phase, see tables.hpp. columns (phases, 6):
// what Column says. The tables have `rows` >= n rows, the last ones of zeros.
py::tuple example_tables(const Array& modality, const Array& length, const Array& tokens,
                         const Array& segments_of, const Array& columns, i64 rows) {
  const View<i64> m = view(modality, "modality"), l = view(length, "length");
  const View<i64> t = view(tokens, "tokens"), s = weights(segments_of, "segments_of");
  check_size("modality", m.size, static_cast<std::size_t>(total(s)));
  check_size("length", l.size, m.size);
  check_size("tokens", t.size, m.size);
  if (columns.ndim() != 2 || columns.shape(1) != 6) {
    throw std::invalid_argument("columns must be (phases, 6)");
  }
  if (rows < segments_of.size()) throw std::invalid_argument("rows must be >= the examples");
  std::vector<orchmllm::Column> phases;
  for (const i64* c = columns.data(); c < columns.data() + columns.size(); c += 6) {
    if (c[4] < 1) throw std::invalid_argument("unit must be >= 1");
    phases.push_back({c[0], c[1], c[2], c[3], c[4], c[5]});
  }
  const i64 p = columns.shape(0);
  Array cost = small_pages(rows, p), longest = small_pages(rows, p), held = small_pages(rows, p);
  i64* out[] = {cost.mutable_data(), longest.mutable_data(), held.mutable_data()};
  {
    py::gil_scoped_release release;
    orchmllm::example_tables(m, l, t, s, phases, out[0], out[1], out[2]);
    for (i64* table : out) std::fill(table + segments_of.size() * p, table + rows * p, 0);
  }
  return py::make_tuple(cost, longest, held);
}

Array nodewise(const Array& source, const Array& batch, const Array& volume, i64 num_ranks,
               i64 ranks_per_node, i64 steps) {
  check_count("num_ranks", num_ranks);
  check_count("ranks_per_node", ranks_per_node);
  const View<i64> v = weights(volume, "volume");
  const orchmllm::Transfers transfers{homes(source, v.size, num_ranks),
                                      homes(batch, v.size, num_ranks), v, num_ranks,
                                      std::min(ranks_per_node, num_ranks)};
  Array rank_of_batch(num_ranks);
  i64* out = rank_of_batch.mutable_data();
  py::gil_scoped_release release;
  const std::vector<i64> best = orchmllm::NodewiseSearch(transfers).run(steps);
  std::copy(best.begin(), best.end(), out);
  return rank_of_batch;
}

i64 lower_bound(const Array& weight, i64 num_ranks, const Array& held) {
  check_count("num_ranks", num_ranks);
  const View<i64> w = weights(weight, "weight");
  py::gil_scoped_release release;
  return orchmllm::lower_bound_load(w, num_ranks, held_loads(held, w, num_ranks));
}

}  // namespace orchmllm::python

PYBIND11_MODULE(_core, m) {
  using namespace orchmllm::python;
  namespace py = pybind11;
  m.doc() = "Balancing core of orchmllm; see orchmllm/plan/balance.py.";
  const auto array = [](const char* name) { return py::arg(name).noconvert(); };
  const auto weight = array("weight"), home = array("home"), move_cost = array("move_cost");
  const py::arg num_ranks("num_ranks"), ranks_per_node("ranks_per_node"), cap("cap");
  const auto held = array("held") = orchmllm::Array(0);
  m.def("greedy", &by<greedy>, weight, home, num_ranks);
  m.def("padded", &by<orchmllm::padded>, weight, home, num_ranks);
  m.def("conv_transformer", &conv_transformer, weight, array("pad"), home, num_ranks);
  m.def("least_move", &least_move, weight, home, move_cost, num_ranks, ranks_per_node, cap, held);
  m.def("least_move_counted", &least_move_counted, weight, home, move_cost, num_ranks,
        ranks_per_node, cap, held);
  m.def("place_shares", &place_shares, array("share"), array("count"), home, num_ranks,
        ranks_per_node, py::arg("room"));
  m.def("assign_microbatches", &assign_microbatches, array("share"), py::arg("num_microbatches"));
  m.def("shorten_step", &shorten_step, array("cost"), array("longest"), array("size"),
        array("room"), array("micro_of"), num_ranks, py::arg("num_microbatches"),
        py::arg("least"), py::arg("cut"));
  m.def("fill_slots", &fill_slots, array("cost"), array("size"), array("cap"),
        py::arg("num_slots"));
  m.def("group_by_rank", &group_by_rank, array("rank_of"), num_ranks);
  m.def("expand_order", &expand_order, array("order"), array("counts"));
  m.def("heaviest_holder", &heaviest_holder, array("example"), array("rank"), array("bytes"), home,
        num_ranks);
  m.def("sums_of", &sums_of, array("values"), array("sizes"));
  m.def("read_payloads", &read_payloads, array("payloads"), array("num_words"),
        array("num_examples"), array("num_segments"));
  m.def("example_tables", &example_tables, array("modality"), array("length"), array("tokens"),
        array("segments_of"), array("columns"), py::arg("rows"));
  m.def("nodewise", &nodewise, array("source"), array("batch"), array("volume"), num_ranks,
        ranks_per_node, py::arg("steps"));
  m.def("lower_bound", &lower_bound, weight, num_ranks, held);
  m.attr("TOLERANCES") = py::array_t<double>(std::size(orchmllm::kTolerances), orchmllm::kTolerances);
}
