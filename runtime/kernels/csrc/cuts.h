// A position's scores: its logits after biases, penalties, bans and temperature, and which of them top-k, top-p and min-p
// keep. Nothing is sorted: the score at a cut is found by bisection, in passes over the scores in a range that soon is
// short. For many scores a sample tells the cut's likely range, and one pass finds whether the cut is in this range and
// keeps only the range's scores (Floyd and Rivest, 1975).
//
// Scores are processed in pieces, which threads share. Sums are taken piece by piece, so that they do not depend on the
// number of threads or their other work.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "lanes.h"
#include "softmax.h"
#include "tasks.h"
#include "vector_functions.h"

namespace {

constexpr float kLargestFloat = std::numeric_limits<float>::max();
constexpr int64_t kPiece = 16384;
typedef double Doubles __attribute__((vector_size(8 * kLanes)));

inline bool is_any(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  int32_t any = 0;
  for (int lane = 0; lane < kLanes; ++lane) any |= mask[lane];
  return any != 0;
#endif
}
inline int64_t num_of(Ints mask) {
#if defined(__AVX512F__)
  return __builtin_popcount(_mm512_test_epi32_mask((__m512i)mask, (__m512i)mask));
#else
  int64_t number = 0;
  for (int lane = 0; lane < kLanes; ++lane) number -= mask[lane];
  return number;
#endif
}
inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }
inline Lanes smaller(Lanes a, Lanes b) { return a < b ? a : b; }
inline float smallest_of(Lanes v) { return -largest_of(-v); }
inline int64_t registers(int64_t count) { return (count + kLanes - 1) / kLanes * kLanes; }

// e to the power of x, to 2 units in the last place; 0 below -87. x is at most 0.
inline Lanes exp_negative_lanes(Lanes x) {
  const Lanes shifted = x * 1.44269504f + 12582912.0f, whole = shifted - 12582912.0f;
  const Lanes r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
  Lanes y = exp_polynomial(r);
  y = y * (r * r) + (r + 1.0f);
#if defined(__AVX512F__)
  return (Lanes)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_GT_OQ), (__m512)y,
                                       (__m512)whole);
#else
  return x > -87.0f ? (Lanes)((Words)y + ((Words)shifted << 23)) : Lanes{};
#endif
}

// Sampling parameters of a request (`runtime.core.params.SamplingConfig`).
struct Rules {
  double is_greedy, temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
};

// A token whose score depends on more than its logit: its bias, whether it occurs before, and its count for penalties.
struct Entry {
  int32_t token;
  float bias;
  int32_t occurs, count;
};

template <typename T>
struct Range {
  const T *first, *last;
  const T* begin() const { return first; }
  const T* end() const { return last; }
  bool empty() const { return first == last; }
};

// Penalized score as transformers computes it: each product is rounded before it is used.
inline float penalized(float score, const Entry& entry, const Rules& rules) {
  const auto repetition = static_cast<float>(rules.repetition_penalty);
  const double frequency = static_cast<float>(rules.frequency_penalty);
  score += entry.bias;
  if (entry.occurs) score = score < 0 ? score * repetition : score / repetition;
  if (entry.count) score -= static_cast<float>(rules.presence_penalty);
  return score - static_cast<float>(frequency * entry.count);
}

// Range of the scores other than -inf, and whether any of them is NaN or infinite.
struct Extent {
  bool is_wrong = false;
  float smallest = kLargestFloat, largest = kNever;

  void add(const Extent& other) {
    is_wrong |= other.is_wrong;
    smallest = std::min(smallest, other.smallest), largest = std::max(largest, other.largest);
  }
};

// The scores of a position: -inf for a token that cannot be chosen, and behind the last token up to a whole register.
struct Scores {
  float* scores;
  int64_t size;
  Extent extent;
  std::vector<Extent> extents;  // of the pieces

  int64_t num_pieces() const { return (size + kPiece - 1) / kPiece; }

  // Calls work(begin, end), which returns the extent of what it computed, for each piece that `is_asked`.
  template <typename Work, typename IsAsked>
  void compute(const Work& work, const IsAsked& is_asked) {
    extents.resize(num_pieces());
    share_by_affinity(num_pieces(), [&](int64_t i) {
      if (is_asked(i)) extents[i] = work(i * kPiece, std::min((i + 1) * kPiece, size));
    });
    extent = {};
    for (const Extent& one : extents) extent.add(one);
  }
};

