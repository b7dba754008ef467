// A slow disk for a process that this library is preloaded into: it waits in the middle of every write to a file, and
// before and after what has files last or gives them their names.
#include <dlfcn.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>

namespace {

constexpr std::chrono::milliseconds kCall{20};
constexpr int64_t kBytesPerMillisecond = 20'000;

void wait_for(size_t num_bytes) {
  std::this_thread::sleep_for(std::chrono::milliseconds(1 + static_cast<int64_t>(num_bytes) / kBytesPerMillisecond));
}

bool is_file(int descriptor) {
  struct stat found;
  return fstat(descriptor, &found) == 0 && S_ISREG(found.st_mode);
}

template <typename Call>
Call* real(const char* name) {
  return reinterpret_cast<Call*>(dlsym(RTLD_NEXT, name));
}

template <typename Call, typename... Given>
int slowly(Call* call, Given... given) {
  std::this_thread::sleep_for(kCall);
  const int result = call(given...);
  std::this_thread::sleep_for(kCall);
  return result;
}

}  // namespace

extern "C" {

ssize_t write(int descriptor, const void* data, size_t size) {
  static const auto call = real<ssize_t(int, const void*, size_t)>("write");
  if (size < 2 || !is_file(descriptor)) return call(descriptor, data, size);
  const ssize_t first = call(descriptor, data, size / 2);
  if (first < 0) return first;
  wait_for(size);
  const ssize_t second = call(descriptor, static_cast<const char*>(data) + first, size - first);
  return first + std::max<ssize_t>(second, 0);
}

// Copies of files.
ssize_t sendfile64(int to, int from, off64_t* offset, size_t size) {
  static const auto call = real<ssize_t(int, int, off64_t*, size_t)>("sendfile64");
  const ssize_t done = call(to, from, offset, std::min<size_t>(size, 1 << 16));
  wait_for(std::max<ssize_t>(done, 0));
  return done;
}

int fsync(int descriptor) {
  static const auto call = real<int(int)>("fsync");
  return slowly(call, descriptor);
}

int rename(const char* from, const char* to) {
  static const auto call = real<int(const char*, const char*)>("rename");
  return slowly(call, from, to);
}

}
