// Attention over a paged K/V cache on the CPU. Writes this step's K/V into the pool, then lets every query attend over
// its row's blocks where they lie: nothing is gathered. Softmax is computed online, a chunk of keys at a time (Dao et al.,
// arXiv 2205.14135).

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention_products.h"
#include "kv_pool.h"
#include "lanes.h"
#include "softmax.h"
#include "tasks.h"
#include "tiles.h"

namespace {

constexpr int64_t kChunk = 128, kTasksPerThread = 2;
// Rows per task for few tokens, and for many, for which keys and values are copied into the tile layout.
constexpr int64_t kFewRowsPerTask = 36, kRowsPerTask = 96;
// Keys are always divided at multiples of this position: a row's parts, and the order in which they are added up, depend on
// its position alone, and so do its output's bits.
constexpr int64_t kSplit = 2 * kChunk;
constexpr float kLog2E = 1.4426950408889634f;

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Keys that are looked at together.
inline int64_t chunk_of(int64_t block_size) {
  return std::min(kChunk, std::max(kChunk / block_size, int64_t{1}) * block_size);
}

// Sequences whose keys lie in the same blocks from share `first` to share `end`, exclusive: these keys are read once for all.
struct SequenceGroup {
  std::vector<int64_t> members;
  int64_t first, end;
};

// Some rows of some neighbouring KV heads of a group. Row (g * M + m) * Q + i of a KV head is query i of member m of M, by
// the query's head g.
struct Task {
  const SequenceGroup* group;
  int64_t first_head, num_heads, first_row, num_rows;

  int64_t num_shares() const { return group->end - group->first; }
};

// Calls use(row, g, token) for the rows of one of a task's KV heads, with the row's query head g and token. (Divisions for
// every row would take longer than copying it.)
template <typename T, typename S, typename Use>
inline void for_rows_of_head(const Inputs<T, S>& in, const Task& task, const Use& use) {
  const std::vector<int64_t>& members = task.group->members;
  const auto num_members = static_cast<int64_t>(members.size());
  int64_t query = task.first_row % in.Q, member = task.first_row / in.Q % num_members;
  int64_t g = task.first_row / in.Q / num_members;
  for (int64_t row = 0; row < task.num_rows; ++row) {
    use(row, g, members[member] * in.Q + query);
    if (++query < in.Q) continue;
    query = 0;
    if (++member == num_members) member = 0, ++g;
  }
}

// Keys `begin` to `end`, exclusive, of a task's sequences.
struct Share {
  int64_t begin, end;
};

// Positions of a task's rows, and the range of the share's keys that any of the rows sees.
struct Seen {
  int64_t positions[kRowsPerTask], chunk, first_key, last_key;

