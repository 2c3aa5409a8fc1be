# Checks the default of HVD_CONTRACTS, EXPECTED (1 or 0), in a build of type CMAKE_BUILD_TYPE.
set(CMAKE_INSTALL_LIBDIR lib)
include(${OPTIONS})
if((HVD_CONTRACTS AND NOT EXPECTED) OR (EXPECTED AND NOT HVD_CONTRACTS))
  message(FATAL_ERROR "HVD_CONTRACTS is ${HVD_CONTRACTS} in a build of type '${CMAKE_BUILD_TYPE}', expected ${EXPECTED}")
endif()
