"""docs/run_blocks.py finds what is wrong with a page."""

import pathlib
import subprocess
import sys

import pytest
from time_limits import seconds

pytestmark = pytest.mark.mpi_skip

SCRIPT = pathlib.Path(__file__).parents[2] / 'docs' / 'run_blocks.py'

PAGE = '''
```python
y = 2
print(1)
```

<!-- printed -->
```text
1
```

<!-- file: one.py -->
```python
import sys
sys.exit('no')
```

<!-- fails: no -->
```sh
python one.py
```

<!-- not run: needs a GPU -->
```python
import cupy
```

```python
assert y == 2
```
'''


@pytest.mark.sample(2)
@pytest.mark.parametrize('right, wrong, says', [
    ('', '', 'page.md: ok (5 blocks, 1 rank)\n'),
    ('y == 2', 'y == 3', 'in <module>\n    assert y == 3\n'),
    ("exit('no')", 'exit(0)', 'should have failed with "no"'),
    ('text\n1', 'text\n2', 'missing output:\n2\n'),
    ('printed -->\n```text\n1', 'printed: ... -->\n```text\n2', 'page.md: ok (5 blocks, 1 rank)\n'),
    ('printed -->\n```text\n1', 'printed: 1 -->\n```text\n2', 'missing output:\n1\n')])
def test_a_page(tmp_path, right, wrong, says):
    tmp_path.joinpath('page.md').write_text(PAGE.replace(right, wrong) if right else PAGE)
    done = subprocess.run([sys.executable, SCRIPT, tmp_path / 'page.md'], text=True,
                          timeout=seconds(50), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert says in done.stdout, done.stdout
    assert (done.returncode == 0) == ('ok (' in says)