  template <typename T, typename S>
  Seen(const Inputs<T, S>& in, const Task& task, const Share& share) : chunk(chunk_of(in.block_size)) {
    for_rows_of_head(in, task, [&](int64_t row, int64_t, int64_t token) { positions[row] = in.positions[token]; });
    const auto [lowest, highest] = std::minmax_element(positions, positions + task.num_rows);
    first_key = share.begin, last_key = std::min(share.end, *highest + 1);
    first_key = std::max(first_key, in.first_seen(*lowest) / chunk * chunk);
  }
};

// Calls use(row, head, token) for the rows of a task, with the row's query head and token.
template <typename T, typename S, typename Use>
inline void for_rows(const Inputs<T, S>& in, const Task& task, const Use& use) {
  for (int64_t head = 0; head < task.num_heads; ++head) {
    const int64_t first_row = head * task.num_rows, first_query_head = (task.first_head + head) * (in.H / in.Hk);
    for_rows_of_head(in, task, [&](int64_t row, int64_t g, int64_t token) {
      use(first_row + row, first_query_head + g, token);
    });
  }
}

// Copies a task's query rows one behind the other, as numbers of type E; 0 from D to `stride`.
template <typename E, typename T, typename S>
void gather_query(const Inputs<T, S>& in, const Task& task, E* query, int64_t stride) {
  for_rows(in, task, [&](int64_t row, int64_t head, int64_t token) {
    const T* source = in.query + head * in.query_head + token * in.query_token;
    E* to = query + row * stride;
    if constexpr (std::is_same_v<E, T>) std::copy_n(source, in.D, to);
    else std::transform(source, source + in.D, to, [](T number) { return static_cast<E>(number); });
    std::fill(to + in.D, to + stride, E(0.0f));
  });
}

// Calls use(k, block, offset, count) for the pieces of a chunk that lie in one block, from the chunk's key k on.
template <typename T, typename S, typename Use>
inline void for_blocks(const Inputs<T, S>& in, const Task& task, int64_t start, int64_t num_keys, const Use& use) {
  for (int64_t k = 0; k < num_keys;) {
    const int64_t offset = (start + k) % in.block_size, count = std::min(in.block_size - offset, num_keys - k);
    use(k, in.table_of(task.group->members[0])[(start + k) / in.block_size], offset, count);
    k += count;
  }
}

// Turns the scores of one head's rows and a chunk of keys into weights, (rows, kChunk) both.
template <typename E, typename T, typename S>
void weigh(const Inputs<T, S>& in, const Task& task, const Seen& seen, int64_t head, int64_t start, int64_t num_keys,
           float* scores, E* weights, const Partial& out, int64_t width) {
  constexpr bool is_rounded = Inputs<T, S>::is_rounded;
  const int64_t padded = round_up(num_keys, kLanes);
  float of_keys[is_rounded ? kChunk : 1] = {}, of_values[is_rounded ? kChunk : 1] = {}, biases[kChunk];
  if constexpr (is_rounded)
    for_blocks(in, task, start, num_keys, [&](int64_t k, int64_t block, int64_t offset, int64_t count) {
      std::copy_n(in.scales_of(block, task.first_head + head, false) + offset, count, of_keys + k);
      std::copy_n(in.scales_of(block, task.first_head + head, true) + offset, count, of_values + k);
    });
  const auto weigh_row = in.is_capped() ? exponentiate<is_rounded, true, E> : exponentiate<is_rounded, false, E>;
  for (int64_t r = 0; r < task.num_rows; ++r, scores += kChunk, weights += kChunk) {
    const int64_t end = std::min(num_keys, seen.positions[r] + 1 - start);
    const int64_t begin = std::max(in.first_seen(seen.positions[r]) - start, int64_t{0});
    if (in.slopes) {
      const int64_t rows_per_query_head = in.Q * static_cast<int64_t>(task.group->members.size());
      const int64_t query_head = (task.first_head + head) * (in.H / in.Hk) + (task.first_row + r) / rows_per_query_head;
      const float slope = in.slopes[query_head] / in.score_unit();
      const auto distance = static_cast<int32_t>(start - seen.positions[r]);
      for (int32_t j = 0; j < padded; ++j) biases[j] = static_cast<float>(distance + j) * slope;
    }
    if (begin < end)
      weigh_row(scores, weights, Scales{of_keys, of_values}, in.slopes ? biases : nullptr, begin, end, padded,
                in.log2_scale(), in.cap_scale(), out, head * task.num_rows + r, width);
    else std::fill_n(weights, padded, E(0.0f));
  }
}

// Operand type of the products with keys and values.
template <Arithmetic arithmetic>
struct Factor { using Type = float; };
template <>
struct Factor<kPairs> { using Type = at::BFloat16; };
#if defined(__AMX_BF16__)
template <>
struct Factor<kTiles> { using Type = Widened; };
#endif

// Keys and values are read in place (`direct`), or one head's are copied into floats: for many rows, so that they are widened
// once, and if vectors cannot read them in place. The bits are the same.
template <Arithmetic arithmetic, bool direct, typename T, typename S>
void attend(const Inputs<T, S>& in, const Task& task, const Seen& seen, const Partial& out, int64_t width) {
  using E = typename Factor<arithmetic>::Type;
  using Number = std::conditional_t<direct, S, float>;
  const int64_t num_rows = task.num_rows, all_rows = task.num_heads * num_rows;
  thread_local std::vector<E> numbers;
  thread_local std::vector<float> all_scores, copies;
  numbers.resize(all_rows * (in.D + kChunk));
  all_scores.resize(all_rows * kChunk);
  if constexpr (!direct) copies.resize(kChunk * (in.D + width));
  E* query = numbers.data();
  E* weights = query + all_rows * in.D;
  float* key_copy = copies.data();
  float* value_copy = key_copy + in.D * kChunk;
  float* scores = all_scores.data();
  gather_query(in, task, query, in.D);
  // Tiles of about equal size: 13 rows are 6 and 7.
  const int64_t num_tiles = (num_rows + kMostRows<arithmetic> - 1) / kMostRows<arithmetic>;
  // Calls use(rows, first) for a head's tiles in which any row sees this key or a later one.
  const auto for_tiles = [&](int64_t key, auto use) {
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const int64_t first = tile * num_rows / num_tiles, end = (tile + 1) * num_rows / num_tiles;
      if (*std::max_element(seen.positions + first, seen.positions + end) < key) continue;
      use(end - first, first);
    }
  };
  const auto keys_at = [&](int64_t block, int64_t offset, int64_t head) {
    return in.key_pool + (block * in.Hk + task.first_head + head) * in.D * in.block_size + offset;
  };
  const auto values_at = [&](int64_t block, int64_t offset, int64_t head) {
    return in.value_pool + ((block * in.Hk + task.first_head + head) * in.block_size + offset) * in.Dv;
  };
  for (int64_t start = seen.first_key; start < seen.last_key; start += seen.chunk) {
    const int64_t num_keys = std::min(seen.chunk, seen.last_key - start), padded = round_up(num_keys, kLanes);
    // Calls use(k, head, count, block, offset) for each piece of keys that is multiplied at a time.
    const auto for_pieces = [&](auto use) {
      if constexpr (direct)
        for_blocks(in, task, start, num_keys, [&](int64_t k, int64_t block, int64_t offset, int64_t count) {
          for (int64_t head = 0; head < task.num_heads; ++head) use(k, head, count, block, offset);
        });
      else use(int64_t{0}, int64_t{0}, num_keys, int64_t{0}, int64_t{0});
    };
    if constexpr (!direct) {
      for_blocks(in, task, start, num_keys, [&](int64_t k, int64_t block, int64_t offset, int64_t count) {
        const S *keys = keys_at(block, offset, 0), *values = values_at(block, offset, 0);
        for (int64_t d = 0; d < in.D; ++d) widen(keys + d * in.block_size, key_copy + d * kChunk + k, count);
        for (int64_t j = 0; j < count; ++j) widen(values + j * in.Dv, value_copy + (k + j) * width, in.Dv);
      });
      for (int64_t d = 0; d < in.D; ++d) std::fill_n(key_copy + d * kChunk + num_keys, padded - num_keys, 0.0f);
      for (int64_t j = 0; j < num_keys; ++j) std::fill_n(value_copy + j * width + in.Dv, width - in.Dv, 0.0f);
    }
    for_pieces([&](int64_t k, int64_t head, int64_t count, int64_t block, int64_t offset) {
      Piece<Number> keys;
      if constexpr (!direct) keys = {key_copy, key_copy, kChunk};
      else keys = {keys_at(block, offset, head), values_at(block, offset, head), in.block_size};
      for_tiles(start + k, [&](int64_t rows, int64_t first) {
        const int64_t row = head * num_rows + first;
        multiply_some<arithmetic>(rows, query + row * in.D, in.D, keys, scores + row * kChunk + k, kChunk, in.D,
                                  round_up(count, kLanes), /*adds=*/false);
      });
    });
    for (int64_t head = 0; head < task.num_heads; ++head)
      weigh(in, task, seen, head, start, num_keys, scores + head * num_rows * kChunk, weights + head * num_rows * kChunk,
            out, width);
    for_pieces([&](int64_t k, int64_t head, int64_t count, int64_t block, int64_t offset) {
      Piece<Number> values;
      const int64_t next_key = std::min(start + k + seen.chunk, seen.last_key - 1);
      const int64_t next_block = in.table_of(task.group->members[0])[next_key / in.block_size];
      if constexpr (!direct) values = {value_copy, value_copy, width};
      else values = {values_at(block, offset, head), keys_at(next_block, next_key % in.block_size, head), in.Dv};
      for_tiles(start + k, [&](int64_t rows, int64_t first) {
        const int64_t row = head * num_rows + first;
        multiply_some<arithmetic>(rows, weights + row * kChunk + k, kChunk, values, out.weighted + row * width, width, count,
                                  width, /*adds=*/true);
      });
    });
  }
}

