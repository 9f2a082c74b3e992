#include "host/pack.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include "host/copy.hpp"
#include "host/parallel.hpp"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace nccl_stream {

namespace {

// Of a transposed tensor this many columns are copied at a time: as many cache lines stay in use until all their
// elements have been read, also where a power-of-two stride maps them to few cache sets.
constexpr std::int64_t kTile = 32;
constexpr std::uint64_t kPartBytes = std::uint64_t{1} << 20;  // how finely work is divided among threads

// Copies `count` units of `unit` bytes. On the packed side they lie one after the other, on the other one `stride`
// bytes apart.
using RowCopy = void (*)(char* packed, char* strided, std::int64_t count, std::int64_t stride, std::size_t unit);

template <bool kPack, std::size_t kUnit>
void copy_row(char* packed, char* strided, std::int64_t count, std::int64_t stride, std::size_t) {
    for (std::int64_t i = 0; i < count; ++i) {
        char* const in_slot = packed + i * static_cast<std::int64_t>(kUnit);
        char* const in_tensor = strided + i * stride;
        std::memcpy(kPack ? in_slot : in_tensor, kPack ? in_tensor : in_slot, kUnit);
    }
}

template <bool kPack>
void copy_runs(char* packed, char* strided, std::int64_t count, std::int64_t stride, std::size_t unit) {
    for (std::int64_t i = 0; i < count; ++i) {
        char* const in_slot = packed + i * static_cast<std::int64_t>(unit);
        char* const in_tensor = strided + i * stride;
        copy_bytes(kPack ? in_slot : in_tensor, kPack ? in_tensor : in_slot, unit);
    }
}

template <bool kPack>
RowCopy row_copy(std::size_t unit) {
    switch (unit) {
        case 1:
            return &copy_row<kPack, 1>;
        case 2:
            return &copy_row<kPack, 2>;
        case 4:
            return &copy_row<kPack, 4>;
        case 8:
            return &copy_row<kPack, 8>;
        case 16:
            return &copy_row<kPack, 16>;
        case 32:
            return &copy_row<kPack, 32>;
        case 64:
            return &copy_row<kPack, 64>;
        default:
            return &copy_runs<kPack>;
    }
}

// What is transposed in registers: a square of this many units on each side.
template <std::size_t kUnit>
constexpr std::int64_t kSquare = kUnit <= 2 ? 8 : 4;

// Unit (i, j) lies at src + i * kUnit + j * src_stride and goes to dst + i * dst_stride + j * kUnit.
template <std::size_t kUnit>
void transpose_square(char* dst, std::int64_t dst_stride, const char* src, std::int64_t src_stride) {
#ifdef __SSE2__
    auto load = [&](int j) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(src + j * src_stride)); };
    auto store = [&](int i, __m128i row) { _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + i * dst_stride), row); };
    if constexpr (kUnit == 2) {
        __m128i pairs[8], fours[8];
        for (int k = 0; k < 4; ++k) {
            const __m128i even = load(2 * k), odd = load(2 * k + 1);
            pairs[2 * k] = _mm_unpacklo_epi16(even, odd);
            pairs[2 * k + 1] = _mm_unpackhi_epi16(even, odd);
        }
        for (int k = 0; k < 8; k += 4) {
            fours[k] = _mm_unpacklo_epi32(pairs[k], pairs[k + 2]);
            fours[k + 1] = _mm_unpackhi_epi32(pairs[k], pairs[k + 2]);
            fours[k + 2] = _mm_unpacklo_epi32(pairs[k + 1], pairs[k + 3]);
            fours[k + 3] = _mm_unpackhi_epi32(pairs[k + 1], pairs[k + 3]);
        }
        for (int k = 0; k < 4; ++k) {
            store(2 * k, _mm_unpacklo_epi64(fours[k], fours[k + 4]));
            store(2 * k + 1, _mm_unpackhi_epi64(fours[k], fours[k + 4]));
        }
        return;
    }
    if constexpr (kUnit == 4) {
        const __m128i a = load(0), b = load(1), c = load(2), d = load(3);
        const __m128i ab_low = _mm_unpacklo_epi32(a, b), ab_high = _mm_unpackhi_epi32(a, b);
        const __m128i cd_low = _mm_unpacklo_epi32(c, d), cd_high = _mm_unpackhi_epi32(c, d);
        store(0, _mm_unpacklo_epi64(ab_low, cd_low));
        store(1, _mm_unpackhi_epi64(ab_low, cd_low));
        store(2, _mm_unpacklo_epi64(ab_high, cd_high));
        store(3, _mm_unpackhi_epi64(ab_high, cd_high));
        return;
    }
