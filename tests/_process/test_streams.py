"""Messages are printed even if the script has closed or replaced its streams."""

import io
import os
import subprocess
import sys

import pytest

from chainermn._process import streams


@pytest.mark.parametrize('name', ['stdout', 'stderr'])
@pytest.mark.parametrize('stream', ['none', 'closed', 'broken', 'none at all'])
def test_to_the_file_descriptor(capfd, monkeypatch, name, stream):
    closed = io.StringIO()
    closed.close()
    if stream == 'none at all':
        monkeypatch.delattr(sys, name)
    else:
        monkeypatch.setattr(sys, name, {'none': None, 'closed': closed, 'broken': object()}[stream])
    streams.write('a message: ä\n', name)
    out, err = capfd.readouterr()
    assert (out, err) == (('a message: ä\n', '') if name == 'stdout' else ('', 'a message: ä\n'))


@pytest.mark.parametrize('text, shown', [
    ('plain ä\t\n', 'plain ä\t\n'), ('\x1b[2J\r\x9b\x07', r'\x1b[2J\r\x9b\x07'),
    (os.fsdecode(b'\xff.py'), r'\udcff.py'), ('\u202egpj.exe', r'\u202egpj.exe')])
def test_control_characters_of_names_are_escaped(monkeypatch, text, shown):
    stream = io.TextIOWrapper(io.BytesIO(), encoding='utf-8')
    monkeypatch.setattr(sys, 'stderr', stream)
    streams.write(text)
    assert stream.buffer.getvalue().decode() == shown


def test_to_the_stream_of_the_program(capfd, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, 'stderr', stream)
    streams.write('a message\n')
    assert (stream.getvalue(), *capfd.readouterr()) == ('a message\n', '', '')


@pytest.mark.mpi_skip
def test_not_to_a_file_that_has_taken_the_number(tmp_path):
    """Of a process that was started without the file descriptor."""
    path = tmp_path / 'data'
    done = subprocess.run(
        ['/bin/sh', '-c', f'exec "{sys.executable}" -c "$0" 2>&-', f'''
import os
assert os.open({str(path)!r}, os.O_WRONLY | os.O_CREAT) == 2
from chainermn._process import streams
streams.write('a message')
print('went on')
'''], timeout=50, text=True, stdout=subprocess.PIPE)
    assert (done.stdout, path.read_text()) == ('went on\n', '')
