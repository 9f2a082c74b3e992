#include "cuda/crc_math.hpp"
#include "cuda/cuda_kernels.hpp"
#include "cuda/strided.hpp"

namespace nccl_stream {

namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kMaxBlocks = 1024;  // per piece; a few per SM on every GPU there is

unsigned blocks_for(std::uint64_t items) {
    const std::uint64_t blocks = (items + kThreads - 1) / kThreads;
    return static_cast<unsigned>(blocks < 1 ? 1 : blocks < kMaxBlocks ? blocks : kMaxBlocks);
}

template <bool gather>
__global__ void __launch_bounds__(kThreads) move_strided(const __grid_constant__ StridedBatch batch) {
    const StridedPiece& piece = batch.pieces[blockIdx.y];
    const std::uint64_t step = std::uint64_t{gridDim.x} * kThreads;
    for (std::uint64_t index = std::uint64_t{blockIdx.x} * kThreads + threadIdx.x; index < piece.num_units;
         index += step) {
        move_one(piece, index, gather);
    }
}

__global__ void __launch_bounds__(kThreads)
    sum_segments(const unsigned char* data, std::size_t nbytes, std::size_t num_segments,
                 const __grid_constant__ CrcPowers powers, std::uint32_t* raw) {
    static_assert(kThreads == 256, "each thread makes one entry of the table");
    __shared__ std::uint32_t table[256];
    table[threadIdx.x] = crc_table_entry(threadIdx.x);
    __syncthreads();
    std::uint32_t share = 0;
    const std::size_t step = std::size_t{gridDim.x} * kThreads;
    for (std::size_t index = std::size_t{blockIdx.x} * kThreads + threadIdx.x; index < num_segments; index += step) {
        share ^= crc_share(data, nbytes, index, table, powers);
    }
    if (share != 0) atomicXor(raw, share);
}

}  // namespace

cudaError_t find_kernels() {
    const void* const kernels[] = {reinterpret_cast<const void*>(&move_strided<true>),
                                   reinterpret_cast<const void*>(&move_strided<false>),
                                   reinterpret_cast<const void*>(&sum_segments)};
    cudaFuncAttributes attributes;
    for (const void* kernel : kernels) {
        const cudaError_t code = cudaFuncGetAttributes(&attributes, kernel);
        if (code != cudaSuccess) return code;
    }
    return cudaSuccess;
}

cudaError_t run_strided(const StridedBatch& batch, bool gather, cudaStream_t stream) {
    std::uint64_t longest = 0;
    for (int n = 0; n < batch.count; ++n) {
        longest = batch.pieces[n].num_units > longest ? batch.pieces[n].num_units : longest;
    }
    if (longest == 0) return cudaSuccess;
    const dim3 grid(blocks_for(longest), static_cast<unsigned>(batch.count));
    if (gather) {
        move_strided<true><<<grid, kThreads, 0, stream>>>(batch);
    } else {
        move_strided<false><<<grid, kThreads, 0, stream>>>(batch);
    }
    return cudaGetLastError();
}

cudaError_t run_crc32c(const void* data, std::size_t nbytes, std::uint32_t* raw, cudaStream_t stream) {
    const cudaError_t code = cudaMemsetAsync(raw, 0, sizeof(*raw), stream);
    if (code != cudaSuccess || nbytes == 0) return code;
    static const CrcPowers powers = crc_powers();
    const std::size_t num_segments = (nbytes + kCrcSegmentBytes - 1) / kCrcSegmentBytes;
    sum_segments<<<blocks_for(num_segments), kThreads, 0, stream>>>(static_cast<const unsigned char*>(data), nbytes,
                                                                    num_segments, powers, raw);
    return cudaGetLastError();
}

}  // namespace nccl_stream
