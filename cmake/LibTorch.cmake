# Imported targets for the parts of LibTorch that Bonfire uses. `find_package(Torch)` and `libtorch.so` would drag in all
# of CUDA, so a program linked that way does not start on a machine without it; these two need only the CUDA runtime.
#
# REQUIRES: BONFIRE_LIBTORCH names a folder with include/ and lib/.
set(BONFIRE_TORCH_VERSION 2.11.0)

set(torch_version_header "${BONFIRE_LIBTORCH}/include/torch/headeronly/version.h")
if(NOT EXISTS "${torch_version_header}")
  message(FATAL_ERROR
    "BONFIRE_LIBTORCH is '${BONFIRE_LIBTORCH}', which holds no include/torch/headeronly/version.h. "
    "Name the folder of LibTorch ${BONFIRE_TORCH_VERSION} (setup/libtorch.sh fetches it and prints it).")
endif()

file(READ "${torch_version_header}" torch_version_text)
string(REGEX MATCH "define TORCH_VERSION [^\"]*\"([0-9]+\\.[0-9]+\\.[0-9]+)" torch_version_match "${torch_version_text}")
set(torch_version ${CMAKE_MATCH_1})
if(NOT torch_version VERSION_EQUAL BONFIRE_TORCH_VERSION)
  message(FATAL_ERROR
    "LibTorch in '${BONFIRE_LIBTORCH}' is version ${torch_version}; this Bonfire is built against ${BONFIRE_TORCH_VERSION} and no other.")
endif()

function(bonfire_import_torch name library)
  add_library(bonfire_torch::${name} SHARED IMPORTED GLOBAL)
  set_target_properties(bonfire_torch::${name} PROPERTIES IMPORTED_LOCATION "${BONFIRE_LIBTORCH}/lib/${library}")
  target_include_directories(bonfire_torch::${name} SYSTEM INTERFACE
    "${BONFIRE_LIBTORCH}/include" "${BONFIRE_LIBTORCH}/include/torch/csrc/api/include")
endfunction()

bonfire_import_torch(c10 libc10.so)
bonfire_import_torch(torch_cpu libtorch_cpu.so)
target_link_libraries(bonfire_torch::torch_cpu INTERFACE bonfire_torch::c10)
# The two CUDA libraries that torch_cpu needs lie beside it (or in the toolkit); the linker must not ask for their symbols.
target_link_options(bonfire_torch::torch_cpu INTERFACE
  "LINKER:--allow-shlib-undefined" "LINKER:-rpath-link,${BONFIRE_LIBTORCH}/lib")