#if defined(__AMX_BF16__)
// Computes attention with AMX tiles, which need row pairs copied: head by head, so that the copies stay in L1.
template <typename T, typename S>
void attend_in_tiles(const Inputs<T, S>& in, const Task& task, const Seen& seen, const Partial& out, int64_t width) {
  const int64_t num_rows = task.num_rows, depth = round_up(in.D, kTileDepth);
  struct alignas(64) Line { at::BFloat16 numbers[kTileDepth]; };  // unaligned, each row of a tile would span two lines
  struct alignas(64) Scores { float of_keys[kChunk]; };
  thread_local std::vector<Line> lines;
  thread_local std::vector<Scores> all_scores;
  const int64_t all_rows = task.num_heads * num_rows;
  lines.resize((all_rows * depth + num_rows * kChunk + std::max(depth, width) * kChunk) / kTileDepth);
  all_scores.resize(num_rows);
  at::BFloat16 *query = lines.data()->numbers, *weights = query + all_rows * depth, *pairs = weights + num_rows * kChunk;
  float* scores = all_scores.data()->of_keys;
  gather_query(in, task, query, depth);
  TileRegisters tiles;
  const int64_t num_tiles = (num_rows + kTileHeight - 1) / kTileHeight;
  const auto for_tiles = [&](int64_t key, auto use) {
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      const int64_t first = tile * num_rows / num_tiles, end = (tile + 1) * num_rows / num_tiles;
      if (*std::max_element(seen.positions + first, seen.positions + end) >= key) use(first, end - first);
    }
  };
  for (int64_t start = seen.first_key; start < seen.last_key; start += seen.chunk) {
    const int64_t num_keys = std::min(seen.chunk, seen.last_key - start), padded = round_up(num_keys, kTileDepth);
    for (int64_t head = 0; head < task.num_heads; ++head) {
      const int64_t pool_head = task.first_head + head;
      for_blocks(in, task, start, num_keys, [&](int64_t k, int64_t block, int64_t offset, int64_t count) {
        const S* keys = in.key_pool + (block * in.Hk + pool_head) * in.D * in.block_size + offset;
        for (int64_t d = 0; d < in.D; d += 2)
          pair_rows(keys + d * in.block_size, keys + (d + 1) * in.block_size, round_up(count, kLanes), pairs + d * kChunk + 2 * k);
      });
      std::fill(pairs + in.D * kChunk, pairs + depth * kChunk, at::BFloat16(0.0f));
      for_tiles(start, [&](int64_t first, int64_t rows) {
        multiply_tiles<false>(tiles, query + (head * num_rows + first) * depth, depth, pairs, kChunk, scores + first * kChunk,
                              kChunk, rows, depth, round_up(num_keys, kTileHeight));
      });
      std::fill_n(weights, num_rows * kChunk, at::BFloat16(0.0f));
      weigh(in, task, seen, head, start, num_keys, scores, weights, out, width);
      for_blocks(in, task, start, num_keys, [&](int64_t k, int64_t block, int64_t offset, int64_t count) {
        const S* values = in.value_pool + ((block * in.Hk + pool_head) * in.block_size + offset) * in.Dv;
        // An odd last row is paired with itself, with a weight of 0, since the memory behind it may hold NaN.
        for (int64_t j = 0; j < count; j += 2)
          pair_rows(values + j * in.Dv, values + std::min(j + 1, count - 1) * in.Dv, in.Dv, pairs + (k + j) * width);
      });
      std::fill(pairs + round_up(num_keys, 2) * width, pairs + padded * width, at::BFloat16(0.0f));
      for_tiles(start, [&](int64_t first, int64_t rows) {
        multiply_tiles<true>(tiles, weights + first * kChunk, kChunk, pairs, width,
                             out.weighted + (head * num_rows + first) * width, width, rows, padded, width);
      });
    }
  }
}
#endif

