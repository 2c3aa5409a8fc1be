# hvd_add_test(NAME n SOURCES a.cpp ... [LIBRARIES ...] LABELS l ... [TIMEOUT s] [ARGUMENTS ...])
#   One GoogleTest executable, run in one process with these arguments.
# hvd_add_mpi_test(NAME n SOURCES a.cpp ... [LIBRARIES ...] LABELS l ... RANKS 1 2 ... [LONG_RANKS 3 ...] [TIMEOUT s])
#   The same executable under mpirun, one ctest entry per number of ranks: n.np2, n.np3, ... Those of LONG_RANKS have the label `long`
#   instead of the others: test/run.sh runs them with --long.
# hvd_add_mpirun(NAME t RANKS n COMMAND program [arguments...] LABELS l ... [TIMEOUT s] [ENVIRONMENT V=...])
#   A further entry for a program that is there.
# hvd_add_abi_run(NAME t [RANKS n] [LINKED] COMMAND program [arguments...] LABELS l ... [TIMEOUT s] [ENVIRONMENT V=...])
#   The same under an MPI with the ABI of MPI 5 (test/mpi/any_mpi.sh), with the label `abi`; skipped where there is none. Without RANKS the
#   program starts the ranks itself. LINKED: the ranks are linked with libmpi_abi.so.1. test/mpi/abi.sh runs all with this label.
# hvd_set_test_environment(t V=...)
#   Adds to a test's environment. Every test that starts an mpirun, itself or through hvdrun, needs a call: it brings what mpirun needs.
# hvd_label_target(target l ...)
#   tests-l builds the target. The functions above do it for theirs.
include(GoogleTest)

function(hvd_label_target target)
  foreach(label IN LISTS ARGN)
    if(NOT TARGET tests-${label})
      add_custom_target(tests-${label})
    endif()
    add_dependencies(tests-${label} ${target})
  endforeach()
endfunction()

function(_hvd_test_executable)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "NAME" "SOURCES;LIBRARIES;LABELS")
  add_executable(${arg_NAME} ${arg_SOURCES})
  hvd_configure_target(${arg_NAME})
  target_include_directories(${arg_NAME} PRIVATE ${PROJECT_SOURCE_DIR}/core ${PROJECT_SOURCE_DIR}/test)
  target_link_libraries(${arg_NAME} PRIVATE ${arg_LIBRARIES} hvd_test_support GTest::gmock GTest::gtest)
  hvd_label_target(${arg_NAME} ${arg_LABELS})
  # Most of a test's compile time is spent in the headers of others. GCC takes precompiled ones only where all options are equal.
  if(hvd_torch IN_LIST arg_LIBRARIES)
    hvd_reuse_torch_headers(${arg_NAME})
  elseif(NOT arg_NAME STREQUAL support_test AND "${hvd_folder_options}" STREQUAL "${HVD_TEST_OPTIONS}")
    target_precompile_headers(${arg_NAME} REUSE_FROM support_test)
  endif()
endfunction()

function(hvd_set_test_environment test)
  # Two mpiruns of one user that start at once race for their session folder, so each test has a folder of its own.
  set(folder ${PROJECT_BINARY_DIR}/mpi/${test})
  file(MAKE_DIRECTORY ${folder})
  set_property(TEST ${test} APPEND PROPERTY ENVIRONMENT OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
               OMPI_MCA_orte_tmpdir_base=${folder} OMP_NUM_THREADS=1 ${ARGN})
endfunction()

function(hvd_add_test)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "NAME;TIMEOUT" "SOURCES;LIBRARIES;LABELS;ARGUMENTS")
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 60)
  endif()
  if(HVD_SANITIZE)  # sanitized code takes several times as long
    math(EXPR arg_TIMEOUT "3 * ${arg_TIMEOUT}")
  endif()
  _hvd_test_executable(NAME ${arg_NAME} SOURCES ${arg_SOURCES} LIBRARIES ${arg_LIBRARIES} LABELS ${arg_LABELS})
  add_test(NAME ${arg_NAME} COMMAND ${arg_NAME} ${arg_ARGUMENTS})
  set_tests_properties(${arg_NAME} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT}
                       ENVIRONMENT "HVD_TEST_WATCHDOG_SECONDS=${arg_TIMEOUT}")
