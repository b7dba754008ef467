// The tokens that requests choose at positions, each of which has a row of logits. Greedy: the index of the largest score, the
// first of equal ones. Sampled: among the tokens that the cuts leave, the one whose score and noise have the largest sum.
// Behind a request's first token that differs from its draft, nothing is chosen.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "cuts.h"
#include "lanes.h"
#include "noise.h"
#include "tasks.h"

namespace {

constexpr int64_t kNoNumbers = -1, kNoTokenLeft = -2, kNotAsked = -3;  // in place of a token, also in `runtime.core.sampling`

// The index of the largest number. Four registers are compared at a time, and looked through only if one is larger.
template <typename T>
int64_t argmax(const T* row, int64_t size) {
  constexpr int64_t kWide = 4 * kLanes;
  float largest = kNever;
  int64_t best = 0, i = 0;
  // NaN counts as larger than any number, so that a broken model is noticed.
  const auto look = [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end && !std::isnan(largest); ++j) {
      const float value = static_cast<float>(row[j]);
      if (value > largest || std::isnan(value)) largest = value, best = j;
    }
  };
  for (; i + kWide <= size && !std::isnan(largest); i += kWide) {
    const Lanes bound = Lanes{} + largest;
    auto is_higher = !(widen(row + i) <= bound);
    for (int64_t j = kLanes; j < kWide; j += kLanes) is_higher |= !(widen(row + i + j) <= bound);
    int32_t any = 0;
    for (int lane = 0; lane < kLanes; ++lane) any |= is_higher[lane];
    if (any) look(i, i + kWide);
  }
  look(i, size);
  return std::isfinite(largest) ? best : kNoNumbers;
}

// A token, and the sum of its score and noise, less the largest score.
struct Best {
  double score = kLeastNoise;
  int64_t token = -1;
};

// The best token of a piece. An upper bound on the noise is cheaper than the noise: tokens that it cannot make win are skipped.
Best draw(const Scores& scores, const Cut& cut, const Noise& noise, int64_t begin, int64_t end) {
  const float above_equal = std::nextafter(cut.least, kLargestFloat);
  Best best;
  Words tokens;
  for (int lane = 0; lane < kLanes; ++lane) tokens[lane] = static_cast<uint32_t>(begin + lane);
  for (int64_t i = begin; i < end; i += kLanes, tokens += kLanes) {
    const Lanes v = load(scores.scores + i);
    const Ints is_left = v >= (i + kLanes <= cut.first_equal ? above_equal : cut.least);
    if (!is_any(is_left)) continue;
    const Ints may_win = is_left & ((v - scores.extent.largest) + noise.at_most(tokens) >= static_cast<float>(best.score));
    if (!is_any(may_win)) continue;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      if (!may_win[lane] || (v[lane] == cut.least && i + lane < cut.first_equal)) continue;
      const double beyond = static_cast<double>(v[lane]) - scores.extent.largest;
      const double score = beyond + noise.of(static_cast<uint32_t>(i + lane));
      if (score > best.score) best = {score, i + lane};
    }
  }
  return best;
}

int64_t draw(const Scores& scores, const Cut& cut, uint64_t key) {
  const Noise noise(key);
  std::vector<Best> of_pieces(scores.num_pieces());
  share_by_affinity(scores.num_pieces(), [&](int64_t i) {
    of_pieces[i] = draw(scores, cut, noise, i * kPiece, std::min((i + 1) * kPiece, scores.size));
  });
  Best best;
  for (const Best& one : of_pieces)
    if (one.score > best.score) best = one;
  return best.token;
}

// A row of logits, and its request's rules for it.
struct Position {
  const void* logits;
  at::ScalarType dtype;
  int64_t size;
  Rules rules;
  Range<Entry> entries, later;
  Range<int32_t> bans;
  uint64_t key;

  bool is_plain() const { return rules.is_greedy && entries.empty() && later.empty() && bans.empty(); }
};

