// Programs that compute a step token by token (`runtime/compiler/token_program.py`): kernels, which take all tokens at once,
// and between them blocks of operations on vectors, which a thread carries out for one token after the other. Nothing is
// compiled for a model. A token's operations are always the same, so its bits do not depend on the other tokens.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "kernel_calls.h"
#include "tasks.h"
#include "vector_groups.h"

namespace {

// In the order of `runtime.compiler.vectors.OPERATIONS`.
enum class VectorOp : int64_t {
  kLoad, kPick, kStore, kEmbed, kCopy, kAdd, kSub, kMul, kDiv, kMaximum, kMinimum, kNeg, kAbs, kSqrt, kRsqrt, kPow, kExp,
  kSin, kCos, kTanh, kSigmoid, kSilu, kRelu, kSoftplus, kGelu, kGeluTanh, kSum, kMean, kSoftmax, kTopk, kGather, kFloor, kLog,
  kGreater, kUnequal, kScatter, kSelect, kAddArrays, kRmsNorm, kLayerNorm, kRotary, kGateSilu, kGateGelu, kGateGeluTanh
};
constexpr VectorOp kFirstOfThree = VectorOp::kSelect;  // this operation and all behind it read three operands

// A token's numbers: in its scratch memory, in its row of an array, or in a constant, which all tokens share. There is a
// stride for each of three loops.
struct Operand {
  const float* constant = nullptr;
  int64_t offset = 0, strides[3] = {};
  int64_t array = -1, row = 0;  // numbers in a row of the array
  const float* in(const float* scratch) const { return (constant ? constant : scratch) + offset; }
};

struct VectorCall {
  VectorOp op;
  Rounding rounding;
  int64_t sizes[3];
  int64_t number;  // index of an array, a weight or a number, or a count (top-k)
  Operand out, a, b, c;
  bool rounds_within;  // a group rounds the numbers before its last operation too
};

// Calls use(out, a, b) with pointers to the innermost rows.
template <typename Use>
inline void for_rows(const VectorCall& call, float* scratch, const Use& use) {
  float* out = scratch + call.out.offset;
  const float *a = call.a.in(scratch), *b = call.b.in(scratch);
  for (int64_t i = 0; i < call.sizes[0]; ++i)
    for (int64_t j = 0; j < call.sizes[1]; ++j)
      use(out + i * call.out.strides[0] + j * call.out.strides[1], a + i * call.a.strides[0] + j * call.a.strides[1],
          b + i * call.b.strides[0] + j * call.b.strides[1]);
}

// Reads or writes few numbers with a stride. Not inlined: copies would be most of the compiler's work.
[[gnu::noinline]] Lanes lanes_at(const float* p, int64_t stride, int64_t count) {
  Lanes v = Lanes{} + 1.0f;
  for (int64_t k = 0; k < count; ++k) v[k] = p[k * stride];
  return v;
}
[[gnu::noinline]] void put_lanes(float* p, int64_t stride, int64_t count, Lanes v) {
  for (int64_t k = 0; k < count; ++k) p[k * stride] = v[k];
}

// Rounds several vectors with one branch.
template <int count>
inline void round_vectors(Lanes (&v)[count], Rounding rounding) {
  switch (rounding) {
    case Rounding::kNone: return;
    case Rounding::kBFloat16: return unrolled<count>([&](auto i) { v[i] = rounded<Rounding::kBFloat16>(v[i]); });
    case Rounding::kHalf: return unrolled<count>([&](auto i) { v[i] = rounded<Rounding::kHalf>(v[i]); });
  }
}

// Applies one function to all numbers: the last numbers of a row are computed by the same instructions as the others. An
// operand that all numbers share is read from a register filled with it, so that one loop serves instead of four.
template <typename Function>
[[gnu::noinline]] void compute(const VectorCall& call, float* scratch, Function function) {
  const int64_t n = call.sizes[2], so = call.out.strides[2], sa = call.a.strides[2], sb = call.b.strides[2];
  const bool is_plain = so == 1 && sa >= 0 && sa <= 1 && sb >= 0 && sb <= 1;
  for_rows(call, scratch, [&](float* out, const float* a, const float* b) {
    int64_t i = 0;
    if (is_plain) {
      float same_a[kLanes], same_b[kLanes];
      store(same_a, Lanes{} + *a), store(same_b, Lanes{} + *b);
      const float *first = sa ? a : same_a, *second = sb ? b : same_b;
      const auto whole_vectors = [&](auto together) {
        constexpr int count = together();
        for (; i + count * kLanes <= n; i += count * kLanes) {
          Lanes v[count];
          unrolled<count>([&](auto k) {
            const int64_t at = i + k * kLanes;
            v[k] = function(load(first + at * sa), load(second + at * sb));
          });
          round_vectors(v, call.rounding);
          unrolled<count>([&](auto k) { store(out + i + k * kLanes, v[k]); });
        }
      };
      whole_vectors(std::integral_constant<int, 4>());
      whole_vectors(std::integral_constant<int, 1>());
    }
    for (; i < n; i += kLanes) {
      const int64_t count = std::min(kLanes, n - i);
      Lanes v[] = {function(lanes_at(a + i * sa, sa, count), lanes_at(b + i * sb, sb, count))};
      round_vectors(v, call.rounding);
      put_lanes(out + i * so, so, count, *v);
    }
  });
}

// Calls use(zero) with a number of the dtype.
template <typename Use>
inline void with_dtype(at::ScalarType dtype, const Use& use) {
  switch (dtype) {
    case at::kFloat: return use(float{});
    case at::kBFloat16: return use(at::BFloat16{});
    case at::kHalf: return use(at::Half{});
    case at::kLong: return use(int64_t{});
    default: TORCH_CHECK(false, "a token program has no numbers of ", dtype);
  }
}

template <typename T>
inline void widen_row(const T* from, float* to, int64_t count) {
  if constexpr (std::is_same_v<T, int64_t>) std::copy_n(from, count, to);
  else widen(from, to, count);
}

template <typename T>
inline void narrow_row(const float* from, T* to, int64_t count) {
  int64_t i = 0;
  if constexpr (!std::is_same_v<T, int64_t>)
#pragma GCC unroll 4
    for (; i + kLanes <= count; i += kLanes) narrow(load(from + i), to + i);
  for (; i < count; ++i) to[i] = static_cast<T>(from[i]);
}

// Sums in kLanes parts, which are added at the end.
inline float sum_row(const float* row, int64_t stride, int64_t n) {
  Lanes sum = {};
  int64_t i = 0;
  if (stride == 1)
    for (; i + kLanes <= n; i += kLanes) sum += load(row + i);
  for (; i < n; i += kLanes)
    for (int64_t k = 0; k < std::min(kLanes, n - i); ++k) sum[k] += row[(i + k) * stride];
  float total = 0;
  for (int64_t k = 0; k < kLanes; ++k) total += sum[k];
  return total;
}

inline float round_number(float x, Rounding rounding) {
  if (rounding == Rounding::kBFloat16) return static_cast<at::BFloat16>(x);
  return rounding == Rounding::kHalf ? static_cast<float>(static_cast<at::Half>(x)) : x;
}

// Sums of neighbouring columns, such as the outputs of a token's experts: kLanes at once, each in the order of sum_row.
template <Rounding rounding>
[[gnu::noinline]] void sum_columns(const VectorCall& call, float* scratch) {
  const int64_t width = call.sizes[1], n = call.sizes[2], stride = call.a.strides[2];
  const float divisor = call.op == VectorOp::kMean ? static_cast<float>(n) : 1.0f;
  for (int64_t i = 0; i < call.sizes[0]; ++i) {
    const float* a = call.a.in(scratch) + i * call.a.strides[0];
    float* out = scratch + call.out.offset + i * call.out.strides[0];
    int64_t j = 0;
    for (; j + kLanes <= width; j += kLanes) {
      Lanes total = {};
      for (int64_t k = 0; k < std::min(kLanes, n); ++k) {
        Lanes sum = {};
        for (int64_t row = k; row < n; row += kLanes) sum += load(a + j + row * stride);
        total += sum;
      }
      store(out + j, rounded<rounding>(total / divisor));
    }
    for (; j < width; ++j) out[j] = round_number(sum_row(a + j, stride, n) / divisor, call.rounding);
  }
}

inline void sum_columns(const VectorCall& call, float* scratch) {
  if (call.rounding == Rounding::kBFloat16) return sum_columns<Rounding::kBFloat16>(call, scratch);
  if (call.rounding == Rounding::kHalf) return sum_columns<Rounding::kHalf>(call, scratch);
  sum_columns<Rounding::kNone>(call, scratch);
}

inline void softmax_row(float* out, const float* x, int64_t stride, int64_t n, Rounding rounding) {
  float largest = -std::numeric_limits<float>::infinity(), sum = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, x[i * stride]);
  for (int64_t i = 0; i < n; ++i) sum += out[i] = std::exp(x[i * stride] - largest);
  for (int64_t i = 0; i < n; ++i) out[i] = round_number(out[i] / sum, rounding);
}

