// Calls of the library's own kernels, each of which looks its name up only once.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

namespace {

using MaybeTensor = std::optional<at::Tensor>;

template <typename... Arguments>
auto operation(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<at::Tensor(Arguments...)>();
}

inline at::Tensor call_linear(const at::Tensor& x, const at::Tensor& packed, const MaybeTensor& bias, int64_t num_outputs,
                              int64_t arithmetic) {
  static const auto linear =
      operation<const at::Tensor&, const at::Tensor&, const MaybeTensor&, int64_t, int64_t>("specdec::linear");
  return linear.call(x, packed, bias, num_outputs, arithmetic);
}

inline at::Tensor call_experts_linear(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& chosen,
                                      int64_t num_outputs, int64_t arithmetic, int64_t token_bits) {
  static const auto experts =
      operation<const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, int64_t, int64_t>(
          "specdec::experts_linear");
  return experts.call(x, packed, chosen, num_outputs, arithmetic, token_bits);
}

inline at::Tensor call_quantized_linear(const at::Tensor& x, const at::Tensor& packed, const MaybeTensor& bias,
                                        int64_t num_outputs, int64_t arithmetic, int64_t token_bits) {
  static const auto linear =
      operation<const at::Tensor&, const at::Tensor&, const MaybeTensor&, int64_t, int64_t, int64_t>(
          "specdec::quantized_linear");
  return linear.call(x, packed, bias, num_outputs, arithmetic, token_bits);
}

inline at::Tensor call_paged_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                       const at::Tensor& key_pool, const at::Tensor& value_pool,
                                       const at::Tensor& positions, const at::Tensor& slots,
                                       const at::Tensor& block_tables, double scale, int64_t window, int64_t arithmetic,
                                       const MaybeTensor& scales, const MaybeTensor& sinks, double softcap,
                                       int64_t attention_chunk, const MaybeTensor& slopes) {
  static const auto attention =
      operation<const at::Tensor&, const at::Tensor&, const at::Tensor&, at::Tensor, at::Tensor, const at::Tensor&,
                const at::Tensor&, const at::Tensor&, double, int64_t, int64_t, MaybeTensor, const MaybeTensor&, double,
                int64_t, const MaybeTensor&>("specdec::paged_attention");
  return attention.call(query, key, value, key_pool, value_pool, positions, slots, block_tables, scale, window,
                        arithmetic, scales, sinks, softcap, attention_chunk, slopes);
}

inline at::Tensor call_short_conv(const at::Tensor& inputs, const at::Tensor& weight, const MaybeTensor& bias,
                                  const at::Tensor& pool, const at::Tensor& positions, const at::Tensor& slots,
                                  const at::Tensor& state_slots) {
  static const auto conv =
      operation<const at::Tensor&, const at::Tensor&, const MaybeTensor&, at::Tensor, const at::Tensor&,
                const at::Tensor&, const at::Tensor&>("specdec::short_conv");
  return conv.call(inputs, weight, bias, pool, positions, slots, state_slots);
}

inline at::Tensor call_linear_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                        const at::Tensor& decay, const MaybeTensor& beta, const at::Tensor& pool,
                                        const at::Tensor& positions, const at::Tensor& slots,
                                        const at::Tensor& state_slots, int64_t chunk_size, double scale,
                                        bool normalizes) {
  static const auto attention =
      operation<const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const MaybeTensor&,
                at::Tensor, const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, double, bool>(
          "specdec::linear_attention");
  return attention.call(query, key, value, decay, beta, pool, positions, slots, state_slots, chunk_size, scale,
                        normalizes);
}

inline at::Tensor call_selective_scan(const at::Tensor& added, const at::Tensor& steps, const at::Tensor& keys,
                                      const at::Tensor& queries, const at::Tensor& decays, const at::Tensor& pool,
                                      const at::Tensor& positions, const at::Tensor& slots,
                                      const at::Tensor& state_slots, int64_t chunk_size) {
  static const auto scan =
      operation<const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, at::Tensor,
                const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t>("specdec::selective_scan");
  return scan.call(added, steps, keys, queries, decays, pool, positions, slots, state_slots, chunk_size);
}

inline at::Tensor call_all_reduce(const at::Tensor& x) {
  static const auto all_reduce = operation<const at::Tensor&>("specdec::all_reduce");
  return all_reduce.call(x);
}

inline at::Tensor call_gather_columns(const at::Tensor& x, int64_t size) {
  static const auto gather_columns = operation<const at::Tensor&, int64_t>("specdec::gather_columns");
  return gather_columns.call(x, size);
}

inline at::Tensor call_own_columns(const at::Tensor& x, int64_t size) {
  static const auto own_columns = operation<const at::Tensor&, int64_t>("specdec::own_columns");
  return own_columns.call(x, size);
}

inline at::Tensor call_own_embeddings(const at::Tensor& ids, const at::Tensor& weight) {
  static const auto own_embeddings = operation<const at::Tensor&, const at::Tensor&>("specdec::own_embeddings");
  return own_embeddings.call(ids, weight);
}

inline at::Tensor call_quantized_rows(const at::Tensor& ids, const at::Tensor& packed, int64_t num_rows,
                                      int64_t num_inputs, int64_t dtype) {
  static const auto rows =
      operation<const at::Tensor&, const at::Tensor&, int64_t, int64_t, at::ScalarType>("specdec::quantized_rows");
  return rows.call(ids, packed, num_rows, num_inputs, static_cast<at::ScalarType>(dtype));
}

}  // namespace
