# hvd_add_test(NAME n SOURCES a.cpp ... [LIBRARIES ...] LABELS l ... [TIMEOUT s])
#   One GoogleTest executable, run in one process.
# hvd_add_mpi_test(NAME n SOURCES a.cpp ... [LIBRARIES ...] LABELS l ... RANKS 1 2 ... [TIMEOUT s])
#   The same executable under mpirun, one ctest entry per number of ranks: n.np2, n.np3, ...
include(GoogleTest)

function(_hvd_test_executable)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "NAME" "SOURCES;LIBRARIES")
  add_executable(${arg_NAME} ${arg_SOURCES})
  hvd_configure_target(${arg_NAME})
  target_include_directories(${arg_NAME} PRIVATE ${PROJECT_SOURCE_DIR}/core ${PROJECT_SOURCE_DIR}/test)
  target_link_libraries(${arg_NAME} PRIVATE ${arg_LIBRARIES} hvd_test_support GTest::gmock GTest::gtest)
endfunction()

function(hvd_add_test)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "NAME;TIMEOUT" "SOURCES;LIBRARIES;LABELS")
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 60)
  endif()
  _hvd_test_executable(NAME ${arg_NAME} SOURCES ${arg_SOURCES} LIBRARIES ${arg_LIBRARIES})
  add_test(NAME ${arg_NAME} COMMAND ${arg_NAME})
  set_tests_properties(${arg_NAME} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT}
                       ENVIRONMENT "HVD_TEST_WATCHDOG_SECONDS=${arg_TIMEOUT}")
endfunction()

function(hvd_add_mpi_test)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "NAME;TIMEOUT" "SOURCES;LIBRARIES;LABELS;RANKS")
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  _hvd_test_executable(NAME ${arg_NAME} SOURCES ${arg_SOURCES} LIBRARIES ${arg_LIBRARIES})
  # Two mpiruns of one user that start at once race for their session folder, hence the lock.
  foreach(ranks IN LISTS arg_RANKS)
    set(test ${arg_NAME}.np${ranks})
    add_test(NAME ${test} COMMAND ${MPIEXEC_EXECUTABLE} --oversubscribe --bind-to none -np ${ranks}
             $<TARGET_FILE:${arg_NAME}>)
    set_tests_properties(${test} PROPERTIES LABELS "${arg_LABELS}" TIMEOUT ${arg_TIMEOUT} PROCESSORS 2
      RESOURCE_LOCK mpirun
      ENVIRONMENT "OMPI_ALLOW_RUN_AS_ROOT=1;OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;OMP_NUM_THREADS=1;HVD_TEST_WATCHDOG_SECONDS=${arg_TIMEOUT}")
  endforeach()
endfunction()
