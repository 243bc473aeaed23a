"""The module of locks in a process without the package, which starts at once.

Run with the paths of the module and of a lock file, and code that uses ``lock`` and ``path``.
"""
import os
import runpy
import sys
import types

MODULE, path, code = sys.argv[1:4]
package = types.ModuleType('chainermn')
package.__path__ = [os.path.join(os.path.dirname(MODULE), '..', '..')]
sys.modules['chainermn'] = package
lock = runpy.run_path(MODULE)
exec(code)
