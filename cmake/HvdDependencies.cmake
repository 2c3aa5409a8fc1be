# Finds everything outside the standard library. third_party/README.md says which package each one is.
find_package(spdlog REQUIRED)
if(HVD_WITH_MPI)
  set(MPI_CXX_SKIP_MPICXX ON)
  find_package(MPI REQUIRED COMPONENTS C)
endif()

if(HVD_WITH_TORCH)
  if(NOT CMAKE_PREFIX_PATH AND NOT Torch_DIR AND NOT DEFINED ENV{CMAKE_PREFIX_PATH} AND NOT DEFINED ENV{Torch_DIR})
    # third_party/setup.sh puts LibTorch into a virtual environment inside the checkout.
    file(GLOB hvd_venv_torch "${PROJECT_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch/share/cmake/Torch")
    if(hvd_venv_torch)
      list(GET hvd_venv_torch 0 Torch_DIR)
      set(Torch_DIR "${Torch_DIR}" CACHE PATH "Folder of TorchConfig.cmake")
    endif()
  elseif(DEFINED ENV{Torch_DIR} AND NOT Torch_DIR)
    set(Torch_DIR "$ENV{Torch_DIR}" CACHE PATH "Folder of TorchConfig.cmake")
  endif()
  find_package(Torch QUIET)
  if(NOT Torch_FOUND)
    message(FATAL_ERROR "hvd: LibTorch was not found. Run 'bash third_party/setup.sh', or name one with "
                        "-DCMAKE_PREFIX_PATH=DIR or -DTorch_DIR=DIR, or leave the adapter out with -DHVD_WITH_TORCH=OFF.")
  endif()
endif()

if(HVD_BUILD_TESTS)
  find_package(GTest REQUIRED)
endif()
