// AMX: registers that are tiles of 16 rows of 64 bytes, and a product of two of them in one instruction. Of 32 neighbouring
// products of bfloat16 it (TDPBF16PS) adds up the even ones and the odd ones apart, then both, then what was there (Intel 64
// and IA-32 Architectures Software Developer's Manual).

#pragma once

constexpr int kFewRows = 4;  // tiles of so few rows are mostly empty

#if defined(__AMX_TILE__)
#include <immintrin.h>
#include <pmmintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

constexpr int64_t kTileHeight = 16;

// Rows of each tile, and bytes per row.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  constexpr void set(int tile, int64_t num_rows, int64_t num_bytes) { rows[tile] = num_rows, row_bytes[tile] = num_bytes; }
  void use() const {
    asm volatile("" : : "r"(this) : "memory");  // the instructions' operands do not tell what they read
    _tile_loadconfig(this);
  }
};

// A thread's tile registers, from their first use to this object's end. Shapes are set only when they change, because setting
// them takes time. Each use is a barrier for the compiler: the instructions' operands do not tell it what they read.
class TileRegisters {
 public:
  void use(const TileShapes& shapes) {
    if (std::memcmp(&shapes, &set_, sizeof shapes) != 0) (set_ = shapes).use();
    asm volatile("" : : : "memory");
  }
  TileRegisters() = default;
  TileRegisters(const TileRegisters&) = delete;
  ~TileRegisters() { _tile_release(); }

 private:
  TileShapes set_;  // no rows: nothing is set
};

// Tiles take denormal numbers for 0. While this object lives, so does everything else that its thread computes.
class FlushDenormals {
 public:
  FlushDenormals() { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON); }
  ~FlushDenormals() { _mm_setcsr(before_); }
  FlushDenormals(const FlushDenormals&) = delete;

 private:
  const unsigned before_ = _mm_getcsr();
};

// Linux lets a process use tiles when it has asked to.
inline bool may_use_tiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}
#endif
