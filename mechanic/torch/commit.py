"""The end of a step: what belongs together is written together."""

from collections.abc import Callable, Sequence

from torch import Tensor

from mechanic.torch import vectors
from mechanic.torch.capture import is_traced

Values = tuple[list[Tensor], list[Tensor]]
"""Tensors, and what is to be written to them."""


def commit(writes: Sequence[Callable[[], Values]]) -> None:
    """Carry out all writes, in their order. Each computes its values first, from tensors that the
    writes before it have not changed, and then copies them to where they belong.

    Once begun, this is finished. Where a signal handler raises in the middle (Ctrl-C), the rest is
    written before the exception goes on, so that no step is ever half made.
    """
    if is_traced():
        for write in writes:
            vectors.copy(*write())
        return
    progress = _Progress()
    interrupt: BaseException | None = None
    while progress.at[0] < len(writes):
        begun_at = progress.at[0]
        try:
            progress.go_on(writes)
        except Exception as error:  # it is tried once more, and again if that went on
            if interrupt is not None and progress.at[0] == begun_at:
                raise
            interrupt = interrupt or error
        except BaseException as error:
            interrupt = interrupt or error
    if interrupt is not None:
        raise interrupt


class _Progress:
    """How far the writes have come. It is one attribute, so that no interrupt finds it halfway:
    the index of the present write, and its values as soon as they are computed. To copy values
    twice does no harm; to compute them twice would, once they have been copied."""

    def __init__(self) -> None:
        self.at: tuple[int, Values | None] = (0, None)

    def go_on(self, writes: Sequence[Callable[[], Values]]) -> None:
        while self.at[0] < len(writes):
            index, values = self.at
            if values is None:
                values = writes[index]()
                self.at = (index, values)
            vectors.copy(*values)
            self.at = (index + 1, None)