struct Extremes {
  Lanes low = Lanes{} + kLargestFloat, high = Lanes{} + kNever;
  Ints is_wrong{};

  void look_at(Lanes v) {
    high = larger(v, high);
    low = v >= -kLargestFloat ? smaller(v, low) : low;
  }
  Extent extent() const { return {is_any(is_wrong), smallest_of(low), largest_of(high)}; }
};

// A template, since a division takes as long as everything else here.
template <bool divides, typename T>
void scale_by(const T* logits, float temperature, Scores& to) {
  const auto work = [&](int64_t begin, int64_t end) {
    Extremes found;
    int64_t i = begin;
    const auto take = [&](Lanes logit) {
      const Lanes v = divides ? logit / temperature : logit;
      store(to.scores + i, v);
      found.is_wrong |= !(logit <= kLargestFloat);
      found.look_at(v);
    };
    for (; i + kLanes <= end; i += kLanes) take(widen(logits + i));
    if (i < end) {
      Lanes rest = Lanes{} + kNever;
      for (int64_t k = i; k < end; ++k) rest[k - i] = static_cast<float>(logits[k]);
      take(rest);
    }
    return found.extent();
  };
  to.compute(work, [](int64_t) { return true; });
}

template <typename T>
void scale(const T* logits, float temperature, Scores& to) {
  temperature == 1 ? scale_by<false>(logits, temperature, to) : scale_by<true>(logits, temperature, to);
}

template <typename T>
void penalize(const T* logits, const Rules& rules, Range<Entry> entries, Range<Entry> later, Range<int32_t> bans,
              float temperature, Scores& to) {
  if (entries.empty() && later.empty() && bans.empty()) return;
  std::vector<bool> lost_extreme(to.num_pieces());  // pieces whose largest or smallest score was changed
  const auto change = [&](int32_t token, float score) {
    const int64_t piece = token / kPiece;
    Extent& extent = to.extents[piece];
    float& place = to.scores[token];
    if (place == extent.smallest || place == extent.largest) lost_extreme[piece] = true;
    place = score;
    extent.largest = std::max(extent.largest, score);
    if (score >= -kLargestFloat) extent.smallest = std::min(extent.smallest, score);
  };
  for (const auto& some : {entries, later})  // of a token that is in both, the later one counts
    for (const Entry& entry : some)
      if (entry.token < to.size)  // a draft model may have fewer tokens than the text before
        change(entry.token, penalized(static_cast<float>(logits[entry.token]), entry, rules) / temperature);
  for (const int32_t token : bans)
    if (token < to.size) change(token, kNever);
  const auto look = [&](int64_t begin, int64_t end) {
    Extremes found;
    for (int64_t i = begin; i < end; i += kLanes) found.look_at(load(to.scores + i));
    return found.extent();
  };
  to.compute(look, [&](int64_t piece) { return lost_extreme[piece]; });
}

// A sample of many scores has one register in kOneIn.
constexpr int64_t kOneIn = 16, kManyScores = 2 * kPiece, kOfPiece = kPiece / kOneIn;

// Memory for one position, kept by the thread that asks for it.
struct Room {
  std::vector<float> scores, candidates, weights, sample, sample_weights, buckets;

  void make(int64_t size) {
    for (auto* some : {&scores, &candidates, &weights}) make(*some, size + kLanes);
  }
  static void make(std::vector<float>& some, int64_t size) {
    if (some.size() < static_cast<size_t>(size)) some.resize(size);
  }
};

// A sum of many floats of at most 1: eight at a time are added up in float32, and these sums in float64.
class Sum {
 public:
  void add(Lanes v) {
    few_ += v;
    if (++number_ % 8 == 0) all_ += __builtin_convertvector(few_, Doubles), few_ = Lanes{};
  }
  double total() const {
    const Doubles v = all_ + __builtin_convertvector(few_, Doubles);
    double sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += v[lane];
    return sum;
  }

 private:
  Doubles all_{};
  Lanes few_{};
  uint32_t number_ = 0;
};