// The k largest in falling order, of equal numbers the first; `places` gets their indices.
inline void topk_row(float* values, float* places, const float* x, int64_t stride, int64_t n, int64_t k) {
  thread_local std::vector<int64_t> order;
  order.resize(n);
  for (int64_t i = 0; i < n; ++i) order[i] = i;
  std::partial_sort(order.begin(), order.begin() + k, order.end(), [&](int64_t i, int64_t j) {
    const float left = x[i * stride], right = x[j * stride];
    return left > right || (left == right && i < j);
  });
  for (int64_t i = 0; i < k; ++i) values[i] = x[order[i] * stride], places[i] = static_cast<float>(order[i]);
}

// The memory of one token.
struct Memory {
  void* const* arrays;
  float* scratch;
  int64_t token;

  template <typename T>
  T* begin(const Operand& of) const {
    if (of.array >= 0) return static_cast<T*>(arrays[of.array]) + token * of.row + of.offset;
    return reinterpret_cast<T*>((of.constant ? const_cast<float*>(of.constant) : scratch) + of.offset);
  }
};

// Calls use(rounding, out, row, of) for each row, where row(operand, of) is the operand's row. Scratch memory has floats, and
// arrays have numbers of the rounding's dtype.
template <typename Use>
inline void compute_group(const VectorCall& call, const Memory& memory, const Use& use) {
  const auto for_types = [&](auto rounding, auto out_zero, auto of) {
    using Out = decltype(out_zero);
    for (int64_t i = 0; i < call.sizes[0]; ++i)
      for (int64_t j = 0; j < call.sizes[1]; ++j) {
        const auto row = [&](const Operand& operand, auto zero) {
          return memory.begin<decltype(zero)>(operand) + i * operand.strides[0] + j * operand.strides[1];
        };
        use(rounding, row(call.out, Out{}), row, of);
      }
  };
  const auto for_rounding = [&](auto rounding) {
    using Narrow = Rounded<rounding.value>;
    const bool reads = call.a.array >= 0, writes = call.out.array >= 0;
    if constexpr (std::is_same_v<Narrow, float>) for_types(rounding, float{}, float{});
    else if (reads && writes) for_types(rounding, Narrow{}, Narrow{});
    else if (reads) for_types(rounding, float{}, Narrow{});
    else if (writes) for_types(rounding, Narrow{}, float{});
    else for_types(rounding, float{}, float{});
  };
  switch (call.rounding) {
    case Rounding::kNone: return for_rounding(std::integral_constant<Rounding, Rounding::kNone>());
    case Rounding::kBFloat16: return for_rounding(std::integral_constant<Rounding, Rounding::kBFloat16>());
    case Rounding::kHalf: return for_rounding(std::integral_constant<Rounding, Rounding::kHalf>());
  }
}

