#pragma once

#include <filesystem>
#include <string>
#include <string_view>

#include "bonfire/base/api.h"
#include "bonfire/schedule/schedule.h"
#include "bonfire/schedule/timeline.h"

// Tables as text: one line a rank, cells with spaces between them.
//
//   # two stages, two microbatches
//   rank 0: 0F0 0F1  .  0B0 -   .  0B1 -   0U
//   rank 1:  .  1F0 1B0 -   1F1 1B1 -   1U
//
// '.' is a tick of waiting and '-' one more tick of the cell before: for the eye only, a reader ignores them. A rank that
// comes again goes on. Without 'rank N:' every line is the next rank.
namespace bonfire::schedule {

// Throws ConfigError with `name` and the line where the text is no table. Whether the table makes sense is for validate().
BONFIRE_API Schedule parse_table(std::string_view text, const std::string& name);
BONFIRE_API Schedule read_table(const std::filesystem::path& file);

// Cells in order, in columns.
BONFIRE_API std::string table_text(const Schedule& schedule);

struct TextOptions {
  int width = 0;  // characters of a line, after which the table goes on below; 0: no limit
};
// Cells in time, a column a second. REQUIRES: `timeline` is of `schedule`, and all its times are whole.
BONFIRE_API std::string table_text(const Schedule& schedule, const Timeline& timeline, TextOptions options = {});

// The neighbourhood of a cell, which is set in brackets.
BONFIRE_API std::string marked_table(const Schedule& schedule, Position cell);

}  // namespace bonfire::schedule
