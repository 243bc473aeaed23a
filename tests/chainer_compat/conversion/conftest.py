"""The tests of conversions need PyTorch."""

import importlib.util

if importlib.util.find_spec('torch') is None:
    collect_ignore_glob = ['test_*.py']
