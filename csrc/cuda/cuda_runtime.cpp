#include <cuda_runtime_api.h>

#include "cuda/cuda_kernels.hpp"
#include "cuda/runtime.hpp"

namespace nccl_stream {

namespace {

static_assert(kSuccess == cudaSuccess && kNotReady == cudaErrorNotReady, "the seam's codes are the runtime's");

constexpr int kUrgent = -5;  // below every priority there is: the runtime takes the highest instead

cudaStream_t native(StreamHandle stream) {
    return static_cast<cudaStream_t>(stream);
}

cudaEvent_t as_event(EventHandle event) {
    return static_cast<cudaEvent_t>(event);
}

class CudaRuntime : public Runtime {
  public:
    int get_device(int* device) override { return taken(cudaGetDevice(device)); }
    int set_device(int device) override { return taken(cudaSetDevice(device)); }
    int stream_create(StreamHandle* stream) override {
        return taken(cudaStreamCreateWithPriority(reinterpret_cast<cudaStream_t*>(stream), cudaStreamNonBlocking,
                                                  kUrgent));
    }
    int stream_destroy(StreamHandle stream) override { return taken(cudaStreamDestroy(native(stream))); }
    int stream_wait_event(StreamHandle stream, EventHandle event) override {
        return taken(cudaStreamWaitEvent(native(stream), as_event(event), 0));
    }
    int stream_synchronize(StreamHandle stream) override { return taken(cudaStreamSynchronize(native(stream))); }
    int event_create(EventHandle* event) override {
        return taken(cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event), cudaEventDisableTiming));
    }
    int event_destroy(EventHandle event) override { return taken(cudaEventDestroy(as_event(event))); }
    int event_record(EventHandle event, StreamHandle stream) override {
        return taken(cudaEventRecord(as_event(event), native(stream)));
    }
    int event_query(EventHandle event) override { return taken(cudaEventQuery(as_event(event))); }
    int memcpy_async(void* destination, const void* source, std::size_t nbytes, StreamHandle stream) override {
        return taken(cudaMemcpyAsync(destination, source, nbytes, cudaMemcpyDefault, native(stream)));
    }
    int find_kernels() override { return taken(nccl_stream::find_kernels()); }
    int launch_strided(const StridedBatch& batch, bool gather, StreamHandle stream) override {
        return taken(run_strided(batch, gather, native(stream)));
    }
    int launch_crc32c(const void* data, std::size_t nbytes, std::uint32_t* raw, StreamHandle stream) override {
        return taken(run_crc32c(data, nbytes, raw, native(stream)));
    }
    std::string describe(int code) const override { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

  private:
    // The caller has the code: it must not turn up again at a later call's check for errors.
    static int taken(cudaError_t code) {
        if (code != cudaSuccess) cudaGetLastError();
        return code;
    }
};

}  // namespace

Runtime& cuda_runtime() {
    static CudaRuntime runtime;
    return runtime;
}

}  // namespace nccl_stream