template <typename Function>
[[gnu::noinline]] void gate(const VectorCall& call, const Memory& memory, Function function) {
  compute_group(call, memory, [&](auto rounding, auto* to, const auto& row, auto of) {
    gate_row<rounding>(to, row(call.a, of), row(call.b, of), call.sizes[2], function);
  });
}

class TokenProgram {
 public:
  // `code` is read by `next`, in the order in which `token_program.py` and `vectors.py` write it. The weights' memory
  // stays the caller's.
  TokenProgram(std::vector<int64_t> code, std::vector<double> numbers, std::vector<at::Tensor> weights)
      : code_(std::move(code)), weights_(std::move(weights)) {
    for (const double number : numbers) numbers_.push_back(static_cast<float>(number));
    scales_ = std::move(numbers);
    widened_.resize(weights_.size());
    num_inputs_ = next(), num_arrays_ = next();
    stages_.resize(next());
    for (Stage& stage : stages_) read_stage(stage);
    outputs_.resize(next());
    for (int64_t& output : outputs_) output = next();
    TORCH_CHECK(at_ == code_.size(), "a token program ends too early");
    plan_releases();
  }

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) const {
    TORCH_CHECK(static_cast<int64_t>(inputs.size()) == num_inputs_, "a token program takes ", num_inputs_, " inputs");
    Arrays arrays(num_arrays_);
    for (size_t i = 0; i < inputs.size(); ++i) arrays.put(i, inputs[i]);
    for (const Stage& stage : stages_) {
      if (stage.kernel == kVectors) run_vectors(stage, arrays);
      else arrays.put(stage.outputs[0], run_kernel(stage, arrays.tensors));
      for (const int64_t array : stage.released) arrays.tensors[array].reset();
    }
    std::vector<at::Tensor> made;
    for (const int64_t output : outputs_) made.push_back(arrays.tensors[output]);
    return made;
  }

 private:
  enum Kernel : int64_t { kVectors, kLinear, kQuantizedLinear, kExpertsLinear, kPagedAttention, kAllReduce, kShortConv,
                        kLinearAttention, kGatherColumns, kOwnColumns, kOwnEmbeddings, kSelectiveScan,
                        kQuantizedRows };

  // An array that a block of operations writes: a dimension is its size, or -c for c rows per token.
  struct Made {
    int64_t array;
    at::ScalarType dtype;
    std::vector<int64_t> shape;
  };
  struct Stage {
    int64_t kernel;
    std::vector<int64_t> inputs, outputs, settings;  // arrays; a kernel's other arguments
    std::vector<int64_t> released;                    // arrays that no later stage reads
    // Of a block of operations:
    int64_t rows_of, width_of_rows, picked_by, num_floats, cost;
    std::vector<Made> made;
    std::vector<VectorCall> calls;
  };

  struct Arrays {
    std::vector<at::Tensor> tensors;
    std::vector<void*> data;
    explicit Arrays(int64_t count) : tensors(count), data(count) {}
    void put(int64_t number, at::Tensor tensor) {
      data[number] = tensor.mutable_data_ptr();
      tensors[number] = std::move(tensor);
    }
  };

  int64_t next() {
    TORCH_CHECK(at_ < code_.size(), "a token program is cut off");
    return code_[at_++];
  }
  std::vector<int64_t> next_list() {
    std::vector<int64_t> list(next());
    for (int64_t& number : list) number = next();
    return list;
  }

  // Finds after which stage each array is freed: early, so that the memory is still in the cache when an array reuses it.
  void plan_releases() {
    std::vector<Stage*> last(num_arrays_);
    for (Stage& stage : stages_) {
      for (const auto& arrays : {stage.inputs, stage.outputs})
        for (const int64_t array : arrays) last.at(array) = &stage;
      for (const Made& made : stage.made) last.at(made.array) = &stage;
      for (const VectorCall& call : stage.calls) {
        if (call.op <= VectorOp::kStore) last.at(call.number) = &stage;
        for (const Operand* operand : {&call.out, &call.a, &call.b, &call.c})
          if (operand->array >= 0) last.at(operand->array) = &stage;
      }
      if (stage.kernel != kVectors) continue;
      last.at(stage.rows_of) = &stage;
      if (stage.picked_by >= 0) last.at(stage.picked_by) = &stage;
    }
    for (const int64_t output : outputs_) last.at(output) = nullptr;
    for (int64_t array = 0; array < num_arrays_; ++array)
      if (last[array]) last[array]->released.push_back(array);
  }

  void read_stage(Stage& stage) {
    stage.kernel = next();
    if (stage.kernel != kVectors) {
      stage.outputs = {next()};
      stage.inputs = next_list();
      stage.settings = next_list();
      return;
    }
    stage.rows_of = next(), stage.width_of_rows = next(), stage.picked_by = next();
    stage.num_floats = next(), stage.cost = next();
    stage.made.resize(next());
    for (Made& made : stage.made) {
      made.array = next();
      made.dtype = static_cast<at::ScalarType>(next());
      made.shape = next_list();
    }
    stage.calls.resize(next());
    for (VectorCall& call : stage.calls) {
      call.op = static_cast<VectorOp>(next()), call.rounding = static_cast<Rounding>(next()), call.number = next();
      for (int64_t& size : call.sizes) size = next();
      for (Operand* operand : {&call.out, &call.a, &call.b}) read_operand(*operand);
      if (call.op >= kFirstOfThree) read_operand(call.c), call.rounds_within = next();
    }
  }

  void read_operand(Operand& operand) {
    enum Place : int64_t { kScratch, kWeight, kNumber, kArray };
    const int64_t place = next(), number = next();
    operand.offset = next();
    for (int64_t& stride : operand.strides) stride = next();
    if (place == kWeight) operand.constant = widened(number);
    if (place == kNumber) operand.constant = &numbers_.at(number);
    if (place == kArray) operand.array = number, operand.row = next();
  }

  // Constants of vector operations are kept as floats.
  const float* widened(int64_t number) {
    if (!widened_.at(number).defined()) widened_[number] = weights_[number].to(at::kFloat).contiguous();
    return widened_[number].const_data_ptr<float>();
  }

  void run_vectors(const Stage& stage, Arrays& arrays) const {
    const int64_t* picks = stage.picked_by < 0 ? nullptr : static_cast<const int64_t*>(arrays.data[stage.picked_by]);
    const int64_t num_tokens = arrays.tensors[stage.rows_of].numel() / stage.width_of_rows;
    for (const Made& made : stage.made) {
      std::vector<int64_t> shape;
      for (const int64_t size : made.shape) shape.push_back(size < 0 ? -size * num_tokens : size);
      arrays.put(made.array, at::empty(shape, at::TensorOptions(made.dtype)));
    }
    const auto compute_tokens = [&](int64_t begin, int64_t end) {
      thread_local std::vector<float> scratch;
      if (scratch.size() < static_cast<size_t>(stage.num_floats)) scratch.resize(stage.num_floats);
      for (int64_t token = begin; token < end; ++token)
        for (const VectorCall& call : stage.calls)
          carry_out(call, arrays.tensors, {arrays.data.data(), scratch.data(), token}, picks ? picks[token] : token);
    };
    // Little work is done sooner than shared. There are more parts than threads: a thread that is late does fewer.
    constexpr int64_t kCostOfSharing = 1 << 17, kPartsOfThread = 4;
    if (num_tokens * stage.cost < kCostOfSharing) return compute_tokens(0, num_tokens);
    const int64_t num_parts = std::min(num_tokens, kPartsOfThread * num_threads());
    share_tasks(num_parts, [&](int64_t i) {
      compute_tokens(i * num_tokens / num_parts, (i + 1) * num_tokens / num_parts);
    });
  }

  // Carries out an operation for the token memory.token; `picked` is the token's row in an array that rows are picked from.
  void carry_out(const VectorCall& call, const std::vector<at::Tensor>& arrays, const Memory& memory,
                 int64_t picked) const {
    const int64_t n = call.sizes[2], stride = call.a.strides[2], token = memory.token;
    float *const scratch = memory.scratch, *const out = scratch + call.out.offset;
    constexpr Lanes one = Lanes{} + 1.0f;
    switch (call.op) {
      case VectorOp::kLoad:
      case VectorOp::kPick: {
        const at::Tensor& array = arrays[call.number];
        const int64_t row = call.op == VectorOp::kPick ? picked : token;
        return with_dtype(array.scalar_type(), [&](auto zero) {
          widen_row(static_cast<const decltype(zero)*>(memory.arrays[call.number]) + row * n, out, n);
        });
      }
      case VectorOp::kStore: {
        const at::Tensor& array = arrays[call.number];
        return with_dtype(array.scalar_type(), [&](auto zero) {
          narrow_row(call.a.in(scratch), static_cast<decltype(zero)*>(memory.arrays[call.number]) + token * n, n);
        });
      }
      case VectorOp::kEmbed: {
        const at::Tensor& table = weights_[call.number];
        const auto row = static_cast<int64_t>(*call.a.in(scratch));
        TORCH_CHECK(0 <= row && row < table.size(0), "there is no row ", row, " of ", table.size(0), " embeddings");
        return with_dtype(table.scalar_type(), [&](auto zero) {
          widen_row(static_cast<const decltype(zero)*>(table.const_data_ptr()) + row * n, out, n);
        });
      }
      case VectorOp::kCopy: return compute(call, scratch, [](Lanes a, Lanes) { return a; });
      case VectorOp::kAdd: return compute(call, scratch, [](Lanes a, Lanes b) { return a + b; });
      case VectorOp::kSub: return compute(call, scratch, [](Lanes a, Lanes b) { return a - b; });
      case VectorOp::kMul: return compute(call, scratch, [](Lanes a, Lanes b) { return a * b; });
      case VectorOp::kDiv: return compute(call, scratch, [](Lanes a, Lanes b) { return a / b; });
      case VectorOp::kMaximum: return compute(call, scratch, [](Lanes a, Lanes b) { return a < b ? b : a; });
      case VectorOp::kMinimum: return compute(call, scratch, [](Lanes a, Lanes b) { return a > b ? b : a; });
      case VectorOp::kNeg: return compute(call, scratch, [](Lanes a, Lanes) { return -a; });
      case VectorOp::kAbs: return compute(call, scratch, [](Lanes a, Lanes) { return (Lanes)((Words)a & 0x7fffffffu); });
      case VectorOp::kSqrt: return compute(call, scratch, [](Lanes a, Lanes) { return sqrt_lanes(a); });
      case VectorOp::kRsqrt: return compute(call, scratch, [](Lanes a, Lanes) { return 1.0f / sqrt_lanes(a); });
      case VectorOp::kPow: return compute(call, scratch, [](Lanes a, Lanes b) { return each(a, b, power); });
      case VectorOp::kExp: return compute(call, scratch, [](Lanes a, Lanes) { return exp_lanes(a); });
      case VectorOp::kSin: return compute(call, scratch, [](Lanes a, Lanes b) { return each(a, b, sine); });
      case VectorOp::kCos: return compute(call, scratch, [](Lanes a, Lanes b) { return each(a, b, cosine); });
      case VectorOp::kTanh: return compute(call, scratch, [](Lanes a, Lanes) { return tanh_lanes(a); });
      case VectorOp::kSigmoid: return compute(call, scratch, [](Lanes a, Lanes) { return 1.0f / (1.0f + exp_lanes(-a)); });
      case VectorOp::kSilu: return compute(call, scratch, [](Lanes a, Lanes) { return silu_lanes(a); });
      case VectorOp::kRelu: return compute(call, scratch, [](Lanes a, Lanes) { return a < 0.0f ? Lanes{} : a; });
      case VectorOp::kSoftplus: return compute(call, scratch, [](Lanes a, Lanes) { return softplus_lanes(a); });
      case VectorOp::kGelu: return compute(call, scratch, [](Lanes a, Lanes) { return gelu_lanes(a); });
      case VectorOp::kGeluTanh: return compute(call, scratch, [](Lanes a, Lanes) { return gelu_tanh_lanes(a); });
      case VectorOp::kSum:
      case VectorOp::kMean:
        if (call.sizes[1] >= kLanes && stride != 1 && call.a.strides[1] == 1 && call.out.strides[1] == 1)
          return sum_columns(call, scratch);
        return for_rows(call, scratch, [&](float* to, const float* a, const float*) {
          const float sum = sum_row(a, stride, n);
          *to = round_number(call.op == VectorOp::kMean ? sum / static_cast<float>(n) : sum, call.rounding);
        });
      case VectorOp::kSoftmax:
        return for_rows(call, scratch, [&](float* to, const float* a, const float*) {
          softmax_row(to, a, stride, n, call.rounding);
        });
      case VectorOp::kTopk: {
        float* places = out + call.sizes[0] * call.sizes[1] * call.number;
        return for_rows(call, scratch, [&](float* to, const float* a, const float*) {
          topk_row(to, places + (to - out), a, stride, n, call.number);
        });
      }
      case VectorOp::kFloor: return compute(call, scratch, [](Lanes a, Lanes b) { return each(a, b, floor_of); });
      case VectorOp::kLog: return compute(call, scratch, [](Lanes a, Lanes b) { return each(a, b, logarithm); });
      case VectorOp::kGreater: return compute(call, scratch, [](Lanes a, Lanes b) { return a > b ? one : Lanes{}; });
      case VectorOp::kUnequal: return compute(call, scratch, [](Lanes a, Lanes b) { return a != b ? one : Lanes{}; });
      case VectorOp::kScatter:  // the other numbers of `to` stay
        return for_rows(call, scratch, [&](float* to, const float* a, const float* b) {
          const int64_t step = call.out.strides[2];
          for (int64_t i = 0; i < n; ++i) to[static_cast<int64_t>(b[i * call.b.strides[2]]) * step] = a[i * stride];
        });
      case VectorOp::kSelect:
        for (int64_t i = 0; i < call.sizes[0]; ++i)
          for (int64_t j = 0; j < call.sizes[1]; ++j)
            for (int64_t k = 0; k < n; ++k) {
              const auto at = [&](const Operand& of) { return i * of.strides[0] + j * of.strides[1] + k * of.strides[2]; };
              const Operand& chosen = call.a.in(scratch)[at(call.a)] != 0.0f ? call.b : call.c;
              out[at(call.out)] = round_number(chosen.in(scratch)[at(chosen)], call.rounding);
            }
        return;
      case VectorOp::kAddArrays:
        return compute_group(call, memory, [&](auto rounding, auto* to, const auto& row, auto of) {
          add_row<rounding>(to, row(call.a, of), row(call.b, of), n);
        });
      case VectorOp::kRmsNorm:
        return compute_group(call, memory, [&](auto rounding, auto* to, const auto& row, auto of) {
          rms_norm_row<rounding>(to, row(call.a, of), row(call.b, float{}), call.b.strides[2], n, numbers_[call.number],
                                 call.rounds_within);
        });
      case VectorOp::kLayerNorm:
        return compute_group(call, memory, [&](auto rounding, auto* to, const auto& row, auto of) {
          const float* bias = call.c.constant ? row(call.c, float{}) : nullptr;
          layer_norm_row<rounding>(to, row(call.a, of), row(call.b, float{}), bias, n, numbers_[call.number]);
        });
      case VectorOp::kRotary:
        return compute_group(call, memory, [&](auto rounding, auto* to, const auto& row, auto of) {
          rotate_row<rounding>(to, row(call.a, of), row(call.b, of), row(call.c, of), n);
        });
      case VectorOp::kGateSilu: return gate(call, memory, silu_lanes);
      case VectorOp::kGateGelu: return gate(call, memory, gelu_lanes);
      case VectorOp::kGateGeluTanh: return gate(call, memory, gelu_tanh_lanes);
      case VectorOp::kGather:
        return for_rows(call, scratch, [&](float* to, const float* a, const float* b) {
          for (int64_t i = 0; i < n; ++i) to[i] = a[static_cast<int64_t>(b[i * call.b.strides[2]]) * stride];
        });
    }
  }

  MaybeTensor weight(int64_t number) const { return number < 0 ? MaybeTensor() : MaybeTensor(weights_.at(number)); }

  at::Tensor run_kernel(const Stage& stage, const std::vector<at::Tensor>& arrays) const {
    const std::vector<int64_t>& s = stage.settings;
    const auto in = [&](size_t i) -> const at::Tensor& { return arrays[stage.inputs.at(i)]; };
    switch (stage.kernel) {
      case kLinear: return call_linear(in(0), weights_.at(s.at(0)), weight(s.at(1)), s.at(2), s.at(3));
      case kQuantizedLinear:
        return call_quantized_linear(in(0), weights_.at(s.at(0)), weight(s.at(1)), s.at(2), s.at(3), s.at(4));
      case kExpertsLinear:
        return call_experts_linear(in(0), weights_.at(s.at(0)), in(1), s.at(1), s.at(2), s.at(3));
      case kPagedAttention: {
        // A token's heads lie side by side in a row of the array, maybe among others.
        const auto heads = [&](size_t i) {
          const int64_t *of = s.data() + 7 + 4 * i, num_heads = of[0], width = of[1], offset = of[2], row = of[3];
          return in(i).as_strided({1, num_heads, in(i).numel() / row, width}, {0, width, row, 1}, offset);
        };
        const MaybeTensor scales = stage.inputs.size() > 8 ? MaybeTensor(in(8)) : std::nullopt;
        at::Tensor output = call_paged_attention(heads(0), heads(1), heads(2), in(3), in(4), in(5), in(6), in(7),
                                                 scales_.at(s.at(0)), s.at(1), s.at(2), scales, weight(s.at(3)),
                                                 scales_.at(s.at(4)), s.at(5), weight(s.at(6)));
        output.unsafeGetTensorImpl()->set_sizes_contiguous({output.size(0), output.size(1) * output.size(2)});
        return output;
      }
      case kAllReduce: return call_all_reduce(in(0));
      case kGatherColumns: return call_gather_columns(in(0), s.at(0));
      case kOwnColumns: return call_own_columns(in(0), s.at(0));
      case kOwnEmbeddings: return call_own_embeddings(in(0), weights_.at(s.at(0)));
      case kQuantizedRows: return call_quantized_rows(in(0), weights_.at(s.at(0)), s.at(1), s.at(2), s.at(3));
      case kShortConv:
        return call_short_conv(in(0), weights_.at(s.at(0)), weight(s.at(1)), in(1), in(2), in(3), in(4));
      case kLinearAttention: {
        const size_t n = stage.inputs.size();  // 9 with `beta`, 8 without
        at::Tensor output =
            call_linear_attention(in(0), in(1), in(2), in(3), n > 8 ? MaybeTensor(in(4)) : std::nullopt, in(n - 4),
                                  in(n - 3), in(n - 2), in(n - 1), s.at(1), scales_.at(s.at(0)), s.at(2));
        output.unsafeGetTensorImpl()->set_sizes_contiguous({in(n - 3).numel(), output.numel() / in(n - 3).numel()});
        return output;
      }
      case kSelectiveScan:
        return call_selective_scan(in(0), in(1), in(2), in(3), weights_.at(s.at(0)), in(4), in(5), in(6), in(7), s.at(1));
      default: TORCH_CHECK(false, "a token program names a kernel that is not there: ", stage.kernel);
    }
  }

  std::vector<int64_t> code_, outputs_;
  size_t at_ = 0;
  std::vector<float> numbers_;
  std::vector<double> scales_;
  std::vector<at::Tensor> weights_, widened_;
  std::vector<Stage> stages_;
  int64_t num_inputs_ = 0, num_arrays_ = 0;
};

}  // namespace