// True if keys and values have a layout that vector loads can use.
template <typename T, typename S>
bool reads_in_place(const Inputs<T, S>& in) {
  return in.block_size % kLanes == 0 && in.Dv % kLanes == 0 && in.D % 2 == 0;
}

template <Arithmetic arithmetic, typename T, typename S>
void attend_fastest(const Inputs<T, S>& in, const Task& task, const Share& share, const Partial& out, int64_t width) {
  const int64_t all_rows = task.num_heads * task.num_rows;
  std::fill_n(out.maximum, all_rows, kNever);
  std::fill_n(out.sums, all_rows * kLanes, 0.0f);
  std::fill_n(out.weighted, all_rows * width, 0.0f);
  const Seen seen(in, task, share);
  if (seen.first_key >= seen.last_key) return;
  if (!reads_in_place(in)) return attend<kFloat32, false>(in, task, seen, out, width);
#if defined(__AMX_BF16__)
  if constexpr (arithmetic == kTiles) {
    const FlushDenormals as_tiles_do;
    if (task.num_rows <= kFewRows && in.block_size % kTileDepth == 0) attend<kTiles, true>(in, task, seen, out, width);
    else attend_in_tiles(in, task, seen, out, width);
    return;
  }
#endif
#if defined(__AVX512BF16__)
  if constexpr (arithmetic == kPairs) return attend<kPairs, true>(in, task, seen, out, width);
#endif
  const bool are_many = task.num_rows > 2 * kTileRows && task.num_heads == 1;  // copies are made head by head
  if (!std::is_same_v<S, float> && are_many) attend<kFloat32, false>(in, task, seen, out, width);
  else attend<kFloat32, true>(in, task, seen, out, width);
}

