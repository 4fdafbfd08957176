#include "bonfire/train/tensorboard.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>

#include <fmt/format.h>

namespace bonfire {
namespace {

constexpr auto crc_table = [] {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78U : 0U);
    table[byte] = crc;
  }
  return table;
}();

std::uint32_t masked_crc(std::string_view data) { return std::rotr(crc32c(data), 15) + 0xa282ead8U; }

template <class T>
void put_fixed(std::string& out, T value) {
  char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));
  out.append(bytes, sizeof(T));
}

void put_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  out += static_cast<char>(value);
}

// Protocol buffers' ways to write a field.
enum Wire { varint = 0, fixed64 = 1, length = 2, fixed32 = 5 };

void put_key(std::string& out, int field, Wire wire) { put_varint(out, static_cast<std::uint64_t>(field << 3 | wire)); }

void put_bytes(std::string& out, int field, std::string_view bytes) {
  put_key(out, field, length);
  put_varint(out, bytes.size());
  out += bytes;
}

double wall_time() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

// Event { 1: double wall_time, 2: int64 step, ... }
std::string event_of(std::int64_t step) {
  std::string event;
  put_key(event, 1, fixed64);
  put_fixed(event, wall_time());
  if (step != 0) {
    put_key(event, 2, varint);
    put_varint(event, static_cast<std::uint64_t>(step));
  }
  return event;
}

// A file that nobody else has, named as TensorBoard looks for it.
std::filesystem::path create_file(const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  char host[256] = "localhost";
  ::gethostname(host, sizeof(host) - 1);
  const auto seconds = static_cast<std::int64_t>(wall_time());
  for (int number = 0;; ++number) {
    auto path = folder / fmt::format("events.out.tfevents.{:010}.{}.{}.{}", seconds, host, ::getpid(), number);
    const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (file < 0 && errno == EEXIST) continue;
    if (file < 0) throw WriteError(path, errno);
    ::close(file);
    return path;
  }
}

}  // namespace

std::uint32_t crc32c(std::string_view data) {
  std::uint32_t crc = ~0U;
  for (const unsigned char byte : data) crc = crc_table[(crc ^ byte) & 0xff] ^ crc >> 8;
  return ~crc;
}

EventWriter::EventWriter(const std::filesystem::path& folder)
    : path_(create_file(folder)), file_(path_, RunFile::Start::at_end) {
  auto event = event_of(0);
  put_bytes(event, 3, "brain.Event:2");
  write_record(event);
}

void EventWriter::scalars(std::int64_t step, std::initializer_list<Scalar> values) {
  std::string summary;
  for (const auto& [tag, value] : values) {
    std::string entry;
    put_bytes(entry, 1, tag);
    put_key(entry, 2, fixed32);
    put_fixed(entry, static_cast<float>(value));
    put_bytes(summary, 1, entry);
  }
  auto event = event_of(step);
  put_bytes(event, 5, summary);
  write_record(event);
}

void EventWriter::write_record(std::string_view event) {
  std::string length, record;
  put_fixed(length, std::uint64_t{event.size()});
  record += length;
  put_fixed(record, masked_crc(length));
  record += event;
  put_fixed(record, masked_crc(event));
  file_.append(record);
}

}  // namespace bonfire
