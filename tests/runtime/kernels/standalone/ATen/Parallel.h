// Threads that begin and end with a loop.

#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace at {

inline int num_threads = 1;
inline thread_local int thread_num = 0;
inline int get_num_threads() { return num_threads; }
inline void set_num_threads(int number) { num_threads = number; }
inline int get_thread_num() { return thread_num; }

template <typename Use>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Use& use) {
  const int64_t parts = std::min<int64_t>(num_threads, (end - begin + grain - 1) / grain);
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < parts; ++i)
    threads.emplace_back([=, &use] {
      thread_num = static_cast<int>(i);
      use(begin + (end - begin) * i / parts, begin + (end - begin) * (i + 1) / parts);
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace at