// Writes a task's output. A sink adds to the sum of a row's weights, and has no value.
template <typename T, typename S>
void finish(const Inputs<T, S>& in, const Task& task, const Partial& total, int64_t width) {
  for_rows(in, task, [&](int64_t row, int64_t head, int64_t token) {
    T* output = in.output + (token * in.H + head) * in.Dv;
    float sum = sum_of(load(total.sums + row * kLanes));
    if (in.sinks) sum += std::exp2(in.sinks[head] * kLog2E - total.maximum[row] * in.log2_scale());
    const float weight = 1 / sum;
    for (int64_t d = 0; d < in.Dv; ++d) output[d] = static_cast<T>(total.weighted[row * width + d] * weight);
  });
}

// Groups of sequences that begin with the same blocks, chosen greedily so that many keys are read once. A sequence is in at
// most one group.
template <typename T, typename S>
std::vector<SequenceGroup> find_prefixes(const Inputs<T, S>& in, int64_t keys_per_share) {
  std::vector<SequenceGroup> groups;
  std::vector<bool> is_member(in.B);
  for (int64_t b = 0; b < in.B; ++b) {
    if (is_member[b]) continue;
    std::vector<std::pair<int64_t, int64_t>> others;  // shares of keys in the same blocks, and the sequence
    for (int64_t other = b + 1; other < in.B; ++other) {
      const int64_t* table = in.table_of(b);
      const int64_t num_equal = std::mismatch(table, table + in.N, in.table_of(other)).first - table;
      const int64_t num_shares = num_equal * in.block_size / keys_per_share;
      if (num_shares > 0 && !is_member[other]) others.emplace_back(num_shares, other);
    }
    std::sort(others.begin(), others.end(), std::greater<>());
    int64_t most = 0, num_others = 0;
    for (int64_t count = 1; count <= static_cast<int64_t>(others.size()); ++count)
      if (const int64_t saved = count * others[count - 1].first; saved > most) most = saved, num_others = count;
    if (num_others == 0) continue;
    SequenceGroup& group = groups.emplace_back(SequenceGroup{{b}, 0, others[num_others - 1].first});
    for (int64_t i = 0; i < num_others; ++i) group.members.push_back(others[i].second);
    for (const int64_t member : group.members) is_member[member] = true;
  }
  return groups;
}