// Writes the kept numbers to `to`, which has room for all, and returns their count.
inline int64_t compress(Lanes v, Ints is_kept, float* to) {
#if defined(__AVX512F__)
  const __mmask16 mask = _mm512_test_epi32_mask((__m512i)is_kept, (__m512i)is_kept);
  store(to, (Lanes)_mm512_maskz_compress_ps(mask, (__m512)v));
  return __builtin_popcount(mask);
#else
  int64_t kept = 0;
  for (int lane = 0; lane < kLanes; ++lane) to[kept] = v[lane], kept += is_kept[lane] & 1;
  return kept;
#endif
}

// A score's weight relative to the largest score, whose weight is 1; or 1 for each score other than -inf.
template <bool has_weights>
inline Lanes weight_of(Lanes v, float largest) {
  if constexpr (has_weights) return exp_negative_lanes(v - largest);
  else return v >= -kLargestFloat ? Lanes{} + 1.0f : Lanes{};
}

// Scores among which a cut is looked for: sizes_[i] of them at the beginning of piece i, filled up with -inf to whole
// registers. They have weights, or each counts 1.
class Candidates {
 public:
  Candidates(const Scores& scores, Room& room) : scores_(scores.scores), room_(room), sizes_(scores.num_pieces()) {
    for (int64_t i = 0; i < scores.num_pieces(); ++i) sizes_[i] = registers(std::min(scores.size - i * kPiece, kPiece));
    count();
  }

  int64_t size() const { return size_; }
  int64_t num_scores() const {
    return static_cast<int64_t>(sum([&](int64_t i) {
      Sum number;
      for_each(i, [&](int64_t k) { number.add(weight_of<false>(load(scores_ + k), 0)); });
      return number.total();
    }));
  }

  // The sum of their weights relative to the largest score, whose weight is 1.
  double weight(float largest) const {
    return sum([&](int64_t i) {
      Sum sum;
      for_each(i, [&](int64_t k) { sum.add(weights_ ? load(weights_ + k) : weight_of<true>(load(scores_ + k), largest)); });
      return sum.total();
    });
  }

  // Sets their weights relative to the largest score, whose weight is 1; returns the sum.
  double weigh(float largest) {
    weights_ = room_.weights.data();
    return sum([&](int64_t i) {
      Sum sum;
      for_each(i, [&](int64_t k) {
        const Lanes weight = exp_negative_lanes(load(scores_ + k) - largest);
        store(room_.weights.data() + k, weight);
        sum.add(weight);
      });
      return sum.total();
    });
  }

  // Returns the sum of all weights, and keeps the scores of at least `least`.
  double weigh_and_keep(float least, float largest) {
    const double all = sum([&](int64_t i) {
      float *to = room_.candidates.data() + i * kPiece, *to_weights = room_.weights.data() + i * kPiece;
      Sum sum;
      int64_t kept = 0;
      for_each(i, [&](int64_t k) {
        const Lanes v = load(scores_ + k), weight = exp_negative_lanes(v - largest);
        const Ints is_kept = v >= least;
        sum.add(weight);
        if (!is_any(is_kept)) return;
        compress(weight, is_kept, to_weights + kept);
        kept += compress(v, is_kept, to + kept);
      });
      std::fill(to + kept, to + registers(kept), kNever);
      std::fill(to_weights + kept, to_weights + registers(kept), 0.0f);
      sizes_[i] = registers(kept);
      return sum.total();
    });
    scores_ = room_.candidates.data(), weights_ = room_.weights.data();
    count();
    return all;
  }

  // The largest score that together with all scores above it weighs at least `wanted`, and the weight above it. No candidate
  // is larger than `largest`, and the result is not smaller than `smallest`.
  struct Boundary {
    float score;
    double above;
  };
  Boundary find(double wanted, float smallest, float largest) {
    double above = 0;
    int64_t num_left = size_;  // at most
    while (smallest < largest) {
      float mid = smallest / 2 + largest / 2;
      if (!(mid > smallest && mid <= largest)) mid = largest;
      const Parts parts = weights_ ? part<true>(smallest, mid, largest) : part<false>(smallest, mid, largest);
      if (above + parts.upper_weight >= wanted) smallest = parts.smallest_upper, num_left = parts.num_upper;
      else above += parts.upper_weight, largest = parts.largest_lower, num_left -= parts.num_upper;
      if (num_left * 3 < size_ && size_ > 8 * kLanes) keep(smallest, largest);
    }
    return {smallest, above};
  }