template <typename Use>
auto with_numbers(const void* logits, at::ScalarType dtype, const Use& use) {
  if (dtype == at::kFloat) return use(static_cast<const float*>(logits));
  if (dtype == at::kBFloat16) return use(static_cast<const at::BFloat16*>(logits));
  return use(static_cast<const at::Half*>(logits));
}

// Computes the scores; returns 0, or the reason why no token can be chosen.
int64_t find_scores(const Position& position, Scores& scores) {
  return with_numbers(position.logits, position.dtype, [&](const auto* logits) -> int64_t {
    const auto temperature = static_cast<float>(position.rules.is_greedy ? 1.0 : position.rules.temperature);
    scale(logits, temperature, scores);
    if (scores.extent.is_wrong || scores.extent.largest == kNever) return kNoNumbers;
    penalize(logits, position.rules, position.entries, position.later, position.bans, temperature, scores);
    return std::isfinite(scores.extent.largest) ? 0 : kNoTokenLeft;
  });
}

int64_t choose(const Position& position, Room& room) {
  if (position.is_plain())
    return with_numbers(position.logits, position.dtype,
                        [&](const auto* logits) { return argmax(logits, position.size); });
  room.make(position.size);
  Scores scores{room.scores.data(), position.size, {}};
  if (const int64_t why = find_scores(position, scores)) return why;
  if (position.rules.is_greedy) return argmax(scores.scores, scores.size);
  return draw(scores, find_cut(scores, position.rules, room), position.key);
}

// The positions of all rows, request by request.
std::vector<Position> positions_of(const at::TensorList rows, const at::Tensor& rules, const at::Tensor& keys,
                                   const at::Tensor& entries, const at::Tensor& bans, const at::Tensor& bounds) {
  std::vector<Position> positions;
  const auto* bound = bounds.const_data_ptr<int64_t>();
  const auto* rule = reinterpret_cast<const Rules*>(rules.const_data_ptr<double>());
  const auto* key = reinterpret_cast<const uint64_t*>(keys.const_data_ptr<int64_t>());
  const auto* entry = reinterpret_cast<const Entry*>(entries.const_data_ptr<int32_t>());
  const auto* ban = bans.const_data_ptr<int32_t>();
  for (const at::Tensor& some : rows) {
    const auto dtype = some.scalar_type();
    TORCH_CHECK(some.dim() == 2 && some.size(1) > 0 && some.stride(1) == 1, "rows must be contiguous");
    TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, "logits must be floats");
    TORCH_CHECK(bound + 6 * some.size(0) <= bounds.const_data_ptr<int64_t>() + bounds.numel(), "rows without bounds");
    for (int64_t row = 0; row < some.size(0); ++row, bound += 6) {
      const auto* logits = static_cast<const char*>(some.const_data_ptr()) + row * some.stride(0) * some.element_size();
      positions.push_back({logits, dtype, some.size(1), *rule++, {entry + bound[0], entry + bound[1]},
                           {entry + bound[2], entry + bound[3]}, {ban + bound[4], ban + bound[5]}, *key++});
    }
  }
  TORCH_CHECK(static_cast<int64_t>(positions.size()) == rules.size(0) && rules.size(1) == 8 && bounds.size(1) == 6 &&
                  keys.size(0) == rules.size(0) && bounds.size(0) == rules.size(0),
              "each row has its rules, key and bounds");
  return positions;
}

thread_local Room own_room;

// Threads share the rows, or the pieces of each row if there are fewer rows than threads.
template <typename Work>
void for_rows(int64_t num_rows, const Work& work) {
  if (num_rows >= num_threads()) return share_tasks(num_rows, [&](int64_t i) { work(i, own_room); });
  for (int64_t i = 0; i < num_rows; ++i) work(i, own_room);
}

