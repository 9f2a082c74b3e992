// What each part of the library adds to the Python module.
#pragma once

#include <nanobind/nanobind.h>

void bind_host(nanobind::module_& module);
void bind_cuda(nanobind::module_& module);  // in csrc/cuda/bind_cuda.cpp
