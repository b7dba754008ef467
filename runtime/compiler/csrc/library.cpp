// What concerns the library as a whole: which sources it was compiled from, and how its threads compute.

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <string>

namespace {

// Found in the file too: engines bring a library each, and a process can load only one of them.
__attribute__((used)) const char kMark[] = "specdec-kernels-of:" SPECDEC_SOURCES;

// Those that begin later do as the one that began them; but some may be there already.
void flush_denormals_of_openmp() {
  at::parallel_for(0, at::get_num_threads(), 1, [](int64_t, int64_t) { at::globalContext().setFlushDenormal(true); });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(specdec, library) {
  library.def("sources() -> str", [] { return std::string(SPECDEC_SOURCES); });
  library.def("flush_denormals_of_openmp() -> ()", flush_denormals_of_openmp);
}
