// Copying tensors of any strides into a flat region and back, several in one launch. The index arithmetic is plain code
// that runs on the host as well, so that it is tested where there is no GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#ifdef __CUDACC__
#define NCCL_STREAM_ANYWHERE __host__ __device__
#else
#define NCCL_STREAM_ANYWHERE
#endif

namespace nccl_stream {

constexpr int kMaxDims = 8;
constexpr int kMaxPieces = 24;  // a batch is a kernel argument, of which there are 4 KiB
constexpr int kMaxUnitBytes = 16;

// One tensor: where it lies, with its strides, and where its elements lie one after the other.
struct StridedPiece {
    char* strided;
    char* flat;
    std::uint64_t num_units;
    std::uint32_t unit_bytes;  // what one thread moves at once: 1, 2, 4, 8 or 16 bytes, aligned on both sides
    std::uint32_t num_dims;
    std::int64_t sizes[kMaxDims];    // in units, outermost first
    std::int64_t strides[kMaxDims];  // in bytes
};

struct StridedBatch {
    int count = 0;
    StridedPiece pieces[kMaxPieces];
};
static_assert(sizeof(StridedBatch) <= 4096, "must fit into the arguments of a kernel");

// A tensor as the caller describes it; sizes and strides in elements, as torch has them.
struct TensorLayout {
    void* address;
    std::size_t itemsize;
    std::vector<std::int64_t> sizes;
    std::vector<std::int64_t> strides;
};

// The widest way to move a tensor to or from flat. Throws std::invalid_argument for negative sizes or strides, and when
// more than kMaxDims dimensions are left after merging what is contiguous.
StridedPiece plan_piece(const TensorLayout& tensor, void* flat);

struct alignas(kMaxUnitBytes) WideUnit {
    std::uint64_t low, high;
};

template <typename Unit>
NCCL_STREAM_ANYWHERE inline void move_unit(const char* from, char* to) {
    *reinterpret_cast<Unit*>(to) = *reinterpret_cast<const Unit*>(from);
}

// Moves unit number index of a piece: into the flat region when gathering, else out of it.
NCCL_STREAM_ANYWHERE inline void move_one(const StridedPiece& piece, std::uint64_t index, bool gather) {
    std::uint64_t rest = index;
    std::int64_t offset = 0;
    for (int dim = static_cast<int>(piece.num_dims) - 1; dim >= 0; --dim) {
        const auto size = static_cast<std::uint64_t>(piece.sizes[dim]);
        // Division of 32 bits is several times as fast on a GPU.
        const std::uint64_t above = (rest | size) >> 32 == 0
                                        ? static_cast<std::uint32_t>(rest) / static_cast<std::uint32_t>(size)
                                        : rest / size;
        offset += static_cast<std::int64_t>(rest - above * size) * piece.strides[dim];
        rest = above;
    }
    char* const strided = piece.strided + offset;
    char* const flat = piece.flat + index * piece.unit_bytes;
    const char* const from = gather ? strided : flat;
    char* const to = gather ? flat : strided;
    switch (piece.unit_bytes) {
        case 16:
            return move_unit<WideUnit>(from, to);
        case 8:
            return move_unit<std::uint64_t>(from, to);
        case 4:
            return move_unit<std::uint32_t>(from, to);
        case 2:
            return move_unit<std::uint16_t>(from, to);
        default:
            return move_unit<std::uint8_t>(from, to);
    }
}

}  // namespace nccl_stream