// The tasks into which the groups' heads and rows are divided, at most `rows_per_task` rows each.
template <typename T, typename S>
std::vector<Task> tasks_of(const Inputs<T, S>& in, const std::vector<SequenceGroup>& groups, int64_t threads) {
  int64_t all_rows = 0, num_shares = 0;
  const auto rows_of = [&](const SequenceGroup& group) {
    return in.H / in.Hk * in.Q * static_cast<int64_t>(group.members.size());
  };
  for (const SequenceGroup& group : groups) {
    all_rows += in.Hk * rows_of(group);
    num_shares = std::max(num_shares, group.end - group.first);
  }
  std::vector<Task> tasks;
  for (int64_t most_heads = in.Hk;; most_heads = (most_heads + 1) / 2) {
    tasks.clear();
    int64_t heads = 1;
    for (const SequenceGroup& group : groups) {
      const int64_t rows = rows_of(group);
      const bool are_many = rows >= kRowsPerTask && all_rows >= kTasksPerThread * threads * kRowsPerTask;
      const int64_t rows_per_task = are_many || group.members.size() > 1 ? kRowsPerTask : kFewRowsPerTask;
      // Few rows: of several heads at a time, because the K/V of a block's heads lie side by side.
      const int64_t own = reads_in_place(in) ? std::clamp(kFewRowsPerTask / rows, int64_t{1}, most_heads) : 1;
      heads = std::max(heads, own);
      for (int64_t head = 0; head < in.Hk; head += own)
        for (int64_t row = 0; row < rows; row += rows_per_task)
          tasks.push_back({&group, head, std::min(own, in.Hk - head), row, std::min(rows_per_task, rows - row)});
    }
    if (heads == 1 || static_cast<int64_t>(tasks.size()) * num_shares >= threads) return tasks;
    most_heads = std::min(most_heads, heads);
  }
}

