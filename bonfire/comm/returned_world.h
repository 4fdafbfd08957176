#pragma once

#include <c10/util/intrusive_ptr.h>

#include "bonfire/base/api.h"
#include "bonfire/comm/world.h"

namespace bonfire {

// The World of a rank that was lost and is back, alone: it knows its place and has the store, by which it can connect to
// some of the others in Worlds of their own. The connections that all ranks made together are gone: its group() is that of
// all ranks, and every collective of it throws. Not collective.
BONFIRE_API World returned_world(c10::intrusive_ptr<c10d::Store> store, int rank, int size, WorldOptions options);

}  // namespace bonfire
