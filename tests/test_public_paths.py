"""Every dotted name of ChainerMN 7 exists, with the same parameters and defaults."""
import importlib
import inspect
import json
import os
import subprocess
import sys

import pytest
from time_limits import seconds

#: Names of classes and functions, by module.
PATHS = {
    'chainermn': [
        'CommunicatorBase', 'DataSizeError', 'MultiNodeChainList', 'create_communicator',
        'create_multi_node_checkpointer', 'create_multi_node_evaluator',
        'create_multi_node_optimizer', 'scatter_dataset', 'scatter_index'],
    'chainermn.communicators': ['CommunicatorBase', 'create_communicator'],
    'chainermn.communicators.communicator_base': ['CommunicatorBase'],
    'chainermn.communicators.mpi_communicator_base': ['MpiCommunicatorBase'],
    'chainermn.communicators.naive_communicator': ['NaiveCommunicator'],
    'chainermn.communicators.flat_communicator': ['FlatCommunicator'],
    'chainermn.communicators.pure_nccl_communicator': ['PureNcclCommunicator'],
    'chainermn.communicators.non_cuda_aware_communicator': ['NonCudaAwareCommunicator'],
    'chainermn.communicators.dummy_communicator': ['DummyCommunicator'],
    'chainermn.communicators._communication_utility': [
        'init_ranks', 'init_intra_mpi_comm', 'init_inter_mpi_comm', 'init_nccl_comm',
        'inter_allreduce_gpu', 'chunked_bcast_obj', '_get_nccl_type_id'],
    'chainermn.communicators._memory_utility': [
        'DeviceMemory', 'HostPinnedMemory', 'ParamsData', 'extract_params_set_data',
        'extract_params_set_grad', 'count_grad_elements', 'pack_params', 'unpack_params',
        'array_to_buffer_object', 'get_device_memory_pointer'],
    'chainermn.datasets': [
        'DataSizeError', 'create_empty_dataset', 'scatter_dataset', 'scatter_index'],
    'chainermn.datasets.empty_dataset': ['create_empty_dataset'],
    'chainermn.datasets.scatter': [
        'DataSizeError', 'get_epoch_trigger', 'get_n_iterations_for_one_epoch', 'scatter_dataset',
        'scatter_index'],
    'chainermn.extensions': [
        'AllreducePersistent', 'GenericMultiNodeEvaluator', 'MultiNodeEarlyStoppingTrigger',
        'ObservationAggregator', 'create_multi_node_checkpointer', 'create_multi_node_evaluator',
        'multi_node_snapshot'],
    'chainermn.extensions._multi_node_snapshot': ['multi_node_snapshot'],
    'chainermn.extensions.allreduce_persistent': ['AllreducePersistent'],
    'chainermn.extensions.checkpoint': ['_CheckpointStats', 'create_multi_node_checkpointer'],
    'chainermn.extensions.multi_node_early_stopping_trigger': ['MultiNodeEarlyStoppingTrigger'],
    'chainermn.extensions.multi_node_evaluator': [
        'GenericMultiNodeEvaluator', 'create_multi_node_evaluator'],
    'chainermn.extensions.observation_aggregator': ['ObservationAggregator'],
    'chainermn.functions': [
        'allgather', 'alltoall', 'bcast', 'gather', 'pseudo_connect', 'recv', 'scatter', 'send'],
    'chainermn.functions.batch_normalization': [
        'MultiNodeBNImplSelector', 'get_communication_backend'],
    'chainermn.functions.collective_communication': [
        'AllGather', 'AllToAll', 'Bcast', 'Gather', 'Scatter',
        'allgather', 'alltoall', 'bcast', 'gather', 'scatter'],
    'chainermn.functions.point_to_point_communication': ['Recv', 'Send', 'recv', 'send'],
    'chainermn.functions.pseudo_connect': ['PseudoConnect', 'pseudo_connect'],
    'chainermn.global_except_hook': ['add_hook'],
    'chainermn.iterators': ['create_multi_node_iterator', 'create_synchronized_iterator'],
    'chainermn.iterators.multi_node_iterator': ['create_multi_node_iterator'],
    'chainermn.links': [
        'MultiNodeBatchNormalization', 'MultiNodeChainList', 'create_mnbn_model',
        'create_multi_node_n_step_rnn'],
    'chainermn.links.batch_normalization': ['MultiNodeBatchNormalization'],
    'chainermn.links.create_mnbn_model': ['create_mnbn_model'],
    'chainermn.links.multi_node_chain_list': ['MultiNodeChainList'],
    'chainermn.links.n_step_rnn': ['create_multi_node_n_step_rnn'],
    'chainermn.nccl': [],
    'chainermn.optimizers': ['create_multi_node_optimizer'],
    'chainermn.testing': ['get_device'],
    'chainermn.testing.device': ['get_device'],
}

#: Classes whose methods are part of the contract.
CLASSES = [
    'chainermn.communicators.naive_communicator.NaiveCommunicator',
    'chainermn.communicators.pure_nccl_communicator.PureNcclCommunicator',
    'chainermn.communicators._memory_utility.DeviceMemory',
    'chainermn.links.multi_node_chain_list.MultiNodeChainList',
    'chainermn.links.batch_normalization.MultiNodeBatchNormalization',
    'chainermn.extensions._generic_multi_node_evaluator.GenericMultiNodeEvaluator',
    'chainermn.extensions.observation_aggregator.ObservationAggregator',
    'chainermn.extensions.multi_node_early_stopping_trigger.MultiNodeEarlyStoppingTrigger',
]

