# Compiler settings shared by every target of the project: hvd_configure_target(TARGET).
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
# Programs run from the build tree without LD_LIBRARY_PATH, and installed ones find the library beside them.
set(CMAKE_INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR};$ORIGIN")
if(NOT SKBUILD)  # a wheel names no folder of this machine
  set(CMAKE_INSTALL_RPATH_USE_LINK_PATH ON)
endif()

find_package(Threads REQUIRED)

# A function that others can see may be replaced by another library's function of that name. GCC therefore does not inline it even within its
# file, and a call from another file goes through the PLT: an operation that finds the caches cold took a third longer. No library replaces
# ours, so GCC gets -fno-semantic-interposition (Clang assumes it), and the linker an option of
# hvd_call_own_functions_directly(LIBRARY).
function(hvd_call_own_functions_directly library)
  target_link_options(${library} PRIVATE LINKER:-Bsymbolic-functions)
endfunction()

add_compile_options($<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fno-semantic-interposition>)

# Clang reports a field or function that is used without its lock (core/base/mutex.h). The folders with annotations have it in
# hvd_folder_options.
set(hvd_lock_warnings $<$<CXX_COMPILER_ID:Clang>:-Wthread-safety>)

add_compile_definitions(HVD_CONTRACTS=$<BOOL:${HVD_CONTRACTS}>)

if(HVD_SANITIZE)
  # Clang takes the streams of libstdc++ for objects of another type.
  add_compile_options(-fsanitize=${HVD_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all $<$<CXX_COMPILER_ID:Clang>:-fno-sanitize=vptr>)
  add_link_options(-fsanitize=${HVD_SANITIZE})
endif()

# hvd_configure_target(TARGET): warnings, and what the folder has put into hvd_folder_options (core: HVD_CORE_OPTIONS, test: HVD_TEST_OPTIONS).
function(hvd_configure_target target)
  set(options -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Wimplicit-fallthrough
              $<$<BOOL:${HVD_WARNINGS_AS_ERRORS}>:-Werror>)
  # When it optimises, GCC 12 takes sums of std::string for overlapping copies (GCC bug 105651), and an empty std::optional for one that is read.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
    list(APPEND options -Wno-restrict -Wno-maybe-uninitialized)
  endif()
  list(APPEND options ${hvd_folder_options})
  # nvcc passes generated code to the C++ compiler, which would warn about it.
  set(cuda_warnings $<$<BOOL:${HVD_WARNINGS_AS_ERRORS}>:-Werror=all-warnings>)
  target_compile_options(${target} PRIVATE "$<$<NOT:$<COMPILE_LANGUAGE:CUDA>>:${options}>" "$<$<COMPILE_LANGUAGE:CUDA>:${cuda_warnings}>")
endfunction()