  // Returns the weight of all scores, and of those above `last`; keeps the scores with first <= score <= last.
  struct Weights {
    double all = 0, above = 0;
  };
  template <bool has_weights>
  Weights weigh_and_keep(float first, float last, float largest) {
    std::vector<Weights> of_pieces(sizes_.size());
    share([&](int64_t i) {
      Sum all, above;
      float *to = room_.candidates.data() + i * kPiece, *to_weights = room_.weights.data() + i * kPiece;
      int64_t kept = 0;
      for_each(i, [&](int64_t k) {
        const Lanes v = load(scores_ + k), weight = weight_of<has_weights>(v, largest);
        const Ints is_kept = (v >= first) & (v <= last);
        if constexpr (has_weights) all.add(weight);
        above.add(v > last ? weight : Lanes{});
        if (is_any(is_kept)) kept += compress(v, is_kept, to + kept);
      });
      std::fill(to + kept, to + registers(kept), kNever);
      sizes_[i] = registers(kept);
      if constexpr (has_weights)
        for (int64_t k = 0; k < kept; k += kLanes)
          store(to_weights + k, weight_of<true>(load(to + k), largest));
      of_pieces[i] = {all.total(), above.total()};
    });
    scores_ = room_.candidates.data(), weights_ = has_weights ? room_.weights.data() : nullptr;
    count();
    Weights sum;
    for (const Weights& one : of_pieces) sum.all += one.all, sum.above += one.above;
    return sum;
  }

  // Keeps the scores with first <= score <= last.
  void keep(float first, float last) {
    share([&](int64_t i) { sizes_[i] = keep_of_piece(i, first, last); });
    scores_ = room_.candidates.data();
    count();
  }

 private:
  // Scores with first <= score <= last, partitioned at `mid`.
  struct Parts {
    double upper_weight = 0;
    int64_t num_upper = 0;
    float smallest_upper, largest_lower;
  };

  template <bool has_weights>
  Parts part(float first, float mid, float last) const {
    std::vector<Parts> parts(sizes_.size());
    share([&](int64_t i) {
      Sum weight;
      Ints count{};
      Lanes smallest_upper = Lanes{} + last, largest_lower = Lanes{} + first;
      for_each(i, [&](int64_t k) {
        const Lanes v = load(scores_ + k);
        const Ints is_upper = (v >= mid) & (v <= last), is_lower = (v < mid) & (v > first);
        count -= is_upper;
        smallest_upper = is_upper ? smaller(v, smallest_upper) : smallest_upper;
        largest_lower = is_lower ? larger(v, largest_lower) : largest_lower;
        if constexpr (has_weights) weight.add(is_upper ? load(weights_ + k) : Lanes{});
      });
      int64_t num_upper = 0;
      for (int lane = 0; lane < kLanes; ++lane) num_upper += count[lane];
      parts[i] = {has_weights ? weight.total() : static_cast<double>(num_upper), num_upper, smallest_of(smallest_upper),
                  largest_of(largest_lower)};
    });
    Parts all{0, 0, last, first};
    for (const Parts& one : parts) {
      all.upper_weight += one.upper_weight, all.num_upper += one.num_upper;
      all.smallest_upper = std::min(all.smallest_upper, one.smallest_upper);
      all.largest_lower = std::max(all.largest_lower, one.largest_lower);
    }
    return all;
  }

  int64_t keep_of_piece(int64_t piece, float first, float last) {
    float* to = room_.candidates.data() + piece * kPiece;
    float* to_weights = room_.weights.data() + piece * kPiece;
    int64_t kept = 0;
    for_each(piece, [&](int64_t k) {
      const Lanes v = load(scores_ + k), weights = weights_ ? load(weights_ + k) : Lanes{};
      const Ints is_kept = (v >= first) & (v <= last);
      if (!is_any(is_kept)) return;
      if (weights_) compress(weights, is_kept, to_weights + kept);
      kept += compress(v, is_kept, to + kept);
    });
    std::fill(to + kept, to + registers(kept), kNever);
    if (weights_) std::fill(to_weights + kept, to_weights + registers(kept), 0.0f);
    return registers(kept);
  }

