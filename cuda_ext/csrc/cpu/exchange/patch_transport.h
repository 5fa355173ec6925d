// The linear sum assignment of patches to ranks (Gaian, section 4.2.2, term 1a under constraint 1d), exact.
//
// Its columns would be repeated for every patch that a rank may take, so it is solved as what it is, a transport to
// few ranks: patches come in one by one, each along the cheapest chain of moves (successive shortest paths).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace nsmg {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Batch {
  const double* counts;  // [patches, ranks]
  const double* totals;  // [patches]
  int64_t patches, ranks;
  double at(int64_t patch, int64_t rank) const { return patch < 0 ? 0.0 : counts[patch * ranks + rank]; }
  double total(int64_t patch) const { return patch < 0 ? 0.0 : totals[patch]; }
};

using Lists = std::vector<std::vector<int64_t>>;  // the patches of each rank; -1 for "no patch"

// The assignment of the greatest sum of counts where ranks differ by at most one patch in number.
inline Lists transport(const Batch& batch) {
  const int64_t R = batch.ranks, least = batch.patches / R;
  const bool uneven = least * R < batch.patches;  // then some ranks have one more
  Lists lists(R);
  std::vector<int64_t> best(R * R, -1);            // whom to move from a to b
  std::vector<double> cost(R * R, kInfinity);      // what that costs
  std::vector<double> distance(R);
  std::vector<int64_t> from(R);
  const auto look = [&](int64_t a) {
    std::fill_n(cost.begin() + a * R, R, kInfinity);
    for (const int64_t patch : lists[a]) {
      const double* row = batch.counts + patch * R;
      for (int64_t b = 0; b < R; ++b) {
        const double change = row[a] - row[b];
        if (b != a && change < cost[a * R + b]) {
          cost[a * R + b] = change;
          best[a * R + b] = patch;
        }
      }
    }
  };
  for (int64_t patch = 0; patch < batch.patches; ++patch) {
    // Rounds of Bellman and Ford: costs may be negative, circles of negative cost there are none.
    for (int64_t r = 0; r < R; ++r) {
      distance[r] = -batch.at(patch, r);
      from[r] = -1;
    }
    bool changed = true;
    for (int64_t round = 0; changed && round < R; ++round) {
      changed = false;
      for (int64_t a = 0; a < R; ++a) {
        for (int64_t b = 0; b < R; ++b) {
          const double through = distance[a] + cost[a * R + b];
          if (through < distance[b] - 1e-9 * (1.0 + std::abs(distance[b]))) {
            distance[b] = through;
            from[b] = a;
            changed = true;
          }
        }
      }
    }
    // The first `least` places of a rank must be filled, so they are filled first; then the spare ones.
    int64_t end = -1;
    const bool filling = patch < least * R;
    for (int64_t r = 0; r < R; ++r) {
      const int64_t held = static_cast<int64_t>(lists[r].size());
      const bool has_capacity = filling ? held < least : held < least + 1;
      if (has_capacity && (end < 0 || distance[r] < distance[end])) end = r;
    }
    std::vector<int64_t> path{end};
    while (from[path.back()] >= 0 && static_cast<int64_t>(path.size()) <= R) path.push_back(from[path.back()]);
    for (size_t k = 0; k + 1 < path.size(); ++k) {  // from the end: b gets one from a, which gets one from before it
      const int64_t b = path[k], a = path[k + 1], moved = best[a * R + b];
      lists[a].erase(std::find(lists[a].begin(), lists[a].end(), moved));
      lists[b].push_back(moved);
    }
    lists[path.back()].push_back(patch);
    for (const int64_t r : path) look(r);
  }
  for (auto& list : lists) {
    std::sort(list.begin(), list.end());
    if (uneven && static_cast<int64_t>(list.size()) == least) list.push_back(-1);
  }
  return lists;
}

}  // namespace nsmg
