#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bonfire/base/api.h"
#include "bonfire/base/error.h"

namespace bonfire {

// The system would not write a file: "'FILE': cannot be written: No space left on device".
class BONFIRE_API WriteError : public Error {
 public:
  // `during` names the step, where it was not the writing itself.
  WriteError(const std::filesystem::path& file, int reason, std::string_view during = {});
  int reason() const { return reason_; }  // errno

 private:
  int reason_;
};

// What a file survives that has its name: the end of this process, or that of the machine too, which takes as long as the
// disk takes to hold all of it.
enum class Survives { process, power_loss };

// A file that has its name only once it is whole: until then it is NAME.PID.N.part in the same folder, so whoever reads NAME
// finds all of the new content, all of the old, or no file. One thread at a time may use it.
class BONFIRE_API OutputFile {
 public:
  // Throws WriteError, also where the name is taken by something that is not a plain file.
  explicit OutputFile(std::filesystem::path path);
  ~OutputFile();  // without commit(), what was written goes
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::uint64_t size() const { return size_; }

  // Small pieces are collected; large ones are handed to the system as they are. Throw WriteError, and then nothing is left
  // of the file.
  void append(std::span<const std::byte> bytes);
  void append(std::string_view text) { append(std::as_bytes(std::span(text))); }
  // In place of what was appended there. REQUIRES: offset + bytes <= size().
  void overwrite(std::uint64_t offset, std::span<const std::byte> bytes);

  // Gives the file its name; nothing may follow. Throws WriteError: what had the name before then still has it, unless only
  // the folder could not be flushed, which the message says.
  void commit(Survives survives = Survives::power_loss);

 private:
  void flush();
  void discard() noexcept;
  template <class Step>
  void attempt(const Step& step);

  std::filesystem::path path_, part_;
  int file_ = -1;
  std::uint64_t size_ = 0;
  std::vector<std::byte> collected_;  // the last bytes of size_, not yet handed over
};

// A small file, in one call.
BONFIRE_API void write_file(const std::filesystem::path& file, std::string_view content,
                            Survives survives = Survives::power_loss);

// The name that a file, or a folder, has been given survives a loss of power. Throws WriteError.
BONFIRE_API void flush_folder(const std::filesystem::path& path);

// Writes all of the bytes at a place of an open file. Throws WriteError, which names `path`.
BONFIRE_API void write_at(int file, const std::filesystem::path& path, std::uint64_t offset,
                          std::span<const std::byte> bytes);

}  // namespace bonfire
