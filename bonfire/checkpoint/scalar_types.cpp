#include "bonfire/checkpoint/scalar_types.h"

#include <array>
#include <utility>

#include "bonfire/base/error.h"

namespace bonfire {
namespace {

constexpr std::array<std::pair<StoredType, at::ScalarType>, 15> pairs{{{StoredType::boolean, at::kBool},
                                                                       {StoredType::u8, at::kByte},
                                                                       {StoredType::i8, at::kChar},
                                                                       {StoredType::f8_e5m2, at::kFloat8_e5m2},
                                                                       {StoredType::f8_e4m3, at::kFloat8_e4m3fn},
                                                                       {StoredType::i16, at::kShort},
                                                                       {StoredType::u16, at::kUInt16},
                                                                       {StoredType::f16, at::kHalf},
                                                                       {StoredType::bf16, at::kBFloat16},
                                                                       {StoredType::i32, at::kInt},
                                                                       {StoredType::u32, at::kUInt32},
                                                                       {StoredType::f32, at::kFloat},
                                                                       {StoredType::f64, at::kDouble},
                                                                       {StoredType::i64, at::kLong},
                                                                       {StoredType::u64, at::kUInt64}}};

}  // namespace

StoredType stored_type(at::ScalarType type) {
  for (const auto& [stored, scalar] : pairs)
    if (scalar == type) return stored;
  fail("tensors of {} cannot be saved; allowed: real numbers, integers and booleans", toString(type));
}

at::ScalarType scalar_type(StoredType type) {
  for (const auto& [stored, scalar] : pairs)
    if (stored == type) return scalar;
  fail("no tensor has stored type {}", static_cast<int>(type));
}

}  // namespace bonfire
