"""Before data moves, all ranks agree on the call: one exchange of headers, one common error.

A rank whose argument was refused says so in its header.  When the headers do not fit together,
the ranks exchange what each can say about it, and all raise the same error.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from chainermn import _environment, _signature
from chainermn._consistency import mismatch
from chainermn._diagnostics import call_site
from chainermn._diagnostics.flight_recorder import Calls
from chainermn._ranks import ranks_text
from chainermn._signature import Header
from chainermn._tracing import recorder


class Agreement:
    """The agreement among the ranks of one communicator.

    Args:
        mpi_comm: A duplicate of the communicator that nothing else uses.

    With ``CHAINERMN_AGREE=0`` in the environment, operations that need no header of another rank
    exchange none, and an error stays on its rank.
    """

    def __init__(self, mpi_comm: Any) -> None:
        self.mpi_comm = mpi_comm
        self.calls = Calls(mpi_comm)
        self.enabled = _environment.flag(_environment.AGREE, default=True)
        #: Whether :meth:`same` exchanges anything.
        self.is_active = self.enabled and mpi_comm.size > 1
        #: Whether a rank has reached the end of the program.
        self.is_over = False
        #: Called once all ranks are known to have reached the end of the program.
        self.at_the_end: Callable[[], None] = lambda: None
        #: What errors say of each call on this rank, before where it was called.
        self.note = ''
        self._size = mpi_comm.size
        self._rank = mpi_comm.rank
        self._received = bytearray(_signature.SIZE * self._size)
        said = mpi_comm.allgather((self.enabled, recorder.is_on()))
        off = [rank for rank, (enabled, _) in enumerate(said) if not enabled]
        if 0 < len(off) < self._size:
            raise ValueError('CHAINERMN_AGREE has to be equal on all ranks, but is 0 only on '
                             + ranks_text(off))
        timed = [rank for rank, (_, is_timed) in enumerate(said) if is_timed]
        if 0 < len(timed) < self._size:
            raise ValueError(f'{recorder.VARIABLE} has to be set on all ranks or on none, but is '
                             'set only on ' + ranks_text(timed))

    def same(self, header: bytes, details: dict[str, str] | None = None) -> bool:
        """Returns if all ranks call it with headers that fit, else raises on all of them.

        Args:
            header: From ``_signature.pack``.
            details: What the header's number is a digest of, for the message.

        Returns:
            Whether the headers are equal in what may differ as well, such as the device; that is
            taken for granted where nothing is exchanged.
        """
        calls = self.calls
        calls.count += 1
        calls.keep(header)
        if not self.is_active:
            return True
        self.mpi_comm.Allgather(header, self._received)
        if self._received == header * self._size:
            return True
        self._compare(self._headers(), details)
        return False

    def exchange(self, header: bytes) -> list[Header]:
        """Returns the headers of all ranks, or raises on all of them if they do not agree."""
        if self._size == 1:
            return [_signature.unpack(header)]
        self.calls.count += 1
        self.calls.keep(header)
        self.mpi_comm.Allgather(header, self._received)
        headers = self._headers()
        self._compare(headers)
        return headers

    def numbers(self, header: bytes) -> list[int]:
        """Returns the numbers that all ranks give, or raises on all of them if they do not agree.

        Args:
            header: Of an operation of which no shape has to be equal, nor the number.
        """
        if self._size > 1:
            self.calls.count += 1
            self.calls.keep(header)
            self.mpi_comm.Allgather(header, self._received)
            numbers = _signature.numbers(self._received, header)
            if numbers is not None:
                return numbers
            headers = self._headers()
            self._compare(headers)
        else:
            headers = [_signature.unpack(header)]
        return [header.number for header in headers]

    def refuse(self, verb: str, error: Exception) -> NoReturn:
        """Raises ``error`` on all ranks, in place of this rank's header."""
        if not self.is_active:
            raise error
        self.calls.count += 1
        said = ' '.join(f'{type(error).__name__}: {error}'.split())[:200]
        self.calls.keep(f'{verb} refused on this rank ({said})')
        self.mpi_comm.Allgather(_signature.pack('refused', refused=True), self._received)
        self._disagree(self._headers(), None, verb, error)

    def _headers(self) -> list[Header]:
        size = _signature.SIZE
        return [_signature.unpack(self._received, size * rank) for rank in range(self._size)]

    def _compare(self, headers: list[Header], details: dict[str, str] | None = None) -> None:
        if not all(header.update for header in headers):  # some are not called by an optimizer
            headers = [header._replace(update=0) for header in headers]
        equal = _signature.EQUAL[headers[0].verb]
        first = headers[0].key(equal)
        for header in headers:
            if header.refused or header.key(equal) != first:
                self._disagree(headers, details)

    def _disagree(self, headers: list[Header], details: dict[str, str] | None = None,
                  verb: str = '', error: Exception | None = None) -> NoReturn:
        """Raises what all ranks raise, from what each has to say."""
        self.is_over = any(header.verb == _signature.END for header in headers)
        refusal = mismatch.Refusal.of(verb, error) if error is not None else None
        said = self.mpi_comm.allgather((refusal, details, self.note + call_site.called()))
        common = mismatch.common_error(headers, *zip(*said, strict=True))
        common.__dict__['agreement'] = self, headers  # see `headers_of`
        raise common from error

    def headers_of(self, error: BaseException) -> list[Header] | None:
        """The headers over which all ranks raised this error, or None if it is another one."""
        agreement, headers = error.__dict__.get('agreement', (None, None))
        return headers if agreement is self else None