// Calls done(task, total) with the softmax of each task's rows over all its shares. If these are not the sequences' first
// shares, before(task, total) gives the softmax over the shares before.
template <Arithmetic arithmetic, typename T, typename S, typename Before, typename Done>
void attend_groups(const Inputs<T, S>& in, const std::vector<SequenceGroup>& groups, int64_t keys_per_share,
                   const Before& before, const Done& done) {
  const int64_t threads = num_threads(), width = in.width();
  const std::vector<Task> tasks = tasks_of(in, groups, threads);
  const auto num_tasks = static_cast<int64_t>(tasks.size());
  int64_t num_shares = 0;
  for (const Task& task : tasks) num_shares = std::max(num_shares, task.num_shares());
  // Few tasks: threads share their keys too, and the parts are added up at the end.
  const bool divides = num_shares > 1 && num_tasks < kTasksPerThread * threads;
  const int64_t partial_size = kRowsPerTask * (1 + kLanes + width);
  const auto buffer =
      std::make_unique_for_overwrite<float[]>((divides ? 1 + num_tasks * num_shares : 2 * threads) * partial_size);
  const auto partial = [&](int64_t i) { return partial_at(buffer.get() + i * partial_size, kRowsPerTask); };
  const auto attend_share = [&](const Task& task, int64_t share, const Partial& out) {
    const int64_t begin = (task.group->first + share) * keys_per_share;
    const int64_t end = std::min(begin + keys_per_share, in.N * in.block_size);
    attend_fastest<arithmetic>(in, task, Share{begin, end}, out, width);
  };
  const auto add = [&](const Task& task, const Partial& total, const Partial& part) {
    add_part(total, part, task.num_heads * task.num_rows, width, in.log2_scale());
  };
  if (divides) {
    share_tasks(num_tasks * num_shares, [&](int64_t i) {
      const Task& task = tasks[i / num_shares];
      if (const int64_t share = i % num_shares; share < task.num_shares()) attend_share(task, share, partial(1 + i));
    });
    for (int64_t i = 0; i < num_tasks; ++i) {
      const Task& task = tasks[i];
      const bool is_first = task.group->first == 0;
      const Partial total = partial(is_first ? 1 + i * num_shares : 0);
      if (!is_first) before(task, total);
      for (int64_t share = is_first; share < task.num_shares(); ++share)
        add(task, total, partial(1 + i * num_shares + share));
      done(task, total);
    }
    return;
  }
  share_tasks(num_tasks, [&](int64_t i, int64_t thread) {
    const Task& task = tasks[i];
    const bool is_first = task.group->first == 0;
    const Partial total = partial(2 * thread), part = partial(2 * thread + 1);
    if (is_first) attend_share(task, 0, total);
    else before(task, total);
    for (int64_t share = is_first; share < task.num_shares(); ++share) {
      attend_share(task, share, part);
      add(task, total, part);
    }
    done(task, total);
  });
}

// Prefixes that several sequences share are attended first, once for all of them. A row's parts are added up in the same order
// as if it were computed alone.
template <Arithmetic arithmetic, typename T, typename S>
void run(const Inputs<T, S>& in) {
  share_range(in.B * in.Q, 64, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) write_new(in, token);
  });
  const int64_t keys_per_share = round_up(kSplit, chunk_of(in.block_size)), width = in.width();
  const std::vector<SequenceGroup> prefixes = find_prefixes(in, keys_per_share);
  std::vector<SequenceGroup> sequences(in.B);
  for (int64_t b = 0; b < in.B; ++b)
    sequences[b] = {{b}, 0, (in.N * in.block_size + keys_per_share - 1) / keys_per_share};
  for (const SequenceGroup& prefix : prefixes)
    for (const int64_t member : prefix.members) sequences[member].first = prefix.end;
  const int64_t num_rows = prefixes.empty() ? 0 : in.B * in.Q * in.H;
  const auto buffer = std::make_unique_for_overwrite<float[]>(num_rows * (1 + kLanes + width));
  const Partial of_prefixes = partial_at(buffer.get(), num_rows);
  if (!prefixes.empty())
    attend_groups<arithmetic>(in, prefixes, keys_per_share, [](const Task&, const Partial&) {},
                              [&](const Task& task, const Partial& total) {
      for_rows(in, task, [&](int64_t row, int64_t head, int64_t token) {
        copy_row(total, row, of_prefixes, token * in.H + head, width);
      });
    });
  attend_groups<arithmetic>(in, sequences, keys_per_share, [&](const Task& task, const Partial& total) {
    for_rows(in, task, [&](int64_t row, int64_t head, int64_t token) {
      copy_row(of_prefixes, token * in.H + head, total, row, width);
    });
  }, [&](const Task& task, const Partial& total) { finish(in, task, total, width); });
}

std::vector<float> as_floats(const at::Tensor& numbers) {
  std::vector<float> floats(numbers.numel());
  const auto copy = [&](auto zero) {
    const auto* source = numbers.const_data_ptr<decltype(zero)>();
    std::transform(source, source + floats.size(), floats.begin(), [](auto number) { return static_cast<float>(number); });
  };
  if (numbers.scalar_type() == at::kFloat) copy(float{});
  else if (numbers.scalar_type() == at::kHalf) copy(at::Half{});
  else copy(at::BFloat16{});
  return floats;
}

