// The Python module nccl_stream._native. Pointers, sizes and streams are integers; whoever calls keeps the memory
// alive.
#include "bindings/bindings.hpp"

NB_MODULE(_native, module) {
    nanobind::set_leak_warnings(false);  // tensors over our memory may well live until the interpreter ends
    module.attr("api_version") = 4;  // _core.py refuses a module built from other sources than its own
    bind_host(module);
    bind_cuda(module);
#ifdef NCCL_STREAM_WITH_CUDA
    module.attr("cuda_compiled") = true;
#else
    module.attr("cuda_compiled") = false;
#endif
}
