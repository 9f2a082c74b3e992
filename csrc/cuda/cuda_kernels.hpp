// The kernels; only the CUDA runtime's seam launches them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace nccl_stream {

struct StridedBatch;

// Whether this build has code of the kernels below for the current device; the error that launching them would give.
cudaError_t find_kernels();
cudaError_t run_strided(const StridedBatch& batch, bool gather, cudaStream_t stream);
cudaError_t run_crc32c(const void* data, std::size_t nbytes, std::uint32_t* raw, cudaStream_t stream);

}  // namespace nccl_stream
