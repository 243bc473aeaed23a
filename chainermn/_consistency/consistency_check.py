"""The consistency check: before data moves, the ranks compare the signatures of their calls.

Small data is sent in the same messages. If the signatures do not match, or a rank rejects its
arguments, the ranks exchange details, and all of them raise the same error.
"""
from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn, TypeVar

from chainermn import global_except_hook
from chainermn._consistency import mismatch
from chainermn._consistency.signature_exchange import (
    MISMATCH,
    SPINS_IF_OVERSUBSCRIBED,
    Data,
    Share,
    SignatureExchange,
    TracedSignatureExchange,
)
from chainermn._diagnostics import call_site
from chainermn._diagnostics.flight_recorder import FlightRecord
from chainermn._operations import call_signature, common_error
from chainermn._operations.call_signature import (
    NO_UPDATE,
    PROGRAM,
    Caller,
    CallSignature,
    Update,
    identifier,
    identifier_of_caller,
)
from chainermn._operations.table import END
from chainermn._process import streams
from chainermn._process.mpi import MPI

_T = TypeVar('_T')

#: Transfers of at least this many bytes start with a second check, because a rank may run out of
#: memory. At this size, the check takes about 1% of the time, even if ranks share a core.
_LARGE = 2**23

#: Maximum number of characters of an error that is quoted in another message.
_MAX_QUOTE = 200


