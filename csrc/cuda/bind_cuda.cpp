#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>

#include "bindings/bindings.hpp"
#include "cuda/crc_math.hpp"
#include "cuda/fake_runtime.hpp"
#include "cuda/runtime.hpp"
#include "cuda/stager.hpp"
#include "cuda/strided.hpp"
#ifdef NCCL_STREAM_WITH_CUDA
#include "cuda/devices.hpp"
#endif

namespace nb = nanobind;
using namespace nccl_stream;

namespace {

using Address = std::uintptr_t;
using Released = nb::call_guard<nb::gil_scoped_release>;
using TensorArgument = std::tuple<Address, std::size_t, std::vector<std::int64_t>, std::vector<std::int64_t>>;

void* pointer(Address address) {
    return reinterpret_cast<void*>(address);
}

std::optional<StreamHandle> stream_of(std::optional<Address> address) {
    return address ? std::optional<StreamHandle>(pointer(*address)) : std::nullopt;
}

int device_count_or_none() {
#ifdef NCCL_STREAM_WITH_CUDA
    return device_count();
#else
    return 0;
#endif
}

std::shared_ptr<Runtime> runtime_of_cuda() {
#ifdef NCCL_STREAM_WITH_CUDA
    return {&cuda_runtime(), [](Runtime*) {}};
#else
    throw std::runtime_error("this build has no CUDA part");
#endif
}

void move_tensors(Runtime& runtime, int device, const std::vector<TensorArgument>& tensors,
                  const std::vector<Address>& flats, bool gather, Address stream) {
    if (tensors.size() != flats.size()) throw std::invalid_argument("one place for each tensor");
    std::vector<StridedPiece> pieces;
    for (std::size_t n = 0; n < tensors.size(); ++n) {
        const auto& [address, itemsize, sizes, strides] = tensors[n];
        const StridedPiece piece = plan_piece({pointer(address), itemsize, sizes, strides}, pointer(flats[n]));
        if (piece.num_units != 0) pieces.push_back(piece);
    }
    DeviceGuard guard(runtime, device);
    for (std::size_t first = 0; first < pieces.size(); first += kMaxPieces) {
        StridedBatch batch;
        batch.count = static_cast<int>(std::min<std::size_t>(kMaxPieces, pieces.size() - first));
        std::copy_n(pieces.begin() + static_cast<std::ptrdiff_t>(first), batch.count, batch.pieces);
        check(runtime, runtime.launch_strided(batch, gather, pointer(stream)), "the packing kernel");
    }
}

}  // namespace

void bind_cuda(nb::module_& module) {
    nb::exception<CudaError>(module, "CudaError", PyExc_RuntimeError);
    module.def("device_count", &device_count_or_none, Released());

    nb::class_<Runtime>(module, "Runtime");
    module.def("cuda_runtime", &runtime_of_cuda);
    nb::class_<FakeRuntime, Runtime>(module, "FakeRuntime")
        .def(nb::init<std::uint32_t, int, int>(), nb::arg("seed") = 0, nb::arg("num_devices") = 1,
             nb::arg("steps_per_query") = 1)
        .def("fail", &FakeRuntime::fail, nb::arg("call"), nb::arg("nth"), nb::arg("code"))
        .def(
            "fill",
            [](FakeRuntime& self, Address memory, std::size_t nbytes, int byte, Address stream) {
                self.fill(pointer(memory), nbytes, byte, pointer(stream));
            },
            nb::arg("memory"), nb::arg("nbytes"), nb::arg("byte"), nb::arg("stream"))
        .def("new_stream",
             [](FakeRuntime& self) {
                 StreamHandle stream = nullptr;
                 check(self, self.stream_create(&stream), "cudaStreamCreateWithPriority");
                 return reinterpret_cast<Address>(stream);
             })
        .def("step", &FakeRuntime::step)
        .def("pending", &FakeRuntime::pending)
        .def("calls", &FakeRuntime::calls, nb::arg("call"))
        .def("live", &FakeRuntime::live);

    nb::class_<StagedCopy>(module, "StagedCopy")
        .def("done", &StagedCopy::done, Released())
        .def("wait", &StagedCopy::wait, nb::arg("timeout"), Released());
    nb::class_<Stager>(module, "Stager")
        .def(nb::init<Runtime&, int, std::size_t, int>(), nb::arg("runtime"), nb::arg("device"),
             nb::arg("chunk_bytes"), nb::arg("streams"), nb::keep_alive<1, 2>())
        .def(
            "copy",
            [](Stager& self, Address destination, Address source, std::size_t nbytes, std::optional<Address> after,
               std::optional<Address> before, const std::vector<StagedCopy*>& behind) {
                return self.copy(pointer(destination), pointer(source), nbytes,
                                 {stream_of(after), stream_of(before), behind});
            },
            nb::arg("destination"), nb::arg("source"), nb::arg("nbytes"), nb::arg("after") = nb::none(),
            nb::arg("before") = nb::none(), nb::arg("behind") = std::vector<StagedCopy*>(), nb::keep_alive<0, 1>(), Released());

    module.def(
        "find_kernels",
        [](Runtime& runtime, int device) {
            DeviceGuard guard(runtime, device);
            check(runtime, runtime.find_kernels(), "cudaFuncGetAttributes");
        },
        nb::arg("runtime"), nb::arg("device"), Released());
    module.def("device_move", &move_tensors, nb::arg("runtime"), nb::arg("device"), nb::arg("tensors"),
               nb::arg("flats"), nb::arg("gather"), nb::arg("stream"), Released());
    module.def(
        "device_crc32c",
        [](Runtime& runtime, int device, Address data, std::size_t nbytes, Address raw, Address stream) {
            DeviceGuard guard(runtime, device);
            auto* sum = static_cast<std::uint32_t*>(pointer(raw));
            check(runtime, runtime.launch_crc32c(pointer(data), nbytes, sum, pointer(stream)), "the CRC-32C kernel");
        },
        nb::arg("runtime"), nb::arg("device"), nb::arg("data"), nb::arg("nbytes"), nb::arg("raw"), nb::arg("stream"),
        Released());
    module.def("crc32c_finish", &crc_finish, nb::arg("raw"), nb::arg("nbytes"), nb::arg("value"));
}
