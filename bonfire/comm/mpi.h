#pragma once

// Header-only, so that Bonfire itself does not depend on any MPI: the program that includes this brings its own.
#include <mpi.h>

#include <optional>
#include <string>

#include "bonfire/comm/join.h"
#include "bonfire/comm/socket.h"

namespace bonfire {

// Collective over `communicator`: a World of its ranks, with their numbers. MPI carries only the invitation; collectives run
// over Gloo or NCCL. The communicator is not kept. REQUIRES: MPI_Init was called.
inline World world_from_mpi(MPI_Comm communicator, JoinOptions options = {}) {
  Environment place;
  place.source = LaunchSource::open_mpi;
  MPI_Comm_rank(communicator, &place.rank);
  MPI_Comm_size(communicator, &place.size);

  MPI_Comm machine;
  MPI_Comm_split_type(communicator, MPI_COMM_TYPE_SHARED, place.rank, MPI_INFO_NULL, &machine);
  MPI_Comm_rank(machine, &place.local_rank);
  MPI_Comm_size(machine, &place.local_size);
  // Nodes are numbered in the order of their lowest ranks.
  int first_of_node = place.local_rank == 0 ? 1 : 0;
  MPI_Scan(&first_of_node, &place.node, 1, MPI_INT, MPI_SUM, communicator);
  --place.node;
  MPI_Bcast(&place.node, 1, MPI_INT, 0, machine);
  MPI_Comm_free(&machine);

  int everybody_here = place.local_size == place.size ? 1 : 0;
  std::optional<MeetingPlace> host;
  std::string invitation;
  if (place.rank == 0) {
    host.emplace(everybody_here != 0 ? "127.0.0.1" : address_for_others(host_name()), options.world.log);
    invitation = host->invitation();
  }
  int length = static_cast<int>(invitation.size());
  MPI_Bcast(&length, 1, MPI_INT, 0, communicator);
  invitation.resize(static_cast<std::size_t>(length));
  MPI_Bcast(invitation.data(), length, MPI_CHAR, 0, communicator);
  return world_from_invitation(invitation, place, std::move(options), host ? &*host : nullptr);
}

}  // namespace bonfire
