# Finds NCCL: in NCCL_HOME (variable or environment), in the wheel that third_party/setup.sh puts into .venv, or on the system.
# Gives the target NCCL::NCCL and NCCL_VERSION (major.minor.patch); NCCL_ROOT works as for every package.
file(GLOB _nccl_wheel "${CMAKE_CURRENT_LIST_DIR}/../.venv/lib/python3*/site-packages/nvidia/nccl")

find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${NCCL_HOME} ENV NCCL_HOME ${_nccl_wheel} PATH_SUFFIXES include)
# The wheel holds the versioned name only.
find_library(NCCL_LIBRARY NAMES libnccl.so.2 nccl HINTS ${NCCL_HOME} ENV NCCL_HOME ${_nccl_wheel} PATH_SUFFIXES lib lib64)
unset(_nccl_wheel)

if(NCCL_INCLUDE_DIR AND EXISTS "${NCCL_INCLUDE_DIR}/nccl.h")
  set(NCCL_VERSION "")
  foreach(_nccl_part MAJOR MINOR PATCH)
    file(STRINGS "${NCCL_INCLUDE_DIR}/nccl.h" _nccl_line REGEX "^#define NCCL_${_nccl_part} +[0-9]+" LIMIT_COUNT 1)
    string(REGEX REPLACE ".* " "" _nccl_number "${_nccl_line}")
    list(APPEND NCCL_VERSION "${_nccl_number}")
  endforeach()
  list(JOIN NCCL_VERSION "." NCCL_VERSION)
  unset(_nccl_part)
  unset(_nccl_line)
  unset(_nccl_number)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(NCCL REQUIRED_VARS NCCL_LIBRARY NCCL_INCLUDE_DIR VERSION_VAR NCCL_VERSION)
mark_as_advanced(NCCL_INCLUDE_DIR NCCL_LIBRARY)

if(NCCL_FOUND AND NOT TARGET NCCL::NCCL)
  add_library(NCCL::NCCL SHARED IMPORTED)
  set_target_properties(NCCL::NCCL PROPERTIES IMPORTED_LOCATION "${NCCL_LIBRARY}"
                        INTERFACE_INCLUDE_DIRECTORIES "${NCCL_INCLUDE_DIR}")
endif()
