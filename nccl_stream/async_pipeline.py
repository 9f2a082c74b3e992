"""Runs a producer in a background thread, so that the target's forward overlaps the draft's training step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import torch
from torch import Tensor

from nccl_stream import _compat
from nccl_stream.errors import ClosedError, ConfigError, ProducerFailedError
from nccl_stream.producer import FeatureProducer
from nccl_stream.refs import SampleRef

__all__ = ["AsyncFeaturePipeline", "PromptBatch", "PromptSource"]

logger = logging.getLogger(__name__)

_PromptBatch: TypeAlias = tuple[Tensor, Tensor, Tensor]
_PackedPromptBatch: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]

_PROMPT_FIELDS = ("input_ids", "attention_mask", "loss_mask", "position_ids", "seq_lens", "doc_remaining")


@runtime_checkable
class PromptSource(Protocol):
    """Callable without arguments that supplies the next prompt batch; called from the pipeline's thread only."""

    def __call__(self) -> _PromptBatch | _PackedPromptBatch | PromptBatch | Tensor | None:
        """Return the next prompt batch, or None when there is none (any more, or just now).

        Returns:
            ``(input_ids, attention_mask, loss_mask)``, each ``[batch, seq]``; or these followed by ``position_ids``,
            ``seq_lens`` and ``doc_remaining`` for packed documents; or ``input_ids`` alone, then every token is
            attended to and supervised.
        """


class PromptBatch(tuple[Tensor, ...]):
    """A prompt batch that carries the id its sample shall have.

    Args:
        items: Three or six tensors, as :class:`PromptSource` describes them.
        sample_id: The sample's id; None leaves the choice to the producer.
    """

    sample_id: str | None

    def __new__(cls, items: Iterable[Tensor], sample_id: str | None = None) -> PromptBatch:
        batch = super().__new__(cls, items)
        batch.sample_id = sample_id
        return batch

    def __getnewargs__(self) -> tuple[tuple[Tensor, ...], str | None]:
        return tuple(self), self.sample_id

    def __repr__(self) -> str:
        return f"PromptBatch(sample_id={self.sample_id!r}, shapes={[tuple(item.shape) for item in self]})"


