// A compiled step for whose computing Python's other threads need not wait: torch's own binding of the loader keeps
// Python's lock for as long as a step takes. It is computed by the kernels' threads and by no other, the compiler's loops
// between the kernels too.

#include <ATen/core/Tensor.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kernel_calls.h"
#include "kernel_table.h"
#include "tasks.h"
#include "token_program.h"

namespace {

const at::Tensor& of(AtenTensorHandle handle) { return *torch::aot_inductor::tensor_handle_to_tensor_pointer(handle); }
MaybeTensor of(const AtenTensorHandle* handle) { return handle ? MaybeTensor(of(*handle)) : std::nullopt; }

AtenTensorHandle give(at::Tensor output) { return torch::aot_inductor::new_tensor_handle(std::move(output)); }

AOTITorchError shim_linear(AtenTensorHandle x, AtenTensorHandle packed, AtenTensorHandle* bias, int64_t num_outputs,
                      int64_t arithmetic, AtenTensorHandle* output) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *output = give(call_linear(of(x), of(packed), of(bias), num_outputs, arithmetic));
  })
}

AOTITorchError shim_experts_linear(AtenTensorHandle x, AtenTensorHandle packed, AtenTensorHandle chosen, int64_t num_outputs,
                              int64_t arithmetic, int64_t token_bits, AtenTensorHandle* output) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *output = give(call_experts_linear(of(x), of(packed), of(chosen), num_outputs, arithmetic, token_bits));
  })
}

AOTITorchError shim_quantized_linear(AtenTensorHandle x, AtenTensorHandle packed, AtenTensorHandle* bias, int64_t num_outputs,
                                int64_t arithmetic, int64_t token_bits, AtenTensorHandle* output) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *output = give(call_quantized_linear(of(x), of(packed), of(bias), num_outputs, arithmetic, token_bits));
  })
}

AOTITorchError shim_paged_attention(AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value,
                               AtenTensorHandle key_pool, AtenTensorHandle value_pool, AtenTensorHandle positions,
                               AtenTensorHandle slots, AtenTensorHandle block_tables, double scale, int64_t window,
                               int64_t arithmetic, AtenTensorHandle* scales, AtenTensorHandle* sinks, double softcap,
                               int64_t attention_chunk, AtenTensorHandle* slopes, AtenTensorHandle* output) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({
    *output = give(call_paged_attention(of(query), of(key), of(value), of(key_pool), of(value_pool), of(positions),
                                        of(slots), of(block_tables), scale, window, arithmetic, of(scales), of(sinks), softcap,
                                        attention_chunk, of(slopes)));
  })
}

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

const SpecdecKernels kernels{share_loop, shim_linear, shim_experts_linear, shim_quantized_linear, shim_paged_attention};

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

// A program compiled by Inductor, with the weights of its call. Their memory stays the caller's.
class CompiledProgram {
 public:
  CompiledProgram(const std::string& library, const c10::Dict<std::string, at::Tensor>& weights) : runner_(library) {
    for (const auto& weight : weights) weights_.emplace(weight.key(), weight.value());
    torch::inductor::TensorConstantMap named;
    for (auto& [name, weight] : weights_) named.emplace(name, &weight);
    runner_.update_constant_buffer(named, /*use_inactive=*/false, /*validate_full_updates=*/true, /*user_managed=*/true);
  }
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) { return runner_.run(inputs); }

 private:
  torch::inductor::AOTIModelContainerRunnerCpu runner_;
  std::unordered_map<std::string, at::Tensor> weights_;  // the runner points to these
};

// A step that is cut into programs (`runtime/compiler/cutting.py`). Layers of one kind are one program, which is called with
// the weights of each. Tensors are known by their place: the step's inputs come first, and what the last call gives are the
// logits.
struct CutStep : torch::CustomClassHolder {
  using Run = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;
  struct Call {
    Run run;
    std::vector<int64_t> inputs, outputs;
  };
  std::vector<Call> calls;
  int64_t num_places = 0;

  void add(Run run, std::vector<int64_t> inputs, std::vector<int64_t> outputs) {
    for (const auto& places : {inputs, outputs})
      for (const int64_t place : places) num_places = std::max(num_places, place + 1);
    calls.push_back({std::move(run), std::move(inputs), std::move(outputs)});
  }

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) {
    const InStep in_step{inputs.at(0).numel()};
    std::vector<at::Tensor> tensors = inputs, read, made;
    tensors.resize(std::max<size_t>(num_places, inputs.size()));
    for (const Call& call : calls) {
      read.clear();
      for (const int64_t place : call.inputs) read.push_back(tensors[place]);
      made = call.run(read);
      for (size_t i = 0; i < made.size(); ++i) tensors[call.outputs[i]] = made[i];
    }
    return made;
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(specdec, library) {
  library.def("kernel_table() -> int", [] { return reinterpret_cast<int64_t>(&kernels); });  // its address
  library.def("keep_openmp_alone(bool alone) -> bool", keep_openmp_alone);
  library.class_<Package>("Package")
      .def(torch::init<std::string>())
      .def("load", [](const c10::intrusive_ptr<Package>& self, const c10::Dict<std::string, at::Tensor>& weights) {
        self->load(weights);
      })
      .def("run", [](const c10::intrusive_ptr<Package>& self, const std::vector<at::Tensor>& inputs) {
        return self->run(inputs);
      });
  library.class_<CutStep>("CutStep")
      .def(torch::init<>())
      .def("add_compiled",
           [](const c10::intrusive_ptr<CutStep>& self, const std::string& path, std::vector<int64_t> inputs,
              std::vector<int64_t> outputs, const c10::Dict<std::string, at::Tensor>& weights) {
             const auto program = std::make_shared<CompiledProgram>(path, weights);
             self->add([program](const auto& read) { return program->run(read); }, std::move(inputs), std::move(outputs));
           })
      .def("add_tokenwise",
           [](const c10::intrusive_ptr<CutStep>& self, std::vector<int64_t> code, std::vector<double> numbers,
              std::vector<at::Tensor> weights, std::vector<int64_t> inputs, std::vector<int64_t> outputs) {
             const auto program = std::make_shared<TokenProgram>(std::move(code), std::move(numbers), std::move(weights));
             self->add([program](const auto& read) { return program->run(read); }, std::move(inputs), std::move(outputs));
           })
      .def("run", [](const c10::intrusive_ptr<CutStep>& self, const std::vector<at::Tensor>& inputs) {
        return self->run(inputs);
      });
}