// Each row's place in its draft, and its request, in the order in which tokens are chosen: all requests' first rows first, so
// that few rows are computed behind a token that differs from its draft.
std::vector<std::pair<int64_t, int64_t>> rows_in_turn(at::TensorList rows) {
  std::vector<std::pair<int64_t, int64_t>> turns;
  for (int64_t request = 0; request < static_cast<int64_t>(rows.size()); ++request)
    for (int64_t row = 0; row < rows[request].size(0); ++row) turns.emplace_back(row, request);
  std::sort(turns.begin(), turns.end());
  return turns;
}

at::Tensor choose_rows(at::TensorList rows, const at::Tensor& rules, const at::Tensor& keys, const at::Tensor& entries,
                       const at::Tensor& bans, const at::Tensor& bounds, const at::Tensor& draft_tokens) {
  const auto positions = positions_of(rows, rules, keys, entries, bans, bounds);
  const auto num_rows = static_cast<int64_t>(positions.size());
  TORCH_CHECK(draft_tokens.numel() == num_rows, "each row has the token that a draft goes on with, or -1");
  const auto* drafted = draft_tokens.const_data_ptr<int64_t>();
  std::vector<int64_t> begins{0};  // first row of each request
  for (const at::Tensor& some : rows) begins.push_back(begins.back() + some.size(0));
  std::vector<std::atomic<int64_t>> ends(rows.size());  // exclusive, behind the first row whose token differs from the draft
  for (size_t i = 0; i < rows.size(); ++i) ends[i] = begins[i + 1];
  const auto turns = rows_in_turn(rows);
  at::Tensor tokens = at::empty({num_rows}, keys.options());
  auto* token = tokens.mutable_data_ptr<int64_t>();
  std::fill(token, token + num_rows, kNotAsked);
  const auto take = [&](int64_t turn) {
    const auto [place, request] = turns[turn];
    const int64_t row = begins[request] + place;
    if (row >= ends[request]) return;
    token[row] = choose(positions[row], own_room);
    if (token[row] == drafted[row]) return;
    for (int64_t end = ends[request]; row + 1 < end && !ends[request].compare_exchange_weak(end, row + 1);) {}
  };
  if (num_rows < num_threads()) {
    for (int64_t turn = 0; turn < num_rows; ++turn) take(turn);
    return tokens;
  }
  std::atomic<int64_t> next{0};
  share_tasks(num_threads(), [&](int64_t) {
    for (int64_t turn = next++; turn < num_rows; turn = next++) take(turn);
  });
  return tokens;
}

// Scores (n, vocab) float32, -inf for cut tokens; and for each row 0, or the reason why no token is left.
std::tuple<at::Tensor, at::Tensor> scores_of_rows(at::TensorList rows, const at::Tensor& rules, const at::Tensor& keys,
                                                  const at::Tensor& entries, const at::Tensor& bans,
                                                  const at::Tensor& bounds) {
  const auto positions = positions_of(rows, rules, keys, entries, bans, bounds);
  const auto num_rows = static_cast<int64_t>(positions.size());
  at::Tensor all = at::empty({num_rows, positions.at(0).size}, keys.options().dtype(at::kFloat));
  at::Tensor why = at::empty({num_rows}, keys.options());
  for_rows(num_rows, [&](int64_t i, Room& room) {
    const int64_t size = positions[i].size;
    room.make(size);
    Scores scores{room.scores.data(), size, {}};
    why.mutable_data_ptr<int64_t>()[i] = find_scores(positions[i], scores);
    if (why.const_data_ptr<int64_t>()[i]) return;
    const Cut cut = positions[i].rules.is_greedy ? Cut{-kLargestFloat, 0}
                                                 : find_cut(scores, positions[i].rules, room);
    float* to = all.mutable_data_ptr<float>() + i * size;
    for (int64_t token = 0; token < size; ++token) {
      const float score = scores.scores[token];
      to[token] = score > cut.least || (score == cut.least && token >= cut.first_equal) ? score : kNever;
    }
  });
  return {all, why};
}

