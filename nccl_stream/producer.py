"""The producing side: run the target once per prompt batch and put what it returns into a feature store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nccl_stream import _compat
from nccl_stream.errors import CapacityError, MisuseError, SchemaError, SpecMismatchError
from nccl_stream.refs import FeatureAlgorithm, FeatureSpec, SampleRef
from nccl_stream.schema import schema_of
from nccl_stream.store import FeatureStore
from nccl_stream.vocab import VOCABULARY_ATTRIBUTE, DraftVocabulary

__all__ = ["FeatureProducer"]

logger = logging.getLogger(__name__)

ROOM_CHECK_S = 0.05
"""Longest wait for room in a full store before the abort condition is asked again, in seconds."""


class _Backend(Protocol):
    """What a producer needs of a target backend; see :class:`nccl_stream.backend.TargetBackend`."""

    @property
    def generate_batch(self) -> Callable[..., Any]: ...

    def get_input_embeddings(self) -> nn.Module: ...

    def set_vocab_mapping(self, selected_token_ids: Tensor, selected_token_mask: Tensor) -> None: ...


@dataclass(frozen=True)
class _Produced:
    """One forward's output on its way into the store; kept while the store is full, so it is never computed twice."""

    sample_id: str
    features: dict[str, Tensor]
    attributes: Mapping[str, str]
    schema_version: int
    num_tokens: int

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.features.values())


