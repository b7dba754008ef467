// Collectives of the ranks of one machine over shared memory: each writes its part, increments a counter, and reads the
// others' parts. Sums are taken in the order of ranks, so all have the same bits, in every run.
//
// A rank has two buffers for parts, used in turn: a rank that has written its next part has read all previous ones, so a
// buffer is free again when its owner has seen the next part of every rank. A waiting rank spins on the counter for a
// while, then yields the core, then sleeps; publishing makes no system call unless a rank sleeps.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include <sched.h>
#include <sys/mman.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "lanes.h"
#include "tasks.h"

namespace {

constexpr int64_t kPartBytes = 1 << 20, kPageBytes = 4096;
constexpr std::chrono::microseconds kSpins{100}, kYields{2000};
constexpr std::chrono::milliseconds kSleeps{20};

struct alignas(64) Counter {
  std::atomic<uint32_t> value{0}, sleepers{0};
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

void sleep_while(std::atomic<uint32_t>& value, uint32_t same) {
#if defined(__linux__)
  const timespec limit{0, std::chrono::nanoseconds(kSleeps).count()};
  syscall(SYS_futex, &value, FUTEX_WAIT, same, &limit, nullptr, 0);
#else
  (void)value, (void)same;
  std::this_thread::sleep_for(std::chrono::microseconds(100));
#endif
}

void wake(std::atomic<uint32_t>& value) {
#if defined(__linux__)
  syscall(SYS_futex, &value, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#else
  (void)value;
#endif
}

// The shared memory begins with a page that says whether the group has stopped, and a page of counters; then come parts.
class Group {
 public:
  static int64_t num_bytes(int64_t size) { return 2 * kPageBytes + size * 2 * kPartBytes; }

  Group(int file, int64_t rank, int64_t size) : rank_(rank), size_(size) {
    TORCH_CHECK(size * int64_t{sizeof(Counter)} <= kPageBytes, "too many ranks: ", size);
    void* memory = mmap(nullptr, num_bytes(size), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    TORCH_CHECK(memory != MAP_FAILED, "memory cannot be shared");
    memory_ = static_cast<char*>(memory);
  }
  ~Group() { munmap(memory_, num_bytes(size_)); }

  int64_t rank() const { return rank_; }
  int64_t size() const { return size_; }
  void stop() { stopped().store(1); }

  // Calls write(part) with memory for this rank's part, and read(parts) when all have written theirs.
  template <typename Write, typename Read>
  void exchange(const Write& write, const Read& read) {
    const uint32_t round = ++round_;
    write(part(rank_, round));
    Counter& own = counter(rank_);
    own.value.store(round);
    if (own.sleepers.load()) wake(own.value);
    for (int64_t other = 0; other < size_; ++other)
      if (other != rank_) wait_for(counter(other), round);
    std::vector<const char*> parts;
    for (int64_t other = 0; other < size_; ++other) parts.push_back(part(other, round));
    read(parts);
  }

 private:
  std::atomic<uint32_t>& stopped() { return *reinterpret_cast<std::atomic<uint32_t>*>(memory_); }
  Counter& counter(int64_t rank) { return reinterpret_cast<Counter*>(memory_ + kPageBytes)[rank]; }
  char* part(int64_t rank, uint32_t round) {
    return memory_ + 2 * kPageBytes + (2 * rank + round % 2) * kPartBytes;
  }

  static bool has_come(uint32_t value, uint32_t round) { return static_cast<int32_t>(value - round) >= 0; }

  void wait_for(Counter& other, uint32_t round) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 1; !has_come(other.value.load(std::memory_order_acquire), round); ++i) {
      if (i % 64) {
        relax();
        continue;
      }
      const auto waited = std::chrono::steady_clock::now() - start;
      if (waited < kSpins) continue;
      if (waited < kYields) {
        sched_yield();
        continue;
      }
      other.sleepers.fetch_add(1);
      const uint32_t value = other.value.load();
      if (!has_come(value, round)) sleep_while(other.value, value);
      other.sleepers.fetch_sub(1);
      TORCH_CHECK(!stopped().load(), "another rank has stopped");
      i = 63;
    }
  }

  char* memory_;
  int64_t rank_, size_;
  uint32_t round_ = 0;
};

std::mutex lock_of_groups;
std::map<int64_t, std::shared_ptr<Group>> groups;
thread_local std::shared_ptr<Group> current;

Group& group() {
  TORCH_CHECK(current, "no ranks compute together in this thread");
  return *current;
}

void join_group(int64_t key, int64_t file, int64_t rank, int64_t size) {
  const std::lock_guard guard(lock_of_groups);
  groups[key] = std::make_shared<Group>(static_cast<int>(file), rank, size);
}

void use_group(int64_t key) {
  const std::lock_guard guard(lock_of_groups);
  const auto found = groups.find(key);
  current = found == groups.end() ? nullptr : found->second;
}

void stop_group(int64_t key) {
  const std::lock_guard guard(lock_of_groups);
  if (const auto found = groups.find(key); found != groups.end()) found->second->stop();
}

void leave_group(int64_t key) {
  const std::lock_guard guard(lock_of_groups);
  groups.erase(key);
}

template <typename T>
void add_parts(const std::vector<const char*>& parts, int64_t count, T* out) {
  const auto* first = reinterpret_cast<const T*>(parts[0]);
  if (parts.size() == 2) {
    const auto* second = reinterpret_cast<const T*>(parts[1]);
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(static_cast<float>(first[i]) + static_cast<float>(second[i]));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    float sum = static_cast<float>(first[i]);
    for (size_t rank = 1; rank < parts.size(); ++rank) sum += static_cast<float>(reinterpret_cast<const T*>(parts[rank])[i]);
    out[i] = static_cast<T>(sum);
  }
}

at::Tensor all_reduce(const at::Tensor& x) {
  Group& ranks = group();
  const at::Tensor own = x.contiguous();
  at::Tensor total = at::empty(x.sizes(), x.options());
  const auto call = [&](auto zero) {
    using T = decltype(zero);
    const T* from = own.const_data_ptr<T>();
    T* to = total.mutable_data_ptr<T>();
    const int64_t all = own.numel(), most = kPartBytes / sizeof(T);
    for (int64_t begin = 0; begin < all; begin += most) {
      const int64_t count = std::min(all - begin, most);
      ranks.exchange([&](char* part) { std::memcpy(part, from + begin, count * sizeof(T)); },
                     [&](const std::vector<const char*>& parts) { add_parts<T>(parts, count, to + begin); });
    }
  };
  if (x.scalar_type() == at::kFloat) call(float{});
  else if (x.scalar_type() == at::kBFloat16) call(at::BFloat16{});
  else if (x.scalar_type() == at::kHalf) call(at::Half{});
  else TORCH_CHECK(false, "no sum over ranks of ", x.scalar_type());
  return total;
}

// Rows go over in pieces of rows, or of columns where a row is longer than a part.
at::Tensor gather_columns(const at::Tensor& x, int64_t size) {
  Group& ranks = group();
  TORCH_CHECK(size == ranks.size(), "a step of ", size, " ranks, and there are ", ranks.size());
  std::vector<int64_t> shape = x.sizes().vec();
  const int64_t row = shape.back() * x.element_size(), rows = row ? x.numel() / shape.back() : 0;
  shape.back() *= size;
  const at::Tensor own = x.contiguous();
  at::Tensor all = at::empty(shape, x.options());
  const auto* from = static_cast<const char*>(own.const_data_ptr());
  auto* to = static_cast<char*>(all.mutable_data_ptr());
  const int64_t width = std::min(row, kPartBytes), height = row ? std::max<int64_t>(kPartBytes / row, 1) : 1;
  for (int64_t first = 0; first < rows; first += height)
    for (int64_t column = 0; column < row; column += width) {
      const int64_t num_rows = std::min(height, rows - first), num_bytes = std::min(width, row - column);
      ranks.exchange(
          [&](char* part) {
            for (int64_t i = 0; i < num_rows; ++i)
              std::memcpy(part + i * num_bytes, from + (first + i) * row + column, num_bytes);
          },
          [&](const std::vector<const char*>& parts) {
            for (int64_t rank = 0; rank < size; ++rank)
              for (int64_t i = 0; i < num_rows; ++i)
                std::memcpy(to + ((first + i) * size + rank) * row + column, parts[rank] + i * num_bytes, num_bytes);
          });
    }
  return all;
}

at::Tensor own_columns(const at::Tensor& x, int64_t size) {
  const int64_t width = x.size(-1) / size;
  return x.narrow(-1, group().rank() * width, width).contiguous();
}

at::Tensor own_embeddings(const at::Tensor& ids, const at::Tensor& weight) {
  const int64_t rows = weight.size(0), first = group().rank() * rows;
  const at::Tensor tokens = ids.contiguous(), table = weight.contiguous();
  std::vector<int64_t> shape = ids.sizes().vec();
  shape.push_back(weight.size(1));
  at::Tensor out = at::empty(shape, weight.options());
  const int64_t row = weight.size(1) * weight.element_size();
  const auto* from = static_cast<const char*>(table.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  const int64_t* id = tokens.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < tokens.numel(); ++i) {
    const int64_t own = id[i] - first;
    if (own >= 0 && own < rows) std::memcpy(to + i * row, from + own * row, row);
    else std::memset(to + i * row, 0, row);
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(specdec, library) {
  library.def("join_group(int key, int file, int rank, int size) -> ()", join_group);
  library.def("use_group(int key) -> ()", use_group);
  library.def("stop_group(int key) -> ()", stop_group);
  library.def("leave_group(int key) -> ()", leave_group);
  library.def("shared_bytes(int size) -> int", Group::num_bytes);
}
// Operations called by a step are declared in runtime/kernels/collectives.py, for every device.
TORCH_LIBRARY_IMPL(specdec, CPU, library) {
  library.impl("all_reduce", all_reduce);
  library.impl("gather_columns", gather_columns);
  library.impl("own_columns", own_columns);
  library.impl("own_embeddings", own_embeddings);
}
