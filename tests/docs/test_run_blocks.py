"""docs/run_blocks.py finds what is wrong with a page."""

import pathlib
import subprocess
import sys

import pytest
from time_limits import seconds

pytestmark = pytest.mark.mpi_skip

SCRIPT = pathlib.Path(__file__).parents[2] / 'docs' / 'run_blocks.py'

RIGHT = '''
<!-- before:
x = 1
-->
```python
print(x)
y = x + 1
```

It prints

<!-- printed -->
```text
1
```

and later blocks know it:

```python
assert y == 2
```

<!-- file: one.py -->
```python
import sys
print(sys.argv[1:], 4711)
sys.exit(3)
```

<!-- fails: ['a'] -->
```sh
python one.py a
```

<!-- printed -->
```
['a'] ...
```

1. In a list, on two ranks:

   <!-- ranks: 2 -->
   ```python
   from mpi4py import MPI
   print(MPI.COMM_WORLD.rank)
   ```

   <!-- printed -->
   ```text
   1
   0
   ```

<!-- not run: needs a GPU -->
```python
import cupy
```

```text
this is no code
```
'''


#: Another page, whose program has a namespace and a folder of its own.
OTHER = '''
<!-- ranks: 2 -->
```python
import os
assert 'MPI' not in globals() and 'one.py' not in os.listdir()
print('other')
```

<!-- printed -->
```text
other
other
```
'''


def run(tmp_path, *texts):
    pages = [tmp_path / f'page{n}.md' for n in range(len(texts))]
    for page, text in zip(pages, texts, strict=True):
        page.write_text(text)
    done = subprocess.run([sys.executable, SCRIPT, *pages], text=True, timeout=seconds(50),
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


def test_a_page_that_is_right(tmp_path):
    status, said = run(tmp_path, RIGHT, OTHER)
    assert status == 0, said
    assert f'{tmp_path}/page0.md: ok (6 blocks, 1 rank)\n' in said
    assert f'{tmp_path}/page0.md, {tmp_path}/page1.md: ok (4 blocks, 2 ranks)\n' in said
    assert f'Not run:\n- needs a GPU: {tmp_path}/page0.md:' in said


@pytest.mark.sample(1)
@pytest.mark.parametrize('right, wrong, says', [
    ('y == 2', 'y == 3', 'page0.md", line 20, in <module>\n    assert y == 3\n'),
    ('exit(3)', 'exit(0)', "should have failed with \"['a']\""),
    ('   0\n', '   2\n', 'missing output:\n2\n'),
    ('not run:', 'not  run:', "unknown comment 'not  run'; use one of ranks, "),
    ('import cupy', 'import no_such_module', 'needs a GPU'),
])
def test_a_page_that_is_wrong(tmp_path, right, wrong, says):
    assert RIGHT.count(right) == 1
    status, said = run(tmp_path, RIGHT.replace(right, wrong))
    assert says in said
    assert (status == 0) == (says == 'needs a GPU')
