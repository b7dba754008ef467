// What the kernels share: 16 floats in a register, and a template's number of rows chosen at run time.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <type_traits>

constexpr int64_t kLanes = 16;
typedef float Lanes __attribute__((vector_size(4 * kLanes)));

template <typename V, typename T>
inline V load(const T* p) { V v; std::memcpy(&v, p, sizeof v); return v; }
inline Lanes load(const float* p) { return load<Lanes>(p); }
inline void store(float* p, Lanes v) { std::memcpy(p, &v, sizeof v); }

// Into the second-level cache: the first has few places for requests, which are needed for what is read now.
inline void fetch_line(const void* p) { __builtin_prefetch(p, 0, 2); }

// Calls do_task(i) for 0 <= i < num_tasks. A thread takes the next few when it has finished, so that all end together
// even where something else runs on their cores: many at first, whose memory is read in one stream, and one at last
// (guided self-scheduling, Polychronopoulos and Kuck, 1987).
template <typename DoTask>
inline void share_tasks(int64_t num_tasks, const DoTask& do_task) {
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), num_tasks);
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t thread, int64_t end_thread) {
    for (; thread < end_thread; ++thread)
      for (int64_t begin = next; begin < num_tasks; begin = next) {
        const int64_t end = begin + std::max<int64_t>((num_tasks - begin) / (2 * threads), 1);
        if (!next.compare_exchange_strong(begin, end)) continue;
        for (int64_t i = begin; i < end; ++i) do_task(i);
      }
  });
}

// Calls use(std::integral_constant<int, rows>()), for 1 <= rows <= most.
template <int most, typename Use>
inline void with_rows(int64_t rows, const Use& use) {
  if (rows == most) use(std::integral_constant<int, most>());
  else if constexpr (most > 1) with_rows<most - 1>(rows, use);
}
