#include "bonfire/comm/wait_policy.h"

namespace bonfire {

bool wait_passively(Variables& variables) {
  for (const char* chosen : {wait_policy_variable, "GOMP_SPINCOUNT"})
    if (const auto found = variables.find(chosen); found != variables.end() && !found->second.empty()) return false;
  variables[wait_policy_variable] = "passive";
  return true;
}

}  // namespace bonfire
