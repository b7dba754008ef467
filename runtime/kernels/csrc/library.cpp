// Library-wide operations: the digest of its sources, and the float mode of its threads.

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <string>

namespace {

// Found in the file too: engines bring a library each, and a process can load only one of them.
__attribute__((used)) const char kMark[] = "specdec-kernels-of:" SPECDEC_SOURCES;

// Flushes denormals in OpenMP's existing threads; new threads inherit the mode of their creator.
void flush_denormals_of_openmp() {
  at::parallel_for(0, at::get_num_threads(), 1, [](int64_t, int64_t) { at::globalContext().setFlushDenormal(true); });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(specdec, library) {
  library.def("sources() -> str", [] { return std::string(SPECDEC_SOURCES); });
  library.def("flush_denormals_of_openmp() -> ()", flush_denormals_of_openmp);
}
