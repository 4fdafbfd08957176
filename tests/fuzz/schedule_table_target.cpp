// A schedule's table: what is accepted is the same when it is printed and read again, and can be checked.
#include <string_view>

#include "bonfire/base/error.h"
#include "bonfire/schedule/text.h"
#include "bonfire/schedule/validate.h"
#include "tests/fuzz/require.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace bonfire::schedule;
  try {
    const auto table = parse_table({reinterpret_cast<const char*>(data), size}, "a.txt");
    const auto text = table_text(table);
    REQUIRE(table_text(parse_table(text, "again")) == text);
    find_problem(table);
  } catch (const bonfire::Error&) {
  }
  return 0;
}
