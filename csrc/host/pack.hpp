// Strided tensors into contiguous memory and back, byte for byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace nccl_stream {

// One side of a copy is contiguous in the order of the dimensions (packed), the other has strides of its own.
struct CopyDim {
    std::int64_t size;
    std::int64_t strided;  // bytes from one index to the next on the strided side
    std::int64_t packed;   // the same on the packed side
};

// How to copy one tensor, in as few dimensions as its strides allow, outermost first.
class CopyPlan {
  public:
    // `shape` and `strides` (in elements) have `ndim` entries; `itemsize` and `strided` are in bytes and an address.
    CopyPlan(void* strided, std::size_t itemsize, std::size_t ndim, const std::int64_t* shape,
             const std::int64_t* strides);

    std::uint64_t nbytes() const { return nbytes_; }

    // What parts() can divide: elements of the outermost dimension, or bytes where all is one run.
    std::int64_t length() const { return dims_.empty() ? static_cast<std::int64_t>(unit_) : dims_.front().size; }

    // The part [begin, end) of length(), from the tensor to `packed`, or from `packed` into the tensor.
    void pack(void* packed, std::int64_t begin, std::int64_t end) const;
    void unpack(const void* packed, std::int64_t begin, std::int64_t end) const;

  private:
    template <bool kPack>
    void run(char* packed, std::int64_t begin, std::int64_t end) const;

    char* strided_;
    std::size_t unit_ = 0;        // bytes that lie together on both sides
    bool is_transposed_ = false;  // the last but one dimension is the denser one on the strided side
    std::uint64_t nbytes_ = 0;
    std::vector<CopyDim> dims_;
};

// A tensor and the place of its contiguous copy.
struct Placement {
    CopyPlan plan;
    std::uint64_t offset;  // in bytes, from the start of the slot
};

// Whether all places lie inside a slot of `slot_nbytes` and none overlaps another. Otherwise `index` is one that does
// not.
bool places_are_sound(const std::vector<Placement>& placements, std::uint64_t slot_nbytes, std::size_t& index);

// Copies all tensors into the slot, or out of it; places must be sound. `threads` as in copy_bytes().
void pack(const std::vector<Placement>& placements, void* slot, int threads = 1);
void unpack(const std::vector<Placement>& placements, const void* slot, int threads = 1);

}  // namespace nccl_stream
