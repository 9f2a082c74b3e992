#include "bindings/bindings.hpp"
#include "cuda/devices.hpp"

void bind_cuda(nanobind::module_& module) {
    module.def("device_count", &nccl_stream::device_count);
}
