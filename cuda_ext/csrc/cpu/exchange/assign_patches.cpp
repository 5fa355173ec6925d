// ns_multigpu::assign_patches: which rank draws which patch of a batch.
//
// The start is the exact linear sum assignment (cpu/patch_transport.h). Then pairs of patches are swapped (Gaian,
// appendix C.1), always the pair that gains most among the best pairs of each two ranks. A best pair is looked for
// again when one of its ranks has changed, by the slopes of the norms: roots are concave, so what gains by its slope
// gains at least as much in truth. Where none gains, all are looked for again, with roots, so that the end is a local
// optimum over all swaps. Swaps with "no patch" are moves, of which a rank with one patch fewer than others has one.
//
// Threads look for best pairs of different ranks; each writes its own place and the choice among them is one thread's,
// so that the result does not depend on their number.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "cpu/exchange/patch_transport.h"

namespace nsmg::assign_patches_cpu {
namespace {

// Of the objective: what gains less is no gain, and what is better by less is no better. Among the many swaps that are
// equal the first is taken, also where another processor's vectors round in another way.
constexpr double kLeastGain = 1e-9;
constexpr int64_t kSwaps = 1 << 18;   // that a thread looks at, at least: less than a millisecond is not worth waking it

struct Weights {
  double alpha, beta, gamma, delta;
};

// Sums of the p-th powers of what ranks send, receive and draw, and the sum of what is in place.
struct Sums {
  double send = 0, receive = 0, draw = 0, here = 0;
};

template <int kDoublings>  // p = 2^kDoublings
struct Norm {
  static double power(double x) {
    x = x > 0.0 ? x : 0.0;
    for (int k = 0; k < kDoublings; ++k) x *= x;
    return x;
  }
  static double root(double x) {
    x = x > 0.0 ? x : 0.0;
    for (int k = 0; k < kDoublings; ++k) x = std::sqrt(x);
    return x;
  }
  // Of the root, at x.
  static double slope(double x) { return x > 0.0 ? root(x) / (x * (1 << kDoublings)) : 0.0; }
  static double objective(const Weights& w, double send, double receive, double draw, double here) {
    return w.beta * root(send) + w.gamma * root(receive) + w.delta * root(draw) - w.alpha * here;
  }
};

struct Candidate {
  int64_t first = 0, second = 0;  // places in the lists of the two ranks
  Sums change;
  bool exists = false, fresh = false, exact = false;
};

// The patches of a rank, with what a swap between it and another needs.
struct Column {
  std::vector<double> mine, other, total;
  void fill(const Batch& batch, const std::vector<int64_t>& list, int64_t me, int64_t you) {
    const size_t n = list.size();
    mine.resize(n), other.resize(n), total.resize(n);
    for (size_t k = 0; k < n; ++k) {
      mine[k] = batch.at(list[k], me);
      other[k] = batch.at(list[k], you);
      total[k] = batch.total(list[k]);
    }
  }
};

template <int kDoublings>
class Search {
  using N = Norm<kDoublings>;

 public:
  Search(const Batch& batch, const double* sent, Lists lists, Weights weights)
      : batch_(batch), lists_(std::move(lists)), weights_(weights), send_(sent, sent + batch.ranks),
        receive_(batch.ranks), draw_(batch.ranks), kept_(batch.ranks * (batch.ranks - 1) / 2) {
    for (int64_t a = 0; a < batch_.ranks; ++a)
      for (int64_t b = a + 1; b < batch_.ranks; ++b) pairs_.push_back({a, b});
    for (int64_t patch = 0; patch < batch_.patches; ++patch)
      for (int64_t r = 0; r < batch_.ranks; ++r) send_[r] += batch_.at(patch, r);
    for (int64_t r = 0; r < batch_.ranks; ++r) {
      for (const int64_t patch : lists_[r]) {
        const double here = batch_.at(patch, r), total = batch_.total(patch);
        send_[r] -= here;
        receive_[r] += total - here;
        draw_[r] += total;
        sums_.here += here;
      }
    }
    add_up();
  }

  // Swaps until none gains, `most` are done or the time is up; returns how many, and whether none gains.
  std::pair<int64_t, bool> run(int64_t most, double seconds) {
    const auto start = std::chrono::steady_clock::now();
    const auto late = [&] {
      return seconds > 0 && std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > seconds;
    };
    for (int64_t swaps = 0;; ++swaps) {
      int64_t chosen = choose();
      if (chosen < 0) return {swaps, true};
      if (swaps == most || late()) return {swaps, false};
      apply(chosen);
    }
  }

  double objective() const { return value(Sums{}); }
  const Lists& lists() const { return lists_; }

 private:
  double value(const Sums& change) const {
    return N::objective(weights_, sums_.send + change.send, sums_.receive + change.receive, sums_.draw + change.draw,
                        sums_.here + change.here);
  }

  void add_up() {
    sums_.send = sums_.receive = sums_.draw = 0;
    for (int64_t r = 0; r < batch_.ranks; ++r) {
      sums_.send += N::power(send_[r]);
      sums_.receive += N::power(receive_[r]);
      sums_.draw += N::power(draw_[r]);
    }
  }

