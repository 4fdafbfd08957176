# Sets BONFIRE_CUDA_FOUND where the CUDA plug-in can be built: nvcc of LibTorch's CUDA, the headers of NCCL and of CUDA's
# libraries (their folders in BONFIRE_CUDA_HEADERS), and LibTorch's CUDA part. No GPU is needed. Where something is missing,
# one line says what.
set(BONFIRE_CUDA_MAJOR 13)
set(BONFIRE_CUDA_FOUND FALSE)

find_program(BONFIRE_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
set(nvcc_major 0)
if(BONFIRE_NVCC)
  execute_process(COMMAND ${BONFIRE_NVCC} --version OUTPUT_VARIABLE nvcc_words ERROR_QUIET)
  if(nvcc_words MATCHES "release ([0-9]+)\\.")
    set(nvcc_major ${CMAKE_MATCH_1})
  endif()
  # Beside nvcc, as CUDA's own packages have it; with pip's wheels, as beside a Python torch and in our cache; the system's.
  get_filename_component(nvcc_file "${BONFIRE_NVCC}" REALPATH)
  get_filename_component(toolkit "${nvcc_file}/../.." ABSOLUTE)
  file(GLOB wheels "${BONFIRE_LIBTORCH}/../nvidia/*/include")
  # The last two are what torch's own headers ask for.
  set(BONFIRE_CUDA_HEADERS "")
  set(missing_header "")
  foreach(header IN ITEMS nccl cublasLt cusparse cusolverDn)
    find_path(BONFIRE_INCLUDE_${header} ${header}.h
      HINTS "${toolkit}/include" "${toolkit}/targets/x86_64-linux/include" ${wheels})
    if(BONFIRE_INCLUDE_${header})
      list(APPEND BONFIRE_CUDA_HEADERS ${BONFIRE_INCLUDE_${header}})
    else()
      set(missing_header ${header}.h)
    endif()
  endforeach()
  list(REMOVE_DUPLICATES BONFIRE_CUDA_HEADERS)
endif()

set(missing "")
if(NOT BONFIRE_NVCC)
  set(missing "no nvcc")
elseif(NOT nvcc_major EQUAL BONFIRE_CUDA_MAJOR)
  set(missing "${BONFIRE_NVCC} is of CUDA ${nvcc_major}, LibTorch of CUDA ${BONFIRE_CUDA_MAJOR}")
elseif(NOT EXISTS "${BONFIRE_LIBTORCH}/lib/libtorch_cuda.so")
  set(missing "no libtorch_cuda.so in ${BONFIRE_LIBTORCH}/lib")
elseif(missing_header)
  set(missing "no ${missing_header} in CUDA's folder, the system's or LibTorch's (for nccl.h Debian package libnccl-dev)")
endif()

if(missing)
  message(STATUS "The CUDA plug-in is not built: ${missing}")
else()
  set(CMAKE_CUDA_COMPILER ${BONFIRE_NVCC} CACHE FILEPATH "nvcc")
  # Hopper's own code, and PTX from which the driver makes that of any GPU since Ampere.
  set(CMAKE_CUDA_ARCHITECTURES 90-real 80-virtual CACHE STRING "GPUs to make code for")
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  set(BONFIRE_CUDA_FOUND TRUE)
endif()
