// The dtypes that the kernels know.

#pragma once

namespace c10 {

enum ScalarType { kFloat, kBFloat16, kHalf, kLong, kChar, kByte, kFloat8_e4m3fn, kInt, kDouble, kShort };

}  // namespace c10
