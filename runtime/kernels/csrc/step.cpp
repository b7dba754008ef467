// A step that is cut into token programs (`runtime/compiler/cutting.py`). The kernels' threads alone compute it, and Python's
// other threads go on meanwhile.

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "kernel_calls.h"
#include "tasks.h"
#include "token_program.h"

namespace {

// Scope of a step computed by this thread.
class InStep {
 public:
  InStep() : was_alone_(keep_openmp_alone(true)) {}
  ~InStep() { keep_openmp_alone(was_alone_); }
  InStep(const InStep&) = delete;
  InStep& operator=(const InStep&) = delete;

 private:
  bool was_alone_;
};

// A step is a list of calls of programs. Tensors are known by their place: the step's inputs come first, and the last call's
// outputs are the step's.
struct CutStep : torch::CustomClassHolder {
  struct Call {
    std::unique_ptr<const TokenProgram> program;
    std::vector<int64_t> inputs, outputs;
  };
  std::vector<Call> calls;
  int64_t num_places = 0;

  void add(std::unique_ptr<const TokenProgram> program, std::vector<int64_t> inputs, std::vector<int64_t> outputs) {
    for (const auto& places : {inputs, outputs})
      for (const int64_t place : places) num_places = std::max(num_places, place + 1);
    calls.push_back({std::move(program), std::move(inputs), std::move(outputs)});
  }

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) {
    const InStep in_step;
    std::vector<at::Tensor> tensors = inputs, read, made;
    tensors.resize(std::max<size_t>(num_places, inputs.size()));
    for (const Call& call : calls) {
      read.clear();
      for (const int64_t place : call.inputs) read.push_back(tensors[place]);
      made = call.program->run(read);
      for (size_t i = 0; i < made.size(); ++i) tensors[call.outputs[i]] = made[i];
    }
    return made;
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(specdec, library) {
  library.def("keep_openmp_alone(bool alone) -> bool", keep_openmp_alone);
  library.class_<CutStep>("CutStep")
      .def(torch::init<>())
      .def("add_tokenwise",
           [](const c10::intrusive_ptr<CutStep>& self, std::vector<int64_t> code, std::vector<double> numbers,
              std::vector<at::Tensor> weights, std::vector<int64_t> inputs, std::vector<int64_t> outputs) {
             auto program = std::make_unique<TokenProgram>(std::move(code), std::move(numbers), std::move(weights));
             self->add(std::move(program), std::move(inputs), std::move(outputs));
           })
      .def("run", [](const c10::intrusive_ptr<CutStep>& self, const std::vector<at::Tensor>& inputs) {
        return self->run(inputs);
      });
}
