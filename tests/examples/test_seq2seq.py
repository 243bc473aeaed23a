"""The translation examples, for a few steps, on generated sentences and on files."""

import re

import pytest


@pytest.mark.slow
def test_data_parallel(run, tmp_path):
    output = run('seq2seq/seq2seq.py', '--iteration', '2', '--unit', '8')
    assert output.count('2 processes; 1250 pairs per process') == 1
    assert len(re.findall(r'^(\d )+->( \w+)+$', output, re.MULTILINE)) == 3
    assert len(re.findall(r'^BLEU: [\d.]+%$', output, re.MULTILINE)) == 1
    assert {path.name for path in (tmp_path / 'result').iterdir()} == {'log', 'snapshot_iter_2'}


@pytest.mark.slow
def test_encoder_and_decoder_on_two_processes(run, tmp_path):
    for name in 'train', 'dev':
        (tmp_path / f'{name}.de').write_text('das ist sehr gut\nein Haus\ngut\n')
        (tmp_path / f'{name}.en').write_text('that is very good\na house\ngood\n')
    output = run('seq2seq/seq2seq_mp1.py', '--iteration', '50', '--batchsize', '3',
                 '--files', 'train.de', 'train.en', 'dev.de', 'dev.en')
    assert output.endswith('BLEU: 100.00%\n')