endfunction()

# The same test once more, with NCCL's calls made by hvd's thread (support/nccl_launch.h). Further arguments go to the program.
function(hvd_add_launcher_run name)
  get_test_property(${name} LABELS labels)
  get_test_property(${name} TIMEOUT timeout)
  add_test(NAME ${name}.launcher COMMAND ${name} ${ARGN})
  set_tests_properties(${name}.launcher PROPERTIES LABELS "${labels}" TIMEOUT ${timeout}
                       ENVIRONMENT "HVD_TEST_NCCL_LAUNCH=thread;HVD_TEST_WATCHDOG_SECONDS=${timeout}")
endfunction()

function(hvd_add_mpirun)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "NAME;RANKS;TIMEOUT" "COMMAND;LABELS;ENVIRONMENT")
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  list(POP_FRONT arg_COMMAND program)
  add_test(NAME ${arg_NAME} COMMAND ${MPIEXEC_EXECUTABLE} --oversubscribe --bind-to none -np ${arg_RANKS} $<TARGET_FILE:${program}> ${arg_COMMAND})
  set_tests_properties(${arg_NAME} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT})
  hvd_set_test_environment(${arg_NAME} HVD_TEST_WATCHDOG_SECONDS=${arg_TIMEOUT} ${arg_ENVIRONMENT})
endfunction()

function(hvd_add_abi_run)
  cmake_parse_arguments(PARSE_ARGV 0 arg "LINKED" "NAME;RANKS;TIMEOUT" "COMMAND;LABELS;ENVIRONMENT")
  if(NOT HVD_HAVE_MPI_ABI)
    return()
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  set(options "")
  if(arg_LINKED)
    list(APPEND options -l)
  endif()
  if(arg_RANKS)
    list(APPEND options -n ${arg_RANKS})
  endif()
  list(POP_FRONT arg_COMMAND program)
  add_test(NAME ${arg_NAME} COMMAND bash ${PROJECT_SOURCE_DIR}/test/mpi/any_mpi.sh ${options} $<TARGET_FILE:${program}> ${arg_COMMAND})
  set_tests_properties(${arg_NAME} PROPERTIES LABELS "abi;${arg_LABELS}" TIMEOUT ${arg_TIMEOUT} SKIP_RETURN_CODE 77
                       ENVIRONMENT "HVD_TEST_WATCHDOG_SECONDS=${arg_TIMEOUT};OMP_NUM_THREADS=1;${arg_ENVIRONMENT}")
  hvd_label_target(${program} ${arg_LABELS})
endfunction()

function(hvd_add_mpi_test)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "NAME;TIMEOUT" "SOURCES;LIBRARIES;LABELS;RANKS;LONG_RANKS")
  _hvd_test_executable(NAME ${arg_NAME} SOURCES ${arg_SOURCES} LIBRARIES ${arg_LIBRARIES} LABELS ${arg_LABELS})
  foreach(ranks IN LISTS arg_RANKS)
    hvd_add_mpirun(NAME ${arg_NAME}.np${ranks} RANKS ${ranks} COMMAND ${arg_NAME} LABELS ${arg_LABELS} TIMEOUT ${arg_TIMEOUT})
  endforeach()
  foreach(ranks IN LISTS arg_LONG_RANKS)
    hvd_add_mpirun(NAME ${arg_NAME}.np${ranks} RANKS ${ranks} COMMAND ${arg_NAME} LABELS long TIMEOUT ${arg_TIMEOUT})
  endforeach()
endfunction()