  // The kept pair that gains most, or -1 where no pair of patches gains.
  int64_t choose() {
    for (bool exact = false;; exact = true) {
      std::vector<int64_t> stale;
      for (size_t k = 0; k < pairs_.size(); ++k)
        if (!kept_[k].exists) stale.push_back(static_cast<int64_t>(k));
      look(stale, exact);
      const double now = objective();
      const double margin = kLeastGain * std::abs(now);
      double least = now;
      int64_t chosen = -1;
      bool all_fresh = true;
      for (size_t k = 0; k < pairs_.size(); ++k) {
        all_fresh &= kept_[k].fresh && kept_[k].exact;
        if (kept_[k].first < 0) continue;
        const double then = value(kept_[k].change);
        if (then < least - margin) {
          least = then;
          chosen = static_cast<int64_t>(k);
        }
      }
      if (chosen >= 0 || all_fresh) return chosen;
      for (auto& one : kept_) one.exists = one.fresh && one.exact;  // the others are looked for again
    }
  }

  void look(const std::vector<int64_t>& stale, bool exact) {
    const int64_t longest = batch_.patches / batch_.ranks + 1, pairs = std::max<int64_t>(1, kSwaps / (longest * longest));
    at::parallel_for(0, static_cast<int64_t>(stale.size()), pairs, [&](int64_t begin, int64_t end) {
      Column first, second;
      std::vector<double> then;
      for (int64_t k = begin; k < end; ++k) {
        const auto pair = pairs_[stale[k]];
        kept_[stale[k]] = exact ? best_of<true>(pair, first, second, then) : best_of<false>(pair, first, second, then);
      }
    });
  }

  Sums change(std::pair<int64_t, int64_t> pair, double am, double ao, double at, double bm, double bo,
              double bt) const {
    const auto [a, b] = pair;
    const double more = bt - at;  // that a draws then
    Sums s;
    s.send = N::power(send_[a] + am - bo) - N::power(send_[a]) + N::power(send_[b] + bm - ao) - N::power(send_[b]);
    s.receive = N::power(receive_[a] + more + am - bo) - N::power(receive_[a]) +
                N::power(receive_[b] - more + bm - ao) - N::power(receive_[b]);
    s.draw = N::power(draw_[a] + more) - N::power(draw_[a]) + N::power(draw_[b] - more) - N::power(draw_[b]);
    s.here = bo + ao - am - bm;
    return s;
  }

  template <bool kExact>
  Candidate best_of(std::pair<int64_t, int64_t> pair, Column& first, Column& second, std::vector<double>& then) const {
    const auto [a, b] = pair;
    first.fill(batch_, lists_[a], a, b);
    second.fill(batch_, lists_[b], b, a);
    const int64_t n = static_cast<int64_t>(second.mine.size());
    then.resize(n);
    Candidate best;
    best.exists = best.fresh = true;
    best.exact = kExact;
    best.first = -1;
    const double margin = kLeastGain * std::abs(objective());
    double least = kInfinity;
    // A rank has "no patch" once at most: where both have it, it stays where it is.
    const auto nobody = [](const std::vector<int64_t>& list) {
      return std::find(list.begin(), list.end(), int64_t{-1}) - list.begin();
    };
    int64_t stays_a = nobody(lists_[a]), stays_b = nobody(lists_[b]);
    if (stays_a == static_cast<int64_t>(lists_[a].size()) || stays_b == static_cast<int64_t>(lists_[b].size()))
      stays_a = stays_b = -1;
    const double send_slope = weights_.beta * N::slope(sums_.send);
    const double receive_slope = weights_.gamma * N::slope(sums_.receive);
    const double draw_slope = weights_.delta * N::slope(sums_.draw);
    const double rest_send = sums_.send - N::power(send_[a]) - N::power(send_[b]);
    const double rest_receive = sums_.receive - N::power(receive_[a]) - N::power(receive_[b]);
    const double rest_draw = sums_.draw - N::power(draw_[a]) - N::power(draw_[b]);
    const double *bm = second.mine.data(), *bo = second.other.data(), *bt = second.total.data();
    double* out = then.data();
    for (size_t i = 0; i < first.mine.size(); ++i) {
      if (static_cast<int64_t>(i) == stays_a) continue;
      const double am = first.mine[i], ao = first.other[i], at = first.total[i];
      const double sa = send_[a] + am, sb = send_[b] - ao, ra = receive_[a] + am - at, rb = receive_[b] - ao + at;
      const double da = draw_[a] - at, db = draw_[b] + at, here = sums_.here + ao - am;
#pragma omp simd
      for (int64_t j = 0; j < n; ++j) {
        const double s = rest_send + N::power(sa - bo[j]) + N::power(sb + bm[j]);
        const double r = rest_receive + N::power(ra + bt[j] - bo[j]) + N::power(rb - bt[j] + bm[j]);
        const double d = rest_draw + N::power(da + bt[j]) + N::power(db - bt[j]);
        if constexpr (kExact) {
          out[j] = N::objective(weights_, s, r, d, here + bo[j] - bm[j]);
        } else {
          out[j] = send_slope * s + receive_slope * r + draw_slope * d - weights_.alpha * (here + bo[j] - bm[j]);
        }
      }
      for (int64_t j = 0; j < n; ++j) {
        if (out[j] < least - margin && j != stays_b) {
          least = out[j];
          best.first = static_cast<int64_t>(i);
          best.second = j;
        }
      }
    }
    if (best.first >= 0) {
      const size_t i = best.first, j = best.second;
      best.change = change(pair, first.mine[i], first.other[i], first.total[i], bm[j], bo[j], bt[j]);
    }
    return best;
  }

