"""KVStore: a key-value store of arrays that workers push to and pull from."""
from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, overload

import chainer
import numpy as np

from chainermn.communicators import compression
from chainermn.communicators.errors import raise_on_all_ranks
from chainermn.kvstore import _arguments, _optimizer_states
from chainermn.kvstore._arguments import KeyLike, KeysLike, RowIdsLike, Value, Values
from chainermn.kvstore._backends import Backend
from chainermn.kvstore._optimizer_updater import OptimizerUpdater
from chainermn.kvstore._server import Updater
from chainermn.kvstore._sharding import Key, KeyLayout
from chainermn.kvstore.row_sparse import Array, RowSparse

#: Types of stores; see :func:`chainermn.kvstore.create`.
StoreType: TypeAlias = Literal[
    'local', 'device', 'nccl', 'dist_sync', 'dist_device_sync', 'dist_async']


class KVStore:
    """A key-value store of arrays that workers push to and pull from.

    Create one with :func:`chainermn.kvstore.create`, which describes the types.

    A key is an int or a str. A value is a NumPy or CuPy array or a :class:`RowSparse`, or a list
    of these, one for each device of this process. Arrays can have any shape and any boolean,
    integer, floating-point or complex dtype in native byte order. Every method that takes a key and
    a value also takes a list of keys and a list of their values.

    ``priority`` is accepted for compatibility but has no effect, because each call is complete when
    it returns.

    Example:
        >>> with chainermn.kvstore.create('dist_sync', comm) as store:
        ...     store.rank, store.num_workers
        (0, 2)
    """

    def __init__(self, type: StoreType, backend: Backend, bigarray_bound: float) -> None:
        self._type = type
        self._backend = backend
        self._bigarray_bound = bigarray_bound
        self._layouts: dict[Key, KeyLayout] = {}
        self._is_closed = False

    @property
    def type(self) -> StoreType:
        """Name of the type; see :func:`create`."""
        return self._type

    @property
    def rank(self) -> int:
        """Rank of this worker; 0 if the store is local to this process."""
        return self._backend.rank

    @property
    def num_workers(self) -> int:
        """Number of workers that share the store; 1 if the store is local to this process."""
        return self._backend.size

    # --- values ----------------------------------------------------------------------------------

    def init(self, key: KeyLike | KeysLike, value: Values) -> None:
        """Add keys with their initial values. Each key is initialized once, before any push.

        Collective in ``dist`` types: every rank calls it with the same keys, dtypes and shapes. The
        values of rank 0 are used.

        Args:
            key: Key, or list of keys.
            value: An array or a :class:`RowSparse` for each key, which is copied. A
                :class:`RowSparse` creates a row-sparse key. Its rows can be pulled one by one.

        Raises:
            ValueError: If a key is already initialized, or the arguments differ between ranks.
            TypeError: If a key or a value has the wrong type.

        Example:
            >>> store = chainermn.kvstore.create('dist_sync', comm)
            >>> store.init('w', np.full(3, comm.rank))
            >>> store.pull('w')  # the value of rank 0
            array([0, 0, 0])
        """
        with raise_on_all_ranks(self._backend, 'init'):
            layouts, values = self._new_layouts(key, value)
        self._backend.check_same('init', ', '.join(map(str, layouts)), layouts)
        self._backend.init(layouts, values)
        self._layouts.update({layout.key: layout for layout in layouts})

    def push(self, key: KeyLike | KeysLike, value: Values,
             priority: float | Sequence[float] = 0) -> None:
        """Push values, which the updater merges into the stored arrays.

        If a key has several values, because its value is a list or because it occurs several times
        in ``key``, they are summed first, as in MXNet.

        Collective in ``dist_sync``: every rank calls it with the same keys. The values of all ranks
        are summed in rank order, and the updater is called once.

        Not collective in ``dist_async``: the updater is called with this rank's value.

        Args:
            key: Key, or list of keys.
            value: An array or a :class:`RowSparse`, or a list of these, for each key, with the
                key's dtype and shape. The values are not changed.
            priority: Number, or list with a number for each key. Has no effect.

        Raises:
            ValueError: If a key is not initialized, a value does not have the key's shape, or the
                optimizer of the store cannot update shards.
            TypeError: If a value does not have the key's dtype, an argument has the wrong type, or
                the store has an optimizer and the key is not floating-point.
            Exception: Any error that the updater raises.

        Example:
            >>> store = chainermn.kvstore.create('dist_sync', comm)
            >>> store.init(['w', 'b'], [np.zeros(3), np.zeros(1)])
            >>> store.push(['w', 'b'], [np.ones(3), np.full(1, 5.0)])
            >>> store.pull(['w', 'b'])
            [array([2., 2., 2.]), array([10.])]
        """
        with raise_on_all_ranks(self._backend, 'push'):
            layouts = self._find_layouts(key)
            of_keys = _arguments.as_value_lists(key, value)
            by_key: dict[int, list[Value]] = {}
            updater = self._backend.server.updater
            for layout, values in zip(layouts, of_keys, strict=True):
                if isinstance(updater, OptimizerUpdater):
                    updater.check(layout)
                for x in values:
                    _arguments.check_fits(x, layout)
                by_key.setdefault(layout.key_id, []).extend(values)
            layouts = [*{layout.key_id: layout for layout in layouts}.values()]
            summed = [self._backend.sum_devices(layout, by_key[layout.key_id])
                      for layout in layouts]
        if isinstance(updater, OptimizerUpdater):
            with self._backend.comparing(updater.settings, []):
                self._backend.push(layouts, summed)
        else:
            self._backend.push(layouts, summed)

    @overload  # a str is one key, although it is also a sequence of str
    def pull(self, key: KeyLike, out: None = None,  # type: ignore[overload-overlap]
             priority: float | Sequence[float] = 0) -> Array: ...
    @overload
    def pull(self, key: KeysLike, out: None = None,
             priority: float | Sequence[float] = 0) -> list[Array]: ...
    @overload
    def pull(self, key: KeyLike | KeysLike, out: Values,
             priority: float | Sequence[float] = 0) -> None: ...
    def pull(self, key: KeyLike | KeysLike, out: Values | None = None,
             priority: float | Sequence[float] = 0) -> Array | list[Array] | None:
        """Read the values of keys.

        Collective in ``dist_sync``: every rank calls it with the same keys. Not collective in
        ``dist_async``.

        Row-sparse keys are skipped with a warning; use :meth:`row_sparse_pull` for them.

        Args:
            key: Key, or list of keys.
            out: An array or a list of arrays for each key, with the key's dtype and shape, to
                which the value is written.
            priority: Number, or list with a number for each key. Has no effect.

        Returns:
            ``None`` if ``out`` is given. Otherwise, a new array with the key's dtype and shape, or
            a list of arrays for a list of keys, with ``None`` in place of the array of a row-sparse
            key. The arrays are in host memory, except in ``device`` and ``nccl`` stores, where they
            are on the device of the initial value.

        Raises:
            ValueError: If a key is not initialized, or an output does not have the key's shape.
            TypeError: If an output does not have the key's dtype, or an argument has the wrong
                type.

        Example:
            >>> store = chainermn.kvstore.create('dist_sync', comm)
            >>> store.init('w', np.arange(3))
            >>> x = np.empty(3, int)
            >>> store.pull('w', out=x)
            >>> x
            array([0, 1, 2])
        """
        with raise_on_all_ranks(self._backend, 'pull'):
            layouts = self._find_layouts(key)
            outs = [[] for _ in layouts] if out is None else \
                _arguments.as_lists(key, out, 'out')
            for layout, of_key in zip(layouts, outs, strict=True):
                for x in of_key if not layout.is_row_sparse else ():
                    _arguments.check_output(x, layout)
        dense = [layout for layout in layouts if not layout.is_row_sparse]
        if len(dense) < len(layouts):
            warnings.warn('pull skips row-sparse keys; use row_sparse_pull', UserWarning,
                          stacklevel=2)
        pulled = {layout.key_id: x for layout, (x,) in zip(dense, self._backend.pull(
            dense, [[None]] * len(dense)), strict=True)} if dense else {}
        for layout, of_key in zip(layouts, outs, strict=True):
            for x in of_key if not layout.is_row_sparse else ():
                _arguments.write(x, pulled[layout.key_id])
        if out is not None:
            return None
        copied = set()  # a key can occur several times
        found: list[Array | None] = []
        for layout in layouts:
            x = pulled.get(layout.key_id)
            found.append(x.copy() if x is not None and layout.key_id in copied else x)
            copied.add(layout.key_id)
        return found if isinstance(key, (tuple, list)) else found[0]

    @overload
    def row_sparse_pull(self, key: KeyLike, out: None = None,  # type: ignore[overload-overlap]
                        priority: float | Sequence[float] = 0,
                        row_ids: RowIdsLike | None = None) -> RowSparse: ...
    @overload
    def row_sparse_pull(self, key: KeysLike, out: None = None,
                        priority: float | Sequence[float] = 0,
                        row_ids: RowIdsLike | None = None) -> list[RowSparse]: ...
    @overload
    def row_sparse_pull(self, key: KeyLike | KeysLike, out: Values,
                        priority: float | Sequence[float] = 0,
                        row_ids: RowIdsLike | None = None) -> None: ...
    def row_sparse_pull(self, key: KeyLike | KeysLike, out: Values | None = None,
                        priority: float | Sequence[float] = 0,
                        row_ids: RowIdsLike | None = None) -> RowSparse | list[RowSparse] | None:
        """Read some rows of row-sparse keys.

        Collective in ``dist_sync``: every rank calls it with the same keys, but the rows may
        differ. Not collective in ``dist_async``.

        Args:
            key: Key, or list of keys.
            out: An array or a :class:`RowSparse`, or a list of these, for each key, with the key's
                dtype and shape, to which the rows are written. All other rows become 0.
            priority: Number, or list with a number for each key. Has no effect.
            row_ids: Required. Indices of the rows: a one-dimensional array or list of integers, in
                any order and possibly with repetitions. For several keys, it may be a list with an
                array for each key. For several outputs of a key, this array may be a list with an
                array for each output.

        Returns:
            ``None`` if ``out`` is given. Otherwise, a new :class:`RowSparse` in which each of the
            rows occurs once, in ascending order, or a list of these for a list of keys.

        Raises:
            ValueError: If a key is not initialized or not row-sparse, or a row is out of range.
            TypeError: If an argument has the wrong type.

        Example:
            >>> store = chainermn.kvstore.create('dist_sync', comm)
            >>> table = np.arange(6).reshape(3, 2)
            >>> store.init('table', chainermn.kvstore.RowSparse.from_dense(table))
            >>> store.row_sparse_pull('table', row_ids=[2, 0]).rows
            array([[0, 1],
                   [4, 5]])
        """
        with raise_on_all_ranks(self._backend, 'row_sparse_pull'):
            layouts = self._find_layouts(key)
            outs = None if out is None else _arguments.as_lists(key, out, 'out')
            for n, layout in enumerate(layouts):
                if not layout.is_row_sparse:
                    raise ValueError(f'key {layout.key!r} was not initialized with a RowSparse; '
                                     'use pull for it')
                for x in outs[n] if outs is not None else ():
                    _arguments.check_output(x, layout)
            n_outs = [1] * len(layouts) if outs is None else [len(of_key) for of_key in outs]
            ids = _arguments.as_row_lists(row_ids, key, n_outs, layouts)
        rows = self._backend.pull(layouts, ids)
        if outs is not None:
            for of_key, its_ids, its_rows in zip(outs, ids, rows, strict=True):
                for n, x in enumerate(of_key):  # all outputs may share one read
                    _arguments.write_rows(x, its_ids[n % len(its_ids)], its_rows[n % len(its_rows)])
            return None
        found = [RowSparse(one_ids, one_rows, layout.shape) for layout, (one_ids,), (one_rows,)
                 in zip(layouts, ids, rows, strict=True)]
        return found if isinstance(key, (tuple, list)) else found[0]

    # --- updates ---------------------------------------------------------------------------------

    def set_updater(self, updater: Updater) -> None:
        """Set the function that merges pushed values. By default, they replace the stored value.

        Collective in ``dist`` types: every rank calls it with the same function. The function is
        called on the rank that stores the key or, for a large array, on each rank with the shard of
        that rank.

        Args:
            updater: Function that is called as ``updater(key, pushed, stored)`` with the key (an
                int or a str), the sum of the pushed values, and the stored array, which has the
                same dtype and shape. It changes ``stored`` in place, may overwrite ``pushed``, and
                must not use the store. If it returns a new array, :meth:`push` raises an error,
                because that array would be lost.

        Raises:
            TypeError: If ``updater`` cannot be called with three arguments.
            ValueError: If the ranks made different calls.

        Example:
            >>> store = chainermn.kvstore.create('dist_sync', comm)
            >>> def step(key, gradient, stored):
            ...     stored -= 0.1 * gradient
            >>> store.set_updater(step)
            >>> store.init('w', np.ones(2))
            >>> store.push('w', np.ones(2))
            >>> store.pull('w')
            array([0.8, 0.8])
        """
        with raise_on_all_ranks(self._backend, 'set_updater'):
            self._check_open()
            _arguments.check_updater(updater)
        self._backend.check_same('set_updater', '')
        self._backend.server.set_updater(updater)
        self._backend.barrier('set_updater')

    _set_updater = set_updater  # name in MXNet

    def set_optimizer(self, optimizer: chainer.optimizer.GradientMethod, rescale_grad: float = 1.,
                      *, compare_settings: bool = True) -> None:
        """Make the store apply an optimizer: pushed values are the gradients of the stored arrays.

        Collective in ``dist`` types: every rank calls it with an optimizer of the same class and
        with the same hyperparameters. Each server reads the hyperparameters of its rank's optimizer
        at each step, so change them on every rank. In ``dist_sync``, :meth:`push` raises an error
        if the hyperparameters or hooks differ between ranks. The states of an earlier optimizer are
        discarded.

        Args:
            optimizer: Any ``chainer.optimizer.GradientMethod``. It may be set up with a model,
                which is not changed. Its hooks must be called for each parameter separately, like
                ``WeightDecay``.
            rescale_grad: Factor by which gradients are multiplied. Pass ``1 / kvstore.num_workers``
                to average them in ``dist_sync``, which sums them. float16 sums are rescaled in
                float32 (and stay float32 with ``use_fp32_update``), so they neither overflow nor
                underflow. If gradients are loss-scaled, multiply this factor by ``1 / scale``.
            compare_settings: Whether hyperparameters and hooks must be the same on all ranks.

        Raises:
            TypeError: If ``optimizer`` has the wrong type.
            ValueError: If a hook needs all parameters together; if the optimizer cannot update
                shards, but some arrays are already split into shards; or if the arguments differ
                between ranks. A subclass of one of Chainer's rules that overrides its methods can
                update shards only if the subclass itself declares ``is_elementwise = True``.

        Example:
            >>> store = chainermn.kvstore.create('dist_sync', comm)
            >>> store.set_optimizer(chainer.optimizers.SGD(lr=0.1), 1 / store.num_workers)
            >>> store.init('w', np.ones(2))
            >>> store.push('w', np.ones(2))
            >>> store.pull('w')
            array([0.9, 0.9])
        """
        with raise_on_all_ranks(self._backend, 'set_optimizer'):
            self._check_open()
            updater = OptimizerUpdater(optimizer, rescale_grad, compare_settings)
            split = [layout for layout in self._layouts.values() if layout.is_split]
            if split and not updater.is_elementwise:
                raise ValueError(
                    'this optimizer or one of its hooks cannot update shards of an array, but the '
                    f'following keys are split over the servers: {", ".join(map(str, split))}. '
                    'Call set_optimizer before init, or create the store with a larger '
                    'bigarray_bound.')
            call = _optimizer_states.call_of(optimizer, compare_settings)
        self._backend.check_same('set_optimizer', f'{call}, rescale_grad={rescale_grad!r}')
        self._backend.server.set_updater(updater)
        self._backend.barrier('set_optimizer')

    def set_gradient_compression(self, compression_params: Mapping[str, object]) -> None:
        """Compress all values that are pushed from now on to 2 bits each.

        Each value is sent as ``threshold``, ``-threshold`` or 0, so 16 values take up the bytes of
        one float32. The sender keeps the difference and adds it to its next push of the key (error
        feedback). In ``dist`` types, pushes from workers to servers are compressed. In the other
        types, the values of the devices of this process are compressed if a key is pushed with
        several values. Only floating-point arrays are compressed: :class:`RowSparse` values of
        row-sparse keys are not, and neither are pulls.

        Collective in ``dist`` types: every rank calls it with the same parameters.

        Args:
            compression_params: ``{'type': '2bit', 'threshold': 0.5}``. The threshold is a positive
                number; the default is 0.5.

        Raises:
            TypeError: If ``compression_params`` is not a dict, or the threshold is not a number.
            ValueError: If the type or a parameter is unknown or out of range, or the arguments
                differ between ranks.

        Example:
            >>> store = chainermn.kvstore.create('dist_sync', comm)
            >>> store.set_gradient_compression({'type': '2bit', 'threshold': 0.5})
            >>> store.init('w', np.zeros(2))
            >>> store.push('w', np.array([0.7, 0.1]))
            >>> store.pull('w')
            array([1., 0.])
        """
        with raise_on_all_ranks(self._backend, 'set_gradient_compression'):
            self._check_open()
            if not isinstance(compression_params, dict):
                raise TypeError('compression_params must be a dict such as '
                                f"{{'type': '2bit', 'threshold': 0.5}}, not {compression_params!r}")
            if compression_params.get('type') != '2bit':
                raise ValueError("the compression of a KVStore must be of type '2bit', not "
                                 f'{compression_params.get("type")!r}')
            compressor = compression.get(compression_params)
            assert isinstance(compressor, compression.TwoBit)
        self._backend.check_same('set_gradient_compression', repr(compressor))
        self._backend.server.compressor = compressor
        self._backend.barrier('set_gradient_compression')

    # --- optimizer states ------------------------------------------------------------------------

    def save_optimizer_states(self, fname: str | os.PathLike[str],
                              dump_optimizer: bool = False) -> None:
        """Write the optimizer's states, such as momenta and float32 copies, and ``t`` to a file.

        The NPZ file does not contain the values of the keys; pull and save them separately. An old
        file is replaced atomically.

        Collective in ``dist`` types: every rank calls it. Rank 0 writes the states of all ranks to
        one file, which any number of ranks can load.

        Args:
            fname: Path of the file.
            dump_optimizer: Whether to write the optimizer's class and hyperparameters as well.

        Raises:
            RuntimeError: If no optimizer is set.
            OSError: If rank 0 cannot write the file.

        Example:
            >>> store = chainermn.kvstore.create('dist_sync', comm)
            >>> store.set_optimizer(chainer.optimizers.Adam())
            >>> store.init('w', np.ones(2))
            >>> store.push('w', np.ones(2))
            >>> store.save_optimizer_states('adam.npz')
        """
        with raise_on_all_ranks(self._backend, 'save_optimizer_states'):
            optimizer = self._optimizer('save')
        by_server = self._backend.gather(
            'save_optimizer_states', self._backend.server.optimizer_states())
        if by_server is not None:
            with raise_on_all_ranks(self._backend, 'save_optimizer_states'):
                states = {}
                for layout in self._layouts.values():
                    shards = {server: found[layout.key_id] for server, found in enumerate(by_server)
                              if layout.key_id in found}
                    if shards:
                        states[layout.key] = _optimizer_states.join_states(layout, shards)
                _optimizer_states.write_states(
                    fname, states,
                    _optimizer_states.describe(optimizer) if dump_optimizer else None,
                    int(optimizer.t))
        self._backend.barrier('save_optimizer_states')

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Load a file that :meth:`save_optimizer_states` wrote. No code in the file is executed.

        Keys that are not in the file lose their states. A float32 copy is loaded only if it still
        rounds to the value of its key.

        Keys that are not initialized yet get their states when they are initialized. The
        optimizer's ``t`` is set to the saved one. If the file contains hyperparameters, they are
        set in the optimizer.

        Collective in ``dist`` types: every rank calls it. Rank 0 reads the file.

        Args:
            fname: Path of the file.

        Raises:
            RuntimeError: If no optimizer is set.
            ValueError: If the file is corrupt, has a different format, or does not match the
                optimizer.
            OSError: If rank 0 cannot read the file.

        Example:
            >>> store = chainermn.kvstore.create('dist_sync', comm)
            >>> store.set_optimizer(chainer.optimizers.Adam())
            >>> store.init('w', np.ones(2))
            >>> store.push('w', np.ones(2))
            >>> store.save_optimizer_states('adam.npz')
            >>> store.load_optimizer_states('adam.npz')
        """
        found = None
        with raise_on_all_ranks(self._backend, 'load_optimizer_states'):
            optimizer = self._optimizer('load')
            if self.rank == 0:
                found = _optimizer_states.read_states(fname)
        found = self._backend.bcast('load_optimizer_states', found)
        assert found is not None
        states, saved, t = found
        if saved is not None:
            current = _optimizer_states.describe(optimizer)['optimizer']
            if saved['optimizer'] != current:
                raise ValueError(f'{os.fspath(fname)} has the states of {saved["optimizer"]}, but '
                                 f'the optimizer of this store is {current}. Call set_optimizer '
                                 'with the optimizer that was saved, or load a different file.')
            for name, value in saved['hyperparameters'].items():
                setattr(optimizer.hyperparam, name, value)
        self._backend.server.load_optimizer_states(states)
        if t is not None:
            optimizer.t = t
        updater = self._backend.server.updater
        assert isinstance(updater, OptimizerUpdater)
        updater.on_load(states)
        self._backend.barrier('load_optimizer_states')

    # --- synchronization -------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait for all workers. Collective in ``dist`` types: every rank calls it.

        When it returns, all pushes that any worker made before the barrier are merged.

        Example:
            >>> store = chainermn.kvstore.create('dist_async', comm)
            >>> store.init('n', np.zeros(1))
            >>> store.set_updater(lambda key, value, stored: stored.__iadd__(value))
            >>> store.push('n', np.ones(1))
            >>> store.barrier()  # all ranks have pushed
            >>> store.pull('n')
            array([2.])
            >>> store.close()
        """
        with raise_on_all_ranks(self._backend, 'barrier'):
            self._check_open()
        self._backend.barrier('barrier')

    def _barrier(self) -> None:  # name in MXNet
        self.barrier()

    def close(self) -> None:
        """Close the store on this worker. Not collective.

        Later calls on this worker raise ValueError. In a ``dist_async`` store, this rank continues
        to serve the other workers until all of them have closed the store. Stores that are still
        open at the end of the script are closed then.

        Example:
            >>> store = chainermn.kvstore.create('dist_async', comm)
            >>> store.close()
        """
        self._is_closed = True
        self._backend.close()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- private ---------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError('the store was closed on this rank, so other ranks may have exited; '
                             'do not use it after close()')

    def _new_layouts(self, key: KeyLike | KeysLike, value: Values
                     ) -> tuple[list[KeyLayout], list[Array]]:
        """Return the layouts of new keys, and copies of their values where the store keeps them."""
        self._check_open()
        updater = self._backend.server.updater
        may_split = not isinstance(updater, OptimizerUpdater) or updater.is_elementwise
        bound = self._bigarray_bound if may_split else float('inf')
        keys = _arguments.as_keys(key)
        layouts: list[KeyLayout] = []
        arrays = []
        for one, (x, *more) in zip(keys, _arguments.as_value_lists(key, value), strict=True):
            if more:
                raise ValueError('init needs one value for each key, but key '
                                 f'{one!r} has {1 + len(more)}')
            if one in self._layouts or one in keys[:len(layouts)]:
                raise ValueError(f'key {one!r} is already initialized; use push to change it')
            layouts.append(KeyLayout.of(
                one, len(self._layouts) + len(layouts), tuple(x.shape), x.dtype,
                isinstance(x, RowSparse), self.num_workers, bound))
            array = x.todense() if isinstance(x, RowSparse) else x
            arrays.append(array.copy() if self._backend.on_device
                          else np.array(chainer.cuda.to_cpu(array)))
        return layouts, arrays

    def _find_layouts(self, key: KeyLike | KeysLike) -> list[KeyLayout]:
        self._check_open()
        keys = _arguments.as_keys(key)
        for one in keys:
            if one not in self._layouts:
                known = ', '.join(map(repr, list(self._layouts)[:10])) or 'none'
                where = ' on all ranks' if self.num_workers > 1 else ''
                raise ValueError(f'key {one!r} is not initialized; call init({one!r}, value) '
                                 f'first{where} (initialized keys: {known})')
        return [self._layouts[one] for one in keys]

    def _optimizer(self, action: str) -> chainer.optimizer.GradientMethod:
        self._check_open()
        updater = self._backend.server.updater
        if not isinstance(updater, OptimizerUpdater):
            raise RuntimeError(f'there are no optimizer states to {action}; call set_optimizer '
                               'first')
        return updater.optimizer
