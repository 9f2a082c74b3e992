"""The compiled core. Addresses and streams are integers; the caller keeps the memory alive until the call, or the work
it started, is over. Use :mod:`nccl_stream.staging`, which checks its arguments."""

cuda_compiled: bool

def crc32c(address: int, nbytes: int, value: int = 0) -> int: ...

# Only where ``cuda_compiled``.
def device_count() -> int: ...
