"""The consistency check: before data moves, the ranks compare the signatures of their calls.

A rank that rejects its arguments sends a signature marked as failed.  If the signatures do not
match, the ranks exchange details, and all of them raise the same error.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn

from mpi4py import MPI

from chainermn import _environment, _signature
from chainermn._consistency import mismatch
from chainermn._diagnostics import call_site
from chainermn._diagnostics.flight_recorder import FlightRecord
from chainermn._ranks import ranks_text
from chainermn._signature import CallSignature
from chainermn._tracing import recorder


class ConsistencyCheck:
    """The consistency check of one communicator.

    Args:
        mpi_comm: A duplicate of the communicator that nothing else uses.

    With ``CHAINERMN_AGREE=0`` in the environment, operations exchange signatures only if they need
    their contents, and an error is raised only on its own rank.
    """

    def __init__(self, mpi_comm: MPI.Intracomm) -> None:
        self.mpi_comm = mpi_comm
        self.calls = FlightRecord(mpi_comm)
        self.enabled = _environment.flag(_environment.AGREE, default=True)
        #: Whether :meth:`same` exchanges anything.
        self.is_active = self.enabled and mpi_comm.size > 1
        #: Whether the last mismatch showed that ranks have reached the end of the program.
        self.has_finished_ranks = False
        #: Called once all ranks are known to have reached the end of the program.
        self.on_shutdown: Callable[[], None] = lambda: None
        #: Text that errors add to each call of this rank, before its call site.
        self.note = ''
        #: The updates that the calling optimizer has begun since its last exchange; 0: none calls.
        self.update = 0
        self._size = mpi_comm.size
        self._rank = mpi_comm.rank
        self._received = bytearray(_signature.SIZE * self._size)
        self._allgather: Callable[[bytes, bytearray], None] = mpi_comm.Allgather
        responses = mpi_comm.allgather((self.enabled, recorder.is_on()))
        off = [rank for rank, (enabled, _) in enumerate(responses) if not enabled]
        if 0 < len(off) < self._size:
            raise ValueError(f'CHAINERMN_AGREE is 0 only on {ranks_text(off)}; set it to the same '
                             'value on all ranks')
        timed = [rank for rank, (_, is_timed) in enumerate(responses) if is_timed]
        if 0 < len(timed) < self._size:
            raise ValueError(f'{recorder.VARIABLE} is set only on {ranks_text(timed)}; set it on '
                             'all ranks or on none')

    def trace(self) -> None:
        """Records the time spent waiting for other ranks on the timeline."""
        self._allgather = self._traced_allgather

    def _traced_allgather(self, signature: bytes, received: bytearray) -> None:
        with recorder.span('wait', 'wait'):
            self.mpi_comm.Allgather(signature, received)

    def same(self, signature: bytes, details: Mapping[str, str] | None = None) -> bool:
        """Compares the signatures of all ranks; a mismatch raises the same error on all of them.

        Args:
            signature: From ``_signature.pack``.
            details: The contents of the signature's digest, for the error.

        Returns:
            Whether the signatures are identical, including parts that may differ, such as the
            device.  True if the check is disabled.
        """
        calls = self.calls
        calls.count += 1
        calls.record(signature)
        if not self.is_active:
            return True
        self._allgather(signature, self._received)
        if self._received == signature * self._size:
            return True
        self._compare(self._signatures(), details)
        return False

    def exchange(self, signature: bytes) -> list[CallSignature]:
        """Returns the signatures of all ranks; a mismatch raises the same error on all of them."""
        if self._size == 1:
            return [_signature.unpack(signature)]
        self.calls.count += 1
        self.calls.record(signature)
        self._allgather(signature, self._received)
        signatures = self._signatures()
        self._compare(signatures)
        return signatures

    def numbers(self, signature: bytes) -> list[int]:
        """Returns the numbers of all ranks; a mismatch raises the same error on all of them.

        Args:
            signature: Of an operation whose shapes and numbers may differ between ranks.
        """
        if self._size > 1:
            self.calls.count += 1
            self.calls.record(signature)
            self._allgather(signature, self._received)
            numbers = _signature.numbers(self._received, signature)
            if numbers is not None:
                return numbers
            signatures = self._signatures()
            self._compare(signatures)
        else:
            signatures = [_signature.unpack(signature)]
        return [signature.number for signature in signatures]

    def refuse(self, operation: str, error: Exception) -> NoReturn:
        """Raises ``error`` on all ranks, in place of this rank's signature."""
        if not self.is_active:
            raise error
        self.calls.count += 1
        reason = ' '.join(f'{type(error).__name__}: {error}'.split())[:200]
        self.calls.record(f'{operation} failed on this rank ({reason})')
        self._allgather(_signature.pack('failed', failed=True), self._received)
        self._raise_common(self._signatures(), None, operation, error)

    def _signatures(self) -> list[CallSignature]:
        size = _signature.SIZE
        return [_signature.unpack(self._received, size * rank) for rank in range(self._size)]

    def _compare(self, signatures: list[CallSignature], details: Mapping[str, str] | None = None
                 ) -> None:
        if not all(signature.update for signature in signatures):  # not all by an optimizer
            signatures = [signature._replace(update=0) for signature in signatures]
        equal = _signature.EQUAL[signatures[0].operation]
        first = signatures[0].key(equal)
        for signature in signatures:
            if signature.failed or signature.key(equal) != first:
                self._raise_common(signatures, details)

    def _raise_common(self, signatures: list[CallSignature],
                      details: Mapping[str, str] | None = None, operation: str = '',
                      error: Exception | None = None) -> NoReturn:
        """Exchanges details and raises the same error on all ranks."""
        self.has_finished_ranks = any(
            signature.operation == _signature.END for signature in signatures)
        failure = mismatch.RemoteError.of(operation, error) if error is not None else None
        responses = self.mpi_comm.allgather((failure, details, self.note + call_site.describe()))
        common = mismatch.common_error(signatures, *zip(*responses, strict=True))
        common.__dict__['consistency'] = self, signatures  # see `signatures_of`
        raise common from error

    def signatures_of(self, error: BaseException) -> list[CallSignature] | None:
        """The signatures that caused this error, or None if this check did not raise it."""
        check, signatures = error.__dict__.get('consistency', (None, None))
        return signatures if check is self else None
