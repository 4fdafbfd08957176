#include "bonfire/comm/wait_policy.h"

namespace bonfire {

bool spin_shortly(Variables& variables) {
  for (const char* chosen : {"OMP_WAIT_POLICY", spin_variable})
    if (const auto found = variables.find(chosen); found != variables.end() && !found->second.empty()) return false;
  variables[spin_variable] = short_spin;
  return true;
}

}  // namespace bonfire
