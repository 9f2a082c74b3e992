#include "cuda/devices.hpp"

#include <cuda_runtime_api.h>

namespace nccl_stream {

int device_count() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

}  // namespace nccl_stream
