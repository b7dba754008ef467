// As much of torch as the kernels use, for processors that torch is not installed for.

#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <vector>

#define TORCH_CHECK(holds, message, ...) \
  if (!(holds)) std::puts(message), std::exit(1)

namespace at {

using namespace c10;

struct Sizes {
  std::vector<int64_t> all;
  std::vector<int64_t> vec() const { return all; }
};

struct TensorOptions {
  ScalarType type;
  TensorOptions dtype(ScalarType other) const { return {other}; }
};

// Contiguous, unless strides are given.
struct Tensor {
  std::vector<int64_t> shape, strides;
  ScalarType type;
  std::shared_ptr<std::vector<int64_t>> memory;

  Tensor() : Tensor({0}, kFloat) {}
  Tensor(std::vector<int64_t> shape, ScalarType type) : shape(shape), strides(shape.size(), 1), type(type) {
    for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
    memory = std::make_shared<std::vector<int64_t>>(numel());  // of 8 bytes, enough for any type
  }

  int64_t dim() const { return shape.size(); }
  int64_t size(int64_t i) const { return shape[i < 0 ? i + dim() : i]; }
  int64_t stride(int64_t i) const { return strides[i]; }
  Sizes sizes() const { return {shape}; }
  ScalarType scalar_type() const { return type; }
  int64_t element_size() const {
    constexpr int64_t bytes[] = {4, 2, 2, 8, 1, 1, 1, 4, 8, 2};  // as ScalarType lists them
    return bytes[type];
  }
  TensorOptions options() const { return {type}; }
  Tensor contiguous() const { return *this; }
  bool is_contiguous() const { return true; }
  int64_t numel() const {
    int64_t product = 1;
    for (int64_t size : shape) product *= size;
    return product;
  }
  const void* const_data_ptr() const { return memory->data(); }
  void* mutable_data_ptr() const { return memory->data(); }
  template <typename T>
  const T* const_data_ptr() const { return reinterpret_cast<const T*>(memory->data()); }
  template <typename T>
  T* mutable_data_ptr() const { return reinterpret_cast<T*>(memory->data()); }

  // The same bytes.
  Tensor view(ScalarType other) const {
    Tensor tensor = *this;
    tensor.type = other;
    tensor.shape.back() = shape.back() * element_size() / tensor.element_size();
    return tensor;
  }
  // Of floats and halves.
  Tensor to(ScalarType other) const {
    Tensor tensor(shape, other);
    for (int64_t i = 0; i < numel(); ++i) {
      const float number = type == kHalf ? float(const_data_ptr<Half>()[i]) : const_data_ptr<float>()[i];
      if (other == kHalf) tensor.mutable_data_ptr<Half>()[i] = number;
      else tensor.mutable_data_ptr<float>()[i] = number;
    }
    return tensor;
  }
};

using TensorList = std::vector<Tensor>;

inline Tensor zeros(std::vector<int64_t> shape, TensorOptions options) { return {shape, options.type}; }
inline Tensor empty(std::vector<int64_t> shape, TensorOptions options) { return {shape, options.type}; }

}  // namespace at
