// Tables of numbers that lie in several columns of memory, each [rows, width] and contiguous.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/scalar.h"

namespace nsmg {

template <int... kWidths>
struct Columns {
  static constexpr int kCount = sizeof...(kWidths);
  static constexpr int kNumbers = (kWidths + ... + 0);  // of a row

  NSMG_HD static constexpr int width(int column) {
    const int widths[] = {kWidths...};
    return widths[column];
  }

  // Place of a column's first number among those of a row.
  NSMG_HD static constexpr int start(int column) {
    int before = 0;
    for (int c = 0; c < column; ++c) before += width(c);
    return before;
  }

  // T may be const.
  template <typename T>
  struct Pointers {
    T* at[kCount];
  };

  // Calls f(pointer, place): of each number of a row, where it lies and its place in the row.
  template <typename T, typename F>
  NSMG_HD static void each(const Pointers<T>& columns, int64_t row, const F& f) {
    each_from<0>(columns, row, f);
  }

  template <typename T>
  NSMG_HD static void load(const Pointers<const T>& columns, int64_t row, T (&numbers)[kNumbers]) {
    each(columns, row, [&](const T* from, int place) { numbers[place] = *from; });
  }

  template <typename T>
  NSMG_HD static void store(const Pointers<T>& columns, int64_t row, const T (&numbers)[kNumbers]) {
    each(columns, row, [&](T* to, int place) { *to = numbers[place]; });
  }

 private:
  template <int kColumn, typename T, typename F>
  NSMG_HD static void each_from(const Pointers<T>& columns, int64_t row, const F& f) {
    if constexpr (kColumn < kCount) {
      constexpr int kWidth = width(kColumn), kStart = start(kColumn);
      T* column = columns.at[kColumn] + kWidth * row;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) f(column + k, kStart + k);
      each_from<kColumn + 1>(columns, row, f);
    }
  }
};

// A struct that begins with these numbers, in their order; and the first numbers of one.
template <typename To, typename T, int kNumbers>
NSMG_HD To as_struct(const T (&numbers)[kNumbers]) {
  static_assert(sizeof(To) == sizeof(numbers), "a struct of these numbers alone");
  To found;
  memcpy(&found, numbers, sizeof(numbers));
  return found;
}

template <typename From, typename T, int kNumbers>
NSMG_HD void to_numbers(const From& from, T (&numbers)[kNumbers], int first = 0) {
  memcpy(numbers, reinterpret_cast<const T*>(&from) + first, sizeof(numbers));
}

}  // namespace nsmg
