"""A checkpoint is only loaded into objects of the same classes, unless others are allowed."""
import chainer
import numpy as np
import pytest
from chainer.training import extensions

import chainermn
from chainermn.extensions import multi_node_snapshot
from chainermn.extensions._checkpointing import classes, state
from chainermn.extensions._checkpointing.parts import SavedParts

ADAM, MOMENTUM, RMSPROP = (chainer.optimizers.Adam, chainer.optimizers.MomentumSGD,
                           chainer.optimizers.RMSprop)


class OtherModel(chainer.links.Classifier):
    pass


def make(comm, folder, optimizer=ADAM, model=chainer.links.Classifier, rule=None,
         iterator=chainer.iterators.SerialIterator, **options):
    target = model(chainer.links.Linear(2, 2))
    optimizer = chainermn.create_multi_node_optimizer(optimizer(), comm, **options).setup(target)
    if rule is not None:
        target.predictor.W.update_rule = rule().create_update_rule()
    data = [(np.ones(2, np.float32), np.int32(0))] * 4
    updater = chainer.training.StandardUpdater(iterator(data, 2), optimizer)
    return chainer.training.Trainer(updater, (2, 'iteration'), out=folder), optimizer


def checkpointer_of(comm, folder, **options):
    return chainermn.create_multi_node_checkpointer('run', comm, path=folder, **options)


def save(comm, folder, **options):
    trainer, _ = make(comm, folder, **options)
    checkpointer = checkpointer_of(comm, folder)
    checkpointer.finalize = lambda: None
    trainer.extend(checkpointer, trigger=(1, 'iteration'))
    trainer.run()
    checkpointer._saver.flush()


CHANGES = {
    'optimizer': (dict(optimizer=MOMENTUM),
                  'updater/optimizer:main changed from Adam to MomentumSGD'),
    'model': (dict(model=OtherModel), 'updater/model:main changed from Classifier to OtherModel'),
    'iterator': (dict(iterator=chainer.iterators.MultithreadIterator),
                 'updater/iterator:main changed from SerialIterator to MultithreadIterator'),
    'update rule': (dict(rule=RMSPROP), 'the update rule of updater/optimizer:main/predictor/W '
                                        'changed from AdamRule to RMSpropRule'),
}


def test_a_difference_is_an_error_on_all_ranks(comm, folder, same_error):
    save(comm, folder)
    for options, text in CHANGES.values():
        check_difference(comm, folder, same_error, options, text)


def check_difference(comm, folder, same_error, options, text):
    trainer, optimizer = make(comm, folder, **options)
    before = trainer.updater.get_optimizer('main').target.predictor.W.array.copy()
    error = same_error(lambda: checkpointer_of(comm, folder).maybe_load(trainer, optimizer))
    assert isinstance(error, ValueError) and text in str(error)
    assert 'pass allow_other_classes=True' in str(error)
    assert trainer.updater.iteration == 0
    np.testing.assert_array_equal(
        trainer.updater.get_optimizer('main').target.predictor.W.array, before)


def test_a_difference_on_one_rank(comm, folder, same_error):
    save(comm, folder)
    last = comm.rank == comm.size - 1
    trainer, optimizer = make(comm, folder, model=OtherModel if last else chainer.links.Classifier)
    error = same_error(lambda: checkpointer_of(comm, folder).maybe_load(trainer, optimizer))
    assert f'rank {comm.size - 1}: updater/model:main changed from Classifier' in str(error)
    assert comm.size == 1 or ': no difference' in str(error)


def test_a_difference_may_be_allowed(comm, folder):
    save(comm, folder)
    trainer, optimizer = make(comm, folder, model=OtherModel)
    assert checkpointer_of(comm, folder, allow_other_classes=True).maybe_load(
        trainer, optimizer) == 2
    assert trainer.updater.iteration == 2


def test_equal_classes_are_loaded(comm, folder):
    """Proxies do not count, such as those that options of the multi-node optimizer add."""
    save(comm, folder)
    for options in {}, dict(n_accumulations=2), dict(overlap='always'):
        trainer, optimizer = make(comm, folder, **options)
        assert checkpointer_of(comm, folder).maybe_load(trainer, optimizer) == 2


def test_iterators_on_other_ranks_than_the_master(comm):
    """They hold no state, so they may be of any class."""
    serial, multithread = chainer.iterators.SerialIterator, chainer.iterators.MultithreadIterator
    saved = chainermn.iterators.create_multi_node_iterator(
        multithread(range(4), 2) if comm.rank == 0 else serial(range(4), 2), comm)
    arrays = classes.capture_classes(SavedParts({'iterator': saved}))
    target = chainermn.iterators.create_multi_node_iterator(multithread(range(4), 2), comm)
    assert not classes.find_differences(arrays, SavedParts({'iterator': target}))


def test_a_file_of_an_older_version_is_loaded(comm, folder, monkeypatch):
    """It does not contain the names of classes."""
    with monkeypatch.context() as patched:
        patched.setattr(state, 'capture_classes', lambda parts: {})
        save(comm, folder)
    trainer, optimizer = make(comm, folder, model=OtherModel)
    assert checkpointer_of(comm, folder).maybe_load(trainer, optimizer) == 2


@pytest.mark.parametrize('is_allowed', [False, True])
def test_snapshots(comm, folder, same_error, is_allowed):
    trainer, _ = make(comm, folder)
    trainer.extend(multi_node_snapshot(comm, extensions.snapshot()), trigger=(1, 'iteration'))
    trainer.run()
    comm.barrier()
    trainer, _ = make(comm, folder, model=OtherModel)
    trainer.extend(multi_node_snapshot(
        comm, extensions.snapshot(autoload=True), allow_other_classes=is_allowed),
        trigger=(1, 'iteration'))
    if is_allowed:
        trainer.run()
        assert trainer.updater.iteration == 2
    else:
        error = same_error(trainer.run)
        assert 'updater/model:main changed from Classifier to OtherModel' in str(error)


def test_a_hundred_parameters_take_one_line(comm):
    model = chainer.ChainList(*(chainer.links.Linear(1, 1) for _ in range(50)))
    optimizer = ADAM().setup(model)
    parts = SavedParts({'optimizer': optimizer})
    arrays = classes.capture_classes(parts)
    for param in model.params():
        param.update_rule = RMSPROP().create_update_rule()
    text = classes.find_differences(arrays, parts)
    assert 'and 97 more changed from AdamRule to RMSpropRule' in text and len(text) < 200
