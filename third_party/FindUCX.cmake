# Finds the headers of UCX; the library is loaded when a program runs. Gives UCX_FOUND, UCX_INCLUDE_DIR and UCX_VERSION; UCX_ROOT works as
# for every package. UCX brings a CMake package too, but not where a system has packaged it without.
find_path(UCX_INCLUDE_DIR ucp/api/ucp.h)

if(UCX_INCLUDE_DIR)
  set(UCX_VERSION "")
  foreach(_ucx_part MAJOR MINOR)
    file(STRINGS "${UCX_INCLUDE_DIR}/ucp/api/ucp_version.h" _ucx_line REGEX "^#define UCP_API_${_ucx_part} +[0-9]+" LIMIT_COUNT 1)
    string(REGEX REPLACE ".* " "" _ucx_number "${_ucx_line}")
    list(APPEND UCX_VERSION "${_ucx_number}")
  endforeach()
  list(JOIN UCX_VERSION "." UCX_VERSION)
  unset(_ucx_part)
  unset(_ucx_line)
  unset(_ucx_number)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(UCX REQUIRED_VARS UCX_INCLUDE_DIR VERSION_VAR UCX_VERSION)
mark_as_advanced(UCX_INCLUDE_DIR)