#: A script that runs with ChainerMN 7 and prints the parameters of each name.
OLD = '''
import importlib, inspect, json, sys, warnings
warnings.simplefilter('ignore')
paths, classes = json.loads(sys.argv[1])
import chainermn
assert chainermn.__version__.startswith('7.'), chainermn.__file__

def parameters(function):
    try:
        found = inspect.signature(function).parameters.values()
    except ValueError:
        return None
    return [[p.name, p.kind.name, None if p.default is p.empty else repr(p.default)] for p in found]

signatures = {}
for module, names in paths.items():
    for name in names:
        signatures[f'{module}.{name}'] = parameters(getattr(importlib.import_module(module), name))
for path in classes:
    module, _, name = path.replace('._generic_', '.').rpartition('.')
    found = getattr(importlib.import_module(module), name)
    for method, function in inspect.getmembers(found, inspect.isfunction):
        if function.__module__.startswith('chainermn') and not method.startswith('_'):
            signatures[f'{path}.{method}'] = parameters(function)
    for method, _ in inspect.getmembers(found, lambda member: isinstance(member, property)):
        signatures.setdefault(f'{path}.{method}', 'property')
print(json.dumps(signatures))
'''

#: Parameters that nobody can have passed by name or changed, or that differ on purpose.
DIFFERENT = {
    # One class replaces all the function nodes; scripts do not create these nodes themselves.
    'chainermn.functions.collective_communication.AllGather',
    'chainermn.functions.collective_communication.AllToAll',
    'chainermn.functions.collective_communication.Bcast',
    'chainermn.functions.collective_communication.Gather',
    'chainermn.functions.collective_communication.Scatter',
}


def find(path):
    """Import the module of a dotted name, and look up the rest as attributes."""
    parts = path.split('.')
    for end in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module('.'.join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            found = getattr(found, name)
        return found
    raise AssertionError(path)


@pytest.mark.mpi_skip
def test_modules_of_communicators_need_no_import(tmp_path):
    """Scripts check isinstance(comm, communicators.pure_nccl_communicator.PureNcclCommunicator)."""
    modules = [path.rpartition('.')[2] for path in PATHS if path.endswith('_communicator')]
    assert len(modules) == 5
    program = ('import chainermn\n'
               f'for name in {modules}: getattr(chainermn.communicators, name)\n'
               'assert not hasattr(chainermn.communicators, "other_communicator")')
    subprocess.run([sys.executable, '-c', program], cwd=tmp_path, timeout=50, check=True)


def test_names_of_nccl():
    nccl = importlib.import_module('chainermn.nccl')
    assert isinstance(nccl._available, bool)
    if nccl._available:
        for name in ('get_build_version', 'get_unique_id', 'get_version', 'NCCL_FLOAT',
                     'NCCL_FLOAT16', 'NCCL_FLOAT32', 'NCCL_FLOAT64', 'NCCL_SUM',
                     'NcclCommunicator', 'NcclError'):
            assert hasattr(nccl, name)


def test_a_device_for_tests():
    from chainermn.testing import get_device
    assert get_device().xp.__name__ == 'numpy'


def parameters(ours):
    is_own = isinstance(ours, type) and inspect.isfunction(ours.__init__)
    if is_own:  # the class itself has the parameters of an inherited __new__ on Python 3.11.2
        ours = ours.__init__
    return {p.name: p for p in [*inspect.signature(ours).parameters.values()][is_own:]}


@pytest.mark.mpi_skip
def test_parameters_are_those_of_the_old_chainermn(tmp_path):
    done = subprocess.run(
        [sys.executable, '-c', OLD, json.dumps([PATHS, CLASSES])], cwd=tmp_path,
        env={**os.environ, 'CHAINERMN_OVERLAY': '0'}, capture_output=True, text=True,
        timeout=seconds(50))
    assert done.returncode == 0, done.stderr
    signatures = json.loads(done.stdout)
    assert len(signatures) > 150
    differing = []
    for path, old in signatures.items():
        ours = find(path)
        if old is None or path in DIFFERENT:
            continue
        if old == 'property':
            if not isinstance(ours, property):
                differing.append(f'{path} was a property')
            continue
        new = parameters(ours)
        names = [name for name, kind, _ in old if kind == 'POSITIONAL_OR_KEYWORD']
        if names[:1] == ['self']:  # nobody passes it by name
            _, *others = new.items()
            new = {'self': None, **dict(others)}
        if list(new)[:len(names)] != names:
            differing.append(f'{path} has parameters {list(new)}, had {names}')
            continue
        for name, _, default in old:
            if name not in new:
                differing.append(f'{path} has no parameter {name}')
            elif default is not None and repr(new[name].default) != default and \
                    ' at 0x' not in default:
                differing.append(f'{path}: {name}={new[name].default!r}, was {default}')
    assert not differing, '\n' + '\n'.join(differing)
