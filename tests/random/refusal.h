#pragma once

#include <functional>
#include <optional>
#include <stdexcept>
#include <string>

#include "bonfire/comm/world.h"
#include "tests/random/verdict.h"

// How the ranks of a case say what went wrong.
namespace bonfire::cases {

// Numbers that differ, or an error that did not come: never what a case is refused with.
struct Mismatch : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::string first_line(const std::string& text);
// Whether an error says that other ranks did not answer: that is a dead-lock, not a refusal.
bool is_timeout(const std::string& message);

// Runs `body` as so many ranks; each returns what is wrong. The results, one line for each rank that has one, without
// repetitions.
std::string run_and_judge(int ranks, const std::function<std::string(World&)>& body);

// One rank's result: `begin` makes a trainee, whose run() throws a Mismatch where something is wrong.
inline constexpr const char* refused = "refused";
template <class Trainee>
std::string judge(Verdict verdict, const char* what, const std::function<void(std::optional<Trainee>&)>& begin) {
  std::optional<Trainee> trainee;
  try {
    begin(trainee);
  } catch (const std::exception& error) {
    if (verdict != Verdict::works && !is_timeout(error.what())) return refused;
    return std::string(what) + " threw: " + first_line(error.what());
  }
  if (verdict == Verdict::refused) return std::string(what) + " accepted what it must refuse";
  try {
    trainee->run();
  } catch (const Mismatch& wrong) {
    return wrong.what();
  } catch (const std::exception& error) {
    if (verdict == Verdict::either && !is_timeout(error.what())) return refused;
    return "threw: " + first_line(error.what());
  }
  return "";
}

}  // namespace bonfire::cases
