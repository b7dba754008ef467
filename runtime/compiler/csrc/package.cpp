// A compiled step for whose computing Python's other threads need not wait: torch's own binding of the loader keeps
// Python's lock for as long as a step takes. It is computed by the kernels' threads and by no other, the compiler's loops
// between the kernels too.

#include <ATen/core/Tensor.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "tasks.h"

namespace {

// A loop of so few tokens is computed sooner than it is shared.
constexpr int64_t kFewTokens = 64;
// More parts than threads: who is late, or has lost its core, does fewer.
constexpr int64_t kPartsOfThread = 4, kMostParts = 256;

thread_local bool has_few_tokens = false;

// Calls compute(of, part, num_parts) for every part of a loop. What a part computes of it is the compiler's to say.
void share_loop(void (*compute)(void*, int64_t, int64_t), void* of) {
  const bool is_shared = !has_few_tokens && num_threads() > 1;
  const int64_t num_parts = is_shared ? std::min(kPartsOfThread * num_threads(), kMostParts) : 1;
  share_tasks(num_parts, [&](int64_t part) { compute(of, part, num_parts); });
}

// Scope of a step computed by this thread.
class InStep {
 public:
  explicit InStep(int64_t num_tokens) : had_few_tokens_(has_few_tokens), was_alone_(keep_openmp_alone(true)) {
    has_few_tokens = num_tokens <= kFewTokens;
  }
  ~InStep() {
    has_few_tokens = had_few_tokens_;
    keep_openmp_alone(was_alone_);
  }
  InStep(const InStep&) = delete;
  InStep& operator=(const InStep&) = delete;

 private:
  bool had_few_tokens_, was_alone_;
};

struct Package : torch::CustomClassHolder {
  torch::inductor::AOTIModelPackageLoader loader;

  explicit Package(const std::string& path) : loader(path) {}

  // The weights' memory stays the caller's.
  void load(const c10::Dict<std::string, at::Tensor>& weights) {
    std::unordered_map<std::string, at::Tensor> named;
    for (const auto& weight : weights) named.emplace(weight.key(), weight.value());
    loader.load_constants(named, /*use_inactive=*/false, /*check_full_update=*/true, /*user_managed=*/true);
  }

  // The first of a step's inputs are its tokens.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) {
    const InStep in_step{inputs.at(0).numel()};
    return loader.run(inputs);
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(specdec, library) {
  // An address: a package is linked to torch, and not to this library (`package_loops.h`).
  library.def("loop_sharer() -> int", [] { return reinterpret_cast<int64_t>(&share_loop); });
  library.def("keep_openmp_alone(bool alone) -> bool", keep_openmp_alone);
  library.class_<Package>("Package")
      .def(torch::init<std::string>())
      .def("load", [](const c10::intrusive_ptr<Package>& self, const c10::Dict<std::string, at::Tensor>& weights) {
        self->load(weights);
      })
      .def("run", [](const c10::intrusive_ptr<Package>& self, const std::vector<at::Tensor>& inputs) {
        return self->run(inputs);
      });
}
