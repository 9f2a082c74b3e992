"""Layouts of generated samples."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nccl_stream.refs import FeatureSpec
from nccl_stream.transport.layout import ALIGN_BYTES, HEADER_BYTES, SMALL_BYTES, SlotLayout

DTYPES = (torch.bool, torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.int64, torch.complex128)

small_shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
large = st.builds(
    FeatureSpec,
    st.tuples(st.integers(1, 2), st.integers(SMALL_BYTES // 4, SMALL_BYTES // 2)),
    st.sampled_from((torch.uint8, torch.bfloat16)),
)
small = st.builds(FeatureSpec, small_shapes, st.sampled_from(DTYPES))
specs = st.dictionaries(
    st.text(min_size=1, max_size=6),
    st.one_of(small, small, small, large),
    max_size=8,
)
chunk_sizes = st.sampled_from([16384, 65536, SMALL_BYTES, 4 * SMALL_BYTES]) | st.integers(64, 512).map(
    lambda n: n * ALIGN_BYTES
)


@settings(max_examples=80, deadline=None)
@given(specs, chunk_sizes)
def test_every_byte_has_one_place_and_travels_once(specs, chunk_bytes):
    layout = SlotLayout.from_specs(specs, chunk_bytes=chunk_bytes)
    assert list(layout.offsets) == list(specs)
    assert layout.total_bytes % ALIGN_BYTES == layout.packed_bytes % ALIGN_BYTES == 0
    spans = sorted(
        [(0, HEADER_BYTES)]
        + [(layout.offsets[name], layout.offsets[name] + spec.nbytes) for name, spec in specs.items()]
    )
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert end <= start, "two features overlap"
    assert spans[-1][1] <= layout.total_bytes
    position = -1
    covered = 0
    for offset, nbytes in layout.chunks:
        assert 0 < nbytes <= chunk_bytes
        assert offset >= position, "chunks overlap or go backwards"
        position = offset + nbytes
    for start, end in spans:
        covered = sum(max(0, min(end, o + n) - max(start, o)) for o, n in layout.chunks)
        assert covered == end - start, "a feature does not travel whole"
    for name, spec in specs.items():
        assert layout.offsets[name] % ALIGN_BYTES == 0
        assert (name in layout.large) == (spec.nbytes >= SMALL_BYTES)
        assert (layout.offsets[name] < layout.packed_bytes or spec.nbytes == 0) == (name not in layout.large)


@settings(max_examples=25, deadline=None)
@given(specs, chunk_sizes, st.data())
def test_sample_survives_the_trip_with_any_choice_of_donations(specs, chunk_bytes, data):
    layout = SlotLayout.from_specs(specs, chunk_bytes=chunk_bytes)
    tensors = {
        name: torch.randint(0, 256, (spec.nbytes,), dtype=torch.uint8).view(spec.dtype).view(spec.shape)
        for name, spec in specs.items()
    }
    donated = {name for name in layout.large if data.draw(st.booleans())}
    packed = {name: tensor for name, tensor in tensors.items() if name not in donated}
    nbytes = layout.packed_bytes if len(donated) == len(layout.large) else layout.total_bytes
    source = torch.zeros(nbytes, dtype=torch.uint8)
    layout.pack(packed, source)
    layout.write_header(source, b"id")
    target = torch.full((layout.total_bytes,), 0xEE, dtype=torch.uint8)
    outgoing = layout.wire_buffers(source, {name: tensors[name] for name in donated})
    incoming = layout.wire_buffers(target)
    for sent, received in zip(outgoing, incoming, strict=True):
        received.copy_(sent)
    assert layout.read_header(target) == b"id"
    views = layout.views(target)
    assert list(views) == list(specs)
    for name, tensor in tensors.items():
        assert views[name].shape == tensor.shape
        assert torch.equal(views[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
