"""A whole stream over NCCL between two GPUs. Without two of them these tests skip."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

import nccl_stream
from nccl_stream.config import StreamConfig
from nccl_stream.streamed.sample import OpenFeatureSpec
from nccl_stream.testing.store_suite import make_sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

MIB = 1 << 20


def run_ranks(*ranks: Any) -> None:
    errors: list[BaseException] = []

    def guarded(rank: Any) -> None:
        try:
            rank()
        except BaseException as exc:  # noqa: BLE001 - raised below, in the test's thread
            errors.append(exc)

    threads = [threading.Thread(target=guarded, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)


def open_stream(port: int, role: Any, device: str, **more: Any) -> Any:
    torch.cuda.set_device(device)
    config = StreamConfig(
        max_sample_bytes=16 * MIB, arena_bytes=64 * MIB, max_bytes=64 * MIB, end="ragged", device=device, **more
    )
    return nccl_stream.connect(
        f"tcp://127.0.0.1:{port}", run_id="gpu", role=role, rank=0, num_targets=1, num_drafts=1, config=config
    )


@pytest.mark.parametrize("poison", [False, True])
def test_samples_arrive_byte_exact_while_both_gpus_compute(poison: bool) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    samples = 200

    def target() -> None:
        with open_stream(server.port, "target", "cuda:0") as stream:
            for i in range(samples):
                sample = {name: tensor.cuda() for name, tensor in make_sample(fill=i, num_tokens=32 + i % 97).items()}
                ref = stream.store.put(f"s{i}", sample, "gpu")
                for tensor in sample.values():
                    tensor.zero_()  # the source may be overwritten as soon as put returns
                stream.queue.put_blocks_until_below(ref)
            stream.queue.close()

    def draft() -> None:
        busy = torch.randn(2048, 2048, device="cuda:1")
        with open_stream(server.port, "draft", "cuda:1", poison=poison) as stream:
            seen = set()
            while not stream.queue.is_drained:
                lease = stream.queue.acquire(1.0)
                if lease is None:
                    continue
                tensors, handle = stream.store.get(lease.ref)
                busy = torch.tanh(busy @ busy)
                fill = int(tensors["input_ids"][0, 0])
                expected = make_sample(fill=fill, num_tokens=32 + fill % 97)
                for name, tensor in expected.items():
                    assert torch.equal(tensors[name].cpu(), tensor), (name, fill)
                seen.add(fill)
                stream.queue.ack(lease)
                stream.store.release(handle)
                del tensors
            assert seen == set(range(samples))

    run_ranks(target, draft)


def test_memory_read_by_queued_work_is_not_overwritten_after_release() -> None:
    """The consumer's kernels are still queued when it releases: the next receive must wait for them on the device."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    samples = 64

    def target() -> None:
        with open_stream(server.port, "target", "cuda:0") as stream:
            for i in range(samples):
                ref = stream.store.put(f"s{i}", make_sample(fill=i, num_tokens=64, hidden=1024), "gpu")
                stream.queue.put_blocks_until_below(ref)
            stream.queue.close()

    def draft() -> None:
        sums: list[tuple[int, torch.Tensor]] = []
        with open_stream(server.port, "draft", "cuda:1") as stream:
            while not stream.queue.is_drained:
                lease = stream.queue.acquire(1.0)
                if lease is None:
                    continue
                tensors, handle = stream.store.get(lease.ref)
                torch.cuda._sleep(20_000_000)  # keeps the reading kernel queued while the host runs ahead
                sums.append((int(lease.ref.sample_id[1:]), tensors["input_ids"].sum()))
                del tensors
                stream.queue.ack(lease)
                stream.store.release(handle)
            assert len(sums) == samples
            assert all(int(total) == fill * 64 for fill, total in sums)

    run_ranks(target, draft)


def test_pieces_arrive_byte_exact_and_are_not_overwritten_under_queued_work() -> None:
    """One sample in pieces through a window of two: each piece's memory is written again while its reader is queued."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pieces = 64

    def target() -> None:
        with open_stream(server.port, "target", "cuda:0") as stream:
            specs = {name: OpenFeatureSpec.of(tensor, 1) for name, tensor in make_sample(num_tokens=64).items()}
            writer = stream.store.open_stream("s", specs, "gpu", piece_length=64, window=2)
            stream.queue.put(writer.ref)
            with writer:
                for i in range(pieces):
                    piece = {name: tensor.cuda() for name, tensor in make_sample(fill=i, num_tokens=64).items()}
                    writer.append(piece)
                    for tensor in piece.values():
                        tensor.zero_()  # the source may be overwritten as soon as append returns
            stream.queue.close()

    def draft() -> None:
        sums = []
        with open_stream(server.port, "draft", "cuda:1", verify_checksums=False) as stream:
            lease = None
            while lease is None:
                lease = stream.queue.acquire(1.0)
            with stream.store.open_reader(lease.ref) as reader:
                for piece in reader:
                    torch.cuda._sleep(20_000_000)  # keeps the reading kernel queued while the host runs ahead
                    sums.append(piece.tensors["input_ids"].sum())
                    piece.release()
                stream.queue.ack(lease)
            assert [int(total) for total in sums] == [i * 64 for i in range(pieces)]

    run_ranks(target, draft)