class AsyncFeaturePipeline:
    """Drains a prompt source through a producer into a queue, in a daemon thread of its own.

    The thread runs ahead of the loader as far as the queue's watermarks and the store's caps allow; a full store is
    waited for and the finished forward kept, never run again. It ends when the source is exhausted, on :meth:`stop`,
    when somebody closes the queue, or on an error; it closes the queue in every case. An error is passed to the queue,
    so that the consumer gets it after the samples that were produced before, and is raised by :meth:`stop`.

    A pipeline is used once. As a context manager it starts on entry and stops on exit.

    Args:
        producer: Makes the samples.
        queue: Gets their refs.
        prompt_source: A callable without arguments, or an iterator; :class:`PromptSource` says what they supply.
        poll_interval: Seconds between two looks at an exhausted source (``stop_on_exhausted=False``) and at the
            watermarks while paused.
        stop_on_exhausted: Whether an exhausted source ends the pipeline; otherwise it is asked again, for sources that
            are filled while training goes on. An iterator that has ended stays ended.
        skip_unsupervised: Leave out prompts whose samples would train nothing
            (:meth:`FeatureProducer.is_worth_a_forward`), without a forward; :attr:`num_skipped` counts them.

    Raises:
        TypeError: ``prompt_source`` is neither callable nor iterable.
        ConfigError: (a ``ValueError``) ``poll_interval`` is not positive, or a producer of another kind cannot tell
            which prompts to skip.
    """

    def __init__(
        self,
        producer: FeatureProducer,
        queue: _compat.RefQueue,
        prompt_source: PromptSource | Iterator[_PromptBatch | _PackedPromptBatch | PromptBatch | Tensor],
        poll_interval: float = 0.1,
        stop_on_exhausted: bool = True,
        *,
        skip_unsupervised: bool = False,
    ) -> None:
        if poll_interval <= 0:
            raise ConfigError(f"poll_interval must be positive, got {poll_interval}")
        if skip_unsupervised and not hasattr(producer, "is_worth_a_forward"):
            raise ConfigError(f"skip_unsupervised needs a FeatureProducer, got {type(producer).__name__}")
        self._producer = producer
        self._queue = queue
        self._next_prompt = _as_callable(prompt_source)
        self._poll_interval = poll_interval
        self._stop_on_exhausted = stop_on_exhausted
        self._skip_unsupervised = skip_unsupervised
        self._num_skipped = 0
        self._waits_for_room = _compat.accepts_keyword(producer.produce, "abort_when")
        self._thread: threading.Thread | None = None
        self._stop_event = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    @property
    def num_skipped(self) -> int:
        """Prompts that were left out because their samples would train nothing."""
        return self._num_skipped

    def start(self) -> None:
        """Start the thread ``streaming-async-producer``. Does nothing while it runs.

        Raises:
            RuntimeError: The pipeline has ended or was stopped: it is single-use, make a new one with a new queue.
        """
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return
            if self._thread is not None or self._stop_event.is_set():
                raise ClosedError("an AsyncFeaturePipeline is single-use: make a new one, with a new queue")
            self._thread = threading.Thread(target=self._run, name="streaming-async-producer", daemon=True)
            self._thread.start()

    def stop(self, join_timeout: float | None = 10.0) -> None:
        """Ask the thread to end and wait for it. Idempotent.

        A put that is paused by backpressure is given up and its sample evicted; refs that are queued stay with the
        consumer. Blocks until the forward in progress is over, at most ``join_timeout`` seconds (None: without limit);
        a thread that is still busy then is left to itself and logged. It publishes nothing more.

        Raises:
            BaseException: What the source, the backend or the store raised in the thread; once.
        """
        self._stop_event.set()
        with self._lock:
            thread = self._thread
        if thread is None:
            self._queue.close()  # Nobody will ever produce: consumers must not wait.
        elif thread is not threading.current_thread():
            thread.join(join_timeout)
            if thread.is_alive():
                logger.warning("thread %s did not end within %s s and is left to itself", thread.name, join_timeout)
        with self._lock:
            error, self._error = self._error, None
        if error is not None:
            raise error

    def join(self, timeout: float | None = None) -> None:
        """Wait until the source is exhausted and everything is queued, at most ``timeout`` seconds (None: no limit).

        Raises nothing for errors of the thread: :meth:`stop` does.
        """
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(timeout)

    def __enter__(self) -> AsyncFeaturePipeline:
        self.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        if exc is None or isinstance(exc, ProducerFailedError):
            self.stop()  # The error of the thread is the cause of a ProducerFailedError: it is the one to show.
            return
        try:
            self.stop()
        except BaseException:
            logger.exception("the producer failed too, while %s was leaving the pipeline", type(exc).__name__)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while not self._ending():
                prompt = self._next_prompt()
                if prompt is not None:
                    self._produce_one(prompt)
                elif self._stop_on_exhausted or self._stop_event.wait(self._poll_interval):
                    break
        except BaseException as caught:
            logger.exception("producing failed; the queue is closed with this error")
            error = caught
        if self._num_skipped:
            logger.info("%d prompts were skipped: they supervise nothing", self._num_skipped)
        with self._lock:
            self._error = error
        _compat.close_queue(self._queue, error)

    def _ending(self) -> bool:
        return self._stop_event.is_set() or self._queue.is_closed

    def _produce_one(self, prompt: object) -> None:
        arguments = _produce_arguments(prompt)
        if self._skip_unsupervised and not self._producer.is_worth_a_forward(arguments["loss_mask"]):
            self._num_skipped += 1
            return
        if self._waits_for_room:
            arguments["abort_when"] = self._ending
        try:
            ref = self._producer.produce(**arguments)
        except MemoryError:
            if self._ending():
                return  # Nothing was stored: the wait for room was given up because we are stopping.
            raise
        try:
            self._enqueue(ref)
        except BaseException:
            self._evict(ref)
            raise

    def _enqueue(self, ref: SampleRef) -> None:
        try:
            self._queue.put_blocks_until_below(
                ref, poll_interval=self._poll_interval, abort_when=self._stop_event.is_set
            )
        except RuntimeError as error:
            # An aborted or closed put is how a pause ends on shutdown. Errors of our peers are errors, though.
            if not self._ending() or not (isinstance(error, ClosedError) or type(error) is RuntimeError):
                raise
            logger.debug("sample %s evicted: the pipeline is ending", ref.sample_id)
            self._producer.discard(ref)

    def _evict(self, ref: SampleRef) -> None:
        try:
            self._producer.discard(ref)
        except Exception:
            logger.exception("evicting sample %s failed; its bytes stay until the store closes", ref.sample_id)


def _as_callable(source: object) -> Callable[[], object]:
    if isinstance(source, Iterator):
        iterator: Iterator[object] = source
    elif callable(source):
        return cast("Callable[[], object]", source)
    elif isinstance(source, Iterable):
        iterator = iter(source)
    else:
        raise TypeError(f"prompt_source must be callable or an iterator, got {type(source).__name__}")
    return lambda: next(iterator, None)


def _produce_arguments(prompt: object) -> dict[str, Any]:
    """Name the parts of what a prompt source supplied.

    Raises:
        TypeError: It is neither a tensor nor a tuple of three or six tensors.
    """
    if isinstance(prompt, Tensor):
        ones = torch.ones_like(prompt, dtype=torch.long)
        return {"input_ids": prompt, "attention_mask": ones, "loss_mask": ones.clone()}
    if not isinstance(prompt, tuple) or len(prompt) not in (3, 6) or not all(isinstance(x, Tensor) for x in prompt):
        what = [type(item).__name__ for item in prompt] if isinstance(prompt, (tuple, list)) else ""
        raise TypeError(
            "a prompt source must supply input_ids, or a tuple (input_ids, attention_mask, loss_mask), optionally "
            f"followed by (position_ids, seq_lens, doc_remaining); got {type(prompt).__name__} {what}".rstrip()
        )
    arguments: dict[str, Any] = dict(zip(_PROMPT_FIELDS, prompt, strict=False))
    sample_id = getattr(prompt, "sample_id", None)
    if sample_id is not None:
        arguments["sample_id"] = sample_id
    return arguments
