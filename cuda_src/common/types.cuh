// Element and integer types. No CUDA header is needed: 16-bit floats travel as bits, isa/ converts them.
#pragma once

namespace hfc {

using int64 = long long;
using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;

struct fp16 {
  uint16 bits;
};
struct bf16 {
  uint16 bits;
};
struct alignas(16) Chunk {  // the unit of every vectorised copy and of the shared-memory swizzle
  uint32 words[4];
};

static_assert(sizeof(fp16) == 2 && sizeof(bf16) == 2 && sizeof(Chunk) == 16);

constexpr int kWarpSize = 32;
constexpr float kLn2 = 0.693147180559945309f;
constexpr float kFloatMax = 3.402823466e38f;

template <typename A, typename B>
struct is_same {
  static constexpr bool value = false;
};
template <typename A>
struct is_same<A, A> {
  static constexpr bool value = true;
};

}  // namespace hfc
