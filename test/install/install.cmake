file(REMOVE_RECURSE ${WORK})
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD} --prefix ${WORK}/staging --config "${CONFIG}"
                RESULT_VARIABLE result OUTPUT_QUIET)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "cmake --install failed: ${result}")
endif()
file(RENAME ${WORK}/staging ${PREFIX})

# A path of the build tree in a package file works on this machine and on no other.
file(GLOB_RECURSE package_files ${PREFIX}/*.cmake)
if(NOT package_files)
  message(FATAL_ERROR "no package files were installed")
endif()
foreach(file IN LISTS package_files)
  file(READ ${file} text)
  if(text MATCHES "${BUILD}" OR text MATCHES "${WORK}")
    message(FATAL_ERROR "${file} names the build tree: ${CMAKE_MATCH_0}")
  endif()
endforeach()