class FeatureProducer:
    """Turns prompt batches into samples of a store.

    One thread at a time may call :meth:`produce`; several producers may share a store.

    Args:
        target_backend: The frozen target. Its batches are objects or mappings with the features of the algorithm, under
            their names or one of the schema's other names for them.
        store: Where samples go. It is not closed by this producer.
        run_id: Mirrored onto every ref; not empty.
        algorithm: What the samples are for; default: what the backend says of itself.
        target_model_version: Mirrored onto every ref.
        draft_weight_version: Mirrored onto every ref.
        sample_id_factory: Makes the id of the n-th sample, counted from 1; default ``sample-{run_id}-{n}``.
        donate: Let the store keep the backend's own tensors, if it takes them: on a GPU the next forward then runs
            beside the copy of the last one's output instead of behind it. Only for a backend whose tensors nobody
            writes again; those of a graph that is replayed, or of a buffer that it keeps, are not like that. Tensors
            of the prompt are copied all the same.

    Raises:
        MisuseError: (a ``ValueError``) an empty ``run_id``, or a backend whose algorithm is unknown.
    """

    def __init__(
        self,
        target_backend: _Backend,
        store: FeatureStore,
        run_id: str,
        algorithm: FeatureAlgorithm | None = None,
        target_model_version: str = "0",
        draft_weight_version: str = "0",
        sample_id_factory: Callable[[int], str] | None = None,
        *,
        donate: bool = False,
    ) -> None:
        if not isinstance(run_id, str) or not run_id:
            raise MisuseError(f"run_id must be a non-empty str, got {run_id!r}")
        self._target = target_backend
        self._store = store
        self._run_id = run_id
        self._algorithm = _algorithm_of(target_backend) if algorithm is None else algorithm
        self._schema = schema_of(self._algorithm)
        self._target_model_version = target_model_version
        self._draft_weight_version = draft_weight_version
        self._sample_id_factory = sample_id_factory or self._default_sample_id
        self._sample_seq = 0
        self._vocabulary: DraftVocabulary | None = None
        self._takes_attributes = _compat.accepts_keyword(store.put, "attributes")
        self._donate = donate and _compat.accepts_keyword(store.put, "donate")

    def produce(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        position_ids: Tensor | None = None,
        seq_lens: Tensor | None = None,
        doc_remaining: Tensor | None = None,
        *,
        sample_id: str | None = None,
        abort_when: Callable[[], bool] | None = None,
    ) -> SampleRef:
        """Run the target once and store its output as one sample.

        Args:
            input_ids: ``[batch, seq]`` int64, unshifted, like all tensors here.
            attention_mask: ``[batch, seq]``.
            loss_mask: ``[batch, seq]``; its sum becomes the ref's ``num_tokens``.
            position_ids: ``[batch, seq]``, with the two below for packed documents; all three or none.
            seq_lens: ``[batch, max_docs]``.
            doc_remaining: ``[batch, seq]``.
            sample_id: The sample's id; default: from the factory.
            abort_when: When given, a full store is waited for, without running the target again, until this returns
                true (asked every 50 ms). Default: a full store raises at once.

        Returns:
            The ref, with one spec per stored feature. Until it is queued, the caller answers for the sample: hand a
            ref that will not be queued to :meth:`discard`.

        Raises:
            MisuseError: (a ``ValueError``) the samples need attributes, and the store's ``put`` takes none.
            MemoryError: The store is full (and ``abort_when`` is not given or came true), or the sample can never fit.
            SchemaError: (a ``ValueError``) partial packing features, a batch without the supervision that is needed, or
                features whose shapes and dtypes do not fit together.
            SpecMismatchError: (a ``RuntimeError``) the store described the sample differently; it has been evicted.
        """
        packing = {"position_ids": position_ids, "seq_lens": seq_lens, "doc_remaining": doc_remaining}
        prompt = {"input_ids": input_ids, "attention_mask": attention_mask, "loss_mask": loss_mask}
        prompt.update({name: tensor for name, tensor in packing.items() if tensor is not None})
        self._schema.check_packing(prompt)
        produced = self._forward(prompt, sample_id)
        while True:
            try:
                return self._publish(produced)
            except CapacityError as error:
                if abort_when is None or not error.can_wait or abort_when():
                    raise
                self._await_room(produced.nbytes)

    def discard(self, ref: SampleRef) -> None:
        """Evict a sample whose ref will not be queued. Does nothing when it is already gone."""
        self._store.discard(ref)

    def is_worth_a_forward(self, loss_mask: Tensor) -> bool:
        """Whether a prompt supervises anything that the algorithm learns from.

        A sample of one that does not has no loss: a mean over no tokens is NaN.

        Args:
            loss_mask: ``[batch, seq]``, unshifted.
        """
        return self._schema.is_worth_a_forward(loss_mask)

    def set_vocab_mapping(self, selected_token_ids: Tensor, selected_token_mask: Tensor) -> None:
        """Pass the draft vocabulary on to the backend, which may then return ``target_probs`` instead of logits.

        Args:
            selected_token_ids: ``[draft_vocab]`` int64, target ids in draft order.
            selected_token_mask: ``[vocab]`` bool.

        Raises:
            MisuseError: (a ``ValueError``) the two do not fit together.
        """
        vocabulary = DraftVocabulary(selected_token_ids, selected_token_mask)
        self._target.set_vocab_mapping(selected_token_ids, selected_token_mask)
        self._vocabulary = vocabulary

    def get_input_embeddings(self) -> nn.Module:
        """Return the backend's input embedding."""
        return self._target.get_input_embeddings()

    def close(self) -> None:
        """Do nothing: backend and store belong to the caller, and the producer holds no resources of its own."""

    def _default_sample_id(self, n: int) -> str:
        return f"sample-{self._run_id}-{n}"

    def _forward(self, prompt: dict[str, Tensor], sample_id: str | None) -> _Produced:
        num_tokens = int(prompt["loss_mask"].sum())
        with torch.no_grad():
            batch = self._target.generate_batch(**prompt)
        features, attributes = self._features_of(batch)
        if self._donate:
            features = _apart(features, prompt.values())
        version, attributes = self._check(features, attributes)
        if sample_id is None:
            self._sample_seq += 1
            sample_id = self._sample_id_factory(self._sample_seq)
        return _Produced(sample_id, features, attributes, version, num_tokens)

    def _features_of(self, batch: object) -> tuple[dict[str, Tensor], Mapping[str, str]]:
        names = (*self._schema.names, *self._schema.renames)
        if isinstance(batch, Mapping):
            given = {name: batch.get(name) for name in names}
        else:
            given = {name: getattr(batch, name, None) for name in names}
        features = self._schema.canonical({name: tensor for name, tensor in given.items() if tensor is not None})
        return features, getattr(batch, "attributes", None) or {}

    def _check(self, features: Mapping[str, Tensor], attributes: Mapping[str, str]) -> tuple[int, Mapping[str, str]]:
        """Check what the backend returned; the schema version of the sample, and its attributes."""
        needs_vocabulary = [name for name in self._schema.draft_vocabulary_features if name in features]
        if needs_vocabulary and self._vocabulary is None:
            raise SchemaError(
                f"the backend returned {needs_vocabulary}, which mean nothing to the draft side before both sides know "
                "the draft vocabulary: call set_vocab_mapping first, or use a backend that returns other supervision"
            )
        version = self._schema.version_of(features)
        self._schema.check_packing(features)
        # What is no tensor at all is the store's to refuse.
        specs = {name: FeatureSpec.of(value) for name, value in features.items() if isinstance(value, Tensor)}
        self._schema.check_specs(specs)
        self._schema.check_attributes(features, attributes)
        if attributes and not self._takes_attributes:
            raise MisuseError(
                f"{type(self._store).__name__}.put takes no attributes, and the draft side cannot read these samples "
                f"without {sorted(attributes)}: use another store, or a backend with other supervision"
            )
        if needs_vocabulary and self._vocabulary is not None and self._takes_attributes:
            attributes = {**attributes, VOCABULARY_ATTRIBUTE: self._vocabulary.digest}
        return version, attributes

    def _publish(self, produced: _Produced) -> SampleRef:
        # Stores written to the documented contract alone take neither; _check has refused samples that need attributes.
        optional: dict[str, Any] = {"attributes": produced.attributes} if produced.attributes else {}
        if self._donate:
            optional["donate"] = True
        ref = self._store.put(
            produced.sample_id,
            produced.features,
            run_id=self._run_id,
            algorithm=self._algorithm,
            schema_version=produced.schema_version,
            target_model_version=self._target_model_version,
            draft_weight_version=self._draft_weight_version,
            num_tokens=produced.num_tokens,
            **optional,
        )
        expected = {name: FeatureSpec.of(tensor) for name, tensor in produced.features.items()}
        if dict(ref.feature_specs) != expected:
            self.discard(ref)
            raise SpecMismatchError(
                f"sample {produced.sample_id!r}: the store's ref says {dict(ref.feature_specs)}, put was {expected}"
            )
        return ref

    def _await_room(self, nbytes: int) -> None:
        wait_for_room = getattr(self._store, "wait_for_room", None)
        if wait_for_room is None:
            time.sleep(ROOM_CHECK_S)
        else:
            wait_for_room(nbytes, ROOM_CHECK_S)


def _apart(features: Mapping[str, Tensor], prompt: Iterable[Tensor]) -> dict[str, Tensor]:
    """The features, as copies where they share memory with the prompt, which is its owner's to write."""
    owned = {tensor.untyped_storage().data_ptr() for tensor in prompt}
    return {
        name: tensor.clone() if tensor.untyped_storage().data_ptr() in owned else tensor
        for name, tensor in features.items()
    }


def _algorithm_of(backend: object) -> FeatureAlgorithm:
    algorithm = getattr(backend, "algorithm", None)
    if isinstance(algorithm, FeatureAlgorithm):
        return algorithm
    # NeMo AutoModel's backends say it by their base class alone.
    if any(base.__name__ == "Eagle3TargetBackend" for base in type(backend).__mro__):
        return FeatureAlgorithm.EAGLE3
    raise MisuseError(
        f"cannot tell which algorithm {type(backend).__name__} serves; pass algorithm=FeatureAlgorithm.EAGLE3 "
        "or give the backend an `algorithm` attribute"
    )
