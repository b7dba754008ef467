// Work shared among threads, such that nobody waits for a thread that has not come: the caller takes tasks like the
// threads that help it, and goes on when all that were begun are done. OpenMP waits for every thread of a team, also for
// one that the system has not given a core and that has nothing to do, which on a busy machine costs a step three times
// its time.
//
// Every calling thread has helpers of its own, so that several engines and callers do not know of each other. They are
// made when they are first needed, wait for work a while before they sleep, and end with their caller.

#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <pthread.h>
#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Time for which a helper spins for work, and a caller for helpers, before sleeping. Longer, and under other load a helper
// has used up its time slice when work arrives; shorter, and it is asleep when the next kernel begins.
constexpr std::chrono::microseconds kHelperWaits{200}, kCallerWaits{30};

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Mode for denormal numbers; helpers inherit their caller's.
inline uint64_t float_mode() {
#if defined(__x86_64__)
  return _mm_getcsr();
#elif defined(__aarch64__)
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return mode;
#else
  return 0;
#endif
}
inline void set_float_mode([[maybe_unused]] uint64_t mode) {
#if defined(__x86_64__)
  _mm_setcsr(static_cast<unsigned>(mode));
#elif defined(__aarch64__)
  asm volatile("msr fpcr, %0" : : "r"(mode));
#endif
}

inline void wait_while(const std::atomic<uint32_t>& value, uint32_t same, std::chrono::microseconds spinning) {
  const auto end = std::chrono::steady_clock::now() + spinning;
  for (int i = 1; value.load(std::memory_order_acquire) == same; ++i) {
    if (i % 64 == 0 && std::chrono::steady_clock::now() > end) return value.wait(same);
    relax();
  }
}

// True while this thread runs a task: nested parallel work runs on this thread alone, or two threads would share one task.
inline thread_local bool in_task = false;

class Team {
 public:
  explicit Team(int64_t num_helpers) {
    for (int64_t i = 1; i <= num_helpers; ++i) {
      helpers_.emplace_back([this, i] { help(i); });
#if defined(__linux__)
      pthread_setname_np(helpers_.back().native_handle(), "specdec");  // as `top -H` shows it
#endif
    }
  }
  ~Team() {
    ends_ = true;
    round_.fetch_add(1);
    round_.notify_all();
    for (auto& helper : helpers_) helper.join();
  }
  int64_t num_helpers() const { return helpers_.size(); }

  // Calls work(0) here, and work(i), 0 < i < threads, in those helpers that come while it lasts.
  void run(int64_t threads, void (*work)(const void*, int64_t), const void* argument) {
    work_ = work, argument_ = argument, threads_ = threads, mode_ = float_mode();
    is_open_.store(true);
    round_.fetch_add(1);
    round_.notify_all();
    work(argument, 0);
    is_open_.store(false);
    for (uint32_t busy = num_inside_; busy != 0; busy = num_inside_)
      wait_while(num_inside_, busy, kCallerWaits);
  }

 private:
  void help(int64_t i) {
    in_task = true;
    for (uint32_t seen = 0;;) {
      wait_while(round_, seen, kHelperWaits);
      seen = round_;
      if (ends_) return;
      num_inside_.fetch_add(1);  // before the look: who closes the round then waits for this thread
      if (is_open_ && i < threads_) {
        set_float_mode(mode_);
        work_(argument_, i);
      }
      num_inside_.fetch_sub(1);
      num_inside_.notify_one();
    }
  }

  alignas(64) std::atomic<uint32_t> round_{0};  // grows with every call: helpers wait for it
  alignas(64) std::atomic<uint32_t> num_inside_{0};
  alignas(64) std::atomic<bool> is_open_{false}, ends_{false};
  void (*work_)(const void*, int64_t) = nullptr;
  const void* argument_ = nullptr;
  int64_t threads_ = 0;
  uint64_t mode_ = 0;
  std::vector<std::thread> helpers_;
};

inline thread_local int64_t threads_of_tasks = 0;  // 0: as many as torch uses
inline std::atomic<int64_t> num_forks{0};

// A forked child has the memory of its parent's teams, OpenMP's too, and none of their threads: loops of the thread that
// forked would wait for them for ever. Tasks are shared with new helpers.
inline const int watches_forks = pthread_atfork(nullptr, nullptr, [] {
  num_forks.fetch_add(1);
  if (!threads_of_tasks) threads_of_tasks = at::get_num_threads();
  at::set_num_threads(1);
});

class OwnTeam {
 public:
  ~OwnTeam() { disband(); }

  Team& of(int64_t num_helpers) {
    if (!team_ || forks_ != num_forks || team_->num_helpers() != num_helpers) {
      disband();
      team_ = std::make_unique<Team>(num_helpers);
      forks_ = num_forks;
    }
    return *team_;
  }

