// A compiled step for whose computing Python's other threads need not wait: torch's own binding of the loader keeps
// Python's lock for as long as a step takes.

#include <ATen/core/Tensor.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/custom_class.h>

#include <string>
#include <unordered_map>
#include <vector>

namespace {

struct Package : torch::CustomClassHolder {
  torch::inductor::AOTIModelPackageLoader loader;

  explicit Package(const std::string& path) : loader(path) {}

  // The weights' memory stays the caller's.
  void load(const c10::Dict<std::string, at::Tensor>& weights) {
    std::unordered_map<std::string, at::Tensor> named;
    for (const auto& weight : weights) named.emplace(weight.key(), weight.value());
    loader.load_constants(named, /*use_inactive=*/false, /*check_full_update=*/true, /*user_managed=*/true);
  }

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) { return loader.run(inputs); }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(specdec, library) {
  library.class_<Package>("Package")
      .def(torch::init<std::string>())
      .def("load", [](const c10::intrusive_ptr<Package>& self, const c10::Dict<std::string, at::Tensor>& weights) {
        self->load(weights);
      })
      .def("run", [](const c10::intrusive_ptr<Package>& self, const std::vector<at::Tensor>& inputs) {
        return self->run(inputs);
      });
}
