"""The contract of target backends: a frozen target model, in this process or behind a service."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn

from nccl_stream.batch import FeatureBatch
from nccl_stream.refs import FeatureAlgorithm

__all__ = ["TargetBackend"]


class TargetBackend(ABC):
    """Where the features of an algorithm come from."""

    algorithm: ClassVar[FeatureAlgorithm]

    @abstractmethod
    def generate_batch(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        position_ids: Tensor | None = None,
        seq_lens: Tensor | None = None,
        doc_remaining: Tensor | None = None,
    ) -> FeatureBatch:
        """Run the target once; blocks until the features are there (on a GPU: until they are enqueued).

        Args:
            input_ids: ``[batch, seq]`` int64, unshifted, like all arguments.
            attention_mask: ``[batch, seq]``, nonzero where a token may be attended to.
            loss_mask: ``[batch, seq]``, nonzero where the draft is supervised.
            position_ids: ``[batch, seq]``, with the two below for packed documents; all three or none.
            seq_lens: ``[batch, max_docs]``.
            doc_remaining: ``[batch, seq]``.

        Returns:
            A batch in the algorithm's frame. The caller owns its tensors.
        """

    @abstractmethod
    def get_input_embeddings(self) -> nn.Module:
        """Return the target's input embedding, from which a draft may be initialised."""

    def set_vocab_mapping(self, selected_token_ids: Tensor, selected_token_mask: Tensor) -> None:
        """Tell the backend the draft vocabulary.

        Backends that return probabilities over it need it. The default ignores it: with full ``logits`` or last hidden
        states the draft side projects.

        Args:
            selected_token_ids: ``[draft_vocab]`` int64, target ids in draft order.
            selected_token_mask: ``[vocab]`` bool, true for the selected ids.
        """
        del selected_token_ids, selected_token_mask

    @property
    def supports_async(self) -> bool:
        """Whether :meth:`generate_batch_async` works."""
        return False

    def generate_batch_async(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        position_ids: Tensor | None = None,
        seq_lens: Tensor | None = None,
        doc_remaining: Tensor | None = None,
    ) -> Any:
        """Start :meth:`generate_batch` without waiting; returns a future-like object with ``result()``.

        Raises:
            NotImplementedError: this backend is synchronous (``supports_async`` is False).
        """
        raise NotImplementedError(f"{type(self).__name__} is synchronous: call generate_batch")

    def close(self) -> None:  # noqa: B027 - a backend without resources has nothing to do here
        """Give back what the backend holds (connections, servers). Idempotent."""