// The `num_best` best tokens, the first of equal ones first; if there are fewer, tokens with a score of -inf follow.
std::vector<int64_t> find_best(const Scores& scores, int64_t num_best, Room& room) {
  std::vector<int64_t> found;
  const float least =
      Candidates(scores, room).find(static_cast<double>(num_best), scores.extent.smallest, scores.extent.largest).score;
  for (int64_t token = 0; token < scores.size; token += kLanes) {
    if (!is_any(load(scores.scores + token) >= least)) continue;
    for (int64_t i = token; i < std::min(token + kLanes, scores.size); ++i)
      if (scores.scores[i] >= least) found.push_back(i);
  }
  std::stable_sort(found.begin(), found.end(), [&](int64_t a, int64_t b) { return scores.scores[a] > scores.scores[b]; });
  for (int64_t i = 0; i < scores.size && static_cast<int64_t>(found.size()) < num_best; ++i)
    if (scores.scores[i] == kNever) found.push_back(i);
  found.resize(num_best);
  return found;
}

// Log-probability of one token in each row, and the best tokens (n, num_best) with theirs; NaN for rows with wrong logits.
std::tuple<at::Tensor, at::Tensor, at::Tensor> logprobs_of_rows(const at::Tensor& rows, const at::Tensor& tokens,
                                                                int64_t num_best) {
  TORCH_CHECK(rows.dim() == 2 && rows.stride(1) == 1 && num_best <= rows.size(1), "rows must be contiguous");
  TORCH_CHECK(tokens.numel() == rows.size(0), "each row has a token");
  const int64_t size = rows.size(1);
  at::Tensor own = at::empty({rows.size(0)}, rows.options().dtype(at::kFloat));
  at::Tensor best = at::empty({rows.size(0), num_best}, tokens.options());
  at::Tensor of_best = at::empty({rows.size(0), num_best}, own.options());
  for_rows(rows.size(0), [&](int64_t row, Room& room) {
    room.make(size);
    Scores scores{room.scores.data(), size, {}};
    const auto* logits = static_cast<const char*>(rows.const_data_ptr()) + row * rows.stride(0) * rows.element_size();
    with_numbers(logits, rows.scalar_type(), [&](const auto* numbers) { scale(numbers, 1.0f, scores); });
    const bool is_wrong = scores.extent.is_wrong || scores.extent.largest == kNever;
    const double largest = is_wrong ? std::nan("") : scores.extent.largest;
    const double log_sum = is_wrong ? 0 : std::log(Candidates(scores, room).weigh(scores.extent.largest));
    const auto logprob = [&](int64_t token) { return static_cast<float>(scores.scores[token] - largest - log_sum); };
    own.mutable_data_ptr<float>()[row] = logprob(tokens.const_data_ptr<int64_t>()[row]);
    if (num_best == 0) return;
    std::vector<int64_t> found(num_best);
    if (!is_wrong) found = find_best(scores, num_best, room);
    for (int64_t i = 0; i < num_best; ++i) {
      best.mutable_data_ptr<int64_t>()[row * num_best + i] = found[i];
      of_best.mutable_data_ptr<float>()[row * num_best + i] = logprob(found[i]);
    }
  });
  return {own, best, of_best};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(specdec, library) {
  library.def("choose(Tensor[] rows, Tensor rules, Tensor keys, Tensor entries, Tensor bans, Tensor bounds,"
              " Tensor draft_tokens) -> Tensor");
  library.def("scores(Tensor[] rows, Tensor rules, Tensor keys, Tensor entries, Tensor bans, Tensor bounds)"
              " -> (Tensor, Tensor)");
  library.def("logprobs(Tensor rows, Tensor tokens, int num_best) -> (Tensor, Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(specdec, CPU, library) {
  library.impl("choose", choose_rows);
  library.impl("scores", scores_of_rows);
  library.impl("logprobs", logprobs_of_rows);
}
