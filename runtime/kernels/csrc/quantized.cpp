// Linear layers whose weights are in few bits: packed once, then multiplied by tokens as they are, or by tokens that are
// rounded to 8 or 16 bits.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <vector>

#include "integer_products.h"
#include "packed_weight.h"
#include "rows.h"

namespace {

// Columns of a kernel's group: a weight's group, or its largest divisor of at most kMostColumns.
int64_t kernel_group_size(int64_t group_size) {
  int64_t columns = std::min(group_size, kMostColumns);
  while (group_size % columns) --columns;
  return columns;
}

at::Tensor pack(const at::Tensor& values, const at::Tensor& scales, const std::optional<at::Tensor>& zeros,
                const std::optional<at::Tensor>& offsets, const std::optional<at::Tensor>& book) {
  const bool is_int4 = values.scalar_type() == at::kByte, has_halves = scales.scalar_type() == at::kHalf;
  const int64_t N = values.size(0), K = values.size(1) * (is_int4 ? 2 : 1), group_size = K / scales.size(1);
  const int64_t columns = kernel_group_size(group_size), padded = (columns + 3) / 4 * 4, groups = K / columns;
  const int64_t value_bytes = padded * kPanel / (is_int4 ? 2 : 1), scale_bytes = has_halves ? 2 : 4;
  const int64_t book_bytes = book ? PackedWeight::kBookSize : 0;
  const int64_t bytes = book_bytes + value_bytes + kPanel * (scale_bytes + (zeros || offsets ? 4 : 0));
  at::Tensor packed = at::zeros({(N + kPanel - 1) / kPanel, groups, bytes}, values.options().dtype(at::kByte));
  const at::Tensor rows = values.contiguous(), floats = scales.to(at::kFloat).contiguous();
  const at::Tensor halves = scales.to(at::kHalf).contiguous();
  const at::Tensor zero_points = zeros ? zeros->to(at::kFloat).contiguous() : at::Tensor();
  const at::Tensor others = offsets ? offsets->to(at::kFloat).contiguous() : at::Tensor();
  const auto* source = static_cast<const uint8_t*>(rows.const_data_ptr());
  const float half = is_int4 ? 8 : 128;
  share_range(N, 32, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t lane = n % kPanel, place = n * scales.size(1) + g * columns / group_size;
        uint8_t* to = packed.mutable_data_ptr<uint8_t>() + (n / kPanel * groups + g) * bytes + book_bytes;
        for (int64_t i = 0; i < columns; ++i) {
          const int64_t k = g * columns + i;
          if (is_int4) {
            const uint8_t number = source[(n * K + k) / 2] >> (k % 2 * 4) & 15;
            to[i / 4 * 2 * kPanel + lane % kLanes * 4 + i % 4] |= number << (lane < kLanes ? 0 : 4);
          } else {
            const uint8_t turned = values.scalar_type() == at::kChar ? 128 : 0;
            to[i / 4 * 4 * kPanel + lane * 4 + i % 4] = source[n * K + k] ^ turned;
          }
        }
        const float scale = floats.const_data_ptr<float>()[place];
        if (has_halves) std::memcpy(to + value_bytes + 2 * lane, halves.const_data_ptr<at::Half>() + place, 2);
        else std::memcpy(to + value_bytes + 4 * lane, &scale, 4);
        if (zeros || offsets) {
          const float offset = offsets ? others.const_data_ptr<float>()[place] + scale * half
                                       : -scale * zero_points.const_data_ptr<float>()[place];
          std::memcpy(to + bytes - book_bytes - 4 * (kPanel - lane), &offset, 4);
        }
      }
  });
  if (!book) return packed.view(values.scalar_type());
  const auto* numbers = book->const_data_ptr<int8_t>();
  for (int64_t group = 0; group < packed.size(0) * groups; ++group)
    for (int64_t i = 0; i < book_bytes; ++i)
      packed.mutable_data_ptr<uint8_t>()[group * bytes + i] = static_cast<uint8_t>(numbers[i]) ^ 128;
  return packed.view(at::kShort);
}

// Packs a weight in the form of runtime/checkpoint/quant/weight.py.
at::Tensor pack_quantized(const at::Tensor& values, const at::Tensor& scales, const std::optional<at::Tensor>& zeros,
                          const std::optional<at::Tensor>& offsets) {
  return pack(values, scales, zeros, offsets, {});
}

at::Tensor pack_codes(const at::Tensor& values, const at::Tensor& scales, const at::Tensor& book) {
  TORCH_CHECK(book.numel() == PackedWeight::kBookSize && book.is_contiguous(), "a code book has 16 numbers");
  return pack(values, scales, {}, {}, book);
}

