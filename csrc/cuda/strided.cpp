#include "cuda/strided.hpp"

#include <algorithm>
#include <stdexcept>

namespace nccl_stream {

namespace {

struct Dim {
    std::int64_t size;
    std::int64_t stride;  // bytes
};

// Drops dimensions of one element and merges neighbours that one stride describes.
std::vector<Dim> merged(const std::vector<Dim>& dims) {
    std::vector<Dim> result;
    for (const Dim& dim : dims) {
        if (dim.size == 1) continue;
        if (!result.empty() && result.back().stride == dim.size * dim.stride) {
            result.back() = {result.back().size * dim.size, dim.stride};
        } else {
            result.push_back(dim);
        }
    }
    return result;
}

}  // namespace

StridedPiece plan_piece(const TensorLayout& tensor, void* flat) {
    if (tensor.itemsize == 0 || tensor.sizes.size() != tensor.strides.size()) {
        throw std::invalid_argument("a tensor has an item size, and as many strides as sizes");
    }
    std::vector<Dim> dims;
    std::uint64_t nbytes = tensor.itemsize;
    for (std::size_t n = 0; n < tensor.sizes.size(); ++n) {
        if (tensor.sizes[n] < 0 || tensor.strides[n] < 0) throw std::invalid_argument("negative size or stride");
        nbytes *= static_cast<std::uint64_t>(tensor.sizes[n]);
        dims.push_back({tensor.sizes[n], tensor.strides[n] * static_cast<std::int64_t>(tensor.itemsize)});
    }
    StridedPiece piece{};
    piece.strided = static_cast<char*>(tensor.address);
    piece.flat = static_cast<char*>(flat);
    piece.unit_bytes = 1;
    if (nbytes == 0) return piece;

    // In bytes an element is one more dimension, and the innermost stride is always one.
    dims.push_back({static_cast<std::int64_t>(tensor.itemsize), 1});
    dims = merged(dims);
    if (dims.empty() || dims.back().stride != 1) dims.push_back({1, 1});
    std::uint64_t common = reinterpret_cast<std::uintptr_t>(piece.strided) |
                           reinterpret_cast<std::uintptr_t>(piece.flat) |
                           static_cast<std::uint64_t>(dims.back().size) | kMaxUnitBytes;
    for (std::size_t n = 0; n + 1 < dims.size(); ++n) common |= static_cast<std::uint64_t>(dims[n].stride);
    const std::uint64_t unit = common & (~common + 1);  // the largest power of two that divides them all
    dims.back() = {dims.back().size / static_cast<std::int64_t>(unit), static_cast<std::int64_t>(unit)};
    dims = merged(dims);

    if (dims.size() > kMaxDims) throw std::invalid_argument("too many dimensions that do not merge");
    piece.unit_bytes = static_cast<std::uint32_t>(unit);
    piece.num_units = nbytes / unit;
    piece.num_dims = static_cast<std::uint32_t>(dims.size());
    for (std::size_t n = 0; n < dims.size(); ++n) {
        piece.sizes[n] = dims[n].size;
        piece.strides[n] = dims[n].stride;
    }
    return piece;
}

}  // namespace nccl_stream
