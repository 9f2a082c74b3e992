#pragma once

namespace nccl_stream {

// How many CUDA devices this process sees. Every error (no driver, a driver that is too old, no device) counts as none.
int device_count();

}  // namespace nccl_stream
