# What `cmake --install` leaves behind: the library, the plug-in, the command, the headers, and what find_package reads.
include(CMakePackageConfigHelpers)
set(config_folder ${CMAKE_INSTALL_LIBDIR}/cmake/Bonfire)

install(TARGETS bonfire EXPORT BonfireTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
foreach(target IN ITEMS bonfire_cuda bonfire_cli)
  if(TARGET ${target})
    install(TARGETS ${target}
      LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
      RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  endif()
endforeach()
install(EXPORT BonfireTargets NAMESPACE Bonfire:: DESTINATION ${config_folder})

install(DIRECTORY bonfire DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.h" PATTERN cuda EXCLUDE)
install(FILES ${PROJECT_BINARY_DIR}/include/bonfire/base/version.h
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/bonfire/base)

configure_package_config_file(cmake/BonfireConfig.cmake.in ${PROJECT_BINARY_DIR}/BonfireConfig.cmake
  INSTALL_DESTINATION ${config_folder})
# Before 1.0 a new minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/BonfireConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/BonfireConfig.cmake
  ${PROJECT_BINARY_DIR}/BonfireConfigVersion.cmake
  cmake/LibTorch.cmake
  DESTINATION ${config_folder})