  void apply(int64_t chosen) {
    const auto [a, b] = pairs_[chosen];
    const Candidate one = kept_[chosen];
    int64_t &i = lists_[a][one.first], &j = lists_[b][one.second];
    const double more = batch_.total(j) - batch_.total(i);
    const double less_at_a = batch_.at(j, a) - batch_.at(i, a), less_at_b = batch_.at(i, b) - batch_.at(j, b);
    send_[a] -= less_at_a;
    send_[b] -= less_at_b;
    receive_[a] += more - less_at_a;
    receive_[b] -= more + less_at_b;
    draw_[a] += more;
    draw_[b] -= more;
    sums_.here += less_at_a + less_at_b;
    std::swap(i, j);
    add_up();  // recomputed: differences of powers would accumulate rounding
    for (size_t k = 0; k < pairs_.size(); ++k) {
      const auto [c, d] = pairs_[k];
      if (c == a || c == b || d == a || d == b) kept_[k].exists = false;
      kept_[k].fresh = false;
    }
  }

  const Batch batch_;
  Lists lists_;
  const Weights weights_;
  std::vector<double> send_, receive_, draw_;
  Sums sums_;
  std::vector<std::pair<int64_t, int64_t>> pairs_;
  std::vector<Candidate> kept_;
};

template <int kDoublings>
std::tuple<at::Tensor, at::Tensor> searched(const Batch& batch, const double* sent, Lists lists, const Weights& weights,
                                            int64_t most, double seconds) {
  Search<kDoublings> search(batch, sent, std::move(lists), weights);
  const double before = search.objective();
  const auto [swaps, converged] = search.run(most, seconds);
  at::Tensor ranks = at::empty({batch.patches}, at::kLong), summary = at::empty({4}, at::kDouble);
  int64_t* rank = ranks.mutable_data_ptr<int64_t>();
  for (int64_t r = 0; r < batch.ranks; ++r)
    for (const int64_t patch : search.lists()[r])
      if (patch >= 0) rank[patch] = r;
  double* values = summary.mutable_data_ptr<double>();
  values[0] = before, values[1] = search.objective();
  values[2] = static_cast<double>(swaps), values[3] = converged ? 1.0 : 0.0;
  return {ranks, summary};
}

std::tuple<at::Tensor, at::Tensor> assign_patches(const at::Tensor& counts_, const at::Tensor& totals_,
                                                  const at::Tensor& sent_, double alpha, double beta, double gamma,
                                                  double delta, int64_t power, int64_t most_swaps, double seconds) {
  const at::Tensor counts = counts_.contiguous(), totals = totals_.contiguous(), sent = sent_.contiguous();
  TORCH_CHECK_VALUE(counts.scalar_type() == at::kDouble && totals.scalar_type() == at::kDouble &&
                        sent.scalar_type() == at::kDouble,
                    "counts, totals and sent must be float64.");
  TORCH_CHECK_VALUE(counts.dim() == 2 && totals.numel() == counts.size(0) && sent.numel() == counts.size(1) &&
                        counts.size(1) > 0,
                    "counts must be [P, R], totals [P], sent [R], with R > 0.");
  const Batch batch{counts.const_data_ptr<double>(), totals.const_data_ptr<double>(), counts.size(0), counts.size(1)};
  Lists lists = transport(batch);
  const Weights weights{alpha, beta, gamma, delta};
  switch (power) {
    case 2: return searched<1>(batch, sent.const_data_ptr<double>(), std::move(lists), weights, most_swaps, seconds);
    case 4: return searched<2>(batch, sent.const_data_ptr<double>(), std::move(lists), weights, most_swaps, seconds);
    case 8: return searched<3>(batch, sent.const_data_ptr<double>(), std::move(lists), weights, most_swaps, seconds);
    case 16: return searched<4>(batch, sent.const_data_ptr<double>(), std::move(lists), weights, most_swaps, seconds);
    default: TORCH_CHECK_VALUE(false, "power must be 2, 4, 8 or 16, not ", power, ".");
  }
}

}  // namespace
}  // namespace nsmg::assign_patches_cpu

TORCH_LIBRARY_IMPL(ns_multigpu, CPU, m) {
  m.impl("assign_patches", &nsmg::assign_patches_cpu::assign_patches);
}
