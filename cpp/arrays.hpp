// Arrays of Python as views, checked (orchmllm/plan/balance.py gives the friendlier messages).
#pragma once

#include <pybind11/numpy.h>

#include <string>

#include "common.hpp"

namespace orchmllm {

namespace py = pybind11;

// No forcecast: a float or int32 array is an error, not a silent copy.
using Array = py::array_t<i64, py::array::c_style>;

inline View<i64> view(const Array& array, const char* name) {
  if (array.ndim() != 1) throw std::invalid_argument(std::string(name) + " must be 1-D");
  return {array.data(), static_cast<std::size_t>(array.size())};
}

[[noreturn]] inline void bad_entry(const char* name, std::size_t i, i64 value,
                                   const std::string& why) {
  throw std::invalid_argument(std::string(name) + "[" + std::to_string(i) +
                              "] = " + std::to_string(value) + why);
}

inline void check_size(const char* name, std::size_t size, std::size_t expected) {
  if (size == expected) return;
  throw std::invalid_argument(std::string(name) + " has " + std::to_string(size) +
                              " entries, expected " + std::to_string(expected));
}

inline View<i64> weights(const Array& array, const char* name) {
  const View<i64> values = view(array, name);
  if (values.size > static_cast<std::size_t>(std::numeric_limits<i32>::max())) {
    throw std::invalid_argument(std::string(name) + " has too many items");
  }
  i64 room = std::numeric_limits<i64>::max() / 2;
  for (std::size_t i = 0; i < values.size; ++i) {
    if (values[i] < 0) bad_entry(name, i, values[i], " is negative");
    if (values[i] > room) bad_entry(name, i, values[i], ": the sum overflows int64");
    room -= values[i];
  }
  return values;
}

inline void check_count(const char* name, i64 value) {
  if (value >= 1 && value <= std::numeric_limits<i32>::max()) return;
  throw std::invalid_argument(std::string(name) + " = " + std::to_string(value) + " must be >= 1");
}

inline View<i64> homes(const Array& array, std::size_t size, i64 num_ranks) {
  const View<i64> values = view(array, "home");
  check_size("home", values.size, size);
  for (std::size_t i = 0; i < size; ++i) {
    if (values[i] >= 0 && values[i] < num_ranks) continue;
    bad_entry("home", i, values[i], " is not a rank of " + std::to_string(num_ranks));
  }
  return values;
}

// What ranks hold before any item comes, (num_ranks) or empty; empty too where none holds anything.
inline View<i64> held_loads(const Array& array, View<i64> weight, i64 num_ranks) {
  const View<i64> held = weights(array, "held");
  if (held.size == 0) return held;
  check_size("held", held.size, static_cast<std::size_t>(num_ranks));
  if (total(weight) + total(held) > std::numeric_limits<i64>::max() / 2) {
    throw std::invalid_argument("the sum of weight and held overflows int64");
  }
  return total(held) > 0 ? held : View<i64>{};
}

}  // namespace orchmllm