at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, at::Tensor key_pool,
                           at::Tensor value_pool, const at::Tensor& positions, const at::Tensor& slots,
                           const at::Tensor& block_tables, double scale, int64_t window,
                           int64_t arithmetic, std::optional<at::Tensor> scales, const std::optional<at::Tensor>& sinks,
                           double softcap, int64_t attention_chunk, const std::optional<at::Tensor>& slopes) {
  const int64_t B = slots.size(0), Q = slots.size(1), H = query.size(1), Dv = value_pool.size(3);
  at::Tensor output = at::empty({B * Q, H, Dv}, query.options());
  TORCH_CHECK(query.stride(3) == 1 && key.stride(3) == 1 && value.stride(3) == 1, "heads must be contiguous");
  const auto stored = key_pool.scalar_type();
  TORCH_CHECK(scales.has_value() == (stored == at::kChar || stored == at::kFloat8_e4m3fn), "8 bits have scales");
  const std::vector<float> sinks_of_heads = sinks ? as_floats(*sinks) : std::vector<float>();
  TORCH_CHECK(!sinks || static_cast<int64_t>(sinks_of_heads.size()) == H, "each head has a sink");
  const std::vector<float> slopes_of_heads = slopes ? as_floats(*slopes) : std::vector<float>();
  TORCH_CHECK(!slopes || static_cast<int64_t>(slopes_of_heads.size()) == H, "each head has a slope");
  const auto call = [&](auto chosen, auto zero, auto kept) {
    using T = decltype(zero);
    using S = decltype(kept);
    run<chosen()>(Inputs<T, S>{query.const_data_ptr<T>(), key.const_data_ptr<T>(), value.const_data_ptr<T>(),
                  query.stride(1), query.stride(2), key.stride(1), key.stride(2), value.stride(1), value.stride(2),
                  key_pool.mutable_data_ptr<S>(), value_pool.mutable_data_ptr<S>(),
                  scales ? scales->mutable_data_ptr<float>() : nullptr, output.mutable_data_ptr<T>(),
                  positions.const_data_ptr<int64_t>(), slots.const_data_ptr<int64_t>(),
                  block_tables.const_data_ptr<int64_t>(), sinks ? sinks_of_heads.data() : nullptr,
                  slopes ? slopes_of_heads.data() : nullptr, B, Q, block_tables.size(1), H, key_pool.size(1), key_pool.size(2), Dv, key_pool.size(3), window,
                  attention_chunk, static_cast<float>(scale), static_cast<float>(softcap)});
  };
  const auto call_with = [&](auto chosen, auto zero) {
    if (stored == at::kChar) call(chosen, zero, int8_t{});
    else if (stored == at::kFloat8_e4m3fn) call(chosen, zero, c10::Float8_e4m3fn{});
    else call(chosen, zero, zero);
  };
  constexpr std::integral_constant<Arithmetic, kFloat32> in_float32;
  if (query.scalar_type() == at::kFloat) call_with(in_float32, float{});
  else if (query.scalar_type() == at::kHalf) call_with(in_float32, at::Half{});
#if defined(__AMX_BF16__)
  else if (arithmetic == kTiles && may_use_tiles())
    call_with(std::integral_constant<Arithmetic, kTiles>(), at::BFloat16{});
#endif
#if defined(__AVX512BF16__)
  else if (arithmetic == kPairs && !scales)  // numbers of 8 bits are multiplied in float32
    call(std::integral_constant<Arithmetic, kPairs>(), at::BFloat16{}, at::BFloat16{});
#endif
  else call_with(in_float32, at::BFloat16{});
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(specdec, library) {
  library.def(
      "paged_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) key_pool, Tensor(b!) value_pool, Tensor "
      "positions, Tensor slots, Tensor block_tables, float scale, int window, int arithmetic, *, Tensor(c!)? scales=None, "
      "Tensor? sinks=None, float softcap=0., int attention_chunk=0, Tensor? slopes=None) -> Tensor");
}
TORCH_LIBRARY_IMPL(specdec, CPU, library) { library.impl("paged_attention", paged_attention); }