 private:
  void disband() {
    if (forks_ == num_forks) team_.reset();
    else (void)team_.release();  // its threads cannot be waited for
  }
  std::unique_ptr<Team> team_;
  int64_t forks_ = 0;
};

inline thread_local OwnTeam own_team;

inline int64_t num_threads() { return threads_of_tasks ? threads_of_tasks : at::get_num_threads(); }

// Makes this thread compute torch's own loops alone; tasks are still shared among all threads. OpenMP's threads spin after
// a loop, for 15 ms in GNU's, on the cores that ours need. Returns the previous setting.
inline bool keep_openmp_alone([[maybe_unused]] bool alone) {
  const bool was_alone = threads_of_tasks != 0;
#if defined(_OPENMP)
  if (alone == was_alone || num_forks) return was_alone;
  if (alone) threads_of_tasks = at::get_num_threads();
  omp_set_num_threads(alone ? 1 : static_cast<int>(threads_of_tasks));
  if (!alone) threads_of_tasks = 0;
#endif
  return was_alone;
}

// A task's function where it lies, whatever its type: what shares tasks is compiled once, and a function once too.
class AnyTask {
 public:
  template <typename DoTask>
  AnyTask(const DoTask& do_task)
      : do_task_(&do_task), call_([](const void* of, [[maybe_unused]] int64_t i, [[maybe_unused]] int64_t thread) {
          const auto& function = *static_cast<const DoTask*>(of);
          if constexpr (std::is_invocable_v<DoTask, int64_t, int64_t>) function(i, thread);
          else function(i);
        }) {}
  void operator()(int64_t i, int64_t thread) const { call_(do_task_, i, thread); }

 private:
  const void* do_task_;
  void (*call_)(const void*, int64_t, int64_t);
};

// Calls work(thread), thread < min(num_threads(), num_tasks), here and in those helpers that come while it lasts. False where
// there is one thread for them: then nothing was called.
template <typename Work>
bool run_on_team(int64_t num_tasks, const Work& work) {
  const int64_t all_threads = num_threads(), threads = std::min(all_threads, num_tasks);
  if (threads <= 1 || in_task) return false;
  in_task = true;
  own_team.of(all_threads - 1)
      .run(threads, [](const void* work, int64_t thread) { (*static_cast<const Work*>(work))(thread); }, &work);
  in_task = false;
  return true;
}

// Calls do_task(i) or do_task(i, thread), thread < num_threads(), for 0 <= i < num_tasks. A thread takes the next few when
// it has finished, so that all end together even where something else runs on their cores: many at first, whose memory is
// read in one stream, and one at last (guided self-scheduling, Polychronopoulos and Kuck, 1987).
[[gnu::noinline]] inline void share_tasks(int64_t num_tasks, const AnyTask& do_task) {
  const int64_t threads = std::min(num_threads(), num_tasks);
  std::atomic<int64_t> next{0};
  const bool is_shared = run_on_team(num_tasks, [&](int64_t thread) {
    for (int64_t begin = next; begin < num_tasks; begin = next) {
      const int64_t end = begin + std::max<int64_t>((num_tasks - begin) / (2 * threads), 1);
      if (!next.compare_exchange_strong(begin, end)) continue;
      for (int64_t i = begin; i < end; ++i) do_task(i, thread);
    }
  });
  if (is_shared) return;
  const bool was_in_task = std::exchange(in_task, true);
  for (int64_t i = 0; i < num_tasks; ++i) do_task(i, 0);
  in_task = was_in_task;
}

// The same for tasks that come again and again and whose memory fits a core's cache: a thread begins with those that it had
// before, and then takes others' (affinity scheduling, Markatos and LeBlanc, 1994).
[[gnu::noinline]] inline void share_by_affinity(int64_t num_tasks, const AnyTask& do_task) {
  struct alignas(64) Own {
    std::atomic<int64_t> next;
    int64_t end;
  };
  const int64_t threads = std::min(num_threads(), num_tasks);
  std::vector<Own> own(std::max<int64_t>(threads, 1));
  for (int64_t thread = 0; thread < threads; ++thread) {
    own[thread].next = num_tasks * thread / threads;
    own[thread].end = num_tasks * (thread + 1) / threads;
  }
  const bool is_shared = run_on_team(num_tasks, [&](int64_t thread) {
    for (int64_t k = 0; k < threads; ++k) {
      Own& some = own[(thread + k) % threads];
      for (int64_t i = some.next++; i < some.end; i = some.next++) do_task(i, thread);
    }
  });
  if (is_shared) return;
  for (int64_t i = 0; i < num_tasks; ++i) do_task(i, 0);
}

// Calls use(begin, end) for parts of 0..count of at most `part`.
template <typename Use>
void share_range(int64_t count, int64_t part, const Use& use) {
  share_tasks((count + part - 1) / part, [&](int64_t i) { use(i * part, std::min((i + 1) * part, count)); });
}