  template <typename Use>
  void for_each(int64_t piece, const Use& use) const {
    for (int64_t k = piece * kPiece, end = k + sizes_[piece]; k < end; k += kLanes) use(k);
  }
  template <typename Work>
  void share(const Work& work) const {
    if (size_ > kPiece) return share_by_affinity(sizes_.size(), work);
    for (size_t i = 0; i < sizes_.size(); ++i) work(i);
  }
  template <typename Work>
  double sum(const Work& work) const {
    std::vector<double> sums(sizes_.size());
    share([&](int64_t i) { sums[i] = work(i); });
    double all = 0;
    for (const double one : sums) all += one;
    return all;
  }
  void count() {
    size_ = 0;
    for (const int64_t one : sizes_) size_ += one;
  }

  const float *scores_, *weights_ = nullptr;
  Room& room_;
  std::vector<int64_t> sizes_;
  int64_t size_;
};

// Scores are put into groups, each one lane of kGroup registers, to look for a rank of at most one in kMinRank scores.
constexpr int64_t kGroup = 64, kMinRank = 4 * kGroup;

// The score of this rank among the groups' largest scores: at least `rank` scores reach it, and few more. If fewer groups have
// a score, fewer scores reach it.
inline float reached_by(double rank, const Scores& scores, Room& room) {
  const int64_t size = registers(scores.size);
  Scores groups{room.weights.data(), registers((size + kGroup - 1) / kGroup), {}, {}};
  share_by_affinity(scores.num_pieces(), [&](int64_t piece) {
    const int64_t end = std::min((piece + 1) * kPiece, size);
    for (int64_t i = piece * kPiece; i < end; i += kGroup * kLanes) {
      Lanes largest = load(scores.scores + i);
      for (int64_t k = i + kLanes; k < std::min(i + kGroup * kLanes, end); k += kLanes)
        largest = larger(load(scores.scores + k), largest);
      store(groups.scores + i / kGroup, largest);
    }
  });
  Extremes found;
  for (int64_t i = 0; i < groups.size; i += kLanes) found.look_at(load(groups.scores + i));
  const Extent extent = found.extent();
  return Candidates(groups, room).find(rank, extent.smallest, extent.largest).score;
}

// The range of scores in which a cut likely is, if it is known, and the likely weight of all scores.
struct Between {
  bool is_known = false;
  double all = 0;
  float low = 0, high = 0;
};

// A sample of many scores, and their weights. Each thread samples the pieces that are in its cache.
template <bool has_weights>
class Sample {
 public:
  Sample(const Scores& scores, Room& room)
      : room_(room), num_pieces_(scores.num_pieces()), smallest_(scores.extent.smallest),
        end_((registers(scores.size) / kLanes + kOneIn - 1) / kOneIn * kLanes) {
    room.make(room.sample, num_pieces_ * kOfPiece);
    room.make(room.sample_weights, num_pieces_ * kOfPiece);
    share_by_affinity(num_pieces_, [&](int64_t piece) {
      for_piece(piece, [&](int64_t k) {
        const Lanes v = load(scores.scores + k * kOneIn);
        store(room_.sample.data() + k, v);
        store(room_.sample_weights.data() + k, weight_of<has_weights>(v, scores.extent.largest));
      });
    });
  }

  // The range of two standard deviations of the sample's weight to both sides. `wanted` is a number of scores, or with weights
  // a share of all weight. No score exceeds `top`, or the scores from `top` on weigh `above`, which is known exactly: a sample
  // may miss a few scores with much weight.
  Between guess(double wanted, float top, double above) const {
    if (smallest_ >= top) return {};
    const float below = above > 0 ? top : std::numeric_limits<float>::infinity();
    above /= kOneIn;
    double middle = wanted / kOneIn, deviation = std::sqrt(middle);
    Between found{true, 0, smallest_, top};
    if constexpr (has_weights) {
      Sum sum, squares;
      for (int64_t k = 0; k < end_; k += kLanes) {
        const Lanes weight = weight_below(k, below);
        sum.add(weight), squares.add(weight * weight);
      }
      const double all = above + sum.total();
      middle = wanted * all - above, deviation = std::sqrt(squares.total());
      found.all = all * kOneIn, found.is_known = deviation <= 0.03 * all && middle > 0;
      if (!found.is_known) return found;
    }
    const float width = std::min(top - smallest_, kSpan) / kBuckets;
    const float* buckets = weigh_buckets(top, below, width);
    double of_sample = 0;
    for (int i = 0; i + 2 < kBuckets && of_sample <= middle + 2 * deviation; ++i) {
      if (of_sample + buckets[i] < middle - 2 * deviation) found.high = top - static_cast<float>(i) * width;
      of_sample += buckets[i];
      if (of_sample > middle + 2 * deviation) found.low = top - static_cast<float>(i + 2) * width;  // 1 more, for rounding
    }
    return found;
  }