class ConsistencyCheck:
    """The consistency check of one communicator.

    Args:
        mpi_comm: A duplicate of the communicator. Nothing else uses its collectives or the tag
            ``tags.reserved().check``.
        share: Function that allocates shared memory for the exchanges; ``None`` if the ranks
            cannot share memory.
        spins: The number of polls for a message before this rank yields its core.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, share: Share | None = None,
                 spins: int = SPINS_IF_OVERSUBSCRIBED) -> None:
        self.mpi_comm = mpi_comm
        self.record = FlightRecord(mpi_comm)
        #: Whether there are other ranks to compare calls with.
        self.is_active = mpi_comm.size > 1
        #: Whether the last mismatch showed that ranks have reached the end of the script.
        self.has_finished_ranks = False
        #: Called once all ranks are known to have reached the end of the script.
        self.on_shutdown: Callable[[], None] = lambda: None
        #: The update of the calling optimizer.
        self.update = NO_UPDATE
        self.set_caller(PROGRAM)
        self._mismatch: tuple[int, list[CallSignature]] = -1, []  # the last one: call, signatures
        self._compared = -1  # the last call whose signatures the ranks have exchanged
        self._size = mpi_comm.size
        self._share, self._spins = share, spins
        self.exchange: SignatureExchange = SignatureExchange(
            mpi_comm, call_signature.SIZE, share, spins)
        #: The maximum size, in bytes, of data that a rank can send with the signature of its call.
        self.capacity = self.exchange.capacity

    def set_caller(self, caller: Caller) -> None:
        """Set the caller of the next operations on this rank."""
        self.caller = caller
        self._words = f'of {caller.name}' if caller.name else ''
        self._identifier: Callable[[bytes], bytes] = (
            identifier if caller is PROGRAM
            else lambda signature: identifier_of_caller(signature, caller.identity))

    def _record(self, signature: bytes) -> None:
        call = self.record.add(signature)
        if self._words:
            call.words = self._words

    def trace(self) -> None:
        """Record the time spent waiting for other ranks on the timeline."""
        self.exchange = TracedSignatureExchange(
            self.mpi_comm, call_signature.SIZE, self._share, self._spins)

    def free(self) -> None:
        """Free the shared memory. Collective: every rank calls it, at the end."""
        self.exchange.free()

    def same(self, signature: bytes, details: Mapping[str, str] | None = None) -> bool:
        """Compare the signatures of all ranks; a mismatch raises the same error on all of them.

        Args:
            signature: The signature of the call, from ``call_signature.pack``.
            details: The contents of the signature's digest, for the error.

        Returns:
            Whether the signatures are identical, including parts that may differ, such as the
            device.
        """
        self._record(signature)
        if not self.is_active or self.exchange.matches(self._identifier(signature)):
            return True
        self._compare(signature, details)
        return False

    def gather_equal(self, signature: bytes, block: bytes,
                     details: Mapping[str, str] | None = None) -> Sequence[Data] | None:
        """Compare the signatures as in :meth:`same`, and gather data of the same size on all ranks.

        Args:
            signature: The signature of the call, from ``call_signature.pack``.
            block: The data of this rank, at most ``capacity`` bytes.
            details: The contents of the signature's digest, for the error.

        Returns:
            The data of each rank; ``None`` if the signatures differ in parts that may differ.
        """
        self._record(signature)
        blocks = self.exchange.gather_equal(self._identifier(signature), block)
        if blocks is None:
            self._compare(signature, details)
        return blocks

    def gather(self, signature: bytes, data: bytes = b'') -> Sequence[Data]:
        """Return the signatures and data of all ranks; a mismatch raises an error on all ranks.

        Args:
            signature: The signature of an operation whose shapes and numbers may differ between
                ranks.
            data: The data of this rank, at most ``capacity`` bytes.

        Returns:
            The signature of each rank (``call_signature.SIZE`` bytes), followed by its data.
        """
        self._record(signature)
        if self._size == 1:
            return [signature + data]
        messages = self.exchange.gather(self._identifier(signature), signature + data)
        if messages is None:
            self._compare(signature)  # the callers differ as allowed; now they match
            messages = self.exchange.gather(self._identifier(signature), signature + data)
        assert messages is not None, 'identifiers differ, but the calls match'
        return messages

    def bcast(self, signature: bytes, root: int, data: bytes = b'') -> Data:
        """Return the signature and data of the root; a mismatch raises an error on all ranks.

        Args:
            signature: The signature of an operation whose shapes and numbers may differ between
                ranks.
            root: The root, which the signature also contains.
            data: The data of the root, at most ``capacity`` bytes.

        Returns:
            The signature (``call_signature.SIZE`` bytes), followed by the data.
        """
        self._record(signature)
        if self._size == 1:
            return signature + data
        message = self.exchange.bcast(self._identifier(signature), signature + data, root)
        if message is None:
            self._compare(signature)  # the callers differ as allowed; now they match
            message = self.exchange.bcast(self._identifier(signature), signature + data, root)
        assert message is not None, 'identifiers differ, but the calls match'
        return message

    def is_unknown_to_others(self, error: BaseException) -> bool:
        """Return whether no other rank knows yet of the call in which an error was raised.

        If other ranks know of it, first complete the exchange of signatures: they wait for it.

        Args:
            error: The error. A signal handler may raise any exception, at any point of the call.
        """
        record, exchange = self.record, self.exchange
        if record.count == record.before:
            return True
        if not self.is_active:
            return False
        if exchange.published[0] == exchange.before:
            record.forget()
            return True
        is_same, newest = exchange.settle(error), record.newest
        if not is_same and self._compared != record.count and (
                newest is not None and newest.signature is not None):
            self._compare(newest.signature)
        return False

    def refuse(self, operation: str, error: Exception, consequence: str = mismatch.NOT_SENT
               ) -> NoReturn:
        """Raise ``error`` on all ranks, in the check in which they expect this rank's signature.

        Args:
            operation: The operation that failed.
            error: The error.
            consequence: The consequence of the error, for the message.
        """
        if not self.is_active:
            raise error
        call = self.record.add(operation=operation)
        call.operation = operation  # instead of 'refuse'
        call.words = f'failed on this rank ({streams.one_line(error)[:_MAX_QUOTE]})'
        self._refuse(operation, error, consequence)

    def prepared(self, nbytes: int | None, prepare: Callable[[], _T]) -> _T:
        """Prepare to transfer data, after the ranks have compared their calls.

        If this fails, all ranks raise the error. But if the transfer is small, the other ranks
        already wait for the data of this rank, so this rank aborts the job.

        Args:
            nbytes: The size of the transfer in bytes, the same on all ranks; ``None`` if not all
                ranks know it.
            prepare: Function that allocates memory and packs the data.

        Returns:
            The result of ``prepare``.
        """
        if self._size == 1:
            return prepare()
        newest = self.record.newest
        signature = newest.signature if newest is not None and newest.signature is not None else (
            call_signature.pack('queue_gradients'))
        try:
            result = prepare()
        except Exception as error:
            operation = call_signature.unpack(signature).operation
            if nbytes is not None and nbytes < _LARGE:
                advice = ('Use less memory, for example by running fewer ranks per node.\n'
                          if isinstance(error, MemoryError) else '')
                global_except_hook.abort_job(
                    f'{operation} failed on this rank while the others were waiting for its data',
                    f'{streams.one_line(error)[:_MAX_QUOTE]}\n{advice}')
            self._refuse(operation, error, mismatch.NOT_SENT)
        # Do not count this comparison, because it belongs to the same operation.
        if (nbytes is None or nbytes >= _LARGE) and not (
                self.exchange.matches(self._identifier(signature))):
            self._compare(signature)
        return result

    def _refuse(self, operation: str, error: Exception, consequence: str) -> NoReturn:
        """Raise an error on all ranks; the other ranks are in a check."""
        self.exchange.matches(MISMATCH)
        signatures = self._signatures(call_signature.pack('failed', failed=True))
        self._raise_common(signatures, None, error,
                           mismatch.RemoteError.of(operation, error, consequence))

    def _signatures(self, signature: bytes) -> list[CallSignature]:
        """Gather the signatures of all ranks after a mismatch."""
        self._compared = self.record.count
        signature = call_signature.with_caller(signature, self.caller.digest)
        received = bytearray(call_signature.SIZE * self._size)
        self.mpi_comm.Allgather(signature, received)
        return [call_signature.unpack(received, call_signature.SIZE * rank)
                for rank in range(self._size)]

    def _compare(self, signature: bytes, details: Mapping[str, str] | None = None) -> None:
        """Gather the signatures of all ranks; raise if they differ in parts that must match."""
        signatures = self._signatures(signature)
        if not all(signature.update for signature in signatures):  # not all from optimizers
            signatures = [signature._replace(update=0) for signature in signatures]
        if not all(signature.caller for signature in signatures):
            signatures = [
                signature._replace(caller=0) if signature.declared.is_of_optimizers
                else signature for signature in signatures]
        equal = signatures[0].declared.equal
        first = signatures[0].key(equal)
        for each in signatures:
            if each.failed or each.key(equal) != first:
                self._raise_common(signatures, details)
        if signatures[0].caller and self.caller.place:
            self._compare_places(signatures)
        if signatures[0].caller and self.caller.harmless is not dict:
            self._warn_of_differences()

    def _compare_places(self, signatures: list[CallSignature]) -> None:
        """Raise an error if the ranks use different ones of objects that all of them created.

        If they did not create objects on the same lines in the same order, the lines show nothing.
        """
        caller = self.caller
        site = self.update.text(call_site.iteration()) + call_site.describe()
        places, created, are_accepted, sites = zip(*self.mpi_comm.allgather((
            caller.place, caller.created(), caller.is_place_accepted, site)), strict=True)
        if len(set(places)) == 1 and not any(are_accepted):
            return
        if any(are_accepted) or len(set(created)) > 1:
            caller.accept_place()
            return
        self._mismatch = self.record.count, signatures
        error = mismatch.different_objects_error(
            caller.name, signatures[0].operation, places, sites)
        common_error.mark(error, self.mpi_comm.rank == 0)
        raise error

    def _warn_of_differences(self) -> None:
        """Warn once, on rank 0, if the callers differ in values that may differ."""
        described = self.mpi_comm.allgather(dict(self.caller.harmless()))
        if table := mismatch.difference_table(described, 'none'):
            self.caller.accept_differences()
            if self.mpi_comm.rank == 0:
                first, last = self.caller.warning
                warnings.warn('\n'.join([first, *table, last]), RuntimeWarning, stacklevel=2)

    def _raise_common(self, signatures: list[CallSignature],
                      details: Mapping[str, str] | None = None, error: Exception | None = None,
                      failure: mismatch.RemoteError | None = None) -> NoReturn:
        """Exchange details and raise the same error on all ranks."""
        self._mismatch = self.record.count, signatures
        self.has_finished_ranks = any(
            signature.operation == END for signature in signatures)
        site = self.update.text(call_site.iteration()) + call_site.describe() + _handled(error)
        responses = self.mpi_comm.allgather((failure, details, site, self.caller))
        common = mismatch.common_error(signatures, *zip(*responses, strict=True))
        common_error.mark(common, self.mpi_comm.rank == _first_to_print(signatures))
        if type(common) is type(error):  # show one error instead of two
            assert error is not None
            cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
            raise common.with_traceback(error.__traceback__) from cause
        if error is None:
            raise common  # its context is the exception that user code is handling, if any
        raise common from error

    def mismatch_of(self, error: BaseException) -> list[CallSignature] | None:
        """Return the signatures if the last call of this rank raised this error on all ranks."""
        count, signatures = self._mismatch
        is_last = count == self.record.count and common_error.is_common(error)
        return signatures if is_last else None


def _handled(error: Exception | None) -> str:
    """Describe the exception that user code was handling when it called the operation.

    For example ``, while handling ValueError: lost``, as in ``finally: comm.barrier()``.

    Args:
        error: The error of the operation.
    """
    handled = sys.exc_info()[1]
    if handled is None or handled is error or common_error.is_common(handled):
        return ''
    text = ' '.join(str(handled).split())
    return f', while handling {type(handled).__name__}' + (f': {text[:_MAX_QUOTE]}' if text else '')


class CalledBy:
    """Context manager that sets the update, and the caller unless one is already set."""

    __slots__ = '_caller', '_check', '_count', '_outer', '_update'

    def __init__(self, check: ConsistencyCheck, caller: Caller, update: Update) -> None:
        self._check = check
        self._caller = caller
        self._update = update

    def __enter__(self) -> None:
        check = self._check
        self._outer = check.caller, check.update
        if check.caller is PROGRAM:
            self._count = check.record.count
            check.set_caller(self._caller)
        if self._update is not NO_UPDATE:
            check.update = self._update

    def __exit__(self, *error: object) -> None:
        check = self._check
        caller, check.update = self._outer
        if caller is PROGRAM:
            check.record.n_by_callers += check.record.count - self._count
            check.set_caller(PROGRAM)


def _first_to_print(signatures: Sequence[CallSignature]) -> int:
    """Return the first rank that failed or, if none did, the first that has not finished."""
    return min(range(len(signatures)), key=lambda rank: (
        not signatures[rank].failed, signatures[rank].operation == END, rank))