#endif
    for (std::int64_t i = 0; i < kSquare<kUnit>; ++i) {
        for (std::int64_t j = 0; j < kSquare<kUnit>; ++j) {
            std::memcpy(dst + i * dst_stride + j * static_cast<std::int64_t>(kUnit),
                        src + i * static_cast<std::int64_t>(kUnit) + j * src_stride, kUnit);
        }
    }
}

// The same for `rows` times `columns` units; `i` counts rows and `j` columns.
template <std::size_t kUnit>
void transpose(char* dst, std::int64_t dst_stride, const char* src, std::int64_t src_stride, std::int64_t rows,
               std::int64_t columns) {
    constexpr auto kBytes = static_cast<std::int64_t>(kUnit);
    constexpr std::int64_t kSide = kSquare<kUnit>;
    for (std::int64_t tile = 0; tile < columns; tile += kTile) {
        const std::int64_t end = std::min(tile + kTile, columns);
        const std::int64_t whole_columns = tile + (end - tile) / kSide * kSide;
        std::int64_t i = 0;
        for (; i + kSide <= rows; i += kSide) {
            for (std::int64_t j = tile; j < whole_columns; j += kSide) {
                transpose_square<kUnit>(dst + i * dst_stride + j * kBytes, dst_stride,
                                        src + i * kBytes + j * src_stride, src_stride);
            }
        }
        for (std::int64_t row = 0; row < rows; ++row) {
            for (std::int64_t j = row < i ? whole_columns : tile; j < end; ++j) {
                std::memcpy(dst + row * dst_stride + j * kBytes, src + row * kBytes + j * src_stride, kUnit);
            }
        }
    }
}

using Transpose = void (*)(char* dst, std::int64_t dst_stride, const char* src, std::int64_t src_stride,
                           std::int64_t rows, std::int64_t columns);

Transpose transpose_of(std::size_t unit) {
    switch (unit) {
        case 1:
            return &transpose<1>;
        case 2:
            return &transpose<2>;
        case 4:
            return &transpose<4>;
        case 8:
            return &transpose<8>;
        case 16:
            return &transpose<16>;
        default:
            return nullptr;
    }
}

// Calls one(packed, strided) for each index of the first `count` dimensions.
template <typename One>
void for_each(const CopyDim* dims, std::size_t count, char* packed, char* strided, const One& one) {
    if (count == 0) {
        one(packed, strided);
        return;
    }
    for (std::int64_t i = 0; i < dims->size; ++i) {
        for_each(dims + 1, count - 1, packed + i * dims->packed, strided + i * dims->strided, one);
    }
}

template <typename Part>
void run_all(const std::vector<Placement>& placements, int threads, const Part& part) {
    if (threads <= 1) {
        for (const Placement& placement : placements) {
            part(placement, 0, placement.plan.length());
        }
        return;
    }
    struct Piece {
        const Placement* placement;
        std::int64_t begin, end;
    };
    std::vector<Piece> pieces;
    std::uint64_t total = 0;
    for (const Placement& placement : placements) {
        const std::uint64_t nbytes = placement.plan.nbytes();
        total += nbytes;
        const std::int64_t length = placement.plan.length();
        const auto parts = static_cast<std::int64_t>(nbytes / kPartBytes + 1);
        const std::int64_t step = std::max<std::int64_t>(1, (length + parts - 1) / parts);
        for (std::int64_t begin = 0; begin < length; begin += step) {
            pieces.push_back({&placement, begin, std::min(begin + step, length)});
        }
    }
    const auto useful = static_cast<int>(std::min<std::uint64_t>(total / kPartBytes, 1024));
    parallel_for(pieces.size(), 1, std::min(threads, useful), [&](std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) {
            part(*pieces[i].placement, pieces[i].begin, pieces[i].end);
        }
    });
}

}  // namespace

