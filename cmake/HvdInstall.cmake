# Installs hvd::core, its headers and the package files. frameworks/torch adds hvd::torch to the export set hvdTorchTargets,
# launcher/ adds hvdrun.
include(CMakePackageConfigHelpers)

set(hvd_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/hvd)

install(TARGETS hvd_core EXPORT hvdTargets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
foreach(module hvd_mpi_module hvd_mpi_abi_module)
  if(TARGET ${module})
    install(TARGETS ${module} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  endif()
endforeach()
# Its static library can rarely be linked into a shared one.
if(HVD_BUNDLE_DEPENDENCIES AND TARGET yaml-cpp)
  install(FILES $<TARGET_FILE:yaml-cpp> DESTINATION ${CMAKE_INSTALL_LIBDIR} RENAME $<TARGET_SONAME_FILE_NAME:yaml-cpp>)
endif()
install(DIRECTORY ${PROJECT_SOURCE_DIR}/core/include/hvd DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.h"
        # The interface of backends, which no program can bring along.
        PATTERN "backend.h" EXCLUDE PATTERN "topology.h" EXCLUDE)
install(EXPORT hvdTargets NAMESPACE hvd:: DESTINATION ${hvd_package_dir})
if(TARGET hvd_torch)
  install(EXPORT hvdTorchTargets NAMESPACE hvd:: DESTINATION ${hvd_package_dir})
endif()

# The folder of TorchConfig.cmake where hvdConfig.cmake looks last.
set(hvd_torch_hint "${Torch_DIR}")
if(SKBUILD)
  set(hvd_torch_hint "\${CMAKE_CURRENT_LIST_DIR}/../../../../torch/share/cmake/Torch")
endif()
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/hvdConfig.cmake.in ${PROJECT_BINARY_DIR}/hvdConfig.cmake
                              INSTALL_DESTINATION ${hvd_package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/hvdConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/hvdConfig.cmake ${PROJECT_BINARY_DIR}/hvdConfigVersion.cmake
        DESTINATION ${hvd_package_dir})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
