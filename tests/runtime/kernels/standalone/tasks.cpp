// Several callers share tasks at once, each with helpers of its own that are made anew when their number changes: for
// ThreadSanitizer. What tasks write is neither atomic nor locked, so that every order between threads has to be the
// kernels' own. Says how many rounds there were, and how many were wrong.

#include "tasks.h"

#include <cstdio>

int main() {
  constexpr int kCallers = 3, kRounds = 300;
  std::atomic<int> num_wrong{0};
  const auto call = [&](int caller) {
    // Each of two tasks waits for the other, so that a helper has one of them however busy the machine is.
    std::atomic<bool> begun[2]{};
    int64_t written[2]{};
    threads_of_tasks = 2;
    share_tasks(2, [&](int64_t i) {
      begun[i].store(true, std::memory_order_relaxed);
      while (!begun[1 - i].load(std::memory_order_relaxed)) std::this_thread::yield();
      written[i] = 1;
    });
    num_wrong += written[0] + written[1] != 2;
    for (int round = 0; round < kRounds; ++round) {
      threads_of_tasks = 2 + (caller + round / 50) % 3;
      const int64_t num_tasks = 1 + (round * 7) % 40;
      std::vector<int64_t> done(num_tasks), by_thread(num_threads()), kept(num_tasks);
      share_tasks(num_tasks, [&](int64_t i, int64_t thread) {
        share_tasks(2, [&](int64_t) { done[i] += i; });  // of a task: by the same thread
        ++by_thread[thread];
      });
      for (int again = 0; again < 3; ++again) share_by_affinity(num_tasks, [&](int64_t i) { kept[i] = 2 * kept[i] + i; });
      for (int64_t i = 0; i < num_tasks; ++i) num_wrong += kept[i] != 7 * i;
      int64_t sum = 0, expected = 0;
      for (int64_t i = 0; i < num_tasks; ++i) sum += done[i], expected += 2 * i;
      for (int64_t number : by_thread) sum += number;
      num_wrong += sum != expected + num_tasks;
    }
  };
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller) callers.emplace_back(call, caller);
  for (std::thread& caller : callers) caller.join();
  std::printf("%d rounds, %d wrong\n", kCallers * (kRounds + 1), num_wrong.load());
  return num_wrong > 0;
}