at::Tensor quantized_linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                            int64_t num_outputs, int64_t arithmetic, int64_t token_bits) {
  const int64_t K = x.size(-1), M = x.numel() / K;
  const PackedWeight weight(packed, K);
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = num_outputs;
  at::Tensor out = at::empty(shape, x.options()), rows = x.contiguous();
  const void* start = bias ? bias->const_data_ptr() : nullptr;
  multiply_rows(weight, {x.scalar_type(), rows.const_data_ptr(), start, out.mutable_data_ptr(), M, K, num_outputs},
                arithmetic, token_bits);
  return out;
}

// Rows (ids..., K) of a weight without offsets, dequantized to the dtype: embeddings that are tied to a quantized output layer.
at::Tensor quantized_rows(const at::Tensor& ids, const at::Tensor& packed, int64_t num_rows, int64_t K, at::ScalarType dtype) {
  const PackedWeight weight(packed, K);
  TORCH_CHECK(!weight.has_offsets && (weight.kind == PackedWeight::kInt8 || weight.kind == PackedWeight::kInt4),
              "rows are of integers without offsets");
  const bool is_int4 = weight.kind == PackedWeight::kInt4;
  std::vector<int64_t> shape = ids.sizes().vec();
  shape.push_back(K);
  at::Tensor out = at::empty(shape, ids.options().dtype(dtype));
  const at::Tensor tokens = ids.contiguous();
  const int64_t* id = tokens.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < tokens.numel(); ++i)
    TORCH_CHECK(0 <= id[i] && id[i] < num_rows, "there is no row ", id[i], " of ", num_rows, " embeddings");
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    share_range(tokens.numel(), 8, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t lane = id[i] % kPanel, shift = lane < kLanes ? 0 : 4;
        T* to = out.mutable_data_ptr<T>() + i * K;
        for (int64_t g = 0; g < weight.groups; ++g) {
          const uint8_t* group = weight.group(id[i] / kPanel, g);
          Lanes scales[2];
          weight.scales(group, scales);
          const float scale = scales[lane / kLanes][lane % kLanes];
          for (int64_t k = 0; k < weight.size; ++k) {
            const int number = is_int4 ? group[k / 4 * 2 * kPanel + lane % kLanes * 4 + k % 4] >> shift & 15
                                       : group[k / 4 * 4 * kPanel + lane * 4 + k % 4];
            *to++ = static_cast<T>(scale * static_cast<float>(number - weight.half()));
          }
        }
      }
    });
  });
  return out;
}

}  // namespace

namespace {

// Calls use(digits, kind) with constants.
template <typename Use>
void with_integers(const PackedWeight& weight, int64_t token_bits, const Use& use) {
  dispatch_rows<2>(token_bits / 8, [&](auto digits) {
    with_kind(weight.kind, [&](auto kind) {
      if constexpr (kind() != PackedWeight::kE4m3) use(digits, kind);
    });
  });
}

}  // namespace

void multiply_rows(const PackedWeight& weight, const Rows& rows, int64_t arithmetic, int64_t token_bits) {
  if (weight.takes_integers(token_bits))
    return with_integers(weight, token_bits, [&](auto digits, auto kind) { multiply_integers<digits(), kind()>(rows, weight); });
  with_type(rows.dtype, [&](auto zero) {
    using T = decltype(zero);
    const int64_t multiple = arithmetic == kTiles ? 32 : 4;  // columns of a tile, of a word
    const GroupedTokens<T> grouped(rows.tokens_as<T>(), rows.count, multiple, weight);
    const WidenedWeight widened{weight, grouped.columns, grouped.totals.data()};
    multiply_in(arithmetic, grouped.numbers.data(), widened, rows.bias_as<T>(), rows.out_as<T>(), rows.count,
                weight.groups * grouped.columns, rows.outputs);
  });
}

void multiply_few_rows(const PackedWeight& weight, std::span<const FewRows> parts, const Rows& rows, int64_t token_bits) {
  with_integers(weight, token_bits, [&](auto digits, auto kind) { multiply_few_integers<digits(), kind()>(rows, weight, parts); });
}

TORCH_LIBRARY_FRAGMENT(specdec, library) {
  library.def("pack_quantized(Tensor values, Tensor scales, Tensor? zeros, Tensor? offsets) -> Tensor");
  library.def("pack_codes(Tensor values, Tensor scales, Tensor book) -> Tensor");
  library.def(
      "quantized_linear(Tensor x, Tensor packed, Tensor? bias, int num_outputs, int arithmetic, int token_bits) -> Tensor");
  library.def("quantized_rows(Tensor ids, Tensor packed, int num_rows, int num_inputs, ScalarType dtype) -> Tensor");
}
TORCH_LIBRARY_IMPL(specdec, CPU, library) {
  library.impl("pack_quantized", pack_quantized);
  library.impl("pack_codes", pack_codes);
  library.impl("quantized_linear", quantized_linear);
  library.impl("quantized_rows", quantized_rows);
}
