// Linked into a rank program, this stands in front of the library's own: a program built with another Bonfire.
#include "bonfire/comm/rendezvous.h"

std::string bonfire::CheckIn::own_version() { return "bonfire 9.9.9, LibTorch 2.11.0"; }