 private:
  static constexpr int kBuckets = 1024;
  static constexpr float kSpan = 30;  // whatever weighs less than e to the power of -30 is in the last bucket

  template <typename Use>
  void for_piece(int64_t piece, const Use& use) const {
    for (int64_t k = piece * kOfPiece; k < std::min((piece + 1) * kOfPiece, end_); k += kLanes) use(k);
  }
  Lanes weight_below(int64_t k, float below) const {
    return load(room_.sample.data() + k) < below ? load(room_.sample_weights.data() + k) : Lanes{};
  }

  // The weight of the sample's scores from `top` down, in buckets of this width.
  const float* weigh_buckets(float top, float below, float width) const {
    room_.make(room_.buckets, num_pieces_ * kBuckets);
    float* all = room_.buckets.data();
    share_by_affinity(num_pieces_, [&](int64_t piece) {
      float* buckets = all + piece * kBuckets;
      std::fill(buckets, buckets + kBuckets, 0.0f);
      for_piece(piece, [&](int64_t k) {
        const Lanes weight = weight_below(k, below), place = (top - load(room_.sample.data() + k)) * (1 / width);
        const Ints bucket = __builtin_convertvector(
            smaller(larger(place, Lanes{}), Lanes{} + static_cast<float>(kBuckets - 1)), Ints);
        for (int lane = 0; lane < kLanes; ++lane) buckets[bucket[lane]] += weight[lane];
      });
    });
    for (int64_t piece = 1; piece < num_pieces_; ++piece)
      for (int i = 0; i < kBuckets; ++i) all[i] += all[piece * kBuckets + i];
    return all;
  }

  Room& room_;
  int64_t num_pieces_;
  float smallest_;
  int64_t end_;
};

// The scores that are kept: all above `least`, and of those equal to it the tokens from `first_equal` on.
struct Cut {
  float least;
  int64_t first_equal;
};

// Position of the `wanted`-th entry with this score, counted from the end; 0 if there are fewer.
inline int64_t place_from_end(const Scores& scores, float score, double wanted) {
  std::vector<int64_t> numbers(scores.num_pieces());
  share_by_affinity(scores.num_pieces(), [&](int64_t piece) {
    Ints number{};
    for (int64_t i = piece * kPiece; i < std::min((piece + 1) * kPiece, scores.size); i += kLanes)
      number -= load(scores.scores + i) == score;
    for (int lane = 0; lane < kLanes; ++lane) numbers[piece] += number[lane];
  });
  double found = 0;
  int64_t piece = scores.num_pieces() - 1;
  for (; piece > 0 && found + static_cast<double>(numbers[piece]) < wanted; --piece) found += numbers[piece];
  const int64_t begin = piece * kPiece;
  for (int64_t i = registers(std::min(begin + kPiece, scores.size)) - kLanes; i >= begin; i -= kLanes) {
    const Ints is_equal = load(scores.scores + i) == score;
    if (!is_any(is_equal)) continue;
    const int64_t number = num_of(is_equal);
    if (found + number < wanted) {
      found += number;
      continue;
    }
    for (int lane = kLanes - 1; lane >= 0; --lane)
      if (is_equal[lane] && ++found >= wanted) return i + lane;
  }
  return 0;
}

// top-p keeps the fewest of the largest scores that together have the share; of equal scores at its end the last tokens, as
// if scores were sorted by a stable sort, the smallest first.
inline Cut cut_at(const Scores& scores, Candidates::Boundary boundary, double wanted) {
  const double weight = exp_negative_lanes(Lanes{} + (boundary.score - scores.extent.largest))[0];
  const double num_kept = std::max(std::ceil((wanted - boundary.above) / weight), 1.0);
  return {boundary.score, place_from_end(scores, boundary.score, num_kept)};
}

