// The Python module nccl_stream._native. Pointers, sizes and streams are integers; whoever calls keeps the memory
// alive.
#include "bindings/bindings.hpp"

NB_MODULE(_native, module) {
    module.attr("api_version") = 1;  // staging.py refuses a module built from other sources than its own
    bind_host(module);
#ifdef NCCL_STREAM_WITH_CUDA
    module.attr("cuda_compiled") = true;
    bind_cuda(module);
#else
    module.attr("cuda_compiled") = false;
#endif
}