CopyPlan::CopyPlan(void* strided, std::size_t itemsize, std::size_t ndim, const std::int64_t* shape,
                   const std::int64_t* strides)
    : strided_(static_cast<char*>(strided)), unit_(itemsize), nbytes_(itemsize) {
    dims_.reserve(ndim);
    // From the innermost dimension outwards, so dims_ is in the opposite order until the end.
    for (std::size_t i = ndim; i-- > 0;) {
        const CopyDim dim{shape[i], strides[i] * static_cast<std::int64_t>(itemsize),
                          static_cast<std::int64_t>(nbytes_)};
        nbytes_ *= static_cast<std::uint64_t>(shape[i]);
        if (dim.size == 1) {
            continue;
        }
        if (!dims_.empty() && dim.strided == dims_.back().strided * dims_.back().size) {
            dims_.back().size *= dim.size;
        } else if (dims_.empty() && dim.strided == static_cast<std::int64_t>(unit_)) {
            unit_ *= static_cast<std::size_t>(dim.size);
        } else {
            dims_.push_back(dim);
        }
    }
    if (nbytes_ == 0) {
        unit_ = 0;
        dims_.clear();
        return;
    }
    if (dims_.size() >= 2) {
        auto density = [](const CopyDim& a, const CopyDim& b) { return std::abs(a.strided) < std::abs(b.strided); };
        const auto densest = std::min_element(dims_.begin() + 1, dims_.end(), density);
        if (density(*densest, dims_.front())) {
            std::rotate(dims_.begin() + 1, densest, densest + 1);
            is_transposed_ = true;
        }
    }
    std::reverse(dims_.begin(), dims_.end());
}

template <bool kPack>
void CopyPlan::run(char* packed, std::int64_t begin, std::int64_t end) const {
    if (dims_.empty()) {
        char* const from = kPack ? strided_ : packed;
        char* const to = kPack ? packed : strided_;
        copy_bytes(to + begin, from + begin, static_cast<std::size_t>(end - begin));
        return;
    }
    std::vector<CopyDim> dims = dims_;
    packed += begin * dims.front().packed;
    char* const strided = strided_ + begin * dims.front().strided;
    dims.front().size = end - begin;

    const CopyDim inner = dims.back();
    const RowCopy copy = row_copy<kPack>(unit_);
    if (!is_transposed_) {
        for_each(dims.data(), dims.size() - 1, packed, strided,
                 [&](char* in_slot, char* in_tensor) { copy(in_slot, in_tensor, inner.size, inner.strided, unit_); });
        return;
    }
    const CopyDim dense = dims[dims.size() - 2];
    const Transpose transposed = dense.strided == inner.packed ? transpose_of(unit_) : nullptr;
    for_each(dims.data(), dims.size() - 2, packed, strided, [&](char* in_slot, char* in_tensor) {
        if (transposed != nullptr && kPack) {
            transposed(in_slot, dense.packed, in_tensor, inner.strided, dense.size, inner.size);
            return;
        }
        if (transposed != nullptr) {
            transposed(in_tensor, inner.strided, in_slot, dense.packed, inner.size, dense.size);
            return;
        }
        for (std::int64_t column = 0; column < inner.size; column += kTile) {
            const std::int64_t count = std::min(kTile, inner.size - column);
            for (std::int64_t i = 0; i < dense.size; ++i) {
                copy(in_slot + i * dense.packed + column * inner.packed,
                     in_tensor + i * dense.strided + column * inner.strided, count, inner.strided, unit_);
            }
        }
    });
}

void CopyPlan::pack(void* packed, std::int64_t begin, std::int64_t end) const {
    run<true>(static_cast<char*>(packed), begin, end);
}

void CopyPlan::unpack(const void* packed, std::int64_t begin, std::int64_t end) const {
    // Only read from in this direction.
    run<false>(const_cast<char*>(static_cast<const char*>(packed)), begin, end);
}

bool places_are_sound(const std::vector<Placement>& placements, std::uint64_t slot_nbytes, std::size_t& index) {
    std::vector<std::size_t> order(placements.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    auto before = [&](std::size_t a, std::size_t b) {
        const Placement &first = placements[a], &second = placements[b];
        return first.offset != second.offset ? first.offset < second.offset
                                             : first.plan.nbytes() < second.plan.nbytes();
    };
    if (!std::is_sorted(order.begin(), order.end(), before)) {
        std::sort(order.begin(), order.end(), before);
    }
    std::uint64_t end = 0;
    for (const std::size_t i : order) {
        index = i;
        const std::uint64_t offset = placements[i].offset, nbytes = placements[i].plan.nbytes();
        if (offset > slot_nbytes || nbytes > slot_nbytes - offset || (nbytes != 0 && offset < end)) {
            return false;
        }
        end = std::max(end, offset + nbytes);
    }
    return true;
}

void pack(const std::vector<Placement>& placements, void* slot, int threads) {
    run_all(placements, threads, [slot](const Placement& placement, std::int64_t begin, std::int64_t end) {
        placement.plan.pack(static_cast<char*>(slot) + placement.offset, begin, end);
    });
}

void unpack(const std::vector<Placement>& placements, const void* slot, int threads) {
    run_all(placements, threads, [slot](const Placement& placement, std::int64_t begin, std::int64_t end) {
        placement.plan.unpack(static_cast<const char*>(slot) + placement.offset, begin, end);
    });
}

}  // namespace nccl_stream