// The cut, if it is in its likely range.
inline std::optional<Cut> cut_between(const Scores& scores, const Between& likely, double share, Room& room) {
  if (!likely.is_known) return {};
  const float largest = scores.extent.largest;
  Candidates between(scores, room);
  const auto [all, above] = between.weigh_and_keep<true>(likely.low, likely.high, largest);
  const double wanted = share * all, rounding = 1e-6 * all;
  if (above + rounding >= wanted || wanted + rounding >= above + between.weight(largest)) return {};
  const auto boundary = between.find(wanted - above, likely.low, likely.high);
  return cut_at(scores, {boundary.score, boundary.above + above}, wanted);
}

// The cut of many scores, if it is among the few largest or in the range that a sample tells.
inline std::optional<Cut> cut_of_many(const Scores& scores, double share, Room& room) {
  const float largest = scores.extent.largest;
  const Sample<true> sample(scores, room);
  if (const auto cut = cut_between(scores, sample.guess(share, largest, 0), share, room)) return cut;
  const float some = reached_by(static_cast<double>(scores.size / kMinRank), scores, room);
  Candidates few(scores, room);
  few.keep(some, largest);
  const double of_few = few.weigh(largest);
  const Between likely = sample.guess(share, some, of_few);
  if (of_few < share * likely.all) return cut_between(scores, likely, share, room);
  const double wanted = share * Candidates(scores, room).weight(largest);
  if (of_few < wanted) return {};
  return cut_at(scores, few.find(wanted, some, largest), wanted);
}

inline Cut cut_by_share(const Scores& scores, float least, double share, Room& room) {
  const float largest = scores.extent.largest;
  Candidates candidates(scores, room);
  if (scores.extent.smallest == largest) return cut_at(scores, {largest, 0}, share * candidates.num_scores());
  if (least > -kLargestFloat) candidates.keep(least, largest);
  else if (scores.size >= kManyScores)
    if (const auto cut = cut_of_many(scores, share, room)) return *cut;
  // All scores below it together weigh less than the part that is cut. `sum` is a lower bound on the sum of all weights: at
  // least 1, the largest score's.
  const auto floor = [&](double sum) {
    const double negligible = largest + std::log((1 - share) * sum / static_cast<double>(scores.size)) - 1e-3;
    return std::max({least, scores.extent.smallest, static_cast<float>(negligible)});
  };
  const double sum = candidates.weigh_and_keep(floor(1), largest);
  return cut_at(scores, candidates.find(share * sum, floor(sum), largest), share * sum);
}

// The score of a rank; equal scores have ranks of their own.
inline float score_of_rank(const Scores& scores, double rank, Room& room) {
  const auto [is_wrong, smallest, largest] = scores.extent;
  if (smallest < largest && rank * kMinRank <= static_cast<double>(scores.size)) {
    const float least = reached_by(rank, scores, room);
    Candidates few(scores, room);
    few.keep(least, largest);
    if (static_cast<double>(few.num_scores()) >= rank) return few.find(rank, least, largest).score;
  } else if (smallest < largest && scores.size >= kManyScores) {
    const Between cut = Sample<false>(scores, room).guess(rank, largest, 0);
    Candidates between(scores, room);
    const double above = between.weigh_and_keep<false>(cut.low, cut.high, largest).above;
    if (above < rank && rank <= above + between.num_scores()) return between.find(rank - above, cut.low, cut.high).score;
  }
  return Candidates(scores, room).find(rank, smallest, largest).score;
}

inline Cut find_cut(const Scores& scores, const Rules& rules, Room& room) {
  Cut cut{-kLargestFloat, 0};
  const float largest = scores.extent.largest;
  if (rules.top_k > 0 && rules.top_k < scores.size)
    cut.least = score_of_rank(scores, rules.top_k, room);
  if (rules.top_p > 0 && rules.top_p < 1) cut = cut_by_share(scores, cut.least, rules.top_p, room);
  if (rules.min_p > 0) {
    const double least = largest + std::log(rules.min_p);
    auto rounded = static_cast<float>(least);
    if (rounded < least) rounded = std::nextafter(rounded, kLargestFloat);
    if (rounded > cut.least) cut = {std::min(rounded, largest), 0};
  }
  return cut;
}

}  // namespace
